"""Serves experts of a run beside the training, or instead of it.

    async with open_serving(node.rpc, directory, plan, experts, session):
        ...

`WatchedExperts` knows the run's experts and this peer's own, for the screen, `status`, and `potluck
experts list`. The host (protocols/experts/hosting.py) does the work; here it obeys the owner: it
pauses while the gate is closed, and leaves when the owner wants to leave. So the caps, the
schedule and `potluck pause` mean the same as for training.

A lost network is no reason to pause: nobody can call, and the announcements expire by themselves.

Promises: after `departure.leave()` the others get the newest copies within `LEAVING_SECONDS`; a
second one ends that at once. It does not wait for the training to leave, nor the training for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from node.core.control import Answering
from node.core.training_view import ExpertsView
from node.training.census import ExpertCensus, OwnExpert, take_census
from node.training.happenings import (
    ExpertsLost,
    ExpertsTaken,
    Leaving,
    Notice,
    Paused,
    Resumed,
    ServingBegan,
)
from node.training.phases import NETWORK
from protocols.errors import PotluckError
from protocols.experts import ExpertDirectory, ExpertGrid, Uid

if TYPE_CHECKING:
    from node.core.node import Node
    from node.core.traffic_meter import TrafficMeter
    from node.training.session import TrainingSession
    from protocols.experts import ExpertHost, HostEvent, HostSettings, Maker
    from protocols.rpc import Rpc

CENSUS_SECONDS: Final = 20.0  # between two looks at all experts, for the owner to see
FIRST_CENSUS_SECONDS: Final = 2.0
RATE_SECONDS: Final = 10.0
COUNT_SECONDS: Final = 1.0
GATHERING_SECONDS: Final = 0.3
"""Events of one moment are told in one line: a server takes many experts at once."""

LEAVING_SECONDS: Final = 2.0
"""Of the five that leaving may take; the rest is for connections and files."""


@dataclass(frozen=True)
class ServingPlan:
    """What this peer will serve. `folder`: for its experts, and for copies of others'.
    `memory_bytes`, `disk_bytes`: what that takes at most."""

    run: str
    grids: tuple[ExpertGrid, ...]
    make: Maker
    folder: Path
    settings: HostSettings
    memory_bytes: int
    disk_bytes: int

    @property
    def most(self) -> int:
        return self.settings.most_experts


class WatchedExperts:
    """The experts of the run. `host`: set while this peer serves some. trio's thread only."""

    def __init__(self, directory: ExpertDirectory, run: str, grids: Sequence[ExpertGrid]) -> None:
        self.directory = directory
        self.host: ExpertHost | None = None
        self.most = 0
        self.taken_over = 0
        self.lost = 0
        self._run, self._grids = run, tuple(grids)
        self._census = ExpertCensus(run=run)
        self._counted: dict[Uid, int] = {}
        self._rows = 0
        self._rates: deque[tuple[float, int]] = deque()

    async def watch(self) -> None:
        """Take the census again and again, forever."""
        await trio.sleep(FIRST_CENSUS_SECONDS)
        while True:
            await self.take_census()
            await trio.sleep(CENSUS_SECONDS)

    async def count(self) -> None:
        """Count the computed rows, forever."""
        while True:
            self.count_rows(trio.current_time())
            await trio.sleep(COUNT_SECONDS)

    async def take_census(self) -> ExpertCensus:
        self._census = await take_census(self.directory, self._run, self._grids)
        return self._census

    async def answer_list(self, _arguments: Mapping[str, Any], answer: Answering) -> None:
        """`potluck experts list`."""
        import msgspec

        census = await self.take_census()
        await answer(msgspec.structs.replace(census, own=self._own()))

    def view(self) -> ExpertsView:
        hosted = () if self.host is None else self.host.hosted()
        saved = [one.saved for one in hosted]
        oldest = min((at for at in saved if at is not None), default=None)
        return ExpertsView(
            grids=self._census.in_short(),
            servers=len(self._census.servers),
            most=self.most,
            hosted=len(hosted),
            load_seconds=0.0 if self.host is None else round(self.host.load, 3),
            rows=self._rows,
            rows_per_second=self._rate(),
            steps=sum(one.steps for one in hosted),
            taken_over=self.taken_over,
            lost=self.lost,
            oldest_copy_seconds=None
            if oldest is None or None in saved
            else round(trio.current_time() - oldest, 1),
        )

    def count_rows(self, now: float) -> None:
        """An expert that left takes its count with it, so what was counted is kept here."""
        if self.host is None:
            return
        for one in self.host.hosted():
            self._rows += max(0, one.examples - self._counted.get(one.uid, 0))
            self._counted[one.uid] = one.examples
        self._rates.append((now, self._rows))
        while now - self._rates[0][0] > RATE_SECONDS:
            self._rates.popleft()

    def _rate(self) -> float | None:
        if len(self._rates) < 2:
            return None
        (began, first), (ended, last) = self._rates[0], self._rates[-1]
        return round((last - first) / (ended - began), 1)

    def _own(self) -> tuple[OwnExpert, ...]:
        now = trio.current_time()
        return tuple(
            OwnExpert(
                uid=str(one.uid),
                came=one.origin,
                steps=one.steps,
                rows=one.examples,
                saved_seconds_ago=None if one.saved is None else round(now - one.saved, 1),
            )
            for one in (() if self.host is None else self.host.hosted())
        )


