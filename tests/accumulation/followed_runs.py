"""A run that goes on, in virtual time, while a newcomer fetches its state.

    run = await start_run(world, donors=2, epoch_seconds=10.0)
    fetched = await run.fetch(newcomer)
    newcomer.take(fetched)

There are no training threads: a task makes the "committed" results, and all donors step with them.
A round's decision (parts, digests) is computed from the encoded values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import trio
from torch import Tensor

from protocols.accumulation.keeping_up import KeepingUp, TooSlow
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.local_steps import LocalSteps
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.accumulation.results import (
    CommittedResult,
    Made,
    ResultLayouts,
    ResultsKept,
    lineage_after,
    lone_step,
    proven_digest,
)
from protocols.accumulation.state_download import FetchSettings
from protocols.accumulation.state_fetching import FetchedState, StateSource, fetch_state
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_messages import ResultKind
from protocols.accumulation.state_pace import ServingCost
from protocols.accumulation.state_serving import StateServer, StateServingSettings
from protocols.accumulation.steps import GradientSteps, Steps
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.moshpit.layout import Layout, PartCut, ResultCut
from protocols.rpc import Rpc, open_rpc
from protocols.testing.world import NodeSettings, SimulatedNetwork, SimulatedWorld

RUN = "test"
VALUES = 32 << 10
COLUMNS = 64  # of a matrix
RESULT_BYTES = 2 * VALUES  # in float16, and a little more
STATE_BYTES = 12 * VALUES  # with Adam's two statistics
FIRST = Lineage(0, b"f" * 16)
CHUNK = PIECE_BYTES = 16 << 10
HANDED_ON_SECONDS = 0.01
UNPACED = StateServingSettings(upload_bytes_per_second=None)


class RunMember:
    """A model with its optimizer, at an epoch of the run. With `fragments`, it makes local steps
    that are exchanged in as many, each twice as large as the one before. With `powersgd_rank`, its
    parameter is a matrix."""

    def __init__(
        self,
        *,
        seed: int = 0,
        codec: Codecs = "float16",
        values: int = VALUES,
        fragments: int = 0,
        powersgd_rank: int = 0,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        chance = torch.Generator().manual_seed(seed)
        shape = (values // COLUMNS, COLUMNS) if powersgd_rank else (values,)
        parameter = torch.nn.Parameter(torch.randn(shape, generator=chance))
        adam = partial(torch.optim.Adam, lr=0.01)
        options: dict[str, Any] = {"max_norm": 1.0, "codec": codec, "scales_loss": False}
        self.steps: Steps
        if fragments:
            parts = [torch.randn(values << number, generator=chance) for number in range(fragments)]
            named = [(f"{number}.w", torch.nn.Parameter(one)) for number, one in enumerate(parts)]
            own, options["fragments"] = Parameters(named), fragments
            self.steps = LocalSteps(own, adam, None, buffers={}, **options)
        else:
            own, options["powersgd_rank"] = Parameters([("w", parameter)]), powersgd_rank
            self.steps = GradientSteps(own, adam, None, delayed=False, buffers={}, **options)
        shared = self.steps.shared.segments("none")
        self.layouts = ResultLayouts(self.steps.layouts, Layout(shared))
        self.results = ResultsKept(self.layouts, clock=clock)
        self.lock = StateLock()
        self.at = FIRST

    def look(self) -> LiveState:
        return replace(self.steps.look(RUN, *self.at), piece_bytes=PIECE_BYTES)

    def capture(self) -> TrainingState:
        return self.look().copy()

    def made(self, values: Tensor, kind: ResultKind) -> Made:
        """The description that a round with these values would have made."""
        layout = self.layouts.of(kind, self.at.epoch)
        if kind == "lone step":
            return lone_step(values, self.layouts, self.at.epoch, b"n" * 16, followed=True)
        half = values.numel() // 2 // 1024 * 1024
        cut = ResultCut((PartCut(0, 0, half), PartCut(2, half, layout.values)), CHUNK)
        copy = CommittedResult.encoded_from(self.at, Made(kind, b"", cut), values, self.layouts)
        assert copy is not None
        values.copy_(copy.values(self.layouts))  # what all members of the round have
        return Made(kind, proven_digest(kind, b"", copy.part_digests(self.layouts)), cut)

    def step(self, made: Made, values: Tensor) -> None:
        with self.lock.changing():
            self.results.add(self.at, made, values)
            self._apply(made.kind, values.clone())
            self.at = lineage_after(self.at, made.kind, made.digest)

    def take(self, state: TrainingState | None, results: Sequence[CommittedResult]) -> None:
        """As standing.py does."""
        if state is not None:
            self.steps.restore(state)
            self.at = Lineage(state.epoch, state.history)
        for one in results:
            assert one.before == self.at
            self._apply(one.kind, one.values(self.layouts))
            self.at = one.after

    def _apply(self, kind: ResultKind, values: Tensor) -> None:
        if kind == "parameters":
            self.steps.shared.copy_from(values)
        else:
            self.steps.apply(values)


@dataclass
class RunDonor:
    """A peer of the run that serves its state."""

    network: SimulatedNetwork
    member: RunMember
    serving: StateServingSettings
    cost: ServingCost | None = None
    ready: trio.Event = field(default_factory=trio.Event)
    server: StateServer | None = None

    async def run(self, network: SimulatedNetwork) -> None:
        member = self.member
        async with open_rpc(network) as rpc:
            self.server = StateServer(
                rpc, member.look, member.lock, self.serving, member.results, self.cost
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.server.run)
                self.server.needed()
                await self.server.offered()
                self.ready.set()

    def source(self) -> StateSource:
        """This donor's slot, as a newcomer has read it."""
        if self.server is not None:
            self.server.needed()
        member, offer = self.member, None if self.server is None else self.server.offer
        if self.server is None or offer is None:
            return StateSource(self.network.peer_id, *member.at)
        is_earlier = (offer.epoch, offer.history) != member.at
        if is_earlier and not self.server.leads_to(member.at):
            return StateSource(self.network.peer_id, *member.at)
        return StateSource(self.network.peer_id, *member.at, offer.digest, is_earlier=is_earlier)


