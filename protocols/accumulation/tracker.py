"""Progress on one node: says how this peer is, reads how the others are, keeps the estimate.

    async with open_tracker(network, dht, TrackerSettings(run, target_samples), mine) as tracker:
        tracker.note(mine)                   # from any thread, whenever something has changed
        tracker.estimate                     # from any thread: a plain attribute

What others carry forward by our rate is right most of the time, so a slot is written only when
they would be wrong by more than a little, when something else than the samples has changed, or
when the slot would soon be over. Reading is as frequent as the estimate asks for; and the moment
at which the step becomes due by what is known is not slept through.

Time is counted here in seconds that this node has looked for: while its loop stalls, its machine
sleeps or nothing can be read, nobody else grows old. So a peer that wakes does not take those for
gone who have only not been heard of by it, and makes no step of its own.

Promises: everything ends with the `async with`, and the slot is taken back. Neither `note` nor
`estimate` ever waits. A directory that cannot be reached is tried again for ever; what was known
ends with the life of its slots. Before this node has met its swarm and said that it is there, the
estimate has the number 0, by which nothing may be decided.

Easy to get wrong: `estimate` is replaced, never changed; take it once and look at that one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import trio
from blake3 import blake3

from protocols.accumulation.claims import Credit
from protocols.accumulation.forks import Patience
from protocols.accumulation.lifecycle_events import Ending
from protocols.accumulation.progress import (
    LONGEST_READ_SECONDS,
    READ_WHEN_DUE_SECONDS,
    Estimate,
    Known,
    ProgressSettings,
    Seen,
    estimate,
    expected_of,
)
from protocols.accumulation.progress_slot import (
    MOST_PEERS,
    SLOT_SECONDS,
    ProgressSlot,
    progress_key,
)
from protocols.accumulation.rate_meter import RateMeter
from protocols.accumulation.saying import Said, alike_but_for_samples, say_again_in
from protocols.accumulation.signature import torch_release
from protocols.dht.bootstrap import Joined
from protocols.dht.reading import Entry
from protocols.dht.service import Dht
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.network import Network

log = logging.getLogger("potluck.accumulation")

CALL_SECONDS: Final = 3.0
"""What a reading or a writing may take: as long as the rarest reading waits for the next one."""

RECKON_SECONDS: Final = 0.05
"""The estimate is made anew at most so often for the sake of samples: it takes some 100
microseconds for 16 peers, and batches may come a thousand times a second."""

LONGEST_UNSEEN_SECONDS: Final = LONGEST_READ_SECONDS + CALL_SECONDS
"""Between two readings no more than this counts as time: a node that is well reads so often."""

IDLE_SECONDS: Final = 1.0  # and at least so often: forks and silences settle by time
FAILED_SECONDS: Final = 1.0  # between two tries to write what nobody took
WITHDRAW_SECONDS: Final = 1.0  # at the end; a slot that stays is over soon anyway
SAID_REMEMBERED: Final = 16  # own slots, to tell them from another node's with our identity


@dataclass(frozen=True)
class TrackerSettings:
    """- `run`: the name of the run. - `target_samples`: of one round.
    - `carries_forward`: see ProgressSettings; all peers of a run say the same."""

    run: str
    target_samples: int
    carries_forward: bool = True


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
            nursery.start_soon(tracker.say_on)
            nursery.start_soon(tracker.read_on)
            nursery.start_soon(tracker.reckon_on)
            try:
                yield tracker
            except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                failure = error
            nursery.cancel_scope.cancel()
    finally:  # where the block was cancelled from outside, so was the nursery, which says so here
        with trio.CancelScope(shield=True), trio.move_on_after(WITHDRAW_SECONDS):
            await tracker.withdraw()
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
        self._settings = ProgressSettings(settings.target_samples, settings.carries_forward)
        self._jitter = _share(network.peer_id, settings.run)
        self._token, self._thread = trio.lowlevel.current_trio_token(), threading.get_ident()
        self._mine = mine
        self._meter = RateMeter()
        self._credit, self._patience = Credit(), Patience()
        self._members: frozenset[PeerId] = frozenset()
        self._claimed: tuple[int, dict[PeerId, int]] = (mine.epoch, {})
        self._seen: dict[PeerId, Seen] = {}
        self._sequences: dict[PeerId, int] = {}
        self._number = 0
        self._reads_begun = self._read_whole = 0
        self._read_at: float | None = None
        self._looked_for = 0.0
        """Seconds until `_read_at` (see above)."""
        self._missing: set[PeerId] = set()
        self._asked_at = -READ_WHEN_DUE_SECONDS
        self._said: Said | None = None
        self._own: deque[ProgressSlot] = deque(maxlen=SAID_REMEMBERED)
        self._complaints: dict[PeerId, str] = {}
        self._other_torch: set[PeerId] = set()
        self._wants_look, self._wants_full_look = trio.Event(), True
        self._wants_say, self._wants_reckoning = trio.Event(), trio.Event()
        self._was_said, self._reckoned = trio.Event(), trio.Event()
        self._out: ProgressSlot | None = None
        """What others can read."""
        self._is_away = False
        self._meter.began(trio.current_time())
        self._reckon()

    # -- for others

    def note(self, mine: ProgressSlot, *, at_once: bool = False) -> None:
        """How this peer is now. Any thread; never waits. What is not samples is published at
        once; with `at_once` these are, too. `samples_per_second` in it is replaced by what is
        measured from the samples that are told."""
        self._run(lambda: self._take(mine, at_once=at_once))

    def set_away(self, *, is_away: bool) -> None:
        """Away, this peer's slot is taken back, and nobody counts on it or waits for it; what the
        others say is read as ever. trio's thread; never waits."""
        if is_away != self._is_away:
            self._is_away = is_away
            if is_away:
                self._meter.paused()
            else:
                self._meter.began(trio.current_time())
            self._wants_say.set()

    def look_now(self) -> None:
        """Read the others' slots as soon as can be. Any thread; never waits."""
        self._run(self._look_now)

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
        with trio.move_on_after(CALL_SECONDS):
            while not (self._is_away or self._is_out()):
                self._wants_say.set()
                await self._was_said.wait()
        begun = self._reads_begun
        self._look_now()
        while self._read_whole <= begun or self.estimate.number <= after:
            await self.changed()
        return self.estimate

    async def changed(self) -> Estimate:
        """Wait until the estimate has been made anew."""
        await self._reckoned.wait()
        return self.estimate

    def slots(self) -> dict[PeerId, ProgressSlot]:
        """What all others say that are alive and fit: where a state may be had."""
        peers = self.estimate.peers
        return {peer: self._seen[peer].slot for peer in peers if peer in self._seen}

    def said_by(self, peer: PeerId) -> ProgressSlot | None:
        """What a peer has said last, whether it fits or not."""
        seen = self._seen.get(peer)
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

    def _take(self, mine: ProgressSlot, *, at_once: bool) -> None:
        now, before = trio.current_time(), self._mine
        goes_on = (mine.epoch, mine.history) == (before.epoch, before.history)
        if mine.averaging:
            if not before.averaging:
                self._begin_round(mine)
        elif goes_on and mine.samples > before.samples and not before.averaging:
            self._meter.counted(mine.samples - before.samples, now)
        elif mine.samples != before.samples or before.averaging or not goes_on:
            self._meter.began(now)
        rate = self._meter.rate(now) if mine.role == "trains" else 0.0
        self._mine = msgspec.structs.replace(mine, samples_per_second=rate)
        if not goes_on or mine.averaging != before.averaging:
            self._reckon()
        self._wants_reckoning.set()
        if at_once:
            self._said = None
        self._wants_say.set()

    def _begin_round(self, mine: ProgressSlot) -> None:
        """Remember who is to come, and with what."""
        self._meter.paused()
        self._claimed = (mine.epoch, expected_of(self._seen, mine, self._settings, self._now()))

    # -- saying

    async def say_on(self) -> None:
        """Publish when there is something to say, for ever."""
        while True:
            with trio.move_on_after(self._say_again_in()):
                await self._wants_say.wait()
            self._wants_say = trio.Event()
            if self._is_away:
                await self._stay_away()
            if self._say_again_in() <= 0.0 and not await self._say():
                await trio.sleep(FAILED_SECONDS)

    async def _stay_away(self) -> None:
        with trio.move_on_after(CALL_SECONDS):
            await self.withdraw()
        while self._is_away:
            await self._wants_say.wait()
            self._wants_say = trio.Event()
        self._said = None  # so that the others know at once

    def _say_again_in(self) -> float:
        if self._said is None:
            return 0.0
        return say_again_in(
            self._said,
            self._mine,
            self.estimate,
            self._settings,
            self._meter.largest_batch,
            trio.current_time(),
        )

    async def _say(self) -> bool:
        now = trio.current_time()
        rate = self._meter.rate(now) if self._mine.role == "trains" else 0.0
        slot = self._mine = msgspec.structs.replace(self._mine, samples_per_second=rate)
        self._said = Said(slot, now)
        self._own.append(slot)
        try:
            with trio.move_on_after(CALL_SECONDS):
                await self._dht.put(self._key, slot, SLOT_SECONDS, keep_up=False)
        except PotluckError as error:
            log.debug("progress could not be published: %s", error)
            self._said = None
            return False
        self._out = slot
        self._was_said.set()
        self._was_said = trio.Event()
        return True

    def _is_out(self) -> bool:
        """Whether others can read where this peer is."""
        return self._out is not None and alike_but_for_samples(self._out, self._mine)

    async def withdraw(self) -> None:
        """Say that this peer is gone. Called by `open_tracker`."""
        try:
            await self._dht.withdraw(self._key)
        except PotluckError as error:
            log.debug("progress could not be withdrawn: %s", error)

    # -- reading

    async def read_on(self) -> None:
        """Read what the others say as often as the estimate asks for, for ever."""
        while self._out is None:  # of two that begin at once one then sees the other
            await self._was_said.wait()
        await self._met_the_swarm()
        while True:
            self._wants_look = trio.Event()
            with trio.move_on_after(CALL_SECONDS):
                await self._read()
            self._reckon()
            with trio.move_on_after(self.estimate.read_again_in_seconds):
                await self._wants_look.wait()

    async def _met_the_swarm(self) -> None:
        """Until there is somebody to read from, or nobody to be expected."""
        while self._dht.bootstrap_state().joined is Joined.TRYING:
            with trio.move_on_after(FAILED_SECONDS):
                await self._dht.joined()

    async def _read(self) -> None:
        is_full = self._wants_full_look
        self._reads_begun += 1
        this = self._reads_begun
        try:
            found, gone = await self._dht.get_and_gone(self._key, latest_enough=not is_full)
        except PotluckError as error:
            log.debug("progress could not be read: %s", error)
            return
        before, now = self._looked_for, self._now()
        own = found.pop(self._network.peer_id, None)
        if own is not None and self._number:
            self._look_at_own(own)
        written_at = (before + now) / 2  # between the last reading and this one
        for peer, entry in found.items():
            if entry.sequence > self._sequences.get(peer, -1):
                self._sequences[peer] = entry.sequence
                self._seen[peer] = Seen(entry.value, written_at)
                self._compare_torch(peer, entry.value)
        missing = {peer for peer in self._seen if peer not in found}
        for peer in tuple(missing):
            if peer in gone or now - self._seen[peer].at > SLOT_SECONDS:
                missing.discard(peer)
                del self._seen[peer]
                del self._sequences[peer]
        self._wants_full_look = not is_full and not missing <= self._missing
        self._missing = missing
        self._looked_for, self._read_at = now, trio.current_time()
        self._number += 1
        self._read_whole = this

    def _now(self) -> float:
        """Seconds that this node has looked for."""
        if self._read_at is None:
            return 0.0
        unseen = trio.current_time() - self._read_at
        return self._looked_for + min(unseen, LONGEST_UNSEEN_SECONDS)

    def _compare_torch(self, peer: PeerId, slot: ProgressSlot) -> None:
        """Say once of each peer that it has another release of torch: the two can average, and
        neither can take the other's state."""
        own, theirs = torch_release(self._mine.torch), torch_release(slot.torch)
        if not own or not theirs or own == theirs or peer in self._other_torch:
            return
        if len(self._other_torch) > MOST_PEERS:
            self._other_torch.clear()
        self._other_torch.add(peer)
        log.warning(
            "%s trains with torch %s and this peer with torch %s, so neither can take the other's "
            "state. Install the release that most peers of the run have.",
            peer,
            theirs,
            own,
        )

    def _look_at_own(self, own: Entry) -> None:
        """Two nodes with one identity overwrite each other's slot, and count as one."""
        if own.value not in self._own and self._complaints.get(own.publisher) is None:
            self._complaints[own.publisher] = "twin"
            log.warning(
                "Another node publishes progress with this node's identity. Each of the two "
                "overwrites what the other says. Give every node a key of its own."
            )

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
            self._wants_say.set()
            await trio.sleep(RECKON_SECONDS)

    def _reckon(self) -> None:
        now = self._now()
        known = Known(self._credit, self._members, self._network.peer_id)
        found = estimate(self._seen, self._mine, self._settings, now, known, number=self._number)
        fork = self._patience.settled(found.fork, now, self._jitter)
        if fork is not None and self.estimate.fork is None and found.epoch:
            log.warning("%s What only this side has made is given up.", fork.reason)
        reads = found.read_again_in_seconds
        if found.fork is not None or found.behind is not None:
            reads = min(reads, IDLE_SECONDS)
        self.estimate = replace(found, fork=fork, read_again_in_seconds=reads)
        self._complain()
        self._reckoned.set()
        self._reckoned = trio.Event()

    def _complain(self) -> None:
        """Say once of each peer why it does not count, and again when it is another reason."""
        if len(self._complaints) > MOST_PEERS:
            self._complaints.clear()
        for one in self.estimate.ignored:
            if self._complaints.get(one.peer) != one.kind:
                self._complaints[one.peer] = one.kind
                log.warning("%s does not count: %s", one.peer, one.reason)


def _share(peer: PeerId, run: str) -> float:
    """A number from 0 to 1 that is another one for every peer."""
    return int.from_bytes(blake3(f"{run}/{peer}".encode()).digest(4), "big") / 2**32