@asynccontextmanager
async def open_serving(
    rpc: Rpc, plan: ServingPlan, experts: WatchedExperts, session: TrainingSession
) -> AsyncIterator[ExpertHost]:
    """Serve until the owner wants to leave, or the block ends."""
    from protocols.experts import open_expert_host

    teller = _Teller(session, experts)
    async with open_expert_host(
        rpc, experts.directory, plan.grids, plan.make, plan.folder, plan.settings, teller.take
    ) as host:
        experts.host, experts.most = host, plan.most
        session.happened(ServingBegan(plan.run, plan.most))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(experts.count)
                nursery.start_soon(teller.tell_on)
                nursery.start_soon(_obey_gate, host, session)
                leaving = trio.Event()
                nursery.start_soon(_leave_when_told, experts, host, session, leaving)
                yield host
                if session.departure.wanted:
                    await leaving.wait()
                else:  # the run is complete
                    experts.count_rows(trio.current_time())
                    await host.leave(LEAVING_SECONDS)
                nursery.cancel_scope.cancel()
        finally:
            experts.host = None


async def serve_until_left(node: Node, session: TrainingSession, meter: TrafficMeter) -> None:
    """For a peer that does not train: watch the network, the traffic and the trainers until it is
    told to leave."""
    from node.training.network_watch import watch_network
    from node.training.trainer import TRAFFIC_SECONDS
    from node.training.watched import WatchedServing

    session.watched = watched = WatchedServing(node, session.run, meter)

    async def follow_the_traffic() -> None:
        while True:
            traffic = node.network.traffic()
            meter.note(trio.current_time(), traffic.sent_bytes, traffic.received_bytes)
            await trio.sleep(TRAFFIC_SECONDS)

    async def follow_the_trainers() -> None:
        while True:
            with suppress(PotluckError):  # the network may be lost; it is looked again
                session.account.epoch = await watched.look()
            await trio.sleep(CENSUS_SECONDS)

    async def watch() -> None:
        await watch_network(node.network, node.dht, session, begins=False)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_the_traffic)
        nursery.start_soon(follow_the_trainers)
        nursery.start_soon(watch)
        await session.departure.until_wanted()
        session.happened(Leaving(session.departure.at_once))
        nursery.cancel_scope.cancel()


async def _obey_gate(host: ExpertHost, session: TrainingSession) -> None:
    """Pause while the owner does not want this machine to compute, forever."""
    token, changed = trio.lowlevel.current_trio_token(), trio.Event()
    paused_at: float | None = None

    def wake() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(lambda: changed.set())

    session.gate.watch(wake)
    while not session.departure.wanted:
        reasons = [one.words for one in session.gate.reasons() if one.name != NETWORK]
        if reasons and paused_at is None:
            paused_at = time.monotonic()
            host.pause()
            if not session.trains_samples:
                session.happened(Paused(tuple(reasons)))
        elif not reasons and paused_at is not None:
            host.resume()
            if not session.trains_samples:
                session.happened(Resumed(round(time.monotonic() - paused_at, 3)))
            paused_at = None
        await changed.wait()
        changed = trio.Event()


async def _leave_when_told(
    experts: WatchedExperts, host: ExpertHost, session: TrainingSession, has_left: trio.Event
) -> None:
    departure = session.departure
    await departure.until_wanted()
    experts.count_rows(trio.current_time())
    try:
        async with trio.open_nursery() as nursery:

            async def cut_short() -> None:
                await departure.until_at_once()
                nursery.cancel_scope.cancel()

            nursery.start_soon(cut_short)
            await host.leave(LEAVING_SECONDS)
            nursery.cancel_scope.cancel()
    finally:
        has_left.set()


class _Teller:
    """Tells the owner what the host does."""

    def __init__(self, session: TrainingSession, experts: WatchedExperts) -> None:
        self._session, self._experts = session, experts
        self._events: list[HostEvent] = []
        self._news = trio.Event()
        self._troubles: set[str] = set()

    def take(self, event: HostEvent) -> None:
        from protocols.experts import ExpertLost, ExpertTaken, SavingFailed

        match event:
            case ExpertTaken(origin=origin):
                self._experts.taken_over += origin == "taken over"
            case ExpertLost():
                self._experts.lost += 1
            case SavingFailed(why=why):
                if why in self._troubles:
                    return
                self._troubles.add(why)
            case _:
                return
        self._events.append(event)
        self._news.set()

    async def tell_on(self) -> None:
        """Forever."""
        while True:
            await self._news.wait()
            await trio.sleep(GATHERING_SECONDS)
            self._news = trio.Event()
            events, self._events = self._events, []
            for happening in told_together(events):
                self._session.happened(happening)


def told_together(events: Sequence[HostEvent]) -> list[ExpertsTaken | ExpertsLost | Notice]:
    """One happening for neighbouring events of a kind. Pure."""
    from protocols.experts import ExpertLost, ExpertTaken, SavingFailed

    def kind(event: HostEvent) -> tuple[str, str]:
        return type(event).__name__, event.origin if isinstance(event, ExpertTaken) else ""

    told: list[ExpertsTaken | ExpertsLost | Notice] = []
    for (_, origin), some in groupby(events, kind):
        alike = list(some)
        uids = tuple(str(one.uid) for one in alike)
        if isinstance(alike[0], ExpertTaken):
            told.append(ExpertsTaken(uids, origin))
        elif isinstance(alike[0], ExpertLost):
            told.append(ExpertsLost(uids))
        else:
            told += [
                Notice(f"{one.uid} could not be saved, and it is tried again: {one.why}")
                for one in alike
                if isinstance(one, SavingFailed)
            ]
    return told