class FollowedRun:
    """Donors that step together every `epoch_seconds`."""

    def __init__(self, donors: list[RunDonor], epoch_seconds: float) -> None:
        self.donors, self.epoch_seconds = donors, epoch_seconds
        self.kinds: Callable[[int], Sequence[ResultKind]] = lambda _epoch: ("step",)
        self.told: list[TooSlow] = []
        self.told_at: list[float] = []
        self.places = {self.at}
        """The lineages that the run has had."""
        self._slots_under_way: deque[tuple[float, list[StateSource]]] = deque()

    @property
    def at(self) -> Lineage:
        return self.donors[0].member.at

    async def go_on(self) -> None:
        while True:
            await trio.sleep(self.epoch_seconds)
            self.step()

    def step(self) -> None:
        first, epoch = self.donors[0].member, self.at.epoch
        for kind in self.kinds(epoch):
            seed = torch.Generator().manual_seed(epoch)
            values = torch.randn(first.layouts.of(kind, epoch).values, generator=seed)
            if kind != "parameters":
                # the parameter is used by all, their loss is 2, and nothing overflowed
                values[-4:] = torch.tensor([1.0, 2.0, 1.0, 0.0])
            made = first.made(values, kind)
            for donor in self.donors:
                donor.member.step(made, values)
                self.places.add(donor.member.at)
                if donor.server is not None:
                    donor.server.advanced()

    async def named(self) -> None:
        """Wait until all donors have named their present state."""
        for donor in self.donors:
            assert donor.server is not None
            offer = donor.server.offer
            while offer is None or offer.epoch != self.at.epoch:
                offer = await donor.server.offered(offer)

    def sources(self) -> list[StateSource]:
        return [one.source() for one in self.donors if not one.network.closed]

    def old_sources(self) -> list[StateSource]:
        """The slots as a reader sees them after `slot_seconds` on their way. A donor that has not
        named its state within a step never publishes its digest."""
        return self._slots_under_way[0][1] if self._slots_under_way else []

    async def hand_on_slots(self, slot_seconds: float) -> None:
        """Keep `old_sources` at this age."""
        while True:
            now = trio.current_time()
            self._slots_under_way.append((now, self.sources()))
            while self._slots_under_way[0][0] < now - slot_seconds:
                self._slots_under_way.popleft()
            await trio.sleep(HANDED_ON_SECONDS)

    def tell(self, error: TooSlow) -> None:
        self.told.append(error)
        self.told_at.append(trio.current_time())

    async def fetch(
        self,
        rpc: Rpc,
        member: RunMember,
        sources: Callable[[], Sequence[StateSource]] | None = None,
        keeping_up: KeepingUp | None = None,
        settings: FetchSettings | None = None,
    ) -> FetchedState:
        return await fetch_state(
            rpc,
            sources or self.sources,
            member.look(),
            layouts=member.layouts,
            too_slow=self.tell,
            keeping_up=keeping_up,
            settings=settings,
        )


async def start_run(
    world: SimulatedWorld,
    nursery: trio.Nursery,
    *newcomers: SimulatedNetwork,
    epoch_seconds: float,
    donors: int = 2,
    machines: Sequence[NodeSettings] = (),
    member: Callable[[], RunMember] = RunMember,
    serving: StateServingSettings = UNPACED,
    costs: Sequence[ServingCost] = (),
) -> FollowedRun:
    """Start a run that the newcomers know. `costs`: the cost of serving for each of the donors."""
    started = []
    for number in range(donors):
        machine = machines[number] if number < len(machines) else None
        network = world.add_node(f"donor-{number}", machine)
        donor = RunDonor(network, member(), serving, costs[number] if number < len(costs) else None)
        for newcomer in newcomers:
            world.introduce(newcomer, network)
        world.start(network, donor.run)
        started.append(donor)
    for donor in started:
        await donor.ready.wait()
    run = FollowedRun(started, epoch_seconds)
    run.step()  # Adam has statistics from here on
    nursery.start_soon(run.go_on)
    return run
