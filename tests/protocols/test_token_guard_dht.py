"""The directory goes through the same guard: only those who were admitted read and write it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from auth.refusals import Reason
from auth.roles import Role
from protocols.access import end_refused
from protocols.dht import Dht, DhtSettings, open_dht
from protocols.dht.messages import (
    FIND,
    GREET,
    STORE,
    STORE_MANY,
    VOUCH,
    FindRequest,
    GreetRequest,
    Query,
    StoreRequest,
    VouchRequest,
)
from protocols.errors import PotluckError
from protocols.guard import Guard, OpenGuard
from protocols.not_allowed import AnswerNotAllowed, NotAllowed
from protocols.rpc import Method, Rpc, open_rpc
from protocols.rpc.ping import ECHO, EchoRequest, serve_ping
from protocols.testing.world import SimulatedNetwork, SimulatedWorld
from tests.dht.members import simulated
from tests.dht.publishers import note
from tests.protocols.admitted import Admission

QUESTIONS: dict[Method[object, object], object] = {
    FIND: FindRequest((Query(bytes(32)),)),
    STORE: StoreRequest((note(),)),
    STORE_MANY: StoreRequest((note(),)),
    GREET: GreetRequest(),
    VOUCH: VouchRequest((bytes(32),)),
    ECHO: EchoRequest(b"hello"),
}  # type: ignore[dict-item]


class Node:
    """A node with a directory, and a guard."""

    def __init__(
        self,
        world: SimulatedWorld,
        name: str,
        guard_of: Callable[[SimulatedNetwork], Guard],
        at: str,
    ) -> None:
        self.network = world.add_node(name)
        self._guard_of = guard_of
        self._settings = DhtSettings(bootstrap=(at,) if at else ())
        self._ready = trio.Event()
        world.start(self.network, self._run)

    async def _run(self, network: SimulatedNetwork) -> None:
        async with (
            open_rpc(network, self._guard_of(network)) as self.rpc,
            open_dht(network, self.rpc, settings=self._settings) as self.dht,
        ):
            serve_ping(self.rpc)
            self._ready.set()
            await trio.sleep_forever()

    rpc: Rpc
    dht: Dht

    async def joined(self) -> None:
        await self._ready.wait()
        await self.dht.joined()


async def admitted_swarm(world: SimulatedWorld, admission: Admission, size: int) -> list[Node]:
    nodes: list[Node] = []
    for number in range(size):
        name = f"node-{number}"
        at = nodes[0].network.address if nodes else ""
        one = Node(world, name, lambda it, name=name: admission.admit(it, name), at)  # type: ignore[misc]
        await one.joined()
        nodes.append(one)
    return nodes


@simulated
async def test_a_swarm_with_tokens_keeps_its_directory(world: SimulatedWorld) -> None:
    admission = Admission()
    nodes = await admitted_swarm(world, admission, 6)
    await nodes[1].dht.put("note/hello", "hello", 60)
    for reader in nodes:
        found = await reader.dht.get("note/hello")
        assert [entry.value for entry in found.values()] == ["hello"]
    for access in admission.accesses.values():
        assert not access.refused_requests
        assert not access.refused_answers


@simulated
async def test_every_method_refuses_those_without_a_token(world: SimulatedWorld) -> None:
    admission = Admission()
    nodes = await admitted_swarm(world, admission, 2)
    stranger = world.add_node("stranger")
    world.introduce(stranger, nodes[0].network)
    async with open_rpc(stranger, OpenGuard()) as asking:
        for method, question in QUESTIONS.items():
            with pytest.raises(NotAllowed) as refused:
                await asking.call(nodes[0].network.peer_id, method, question, timeout=5)
            assert refused.value.reason is Reason.TOKEN_MISSING, method.name
    assert nodes[0].rpc.statistics().misbehaviours == 0


@simulated
async def test_no_answer_of_a_node_without_a_token_is_believed(world: SimulatedWorld) -> None:
    admission = Admission()
    swarm = Node(world, "open", lambda _: OpenGuard(), "")
    await swarm.joined()
    asker = world.add_node("asker")
    world.introduce(asker, swarm.network)
    async with open_rpc(asker, admission.admit(asker, "asker")) as asking:
        for method, question in QUESTIONS.items():
            with pytest.raises(AnswerNotAllowed) as refused:
                await asking.call(swarm.network.peer_id, method, question, timeout=5)
            assert refused.value.reason is Reason.TOKEN_MISSING, method.name


@simulated
async def test_a_monitor_reads_the_directory(world: SimulatedWorld) -> None:
    admission = Admission(watcher=(Role.MONITOR,))
    nodes = await admitted_swarm(world, admission, 3)
    await nodes[1].dht.put("note/hello", "hello", 60)
    at = nodes[0].network.address
    watcher = Node(world, "watcher", lambda it: admission.admit(it, "watcher"), at)
    await watcher.joined()
    found = await watcher.dht.get("note/hello")
    assert [entry.value for entry in found.values()] == ["hello"]


@pytest.mark.slow
@simulated
async def test_a_revoked_node_reads_and_writes_nothing_more(world: SimulatedWorld) -> None:
    admission = Admission()
    nodes = await admitted_swarm(world, admission, 5)
    outcast = nodes[4]
    await nodes[1].dht.put("note/hello", "hello", 60)
    first = admission.of(nodes[0].network)
    listed = admission.authority.revoke("node-4", at_ms=first.clock_ms() + 1)
    for one in nodes[:4]:
        access = admission.of(one.network)
        access.revocations.accept(listed, access.keyring)
        for peer in await end_refused(one.rpc, access):
            await one.network.disconnect(peer)
    for _ in range(3):
        try:
            found = await outcast.dht.get("note/secret")
        except PotluckError:
            found = {}
        assert not found
        await trio.sleep(10)
    reasons = set()
    for one in nodes[:4]:
        with pytest.raises(PotluckError) as refused:
            await outcast.rpc.call(one.network.peer_id, ECHO, EchoRequest(b""), timeout=5)
        reasons.add(getattr(refused.value, "reason", None))
    assert reasons <= {None, Reason.REVOKED}
    found = await nodes[0].dht.get("note/hello")
    assert [entry.value for entry in found.values()] == ["hello"], "the others go on"
