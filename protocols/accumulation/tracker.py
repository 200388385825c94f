"""Progress on one node: says how this peer is, reads how the others are, keeps the estimate.

    async with open_tracker(network, dht, TrackerSettings(run, target_samples), mine) as tracker:
        tracker.note(mine)                   # from any thread, whenever something has changed
        tracker.estimate                     # from any thread: a plain attribute

What others carry forward by our rate is right most of the time, so a slot is written only when
they would be wrong by more than a little, when something else than the samples has changed, or
when the slot would soon be over (saying.py, publishing.py). Reading is as frequent as the estimate
asks for; and the moment at which the step becomes due by what is known is not slept through.

Promises: everything ends with the `async with`, and the slot is taken back. Neither `note` nor
`estimate` ever waits. A directory that cannot be reached is tried again for ever; what was known
ends with the life of its slots. Before this node has met its swarm and said that it is there, the
estimate has the number 0, by which nothing may be decided.

Easy to get wrong: `estimate` is replaced, never changed; take it once and look at that one.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import trio
from blake3 import blake3

from protocols.accumulation.batch_plan import MOST_SPARED
from protocols.accumulation.claims import Credit
from protocols.accumulation.complaints import Complaints
from protocols.accumulation.forks import Patience
from protocols.accumulation.lifecycle_events import Ending
from protocols.accumulation.progress import (
    FOLLOWER_AGAIN_SECONDS,
    PATIENCE_SECONDS,
    READ_WHEN_DUE_SECONDS,
    SHORTEST_READ_SECONDS,
    Estimate,
    Known,
    ProgressSettings,
    Seen,
    estimate,
    expected_of,
)
from protocols.accumulation.progress_slot import MOST_PEERS, ProgressSlot, progress_key
from protocols.accumulation.publishing import WRITE_SECONDS, Publishing
from protocols.accumulation.rate_meter import RateMeter
from protocols.accumulation.saying import Said, say_again_in
from protocols.accumulation.slots_seen import READ_SECONDS, SlotsSeen
from protocols.dht.bootstrap import Joined
from protocols.dht.reading import Breadth
from protocols.dht.service import Dht
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.network import Network

log = logging.getLogger("potluck.accumulation")

RECKON_SECONDS: Final = 0.05
"""The estimate is made anew at most so often for the sake of samples: it takes some 100
microseconds for 16 peers, and batches may come a thousand times a second."""

IDLE_SECONDS: Final = 1.0  # and at least so often: forks and silences settle by time
LOOKS_SHARE: Final = 0.1  # of the time that a fetch has lasted is between two looks
TRIED_SECONDS: Final = 1.0  # between two looks at whether the swarm is met
TRIED_ROUNDS: Final = 2
"""In vain, of all peers of an earlier life: who may begin the run waits for them no longer. They
may all have left for good, and come in here otherwise when they are back."""

SAME_PACE: Final = 0.25
"""A peer says the same of its batches' time while that is wrong by no more. Plans that are made of
the same numbers are the same plans (batch_plan.py), whichever slot a reader has."""

WITHDRAW_SECONDS: Final = 1.0  # at the end; a slot that stays is over soon anyway


@dataclass(frozen=True)
class TrackerSettings:
    """- `run`: the name of the run. - `target_samples`: of one round.
    - `carries_forward`: see ProgressSettings; all peers of a run say the same.
    - `patience_seconds`: see ProgressSettings.
    - `counts_silence`: False: what is read while nobody answers says nothing. So a volunteer whose
      own network is gone takes nobody for gone, and makes no step alone.
    - `places`: see ProgressSettings; all peers of a run say the same."""

    run: str
    target_samples: int
    carries_forward: bool = True
    patience_seconds: float = PATIENCE_SECONDS
    counts_silence: bool = True
    places: int = MOST_PEERS


@asynccontextmanager
async def open_tracker(
    network: Network, dht: Dht, settings: TrackerSettings, mine: ProgressSlot
) -> AsyncIterator[Tracker]:
    """Publish and read until the block ends. `mine` is what is said first. The directory's
    families must contain PROGRESS. Errors of the block come out unwrapped."""
    failure: BaseException | None = None
    tracker = Tracker(network, dht, settings, mine)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tracker.publishing.run)
            nursery.start_soon(tracker.read_on)
            nursery.start_soon(tracker.reckon_on)
            try:
                yield tracker
            except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                failure = error
            nursery.cancel_scope.cancel()
    finally:  # where the block was cancelled from outside, so was the nursery, which says so here
        with trio.CancelScope(shield=True), trio.move_on_after(WITHDRAW_SECONDS):
            await tracker.publishing.withdraw()
    if failure is not None:
        raise failure


class Tracker:
    """Made by `open_tracker`. Invariant: all but `estimate` is touched by trio's thread only."""

    estimate: Estimate
    """The latest. Plain attribute; any thread may read it."""

    def __init__(
        self, network: Network, dht: Dht, settings: TrackerSettings, mine: ProgressSlot
    ) -> None:
        self._network, self._dht = network, dht
        self._key = progress_key(settings.run)
        self._settings = ProgressSettings(
            settings.target_samples,
            settings.carries_forward,
            settings.patience_seconds,
            settings.places,
        )
        self._counts_silence = settings.counts_silence
        self._jitter = _share(network.peer_id, settings.run)
        self._token, self._thread = trio.lowlevel.current_trio_token(), threading.get_ident()
        self._mine = mine
        self._meter = RateMeter()
        self._credit, self._patience = Credit(), Patience()
        self._members: frozenset[PeerId] = frozenset()
        self._epoch_began: float | None = None
        self._batch_began: float | None = None
        self._batch_seconds = 0.0
        self._spared = 0
        self._waited_for_follower_at = -math.inf
        self._claimed: tuple[int, dict[PeerId, int]] = (mine.epoch, {})
        self._seen = SlotsSeen()
        self._asked_at = -READ_WHEN_DUE_SECONDS
        self._read_at, self._pause = trio.current_time(), trio.CancelScope()
        """When the last reading ended, and the pause between it and the next one."""
        self._complaints = Complaints()
        self.publishing = Publishing(dht, self._key, self.mine, self._measured, self._again_in)
        self._wants_newest = False
        """The next reading is to find all that was brought out before it."""
        self._wants_look, self._wants_reckoning = trio.Event(), trio.Event()
        self._reckoned = trio.Event()
        self._meter.began(trio.current_time())
        self._reckon()

    # -- for others

    def note(self, mine: ProgressSlot, *, at_once: bool = False, ago: float = 0.0) -> None:
        """How this peer was so many seconds ago. Any thread; never waits. What is not samples is
        published at once; with `at_once` these are, too. How fast it is, and for how long its batch
        is under way, is measured here; `under_way` in it says only whether there is one."""
        self._run(lambda: self._take(mine, at_once=at_once, ago=ago))

    def set_away(self, *, is_away: bool) -> None:
        """Away, this peer's slot is taken back, and nobody counts on it or waits for it; what the
        others say is read as ever. trio's thread; never waits."""
        if self.publishing.set_away(is_away=is_away):
            if is_away:
                self._meter.paused()
            else:
                self._meter.began(trio.current_time())
                if self._batch_began is not None:
                    self._batch_began = trio.current_time()

    def look_now(self) -> None:
        """Read the others' slots as soon as can be. Any thread; never waits."""
        self._run(self._look_now)

    async def look_often(self) -> None:
        """Read on while a state is fetched, until cancelled: however short the run's steps are,
        what is known of them is to be newer than they are. After so many seconds of fetching it
        need not be newer than a tenth of that."""
        began = trio.current_time()
        while True:
            self._look_now()
            lasted = LOOKS_SHARE * (trio.current_time() - began)
            await trio.sleep(min(max(SHORTEST_READ_SECONDS, lasted), IDLE_SECONDS))

    def was_asked(self, _epoch: int) -> None:
        """Others ask this peer into a round that it does not look for: they have begun, or are
        elsewhere, and its own look at them is due. However often they ask, it looks no more often
        than where a step is due. trio's thread."""
        now = trio.current_time()
        if now - self._asked_at >= READ_WHEN_DUE_SECONDS:
            self._asked_at = now
            self._look_now()

    async def looked(self, after: int = 0) -> Estimate:
        """Wait for an estimate whose number is higher than this."""
        while self.estimate.number <= after:
            await self.changed()
        return self.estimate

    async def look_again(self, after: int = 0) -> Estimate:
        """A reading that begins when what was noted is there for the others to read: of two peers
        that do the same, at least one sees the other. Its number is higher than this."""
        with trio.move_on_after(WRITE_SECONDS):
            await self.publishing.brought_out()
        begun = self._seen.begun
        self._wants_newest = True
        self._look_now()
        while self._seen.whole <= begun or self.estimate.number <= after:
            await self.changed()
        return self.estimate

    async def changed(self) -> Estimate:
        """Wait until the estimate has been made anew."""
        await self._reckoned.wait()
        return self.estimate

    def slots(self) -> dict[PeerId, ProgressSlot]:
        """What all others say that are alive and fit: where a state may be had."""
        peers, seen = self.estimate.peers, self._seen.slots
        return {peer: seen[peer].slot for peer in peers if peer in seen}

    def said_by(self, peer: PeerId) -> ProgressSlot | None:
        """What a peer has said last, whether it fits or not."""
        seen = self._seen.slots.get(peer)
        return None if seen is None else seen.slot

    def mine(self) -> ProgressSlot:
        """What this peer says now."""
        return self._mine

    def round_ended(
        self, ending: Ending, brought: Mapping[PeerId, float], *, applied: bool
    ) -> None:
        """A round of this peer has ended: who was in it, with what weight. Those who had claimed
        samples and did not bring them are doubted from then on. trio's thread; before `note`."""
        others = {peer: one for peer, one in brought.items() if peer != self._network.peer_id}
        epoch, claimed = self._claimed
        if ending in (Ending.COMMITTED, Ending.ALONE):
            self._credit.round_ended(epoch, claimed, others)
        if applied:
            self._members = frozenset(others)

    def state_refused(self, peer: PeerId, reason: str) -> None:
        """A peer did not have the state that its slot claims: it is ignored for a while. trio's
        thread."""
        self._credit.state_refused(peer, reason, self._now())
        self._reckon()

    def fetch_failed(self, peers: Iterable[PeerId], reason: str) -> None:
        """A state that these peers claim to have could be had from none of them. Whoever has
        failed to give it twice in a row is ignored for a while. trio's thread."""
        for peer in peers:
            self._credit.fetch_failed(peer, reason, self._now())
        self._reckon()

    # -- own progress

    def _run(self, act: Callable[[], None]) -> None:
        """In trio's thread: now, or soon."""
        if threading.get_ident() == self._thread:
            act()
            return
        try:
            self._token.run_sync_soon(act)
        except trio.RunFinishedError:
            log.debug("progress was told after the end")

    def _look_now(self) -> None:
        self._wants_look.set()

    def _take(self, mine: ProgressSlot, *, at_once: bool, ago: float) -> None:
        now, before = trio.current_time() - ago, self._mine
        goes_on = (mine.epoch, mine.history) == (before.epoch, before.history)
        if not goes_on:
            is_with_it = before.averaging and before.samples > 0
            self._spared = 0 if is_with_it else min(self._spared + 1, MOST_SPARED)
            is_step = before.averaging and mine.epoch == before.epoch + 1
            self._epoch_began = now if is_step else None
        if mine.under_way < 0.0:
            self._batch_began = None
        elif before.under_way < 0.0 or not goes_on or mine.samples != before.samples:
            self._batch_began = now
        if mine.averaging:
            if not before.averaging:
                self._begin_round(mine)
        elif goes_on and mine.samples > before.samples and not before.averaging:
            self._meter.counted(mine.samples - before.samples, now)
        elif mine.samples != before.samples or before.averaging or not goes_on:
            self._meter.began(now)
        if not mine.averaging:
            if mine.under_way >= 0.0 > before.under_way:
                self._meter.began(now)
            elif mine.batch and mine.under_way < 0.0:
                self._meter.paused()
        self._mine = mine
        self._measured()
        if not goes_on or mine.averaging != before.averaging:
            self._reckon()
        self._wants_reckoning.set()
        if at_once:
            self.publishing.say_at_once()
        self.publishing.say_soon()

    def _begin_round(self, mine: ProgressSlot) -> None:
        """Remember who is to come, and with what."""
        self._meter.paused()
        if self.estimate.waits_for_follower:
            self._waited_for_follower_at = trio.current_time()
        self._claimed = (
            mine.epoch,
            expected_of(
                self._seen.slots, mine, self._settings, self._now(), self.estimate.without_place
            ),
        )

    def _measured(self) -> ProgressSlot:
        """How this peer is, with its rate and its times as of now."""
        now, mine = trio.current_time(), self._mine
        rate = self._meter.rate(now) if mine.role == "trains" else 0.0
        seconds = mine.batch / rate if rate else 0.0
        if abs(seconds - self._batch_seconds) > SAME_PACE * self._batch_seconds:
            self._batch_seconds = seconds
        began, epoch_began = self._batch_began, self._epoch_began
        self._mine = msgspec.structs.replace(
            mine,
            samples_per_second=rate,
            batch_seconds=self._batch_seconds if mine.batch else 0.0,
            under_way=-1.0 if began is None else max(0.0, now - began),
            epoch_seconds=-1.0 if epoch_began is None else max(0.0, now - epoch_began),
            spared=self._spared if mine.role == "trains" else 0,
        )
        return self._mine

    def _again_in(self, said: Said) -> float:
        return say_again_in(
            said,
            self._measured(),
            self.estimate,
            self._settings,
            self._meter.largest_batch,
            trio.current_time(),
        )

    # -- reading

    async def read_on(self) -> None:
        """Read what the others say as often as the estimate asks for, for ever."""
        await self.publishing.begun()  # of two that begin at once one then sees the other
        await self._met_the_swarm()
        while True:
            self._wants_look = trio.Event()
            with trio.move_on_after(READ_SECONDS):
                await self._read()
            self._reckon()
            self._read_at = trio.current_time()
            with trio.move_on_after(self.estimate.read_again_in_seconds) as self._pause:
                await self._wants_look.wait()

    async def _met_the_swarm(self) -> None:
        """Until there is somebody to read from, or nobody to be expected."""
        while (state := self._dht.bootstrap_state()).joined is Joined.TRYING:
            if self._counts_silence and not state.addresses and state.rounds_failed >= TRIED_ROUNDS:
                return
            with trio.move_on_after(TRIED_SECONDS):
                await self._dht.joined()

    async def _read(self) -> None:
        is_full, is_first = self._seen.begins(), not self._seen.number
        breadth = Breadth.ALL if is_full else Breadth.FEW
        if self._wants_newest and not is_full:
            breadth = Breadth.FIRST
        self._wants_newest = False
        began = trio.current_time()
        try:
            found, gone = await self._dht.look(self._key, breadth)
        except PotluckError as error:
            log.debug("progress could not be read: %s", error)
            return
        if not self._counts_silence and self._dht.heard_at < began:
            return
        own = found.pop(self._network.peer_id, None)
        if own is not None and not is_first and not self.publishing.is_own(own.value):
            self._complaints.has_a_twin(own.publisher)
        for peer in self._seen.took(found, gone, trio.current_time(), is_full=is_full):
            self._complaints.has_torch(peer, found[peer].value.torch, self._mine.torch)

    def _now(self) -> float:
        """Seconds that this node has looked for."""
        return self._seen.now(trio.current_time())

    # -- reckoning

    async def reckon_on(self) -> None:
        """Make the estimate anew when something has changed or becomes due, for ever."""
        while True:
            until_due = self.estimate.due_in_seconds or IDLE_SECONDS
            seconds = max(RECKON_SECONDS, min(IDLE_SECONDS, until_due))
            with trio.move_on_after(seconds):
                await self._wants_reckoning.wait()
            self._wants_reckoning = trio.Event()
            self._reckon()
            self.publishing.say_soon()
            await trio.sleep(RECKON_SECONDS)

    def _reckon(self) -> None:
        now = self._now()
        seen, said = self._seen, self.publishing.said
        clock = trio.current_time()
        known = Known(
            self._credit,
            self._members,
            self._network.peer_id,
            None if said is None else Seen(said.slot, now - (clock - said.at)),
            None if self._epoch_began is None else now - (clock - self._epoch_began),
            clock - self._waited_for_follower_at >= FOLLOWER_AGAIN_SECONDS,
        )
        found = estimate(seen.slots, self._mine, self._settings, now, known, number=seen.number)
        fork = self._patience.settled(found.fork, now, self._jitter)
        if fork is not None and self.estimate.fork is None and found.epoch:
            log.warning("%s What only this side has made is given up.", fork.reason)
        reads = found.read_again_in_seconds
        if found.fork is not None or found.behind is not None:
            reads = min(reads, IDLE_SECONDS)
        self.estimate = replace(found, fork=fork, read_again_in_seconds=reads)
        self._pause.deadline = min(self._pause.deadline, self._read_at + reads)
        self._complaints.do_not_count(self.estimate.ignored)
        self._reckoned.set()
        self._reckoned = trio.Event()


def _share(peer: PeerId, run: str) -> float:
    """A number from 0 to 1 that is another one for every peer."""
    return int.from_bytes(blake3(f"{run}/{peer}".encode()).digest(4), "big") / 2**32
