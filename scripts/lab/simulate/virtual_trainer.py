"""One peer of a training run, in virtual time and without threads.

    one = trainer(world, "first", Manner(seconds=0.5))
    two = trainer(world, "second", Manner(seconds=0.5), others=[one])
    two.kill()
    longest_gap([one], since, now)

Lifecycle, tracker, averager and directory are the real ones, on the simulated network. A virtual
clock does not see a thread at work. So a task does here the work of driver.py and rounds.py in the
training thread, in the same order and with the same pauses, and with `delayed` another task does
their work in the thread of a round. Two things are simplified. A batch takes time but no CPU, and
its gradient is the same vector every time. A state is copied from its owner after `FETCH_SECONDS`
if that is alive, without its bytes on the network.

Every peer has another gradient, so the parameters of two peers are equal only if they have made the
same steps with the same members and weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import trio
from blake3 import blake3

from lab.simulate.liars import BROUGHT_SHARE, Lie, lying
from protocols.accumulation.driver import (
    FIRST_RETRY_SECONDS,
    LONGEST_RETRY_SECONDS,
    SHORTEST_WAIT_SECONDS,
    UNPROVED_SECONDS,
    NextBatch,
    in_the_way,
)
from protocols.accumulation.known import ProgressSettings
from protocols.accumulation.lifecycle import (
    Average,
    Averaged,
    Contributed,
    Effect,
    Ending,
    Estimated,
    Event,
    Fetch,
    Fetched,
    KeepGradients,
    Lifecycle,
    LookAgain,
    Mode,
    Phase,
    StateFetchFailed,
    Step,
    StepAlone,
    Stepped,
)
from protocols.accumulation.lineage import HISTORY_BYTES
from protocols.accumulation.progress_slot import MOST_PEERS, PROGRESS, ProgressSlot, sums_key
from protocols.accumulation.rounds import averaged, brought_to, lacks_somebody
from protocols.accumulation.tracker import Tracker, open_tracker
from protocols.dht import Dht, DhtSettings, open_dht
from protocols.identity import PeerId
from protocols.moshpit.averager import ONE_GROUP, Averager, open_averager
from protocols.moshpit.layout import Layout, Segment, Vector
from protocols.moshpit.matchmaking import GROUP
from protocols.moshpit.outcome import Committed
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.settings import GROUP_SIZE, AveragerSettings
from protocols.rpc import open_rpc
from protocols.testing.world import NodeSettings, SimulatedNetwork, SimulatedWorld

RUN = "poem"
TARGET = 64
PARAMETERS = 1000
LEARNING_RATE = 0.1
MATCHMAKING_SECONDS = 10.0
ROUND_SECONDS = 60.0
SIGNATURE = b"m" * 16
FETCH_SECONDS = 0.5
FETCH_FAILS_SECONDS = 3.0  # until no known peer has it


@dataclass(frozen=True)
class Manner:
    """How a peer takes part.

    - `seconds`, `samples`: a batch of so many samples takes so long; without samples the peer is
      auxiliary, and looks at the run so often.
    - `restored`: it begins with a state of its own of that epoch.
    - `begins`: it may begin the run; else it waits until there is one, as a volunteer does.
    - `target`: samples of one step of the whole run.
    - `parameters`: how many values the model has.
    - `group_size`, `approximate`: who is in a round, as in CollaborationSettings.
    - `is_measured`: it knows how long a batch takes before the first.
    - `delayed`: it computes the next step's batches beside a round.
    """

    seconds: float = 1.0
    samples: int = 8
    restored: int = 0
    begins: bool = True
    target: int = TARGET
    parameters: int = PARAMETERS
    group_size: int = GROUP_SIZE
    approximate: bool = False
    is_measured: bool = True
    delayed: bool = False


class StepMade(NamedTuple):
    """A step of one peer, made of this many samples of all peers. `epoch` is the one after it,
    `digest` that of the parameters then."""

    at: float
    epoch: int
    history: bytes
    members: int
    digest: bytes
    samples: float


class VirtualBatch(NamedTuple):
    """A batch that one peer has computed, and in which epoch."""

    at: float
    epoch: int
    samples: int


class Trainer:
    """A node that trains until the world ends, it leaves, or it is killed."""

    def __init__(
        self,
        world: SimulatedWorld,
        network: SimulatedNetwork,
        manner: Manner,
        bootstrap: Sequence[str],
        registry: dict[PeerId, Trainer],
    ) -> None:
        self.world, self.network, self.manner = world, network, manner
        self.registry, self._bootstrap = registry, tuple(bootstrap)
        self.steps: list[StepMade] = []
        self.batches: list[VirtualBatch] = []
        self.lie: Lie | None = None
        self._said: ProgressSlot | None = None
        self.alive = True
        self.began = trio.current_time()
        self.died: float | None = None
        self.words: list[str] = []
        self.when_stepped: Callable[[], None] = lambda: None
        self.leaving, self.ended = trio.Event(), trio.Event()
        self._departs_until: float | None = None
        self._seen_out = trio.Event()
        self._away_until: float | None = None
        self.haste = 1.0
        """It computes so many times as fast as its manner says."""
        self._failed, self._retry = 0, FIRST_RETRY_SECONDS
        self._computes, self._leaves = False, False
        self._nursery: trio.Nursery | None = None
        self._round_ended: trio.Event | None = None
        self._left: deque[Effect] = deque()
        chance = torch.Generator().manual_seed(network.random.getrandbits(62))
        self._gradient = torch.randn(manner.parameters, generator=chance)
        self.parameters = torch.zeros(manner.parameters)
        mode = Mode(manner.target, delayed=manner.delayed, auxiliary=not manner.samples)
        self.lifecycle = Lifecycle(mode, epoch=0, history=b"\0" * HISTORY_BYTES)
        self._next_batch = NextBatch(mode)
        self._tracker: Tracker | None = None
        self._averager: Averager | None = None
        self.directory: Dht | None = None
        registry[network.peer_id] = self
        world.start(network, self._run)

    @property
    def name(self) -> str:
        return self.network.name

    @property
    def tracker(self) -> Tracker:
        assert self._tracker is not None
        return self._tracker

    @property
    def has_place(self) -> bool:
        """False if its cohort has no room for it, so that it only follows the run."""
        return self._tracker is None or self._tracker.estimate.has_place

    @property
    def epoch(self) -> int:
        return self.lifecycle.life.epoch

    @property
    def exchanged_bytes(self) -> int:
        """How many bytes of values it has sent in rounds."""
        return 0 if self._averager is None else self._averager.statistics().bytes_sent

    def kill(self, *, silently: bool = False) -> None:
        self.alive, self.died = False, trio.current_time()
        self.world.crash(self.network, silently=silently)

    async def leave(self, *, patience: float = 0.0) -> None:
        """It ends. With patience it does first what a volunteer does on Ctrl-C: it ends its batch,
        and brings what it has to a round that begins within this time."""
        until = trio.current_time() + (patience or math.inf)
        if patience:
            self._departs_until = until
            with trio.move_on_at(until):
                await self._seen_out.wait()
        self.alive, self.died = False, trio.current_time()
        self.leaving.set()
        with trio.move_on_at(until):
            await self.ended.wait()
        self.world.crash(self.network)  # its process ends

    def away(self, seconds: float) -> None:
        """Paused, from the next batch on."""
        self._away_until = trio.current_time() + seconds

    # -- within

    async def _run(self, network: SimulatedNetwork) -> None:
        manner = self.manner
        settings = AveragerSettings(
            RUN,
            reduces=lambda: network.settings.dialable,
            group_size=manner.group_size,
            matchmaking_seconds=MATCHMAKING_SECONDS,
            round_seconds=ROUND_SECONDS,
        )
        dht = DhtSettings(bootstrap=self._bootstrap, client=not network.settings.dialable)
        progress = ProgressSettings(
            manner.target,
            places=MOST_PEERS if manner.approximate else manner.group_size,
            delayed=manner.delayed,
            run=RUN,
        )
        if manner.restored:
            epoch = manner.restored
            history = bytes([epoch]) * HISTORY_BYTES
            self.lifecycle = Lifecycle(self.lifecycle.mode, epoch=epoch, history=history)
        async with (
            open_rpc(network) as rpc,
            open_dht(network, rpc, families=[GROUP, PROGRESS], settings=dht) as self.directory,
            open_averager(network, rpc, self.directory, settings) as self._averager,
            open_tracker(
                network,
                lying(self.directory, self._told, self._also),
                progress,
                self._slot(),
                counts_silence=manner.begins,
            ) as self._tracker,
            trio.open_nursery() as nursery,
        ):
            averager = self._averager
            averager.when_asked(self.tracker.was_asked)
            self.tracker.idle_heads = lambda: averager.idle_heads
            self.tracker.step_shown_by = averager.step_shown_by
            self._averager.when_exchanging(self.tracker.gathered)
            self._nursery = nursery
            nursery.start_soon(self._train)
            nursery.start_soon(self._watch_where_the_run_is)
            await self.leaving.wait()
            nursery.cancel_scope.cancel()
        self.ended.set()

    def _told(self, slot: ProgressSlot) -> ProgressSlot:
        """What the others read in place of this slot."""
        if self.lie is not None and self._said is not None:
            return self.lie.told(slot, self._said, self.manner.target)
        if not slot.peers:
            self._said = slot
        return slot

    def _also(self, slot: ProgressSlot) -> tuple[str, ProgressSlot] | None:
        """What the others read beside it, and where."""
        also = None if self.lie is None or slot.peers else self.lie.also_told(slot)
        return None if also is None else (sums_key(RUN), also)

    async def _watch_where_the_run_is(self) -> None:
        assert self._averager is not None
        while True:
            await self.tracker.changed()
            if self.tracker.estimate.behind is not None:
                self._averager.overtaken(self.tracker.estimate.epoch)

    def _slot(self) -> ProgressSlot:
        life = self.lifecycle.life
        is_averaging = life.phase is Phase.AVERAGING
        return ProgressSlot(
            life.epoch,
            life.history,
            life.published_samples,
            0.0,
            SIGNATURE,
            role="auxiliary" if self.lifecycle.mode.auxiliary else "trains",
            client=not self.network.settings.dialable,
            averaging=is_averaging,
            follows=life.follows,
            batch=self.manner.samples,
            batch_seconds=self.manner.seconds / self.haste if self.manner.is_measured else 0.0,
            under_way=0.0 if self._computes and life.counts_batches else -1.0,
            beside=life.samples if is_averaging else 0,
            leaves=self._leaves,
            uplink=0 if self._averager is None else self._averager.uplink,
        )

    async def _train(self) -> None:
        await self.tracker.looked()
        await self._go_on()
        began = trio.current_time()
        while (
            self.tracker.estimate.may_be_behind and trio.current_time() - began < UNPROVED_SECONDS
        ) or not (self.manner.begins or self.epoch or self.tracker.estimate.keepers):
            with trio.move_on_after(LONGEST_RETRY_SECONDS):
                await self.tracker.changed()
            await self._go_on()
        await self._wait_for_a_batch()
        while self._departs_until is None:
            self._computes = self.manner.samples > 0 and not self._next_batch.is_extra
            self.tracker.note(self._slot())
            await trio.sleep(self.manner.seconds / self.haste)
            self._computes = False
            if self._away_until is not None:
                await self._stay_away(self._away_until)
            if self.manner.samples:
                self.batches.append(
                    VirtualBatch(trio.current_time(), self.epoch, self.manner.samples)
                )
                await self._do_all(self._tell(Contributed(self.manner.samples)))
                self.tracker.note(self._slot())
            await self._go_on()
            await self._wait_for_a_batch()
        await self._see_out(self._departs_until)

    async def _see_out(self, until: float) -> None:
        await self._join()
        self._leaves = True
        self.tracker.note(self._slot(), at_once=True)
        await self._go_on()
        while samples := self.lifecycle.life.samples:
            left, found = until - trio.current_time(), self.tracker.estimate
            due_in = found.due_in_seconds_with(samples)
            if left <= 0.0 or due_in > left or not found.peers:
                break
            with trio.move_on_after(max(min(due_in, left), SHORTEST_WAIT_SECONDS)):
                await self.tracker.changed()
            await self._go_on()
        await self._join()
        self._seen_out.set()

    async def _join(self) -> None:
        if self._round_ended is not None:
            await self._round_ended.wait()
            self._round_ended = None

    async def _wait_for_a_batch(self) -> None:
        """Until this peer has a place in the run's rounds, and a batch of it is wanted."""
        while not self.has_place and self._departs_until is None:
            if self._away_until is not None:
                await self._stay_away(self._away_until)
            with trio.move_on_after(LONGEST_RETRY_SECONDS):
                await self.tracker.changed()
            await self._go_on()
        while self.manner.samples:
            life, found = self.lifecycle.life, self.tracker.estimate
            seconds = self._next_batch.waits(life, found, trio.current_time())
            if seconds <= 0.0:
                return
            if life.phase is Phase.ACCUMULATING:
                with trio.move_on_after(seconds):
                    await self.tracker.changed()
            else:
                await self._join()
            await self._go_on()

    async def _stay_away(self, until: float) -> None:
        self.tracker.set_away(is_away=True)
        await trio.sleep_until(until)
        self._away_until = None
        self.tracker.set_away(is_away=False)
        await self.tracker.look_again(self.tracker.estimate.number)
        await self._go_on()

    async def _go_on(self) -> None:
        while True:
            await self._do_all([])
            effects = self._tell(Estimated(self.tracker.estimate))
            await self._do_all(effects)
            if not effects:
                if self.lifecycle.life.phase is not Phase.BEHIND:
                    return
                await self._look_again()

    def _tell(self, event: Event) -> list[Effect]:
        effects = list(self.lifecycle.take(event))
        for one in effects:
            if isinstance(one, KeepGradients):
                self._failed += 1
                self.words.append(f"{trio.current_time():.1f} {self.epoch} kept: {one.reason}")
        if effects:
            self.tracker.note(self._slot(), at_once=True)
        return effects

    async def _do_all(self, effects: list[Effect]) -> None:
        to_do = deque(effects)
        while to_do or self._left:
            match self._left.popleft() if self._left else to_do.popleft():
                case Average() as average:
                    to_do.extend(await self._begin(average))
                case Fetch() as fetch:
                    to_do.extend(await self._fetch(fetch))
                case LookAgain():
                    await self._look_again()

    async def _begin(self, wanted: Average) -> list[Effect]:
        if not self.manner.delayed:
            return await self._round(wanted)
        assert self._nursery is not None
        await self._join()
        ended = self._round_ended = trio.Event()
        self._nursery.start_soon(self._round_beside, wanted, ended)
        return []

    async def _round_beside(self, wanted: Average, ended: trio.Event) -> None:
        self._left.extend(await self._round(wanted))
        ended.set()

    async def _round(self, wanted: Average) -> list[Effect]:
        assert self._averager is not None
        if self.lie is Lie.SLEEPS:
            await trio.sleep_forever()
        share = BROUGHT_SHARE if self.lie is Lie.KEEPS else 1.0
        over_a_grid = self.manner.approximate and wanted.expected > self.manner.group_size
        request = RoundRequest(
            Vector(Layout((Segment("all", self.manner.parameters),)), self._gradient),
            weight=share * wanted.weight,
            epoch=wanted.epoch,
            topic=wanted.history.hex(),
            expected=wanted.expected,
            awaited=wanted.awaited,
            coming=wanted.coming,
            lost=wanted.lost,
            votes=float(self.lifecycle.life.me in self.lifecycle.life.holders),
            cohort=wanted.cohort,
            fewest=wanted.needs,
            is_again=wanted.is_again,
            follows=self.lifecycle.life.follows,
            confirms=True,
        )
        grid = self._averager.grid_for(wanted.expected) if over_a_grid else ONE_GROUP
        outcome = await self._averager.average(request, grid)
        self.words.append(
            f"{trio.current_time():.1f} {self.epoch} {type(outcome).__name__} "
            f"of {wanted.expected} expected, awaited {len(wanted.awaited)}: "
            f"{getattr(outcome, 'reason', '')}"
        )
        if lacks_somebody(outcome, self.tracker.estimate, self.lifecycle.life.passed_by):
            await self.tracker.look_again(self.tracker.estimate.number)
        ended = averaged(outcome)
        if ended.ending is Ending.ALONE:  # nobody else has these bytes
            ended = Averaged(Ending.ALONE, digest=self.network.random.randbytes(16))
        self.lifecycle.take(Estimated(self.tracker.estimate))
        effects = list(self.lifecycle.take(ended))
        steps = [one for one in effects if isinstance(one, Step | StepAlone)]
        self._averager.confirm(applied=bool(steps))
        self.tracker.round_ended(brought_to(outcome), applied=bool(steps), peers=ended.peers)
        self.tracker.note(self._slot(), at_once=True)
        for one in effects:
            if isinstance(one, KeepGradients):
                self._failed += 1
                self.words.append(f"{trio.current_time():.1f} {self.epoch} kept: {one.reason}")
        if steps:
            self._failed = 0
            result = outcome.result if isinstance(outcome, Committed) else self._gradient
            self.parameters -= LEARNING_RATE * result
            self.steps.append(
                StepMade(
                    trio.current_time(),
                    self.epoch,
                    steps[0].history,
                    len(ended.members) or 1,
                    blake3(self.parameters.numpy().tobytes()).digest(),
                    outcome.weight if isinstance(outcome, Committed) else wanted.weight,
                )
            )
            self.when_stepped()
            effects += self._tell(Stepped())
        return effects

    async def _fetch(self, wanted: Fetch) -> list[Effect]:
        self.words.append(f"{trio.current_time():.1f} {self.epoch} fetches: {wanted.reason}")
        await trio.sleep(FETCH_SECONDS)
        for peer, slot in sorted(self.tracker.slots().items()):
            other = self.registry[peer]
            there = other.lifecycle.life
            fits = wanted.history in (None, there.history)
            if other.alive and slot.epoch >= wanted.at_least_epoch <= there.epoch and fits:
                self._failed = 0
                self.words.append(f"{trio.current_time():.1f} has epoch {there.epoch}")
                self.parameters = other.parameters.clone()
                return self._tell(Fetched(there.epoch, there.history))
        await trio.sleep(FETCH_FAILS_SECONDS - FETCH_SECONDS)
        self.words.append(f"{trio.current_time():.1f} {self.epoch} gets none")
        self.tracker.fetch_failed(wanted.peers, "no peer has it")
        return self._tell(StateFetchFailed())

    async def _look_again(self) -> None:
        life = self.lifecycle.life
        if self.manner.delayed and life.phase is not Phase.BEHIND:
            assert self._nursery is not None
            self._nursery.start_soon(self.tracker.look_again, life.looked_past)
            return
        if life.phase is Phase.BEHIND or self._failed > 1:
            await self._pause(self._retry)
            self._retry = min(2.0 * self._retry, LONGEST_RETRY_SECONDS)
        else:
            self._retry = FIRST_RETRY_SECONDS
        await self.tracker.look_again(life.looked_past)

    async def _pause(self, seconds: float) -> None:
        before, until = in_the_way(self.tracker.estimate), trio.current_time() + seconds
        await trio.sleep(min(seconds, FIRST_RETRY_SECONDS))
        with trio.move_on_at(until):
            while in_the_way(self.tracker.estimate) == before:
                await self.tracker.changed()


