"""Nodes that average in a simulated world, for the tests of rounds.

peers = await averagers(world, 4)
outcomes = await average_all(peers)
check_same_result(outcomes, peers)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import trio
from torch import Tensor

from node.core.machine_changes import MachineWatch
from protocols.dht import DhtSettings, open_dht
from protocols.identity import PeerId
from protocols.moshpit.averager import ONE_GROUP, Averager
from protocols.moshpit.butterfly import Butterfly
from protocols.moshpit.cohorts import Cohort
from protocols.moshpit.grid import Grid
from protocols.moshpit.layout import Vector
from protocols.moshpit.matchmaking import GROUP
from protocols.moshpit.outcome import Committed, Outcome
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.settings import AveragerSettings
from protocols.rpc import Rpc, open_rpc
from protocols.testing.world import (
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
)

SETTINGS = AveragerSettings(
    run="test", matchmaking_seconds=5.0, round_seconds=60.0, chunk_bytes=16 << 10
)
VALUES = 16 << 10  # 64 KiB: two chunks to each of two reducers
HOME = NodeSettings(upload_bytes_per_second=100_000.0, download_bytes_per_second=100_000.0)
"""At this rate, an exchange of `VALUES` among four takes about a second."""


@dataclass(frozen=True)
class Ended:
    """An averaging of one peer that has ended."""

    began: float
    ended: float
    outcome: Outcome
    result: Tensor | None  # a copy

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class AveragingPeer:
    """A node that averages when it is told to, until the world ends or it is killed."""

    def __init__(
        self,
        world: SimulatedWorld,
        network: SimulatedNetwork,
        bootstrap: Iterable[str],
        settings: AveragerSettings,
        kind: type[Butterfly] = Butterfly,
    ) -> None:
        self.world = world
        self.network = network
        self.settings = settings
        self.bootstrap = tuple(bootstrap)
        self.kind = kind
        self.values = VALUES
        self.ready = trio.Event()
        self.ended: list[Ended] = []
        self._averager: Averager | None = None
        self._rpc: Rpc | None = None
        self._jobs, self._waiting = trio.open_memory_channel[Callable[[], Awaitable[None]]](16)
        world.start(network, self._run)

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    @property
    def averager(self) -> Averager:
        assert self._averager is not None
        return self._averager

    @property
    def rpc(self) -> Rpc:
        assert self._rpc is not None
        return self._rpc

    @property
    def alive(self) -> bool:
        return not self.network.closed

    def vector(self) -> Vector:
        """Values that only this peer has, and that are the same in every run."""
        seed = torch.Generator().manual_seed(self.network.index)
        return Vector.of({"w": torch.randn(self.values, generator=seed)})

    def begin(
        self,
        vector: Vector | None = None,
        *,
        weight: float = 1.0,
        epoch: int = 0,
        expected: int | None = None,
        grid: Grid = ONE_GROUP,
        number: int | None = None,
        topic: str = "",
        awaited: frozenset[PeerId] | None = None,
        votes: float = 0.0,
        cohort: Cohort | None = None,
        peers: int = 1,
        fewest: int = 0,
        follows: bool = False,
    ) -> trio.Event:
        """Average in this peer's process; the event is set when there is an outcome."""
        done = trio.Event()
        own = vector if vector is not None else self.vector()

        async def job() -> None:
            began = trio.current_time()
            request = RoundRequest(
                own,
                weight=weight,
                epoch=epoch,
                expected=expected,
                number=number,
                topic=topic,
                awaited=awaited,
                votes=votes,
                cohort=cohort,
                peers=peers,
                fewest=fewest,
                follows=follows,
            )
            outcome = await self.averager.average(request, grid)
            result = outcome.result.clone() if isinstance(outcome, Committed) else None
            self.ended.append(Ended(began, trio.current_time(), outcome, result))
            done.set()

        self._jobs.send_nowait(job)
        return done

    def kill(self, *, silently: bool = False) -> None:
        self.world.crash(self.network, silently=silently)

    async def _run(self, network: SimulatedNetwork) -> None:
        dht = DhtSettings(bootstrap=self.bootstrap)
        async with (
            open_rpc(network) as self._rpc,
            open_dht(network, self._rpc, families=[GROUP], settings=dht) as directory,
            trio.open_nursery() as nursery,
        ):
            self.butterfly = self.kind(self._rpc, network)
            self._averager = Averager(
                network, self._rpc, directory, self.settings, self.butterfly, nursery
            )
            nursery.start_soon(MachineWatch(network, directory, elapsed=network.time_seen).run)
            try:
                await directory.joined()
                self.ready.set()
                async for job in self._waiting:
                    nursery.start_soon(job)
            finally:
                self._averager.close()


