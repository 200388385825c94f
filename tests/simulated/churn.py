"""Churn: nodes that call and pour at random while they crash, stop, come back and are cut apart.

With every seed, every call must end within its timeout, with the right answer or one of our
errors, and every chunk that arrives must be the right one. When the churn is over, all peers must
be served again, and nothing may be left of the calls and transfers that were interrupted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import trio
import trio.testing

from protocols.errors import PotluckError, ProtocolMisuse, RemoteMisbehaviour
from protocols.rpc import Empty, Rpc, open_rpc
from protocols.rpc.ping import ECHO, EchoRequest
from protocols.testing.world import LinkSettings, SimulatedNetwork, SimulatedWorld, WorldSettings
from tests.chunks import next_chunk
from tests.simulated.peers import HANG, POUR, Pattern, Server, chunk

SETTINGS = WorldSettings(
    link=LinkSettings(latency_seconds=0.03, jitter_seconds=0.02, breaks_per_hour=20.0)
)
PAUSE_SECONDS = 1.0  # between what one node does, on average
FAULT_SECONDS = 2.0  # between faults anywhere, on average
LONGEST_FAULT_SECONDS = 40.0
CALM_SECONDS = 1200.0  # longer than the longest penalty, stall and idle limits
TOLERANCE_SECONDS = 0.001


@dataclass
class Tally:
    """Counts of the events, so that the tests see that something happened."""

    answers: int = 0
    chunks: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    faults: int = 0
    trace: str = ""

    def failed(self, error: PotluckError) -> None:
        # nobody here is hostile and nobody errs: such an error would be a bug of ours
        assert not isinstance(error, RemoteMisbehaviour | ProtocolMisuse), repr(error)
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1


class Storm:
    """Some nodes, each a server and a caller, and the faults that befall them."""

    def __init__(self, world: SimulatedWorld, count: int) -> None:
        self.world = world
        self.tally = Tally()
        self.chance = random.Random(f"{world.seed} storm")
        self.servers = [Server(world, world.add_node()) for _ in range(count)]
        self.blowing = False
        self.tasks_at_rest = 0

    async def begin(self) -> None:
        """Wait until all serve, and then let them call each other."""
        for server in self.servers:
            await server.ready.wait()
        await trio.testing.wait_all_tasks_blocked()
        self.tasks_at_rest = trio.lowlevel.current_statistics().tasks_living
        self.blowing = True
        for number in range(len(self.servers)):
            self._begin(number)

    def _begin(self, number: int) -> None:
        network = self.servers[number].network
        self.world.introduce(*(server.network for server in self.servers))

        async def live(network: SimulatedNetwork) -> None:
            async with open_rpc(network) as rpc, trio.open_nursery() as nursery:
                while self.blowing:
                    await trio.sleep(network.random.expovariate(1 / PAUSE_SECONDS))
                    peer = network.random.choice(self.servers).network
                    if peer.peer_id != network.peer_id:
                        nursery.start_soon(self._act, rpc, peer, network.random)

        self.world.start(network, live)

    async def _act(self, rpc: Rpc, peer: SimulatedNetwork, chance: random.Random) -> None:
        timeout = chance.uniform(0.05, 8.0)
        act = chance.choice([self._ask, self._ask, self._hang, self._pour])
        started = trio.current_time()
        try:
            await act(rpc, peer, chance, timeout)
        except PotluckError as error:
            self.tally.failed(error)
        if act != self._pour:
            assert trio.current_time() - started <= timeout + TOLERANCE_SECONDS

    async def _ask(
        self, rpc: Rpc, peer: SimulatedNetwork, chance: random.Random, timeout: float
    ) -> None:
        request = EchoRequest(chance.randbytes(chance.randrange(4096)))
        response = await rpc.call(peer.peer_id, ECHO, request, timeout=timeout)
        assert response.payload == request.payload
        self.tally.answers += 1

    async def _hang(
        self, rpc: Rpc, peer: SimulatedNetwork, chance: random.Random, timeout: float
    ) -> None:
        with trio.move_on_after(chance.uniform(0, timeout)):
            await rpc.call(peer.peer_id, HANG, Empty(), timeout=timeout)

    async def _pour(
        self, rpc: Rpc, peer: SimulatedNetwork, chance: random.Random, timeout: float
    ) -> None:
        pattern = Pattern(chance.randrange(1, 200))
        with trio.move_on_after(chance.uniform(0.1, 60.0)):
            async with rpc.open_bulk(peer.peer_id, POUR, pattern, timeout=timeout) as transfer:
                for number in range(pattern.chunks):
                    assert await next_chunk(transfer) == chunk(number)
                    self.tally.chunks += 1
                assert await next_chunk(transfer) is None

    async def blow(self, seconds: float) -> None:
        """Let faults happen for this long, then let everything mend."""
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(seconds):
                while True:
                    await trio.sleep(self.chance.expovariate(1 / FAULT_SECONDS))
                    fault = self.chance.choice(
                        [self._crash, self._power_cut, self._stop, self._split, self._cut]
                    )
                    self.tally.faults += 1
                    nursery.start_soon(fault, self.chance.uniform(0.0, LONGEST_FAULT_SECONDS))
        self.blowing = False
        await trio.sleep(CALM_SECONDS)

    async def _crash(self, seconds: float, *, silently: bool = False) -> None:
        number = self.chance.randrange(len(self.servers))
        network = self.servers[number].network
        if network.closed:
            return
        self.world.crash(network, silently=silently)
        await trio.sleep(seconds)
        self.servers[number] = Server(self.world, self.world.restart(network))
        self._begin(number)

    async def _power_cut(self, seconds: float) -> None:
        await self._crash(seconds, silently=True)

    async def _stop(self, seconds: float) -> None:
        network = self.chance.choice(self.servers).network
        self.world.stop(network)
        await trio.sleep(seconds)
        self.world.resume(network)

    async def _split(self, seconds: float) -> None:
        networks = [server.network for server in self.servers]
        self.chance.shuffle(networks)
        middle = self.chance.randrange(1, len(networks))
        cuts = self.world.partition(networks[:middle], networks[middle:])
        await trio.sleep(seconds)
        self.world.heal(cuts)

    async def _cut(self, seconds: float) -> None:
        one, other = self.chance.sample([server.network for server in self.servers], 2)
        cuts = self.world.cut([one], [other])
        await trio.sleep(seconds)
        self.world.heal(cuts)

    async def check_that_all_is_well(self) -> None:
        """Everybody serves everybody, and nothing is left of interrupted calls and transfers."""
        for server in self.servers:
            statistics = server.statistics()
            assert server.hanging == 0
            assert statistics.requests_in_flight == 0
            assert statistics.transfers_open == 0
            assert statistics.misbehaviours == 0
        assert trio.lowlevel.current_statistics().tasks_living == self.tasks_at_rest
        observer = self.world.add_node()
        self.world.introduce(observer, *(server.network for server in self.servers))
        async with open_rpc(observer) as rpc:
            for server in self.servers:
                await rpc.call(server.network.peer_id, ECHO, EchoRequest(b"well?"), timeout=5)


async def churn(world: SimulatedWorld, nodes: int, seconds: float) -> Tally:
    """A storm of so many nodes and seconds, its aftermath, and what happened."""
    storm = Storm(world, nodes)
    await storm.begin()
    await storm.blow(seconds)
    await storm.check_that_all_is_well()
    storm.tally.trace = world.trace_hash()
    return storm.tally