def trainer(
    world: SimulatedWorld,
    name: str,
    manner: Manner | None = None,
    others: Sequence[Trainer] = (),
    node: NodeSettings | None = None,
) -> Trainer:
    """A new peer, which knows the addresses of the first three of these that live and can be
    dialled."""
    registry = others[0].registry if others else {}
    known = [one.network for one in others if one.alive and one.network.settings.dialable]
    bootstrap = [one.address for one in known[:3]]
    return Trainer(world, world.add_node(name, node), manner or Manner(), bootstrap, registry)


def longest_gap(peers: Iterable[Trainer], since: float, now: float) -> float:
    """In which the furthest epoch of these did not grow."""
    times, furthest = [since], -1
    for step in sorted(step for one in peers for step in one.steps):
        if step.epoch > furthest:
            furthest = step.epoch
            if step.at >= since:
                times.append(step.at)
    times.append(now)
    return max(after - before for before, after in pairwise(times))


def forks(peers: Iterable[Trainer]) -> list[int]:
    """Epochs that have been reached with more than one history."""
    made: dict[int, set[bytes]] = {}
    for one in peers:
        for step in one.steps:
            made.setdefault(step.epoch, set()).add(step.history)
    return sorted(epoch for epoch, histories in made.items() if len(histories) > 1)