def peer_in(
    world: SimulatedWorld,
    name: str,
    others: Sequence[AveragingPeer] = (),
    *,
    machine: NodeSettings | None = None,
    settings: AveragerSettings = SETTINGS,
    kind: type[Butterfly] = Butterfly,
) -> AveragingPeer:
    network = world.add_node(name, machine)
    bootstrap = [one.network.address for one in others[:3]]
    return AveragingPeer(world, network, bootstrap, settings, kind)


async def averagers(
    world: SimulatedWorld,
    count: int,
    *,
    machine: NodeSettings | None = None,
    settings: AveragerSettings = SETTINGS,
) -> list[AveragingPeer]:
    """Start this many peers, and wait until they have joined and are ready."""
    peers: list[AveragingPeer] = []
    for number in range(count):
        one = peer_in(world, f"peer-{number}", peers, machine=machine, settings=settings)
        peers.append(one)
        if number == 0:
            continue
        await one.ready.wait()
    for one in peers:
        await one.ready.wait()
    return peers


async def average_all(
    peers: Sequence[AveragingPeer],
    *,
    epoch: int = 0,
    grid: Grid = ONE_GROUP,
    within: float = 60.0,
) -> list[Ended]:
    """Let all of these average once. Returns the outcome of each."""
    events = [
        one.begin(
            epoch=epoch,
            expected=len(peers),
            grid=grid,
            number=number if grid != ONE_GROUP else None,
        )
        for number, one in enumerate(peers)
    ]
    with trio.fail_after(within):
        for event in events:
            await event.wait()
    return [one.ended[-1] for one in peers]


def mean_of(peers: Iterable[AveragingPeer]) -> Tensor:
    """The average of these peers' values with equal weights, in double precision."""
    vectors = [one.vector().values.double() for one in peers]
    return torch.stack(vectors).mean(dim=0)


def check_same_result(ended: Sequence[Ended], counted: Sequence[AveragingPeer]) -> None:
    """All have committed the same bits, and these are the average of the members that they name."""
    for one in ended:
        assert isinstance(one.outcome, Committed), one.outcome
        assert set(one.outcome.members) == {peer.peer for peer in counted}
    first = ended[0].result
    assert first is not None
    torch.testing.assert_close(first.double(), mean_of(counted), rtol=1e-5, atol=1e-6)
    for one in ended:
        assert one.result is not None
        assert torch.equal(one.result.view(torch.int32), first.view(torch.int32))


def counted(ended: Sequence[Ended], peers: Sequence[AveragingPeer]) -> list[AveragingPeer]:
    """The members that the first outcome names."""
    outcome = ended[0].outcome
    assert isinstance(outcome, Committed)
    return [one for one in peers if one.peer in outcome.members]


def check_no_private_mix(ended: Iterable[Ended], peers: Sequence[AveragingPeer]) -> int:
    """Check that two results are equal, to the bit, or have no member in common, and that each is
    the average of its members. Returns how many have committed."""
    committed = [one for one in ended if isinstance(one.outcome, Committed)]
    results: dict[bytes, tuple[frozenset[PeerId], Tensor]] = {}
    for one in committed:
        assert isinstance(one.outcome, Committed)
        assert one.result is not None
        digest, members = one.outcome.digest, frozenset(one.outcome.members)
        known = results.setdefault(digest, (members, one.result))
        assert known[0] == members
        assert torch.equal(known[1].view(torch.int32), one.result.view(torch.int32))
    for members, result in results.values():
        counted = [one for one in peers if one.peer in members]
        torch.testing.assert_close(result.double(), mean_of(counted), rtol=1e-5, atol=1e-6)
        for others, _ in results.values():
            assert others == members or not others & members
    return len(committed)


__all__ = [
    "HOME",
    "SETTINGS",
    "VALUES",
    "AveragingPeer",
    "Ended",
    "average_all",
    "averagers",
    "check_no_private_mix",
    "check_same_result",
    "counted",
    "mean_of",
    "peer_in",
]
