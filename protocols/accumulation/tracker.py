"""Progress on one node: publishes this peer's slot, reads the others', and keeps the estimate.

    async with open_tracker(network, dht, settings, mine) as tracker:
        tracker.note(mine)                   # from trio's thread, whenever something has changed
        tracker.estimate                     # from any thread: a plain attribute

The others extrapolate this peer's samples by its rate, and are right most of the time. So a slot is
written only when they would be wrong by more than a little, when anything else has changed, or
before the slot expires (publishing.py). The estimate says how soon to read again. It is also made
anew at the moment when the step becomes due by what is known.

`Tracker` has five parts: methods for others, this peer's own progress, reading, making the
estimate, and cohorts. `_Newcomers` remembers which newcomers rounds have waited for.

Promises: everything ends with the `async with` block, and the slot is withdrawn. `note` and
`estimate` never wait. If the directory cannot be reached, the tracker tries again for ever; what it
knew ends when the slots expire. Until this node has joined its swarm and published its slot, the
estimate has the number 0, and nothing may be decided by it.

Easy to get wrong: `estimate` is replaced, never changed. Read the attribute once and use that
object.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import median_low
from typing import Final

import msgspec
import trio
from blake3 import blake3

from auth.bounded_map import BoundedMap
from protocols.accumulation.batch_plan import MOST_SPARED
from protocols.accumulation.claims import (
    STEPS_OF_THE_PAST,
    Brought,
    CohortPlace,
    Credit,
    Past,
    StateClaims,
    met_elsewhere,
)
from protocols.accumulation.complaints import Complaints
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.known import Known, OtherCohorts, ProgressSettings, Seen
from protocols.accumulation.lineage import (
    BACKERS,
    FindingPatience,
    Lineage,
    Voter,
    needed,
    next_history,
    reached_by,
)
from protocols.accumulation.progress import (
    FOLLOWER_AGAIN_SECONDS,
    KNOWN_SECONDS,
    READ_WHEN_DUE_SECONDS,
    READS_BEFORE_DUE,
    SHORTEST_READ_SECONDS,
    WAITED_AGAIN,
    came_after,
    estimate,
    expected_of,
)
from protocols.accumulation.progress_slot import (
    CARRIED_SECONDS,
    SAY_AGAIN_SECONDS,
    ProgressSlot,
    is_sum,
    name_of_sum,
    progress_key,
    publisher_of,
    sums_key,
)
from protocols.accumulation.publishing import WRITE_SECONDS, Publishing, Said, say_again_in
from protocols.accumulation.rate_meter import RateMeter
from protocols.accumulation.slots_seen import READ_SECONDS, SlotsSeen
from protocols.dht import Breadth, Dht, Joined, SlotEntry
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.closing_time import FOR_MORE_SECONDS
from protocols.moshpit.cohorts import DECISIONS_SHOWN, cohort_of, next_count
from protocols.network import Network

log = logging.getLogger("potluck.accumulation")

_Looked = tuple[dict[PeerId, SlotEntry], frozenset[PeerId]]
"""The slots under a key, and who has withdrawn theirs."""

STOPPED_SECONDS: Final = 5.0
"""If nothing was estimated for so much longer than IDLE_SECONDS, this process was stopped. The loop
of a busy one is late by two or three seconds."""

RECKON_SECONDS: Final = 0.05
"""The shortest time between two estimates that are made because of samples. One takes some 100
microseconds for 16 peers, and there may be a thousand batches a second."""

IDLE_SECONDS: Final = 1.0  # the longest time between two estimates: forks and silences need time
LOOKS_SHARE: Final = 0.1  # the time between two looks, as a share of how long a fetch has taken
TRIED_SECONDS: Final = 1.0  # between two checks whether the swarm is joined
TRIED_ROUNDS: Final = 2
"""After so many failed rounds over all peers of an earlier session, a peer that may begin the run
stops waiting for them. They may have left for good; if they come back, they find this peer."""

SAME_PACE: Final = 0.25
"""Within an epoch, a peer keeps publishing the same batch time while it is wrong by no more than
this. Plans made of the same numbers are equal (batch_plan.py), whichever slot a reader has."""
SAME_PACE_AFTER_STEP: Final = 0.05
"""The same when an epoch begins, and a new slot is published anyway. A peer with two long batches
in each step would come late to all of them if the error of a first measurement stayed."""

FEWEST_THAT_WAIT: Final = 16
"""A run whose last step had so many peers, or that has cohorts, makes no step without most of them:
a part of it that is cut off waits. In a smaller one it is usual that half of the peers leave at
once."""
WAITS_FOR_MOST_SECONDS: Final = 120.0  # from the first round that failed on

SUMS_SECONDS: Final = 1.0
"""How old the other cohorts' sums may be at a peer that is no head, and whose head does not tell
what they are together. Before a step they are newer: all peers plan their last batches with them.
"""
TOLD_SUMS_SECONDS: Final = 1.25
"""The same if the head tells it, for each cohort. Then the sums only say who the other heads are,
and where. A reading costs more the more cohorts there are, and the readers are more as well: so
they read less often, or the few peers that keep the sums would carry the square."""

BOASTING_SECONDS: Final = 4.0
"""A head that tells of too much for so long boasts. When many peers die, the sums fall at once, and
what an honest head tells follows within two seconds or so."""
BOASTER_SECONDS: Final = 300.0  # for how long nothing is believed that such a head tells
MOST_BOASTERS: Final = 64

ELSEWHERE_SECONDS: Final = 30.0
"""How often a peer looks where a run with more, or fewer, cohorts publishes. A run changes their
number with a step; a peer that misses that step mostly sees it in the sums, or is alone."""
NO_SUMS_SECONDS: Final = 5.0  # the same while there are no sums of other cohorts

WITHDRAW_SECONDS: Final = 1.0  # at the end; a slot that is not withdrawn expires soon


@asynccontextmanager
async def open_tracker(
    network: Network,
    dht: Dht,
    settings: ProgressSettings,
    mine: ProgressSlot,
    *,
    counts_silence: bool = True,
) -> AsyncIterator[Tracker]:
    """Publish and read until the block ends. `mine` is published first. The directory's families
    must contain PROGRESS. Errors of the block come out unwrapped.

    Without `counts_silence`, a reading during which nobody answered is ignored. So a volunteer that
    has lost its own network takes no peer for gone, and makes no step alone.
    """
    failure: BaseException | None = None
    tracker = Tracker(network, dht, settings, mine, counts_silence=counts_silence)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tracker.publishing.run)
            nursery.start_soon(tracker.sums.run)
            nursery.start_soon(tracker.read_on)
            nursery.start_soon(tracker.reckon_on)
            nursery.start_soon(tracker.check_states)
            nursery.start_soon(tracker.watch_links)
            try:
                yield tracker
            except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                failure = error
            nursery.cancel_scope.cancel()
    finally:  # also when the block was cancelled from outside: the nursery then raises Cancelled
        with trio.CancelScope(shield=True), trio.move_on_after(WITHDRAW_SECONDS):
            await tracker.publishing.withdraw()
            if tracker.sums.said is not None:
                await tracker.sums.withdraw()
    if failure is not None:
        raise failure


class Tracker:
    """Made by `open_tracker`. Invariant: only trio's thread touches anything but `estimate`."""

    estimate: Estimate
    """The latest estimate: a plain attribute that any thread may read."""

    def __init__(
        self,
        network: Network,
        dht: Dht,
        settings: ProgressSettings,
        mine: ProgressSlot,
        *,
        counts_silence: bool,
    ) -> None:
        self._network, self._dht = network, dht
        self._run_name, self._key = settings.run, progress_key(settings.run)
        self._cohorts, self._next_cohorts = 1, 1
        """How many cohorts the run has in this epoch, and after the step under way."""
        self.idle_heads: Callable[[], frozenset[PeerId]] = frozenset
        """Set it to a function that returns the heads of this cohort that did nothing."""
        self._settings, self._counts_silence = settings, counts_silence
        self._jitter = _share(network.peer_id, settings.run)
        self._mine = mine
        self._meter = RateMeter()
        self._credit, self._patience = Credit(), FindingPatience()
        self._members: frozenset[PeerId] = frozenset()
        self._past, self._past_until = Past(), 0
        """Of steps up to the one that began this epoch."""
        self._brought = Brought(), self._cohorts
        """What the members of the step under way have signed, and how many cohorts it had."""
        self._epoch_began: float | None = None
        self._step_seconds = 0.0
        self._round_began, self._head_start = 0.0, 0.0
        self._came = -1.0
        self._known_since = math.inf
        """Since when others can read that this peer is there, in an epoch that it did not begin
        with them."""
        self._batch_began: float | None = None
        self._ran_at = trio.current_time()
        self._batch_seconds = mine.batch_seconds
        self._noted_batches, self._spared = 0, 0
        self._newcomers = _Newcomers(settings.patience_seconds)
        self._claimed = (mine.epoch, dict[PeerId, int](), dict[PeerId, int]())
        """The epoch of the round under way, and the samples of the peers and of the cohorts that
        are expected in it."""
        self._step_peers, self._next_step_peers = 0, 0
        """How many peers were in the step that made this state, and in the step under way."""
        self._waits_since: float | None = None
        """Since when the rounds of this epoch have made no step."""
        self._failed_at = -math.inf
        """When the last of them did so."""
        self._in_vain = False
        """Whether it had no samples at all, and this peer has computed none since."""
        self.estimate = Estimate(0, mine.epoch, mine.history)
        self._estimated_at = 0.0
        self._suspects = BoundedMap[PeerId, tuple[float, float]](MOST_BOASTERS)
        """Since when, and when last, each of these heads told of too much."""
        self._boasters = BoundedMap[PeerId, float](MOST_BOASTERS)
        """When each of these heads is believed again."""
        self._states = StateClaims(network.random)
        self.step_shown_by: Callable[[PeerId, int], Awaitable[bytes | None]] = _shows_nothing
        """Set it to a function that has this peer show the decision by which the run has gone on
        from this epoch, and returns the result's digest. PotluckError: it does not answer."""
        self._seen = SlotsSeen()
        self._sums: dict[PeerId, SlotEntry] = {}
        self._sums_gone: frozenset[PeerId] = frozenset()
        self._others: dict[PeerId, SlotEntry] = {}
        """As they were read last: the sums, and the slots of those who know of no cohorts."""
        self._read_sums_at = self._read_others_at = -math.inf
        self._sums_heard_at = -math.inf
        """When the last reading of the sums began that anybody answered."""
        self._asked_at = -READ_WHEN_DUE_SECONDS
        self._was_asked = False
        """Since this peer's last round of this epoch, if any."""
        self._read_at, self._pause = trio.current_time(), trio.CancelScope()
        """When the last reading ended, and the pause between that reading and the next."""
        self._complaints = Complaints()
        self.publishing = Publishing(dht, self._key, self.mine, self._measured, self._again_in)
        self.sums = Publishing(
            dht, sums_key(settings.run), self._sum, self._sum, self._sum_again_in
        )
        self.sums.set_away(is_away=True)
        self._wants_newest = False
        """The next reading must find everything that was published before it."""
        self._wants_look, self._wants_reckoning = trio.Event(), trio.Event()
        self._reckoned = trio.Event()
        self._meter.began(trio.current_time())
        self._reckon()

    # -- for others

    def set_away(self, *, is_away: bool) -> None:
        """While this peer is away, its slot is withdrawn, and nobody counts on it or waits for it.
        Reading goes on. trio's thread; never waits."""
        if self.publishing.set_away(is_away=is_away):
            if is_away:
                self._meter.paused()
            else:
                self._known_since = trio.current_time()
                self._meter.began(self._known_since)
                if self._batch_began is not None:
                    self._batch_began = self._known_since

    async def look_often(self) -> None:
        """Read often while a state is fetched, until cancelled, so that this peer keeps up with a
        run of short steps. The pause grows to a tenth of the time that the fetch has taken, but not
        beyond IDLE_SECONDS."""
        began = trio.current_time()
        while True:
            self._look_now()
            lasted = LOOKS_SHARE * (trio.current_time() - began)
            await trio.sleep(min(max(SHORTEST_READ_SECONDS, lasted), IDLE_SECONDS))

    def was_asked(self, epoch: int, begins: bool) -> None:
        """Another peer has asked this one into a group that it is not looking for; a round `begins`
        with that group. The others have begun a round or are elsewhere, so look at them. However
        often they ask, this reads no more often than when a step is due. trio's thread."""
        now, mine = trio.current_time(), self._mine
        if begins and epoch == mine.epoch and not (mine.averaging or self._was_asked):
            self._was_asked = True
            self._wants_reckoning.set()
        if now - self._asked_at >= READ_WHEN_DUE_SECONDS:
            self._asked_at = now
            self._look_now()

    async def looked(self, after: int = 0) -> Estimate:
        """Wait for an estimate whose number is higher than this."""
        while self.estimate.number <= after:
            await self.changed()
        return self.estimate

    async def look_again(self, after: int = 0) -> Estimate:
        """An estimate from a reading that begins after this peer's notes are published, with a
        number higher than `after`. If two peers do this at the same time, at least one sees the
        other."""
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
        """The slots of all other peers that are alive and fit, and name no state without proof:
        possible sources of a state."""
        seen, estimate = self._seen.slots, self.estimate
        found = {}
        for peer in estimate.peers:
            name = peer if peer in seen else name_of_sum(peer)
            if name not in seen or (name in estimate.unproved and self._cohorts > 1):
                continue
            slot, shown = seen[name].slot, self._states.shown.get(name)
            if shown is None or slot.epoch != shown.epoch or slot.history == shown.history:
                found[peer] = slot
        return found

    def said_by(self, peer: PeerId) -> ProgressSlot | None:
        """The latest slot of a peer, whether it fits or not."""
        seen = self._seen.slots.get(peer)
        return None if seen is None else seen.slot

    def mine(self) -> ProgressSlot:
        """This peer's own slot."""
        return self._mine

    def round_ended(self, brought: Brought, *, applied: bool, peers: int = 0) -> None:
        """A round of this peer has ended. From now on, peers that claimed samples and did not bring
        them are doubted. `peers`: how many were in the step. trio's thread; call it before the
        `note` of the next epoch."""
        self.gathered()
        epoch, claimed, claimed_by_heads = self._claimed
        others = {
            one: weight for one, weight in brought.weights.items() if one != self._network.peer_id
        }
        heads = {name_of_sum(one): weight for one, weight in brought.heads.items()}
        now = self._now()
        alive = frozenset[PeerId]() if applied else self._heard_lately()  # a step excuses nobody
        if brought.is_weighed:
            elsewhere = met_elsewhere(claimed, others, alive)
            self._credit.round_ended(epoch, claimed, others, now, elsewhere)
        if heads:  # what a doubted one brings does not show that it would have kept its word
            kept = {one: weight for one, weight in heads.items() if one in claimed_by_heads}
            elsewhere = met_elsewhere(claimed_by_heads, heads, alive)
            self._credit.round_ended(epoch, claimed_by_heads, kept, now, elsewhere)
        if not applied:
            weights = brought.weights.values()
            has_none = bool(weights) and not any(weights) and not self._mine.samples
            self._in_vain = has_none and self._mine.role == "trains"
            self._failed_at = trio.current_time()
            if self._waits_since is None:
                self._waits_since = self._failed_at
        if applied:
            self._next_step_peers = peers or max(1, len(brought.weights))
            self._members = frozenset((*others, *heads))
            self._next_cohorts = next_count(self._cohorts, peers, self._settings.places)
            self._brought = brought, self._cohorts
        self._newcomers.round_ended(others, trio.current_time())

    def _heard_lately(self) -> frozenset[PeerId]:
        since = self._now() - CARRIED_SECONDS
        return frozenset(one for one, seen in self._seen.slots.items() if seen.at >= since)

    def gathered(self) -> None:
        """The list of members of the round under way is closed, or there is none. trio's thread."""
        self._newcomers.gathered(trio.current_time())

    def state_refused(self, peer: PeerId, reason: str) -> None:
        """A peer did not have the state that its slot claims. Ignore it for a while. trio's
        thread."""
        self._credit.state_refused(peer, reason, self._now())
        self._reckon()

    def fetch_failed(self, peers: Iterable[PeerId], reason: str) -> None:
        """None of these peers gave the state that they claim to have. A peer that fails twice in a
        row is ignored for a while. trio's thread."""
        for peer in peers:
            self._credit.fetch_failed(peer, reason, self._now())
        self._reckon()

    # -- own progress

    def _look_now(self) -> None:
        self._wants_look.set()

    def _notice_stop(self) -> None:
        """If this process was stopped until now, do not measure the batch that is under way: it
        would seem to take as long as the stop, and no step is planned with a peer that is so slow.
        """
        now = trio.current_time()
        if now - self._ran_at > IDLE_SECONDS + STOPPED_SECONDS:
            self._meter.paused()
            if self._batch_began is not None:
                self._batch_began = now
        self._ran_at = now

    def note(self, mine: ProgressSlot, *, at_once: bool = False, ago: float = 0.0) -> None:
        """Report how this peer was `ago` seconds ago. trio's thread; never waits. Changes of
        anything but samples are published at once; with `at_once`, samples are, too. The rate and
        how long a batch has been under way are measured here: `under_way` in `mine` only says
        whether a batch is."""
        self._notice_stop()
        now, before = trio.current_time() - ago, self._mine
        is_same_state = (mine.epoch, mine.history) == (before.epoch, before.history)
        # or all have averaged their parameters: those of the last step go on together
        goes_on = is_same_state or (mine.epoch == before.epoch > 0 and not mine.follows)
        is_step = before.averaging and mine.epoch == before.epoch + 1
        if not goes_on:
            if self._spared == MOST_SPARED and self._noted_batches:
                # A first batch may take ten times as long as any other, and so does one in which
                # the machine slept. A peer that seems too slow because of it would never be allowed
                # another one to measure.
                self._meter, self._batch_seconds = RateMeter(), mine.batch_seconds
                self._noted_batches = 0
            is_with_it = before.averaging and before.samples > 0
            has_just_come = before.epoch == 0 and not is_step
            if is_with_it or has_just_come:
                self._spared = 0
            else:
                self._spared = min(self._spared + 1, MOST_SPARED)
            self._step_seconds = 0.0
            if is_step and self._epoch_began is not None and self._came < 0.0:
                self._step_seconds = self._round_began - self._epoch_began + self._head_start
            self._epoch_began, self._came = now if is_step else None, -1.0
            self._head_start = (
                now - self._round_began if is_step and self._settings.delayed else 0.0
            )
            has_failed = self._waits_since is not None
            self._waits_since, self._was_asked, self._in_vain = None, False, False
            self._step_peers = self._next_step_peers if is_step else 0
            if is_step:
                self._remember_step(0.0 if has_failed else self._step_seconds)
                self._past_until = mine.epoch
                self._divide(self._next_cohorts)
            else:
                self._known_since = now
                if not 0 <= mine.epoch - self._past_until <= STEPS_OF_THE_PAST:
                    self._past = Past()
        if mine.averaging and not before.averaging:
            self._round_began, self._was_asked = now, False
            self._begin_round(mine)
        had = before.beside if is_step else before.samples + before.beside
        self._computed(mine.samples + mine.beside - had, mine, now, is_same=goes_on or is_step)
        self._mine = mine
        self._in_vain = self._in_vain and not mine.samples
        self._measured(goes_on=goes_on)
        if not is_same_state or mine.averaging != before.averaging:
            self._reckon()
        self._wants_reckoning.set()
        if at_once:
            self.publishing.say_at_once()
        self.publishing.say_soon()

    def _remember_step(self, seconds: float) -> None:
        brought, count = self._brought
        most = float(self._settings.target_samples)
        weights = {one: min(weight, most) for one, weight in brought.weights.items()}
        cohorts = {
            cohort_of(self._run_name, head, count): min(weight, most)
            for head, weight in brought.heads.items()
            if count == self._cohorts
        }
        self._past.step(weights, cohorts, seconds)

    def _computed(self, samples: int, mine: ProgressSlot, now: float, *, is_same: bool) -> None:
        """Measure the rate: this many samples were done since the last note. `is_same`: this peer
        goes on from where it was. A batch may outlast the round that it is computed beside."""
        before = self._mine
        if mine.under_way < 0.0:
            self._batch_began = None
        elif before.under_way < 0.0 or samples:
            self._batch_began = now
        if samples > 0 and is_same:
            self._meter.counted(samples, now)
            self._noted_batches += 1
        elif samples or not is_same or (mine.under_way < 0.0 and before.averaging):
            self._meter.began(now)
        if mine.under_way >= 0.0 > before.under_way:
            self._meter.began(now)
        elif mine.under_way < 0.0 and (mine.batch or mine.averaging):
            self._meter.paused()

    def _begin_round(self, mine: ProgressSlot) -> None:
        """Remember which peers are expected, and with how many samples."""
        self._newcomers.round_begins(self.estimate.followers, trio.current_time())
        cohort, slots = self.estimate.cohort, self._seen.slots
        sums = () if cohort is None else map(name_of_sum, cohort.heads)
        self._claimed = (
            mine.epoch,
            expected_of(slots, mine, self._settings, self._now(), self.estimate.without_place),
            {
                one: slots[one].slot.samples
                for one in sums
                if one in slots
                and slots[one].slot.epoch == mine.epoch
                and not self._credit.is_doubted(one, mine.epoch, self._now())
            },
        )

    def _measured(self, *, goes_on: bool = True) -> ProgressSlot:
        """This peer's slot, with its rate and times as of now. `goes_on`: in the same epoch."""
        now, mine = trio.current_time(), self._mine
        rate = self._meter.rate(now) if mine.role == "trains" else 0.0
        seconds = mine.batch / rate if rate else mine.batch_seconds
        same = SAME_PACE if goes_on else SAME_PACE_AFTER_STEP
        if abs(seconds - self._batch_seconds) > same * self._batch_seconds:
            self._batch_seconds = seconds
        began, epoch_began = self._batch_began, self._epoch_began
        rest = self._rest_to_tell(mine)
        self._mine = msgspec.structs.replace(
            mine,
            samples_per_second=rate,
            batch_seconds=self._batch_seconds if mine.batch else 0.0,
            under_way=-1.0 if began is None else max(0.0, now - began),
            epoch_seconds=-1.0 if epoch_began is None else max(0.0, now - epoch_began),
            came_seconds=self._came,
            spared=self._spared if mine.role == "trains" else 0,
            cohorts=self._cohorts,
            step_peers=self._step_peers,
            rest_cohorts=0 if rest is None else rest.cohorts,
            rest_samples=0 if rest is None else round(rest.samples),
            rest_per_second=0.0 if rest is None else rest.rate,
        )
        return self._mine

    def _rest_to_tell(self, mine: ProgressSlot) -> OtherCohorts | None:
        """If this peer is its cohort's head: what the others have together, as of now."""
        found = self.estimate
        if found.sum is None or found.rest is None:
            return None
        if (found.epoch, found.history) != (mine.epoch, mine.history):
            return None
        rest, ago = found.rest, trio.current_time() - self._estimated_at
        samples = min(rest.samples + rest.rate * ago, self._settings.target_samples)
        return replace(rest, samples=samples)

    def _again_in(self, said: Said) -> float:
        return say_again_in(
            said,
            self._measured(),
            self.estimate,
            self._meter.largest_batch,
            trio.current_time(),
        )

    # -- reading

    async def read_on(self) -> None:
        """Read the others' slots as often as the estimate asks for, for ever."""
        await self._met_the_swarm()
        await self.publishing.told()  # if two begin at the same time, one then sees the other
        while True:
            self._wants_look = trio.Event()
            with trio.move_on_after(READ_SECONDS):
                await self._read()
            self._read_at = trio.current_time()
            self._known_since = min(self._known_since, self._read_at)
            self._reckon()
            with trio.move_on_after(self.estimate.read_again_in_seconds) as self._pause:
                await self._wants_look.wait()

    async def _met_the_swarm(self) -> None:
        """Wait until there is a peer to read from, or none to be expected."""
        while (state := self._dht.bootstrap_state()).joined is Joined.TRYING:
            if self._counts_silence and not state.addresses and state.rounds_failed >= TRIED_ROUNDS:
                return
            with trio.move_on_after(TRIED_SECONDS):
                await self._dht.joined()

    def _keys_to_read(self) -> list[str]:
        """The key of this peer's cohort. Beside it, that of the sums; and at first, while nobody is
        there, and now and then, the keys where a run publishes that has more, or fewer, cohorts
        than this peer knows of."""
        now = trio.current_time()
        has_met_others = self._mine.epoch > 0 and self.estimate.company > 0
        misses_sums = self._cohorts > 1 and not self._sums
        told_seconds = TOLD_SUMS_SECONDS * self._cohorts
        pause = NO_SUMS_SECONDS if misses_sums else max(ELSEWHERE_SECONDS, told_seconds)
        is_elsewhere_due = not has_met_others or now - self._read_others_at >= pause
        rest = self.estimate.rest
        is_suspicious = any(
            now - last <= BOASTING_SECONDS for _, (_, last) in self._suspects.items()
        )
        told = None if rest is None else rest.told
        is_told = told is not None and self._now() - told.at <= CARRIED_SECONDS
        if is_told and not is_suspicious:
            oldest = told_seconds
        elif self._came >= 0.0:  # many may have come at once, after a cut
            soon = max(SUMS_SECONDS, self.estimate.due_in_seconds / READS_BEFORE_DUE)
            oldest = min(SAY_AGAIN_SECONDS, soon)
        else:
            oldest = min(SUMS_SECONDS, self.estimate.due_in_seconds / READS_BEFORE_DUE)
        if self.estimate.sum is not None or self._wants_newest:
            oldest = 0.0
        keys = [self._key]
        if is_elsewhere_due or (self._cohorts > 1 and now - self._read_sums_at >= oldest):
            keys.append(sums_key(self._run_name))
        if is_elsewhere_due:
            keys.append(progress_key(self._run_name))
        return list(dict.fromkeys(keys))

    async def _look(self, key: str, breadth: Breadth, looked: dict[str, _Looked]) -> None:
        try:
            looked[key] = await self._dht.look(key, breadth)
        except PotluckError as error:
            log.debug("progress could not be read: %s", error)

    async def _read(self) -> None:
        is_full, is_first = self._seen.begins(), not self._seen.number
        breadth = Breadth.ALL if is_full else Breadth.FEW
        if (self._wants_newest or self.estimate.is_crowded) and not is_full:
            breadth = Breadth.FIRST
        began = trio.current_time()
        key, keys = self._key, self._keys_to_read()
        looked: dict[str, _Looked] = {}
        async with trio.open_nursery() as nursery:
            for one in keys:
                if self._cohorts > 1:  # both are needed, and a dead replica costs a wait at each
                    nursery.start_soon(self._look, one, breadth, looked)
                else:
                    await self._look(one, breadth, looked)
        if len(looked) < len(keys):
            return
        if key != self._key:
            self._wants_look.set()  # this peer is in another cohort by now
        self._wants_newest = False
        found, gone = looked[key]
        sums, others = sums_key(self._run_name), progress_key(self._run_name)
        if sums in looked:
            slots, sums_gone = looked[sums]
            slots.pop(self._network.peer_id, None)
            self._sums = {name_of_sum(head): one for head, one in slots.items()}
            self._sums_gone = frozenset(map(name_of_sum, sums_gone))
            self._read_sums_at = began
            if self._dht.heard_at >= began:
                self._sums_heard_at = began
        if sums in looked and others in looked:
            self._others = {} if others == key else looked[others][0]
            self._read_others_at = began
        found = self._others | self._sums | found
        gone |= self._sums_gone
        if not self._counts_silence and self._dht.heard_at < began:
            return
        own = found.pop(self._network.peer_id, None)
        if own is not None and not is_first and not self.publishing.is_own(own.value):
            self._complaints.has_a_twin(own.publisher)
        clock, left = trio.current_time(), self._dht.seconds_left
        for peer in self._seen.took(found, gone, clock, is_full=is_full, left=left):
            if not is_sum(peer):
                self._complaints.has_torch(peer, found[peer].value.torch, self._mine.torch)

    async def check_states(self) -> None:
        """Read the slots of cohorts whose sums name other states than this peer's, for ever."""
        while True:
            await self.changed()
            averages = self._mine.averaging
            claims = self._states.to_check(trio.current_time(), averages=averages)
            if not claims:
                continue
            is_in_doubt = self._waits_since is not None and not averages
            async with trio.open_nursery() as nursery:
                for place in {*claims.values()}:
                    nursery.start_soon(self._check_cohort, place)
                for name in claims if is_in_doubt else ():
                    nursery.start_soon(self._have_step_shown, name)
            self._reckon()

    async def _check_cohort(self, place: CohortPlace) -> None:
        run, looked = self._run_name, dict[str, _Looked]()
        keys = {
            progress_key(run, place.cohorts, place.number),
            progress_key(run, place.cohorts_here, place.number_here),
        }
        with trio.move_on_after(READ_SECONDS):
            async with trio.open_nursery() as nursery:
                for key in sorted(keys):
                    nursery.start_soon(self._look, key, Breadth.FEW, looked)
        if looked.keys() != keys:
            return
        newest = dict[PeerId, SlotEntry]()
        for slots, _ in looked.values():
            for peer, one in slots.items():
                if peer not in newest or one.value.epoch > newest[peer].value.epoch:
                    newest[peer] = one
        voters = [
            Voter(peer, one.value.at, one.value.follows)
            for peer, one in newest.items()
            if one.value.signature == self._mine.signature
            and cohort_of(run, peer, place.cohorts_here) == place.number_here
        ]
        self._states.read(place, reached_by(voters), trio.current_time())

    async def _have_step_shown(self, name: PeerId) -> None:
        mine, seen = self._mine, self._seen.slots.get(name)
        if seen is None:
            return
        at, said = mine.at, seen.slot.at
        if not at.epoch < said.epoch <= at.epoch + DECISIONS_SHOWN:
            return
        try:
            digest = await self.step_shown_by(publisher_of(name), at.epoch)
        except PotluckError as error:
            log.info("%s does not answer whether it has made a step: %s", name, error)
            return
        if digest is None:
            self._states.is_silent(name, at, said)
        else:
            there = Lineage(at.epoch + 1, next_history(at.history, at.epoch, digest))
            self._states.shows(name, there)

    async def watch_links(self) -> None:
        """For ever. By cohorts, nobody waits for a peer that has died, and the next in order is the
        head at once."""
        with self._network.link_events() as events:
            async for event in events:
                peer, seen = event.peer, self._seen
                if self._network.link(peer) is not None:
                    if seen.linked(peer):
                        self._wants_reckoning.set()
                elif self._is_of_my_cohort(peer) or name_of_sum(peer) in seen.slots:
                    seen.link_lost(peer, trio.current_time())
                    self._reckon()

    def _is_of_my_cohort(self, peer: PeerId) -> bool:
        run, count = self._run_name, self._cohorts
        return count > 1 and cohort_of(run, peer, count) == cohort_of(
            run, self._network.peer_id, count
        )

    def _now(self) -> float:
        """For how many seconds this node has been reading; stalls do not count (slots_seen.py)."""
        return self._seen.now(trio.current_time())

    # -- the estimate

    async def reckon_on(self) -> None:
        """Make a new estimate when something has changed or becomes due, for ever."""
        while True:
            until_due = self.estimate.due_in_seconds or IDLE_SECONDS
            until_known = self._known_since + KNOWN_SECONDS - trio.current_time()
            if until_known > 0.0:
                until_due = min(until_due, until_known)
            seconds = max(RECKON_SECONDS, min(IDLE_SECONDS, until_due))
            with trio.move_on_after(seconds):
                await self._wants_reckoning.wait()
            self._wants_reckoning = trio.Event()
            self._notice_stop()
            self._reckon()
            self.publishing.say_soon()
            await trio.sleep(RECKON_SECONDS)

    def _reckon(self) -> None:
        self._reckon_once()
        now, found, newcomers = trio.current_time(), self.estimate, self._newcomers
        if not (found.holds_back and found.has_enough_with(self._mine.samples)):
            newcomers.hold_nothing_back(now)
        elif newcomers.hold_back(found.followers, now) >= self._settings.patience_seconds:
            newcomers.hold_nothing_back(now)
            self._reckon_once()

    # -- cohorts

    def _divide(self, count: int) -> None:
        """The run has this many cohorts from now on: publish and read where this peer's does."""
        if count != self._cohorts:
            self._past.divided()
        self._cohorts = self._next_cohorts = count
        number = cohort_of(self._run_name, self._network.peer_id, count)
        self._key = progress_key(self._run_name, count, number)
        self.publishing.move_to(self._key)
        self._wants_look.set()

    def _adopt_cohorts(self) -> None:
        """Have as many cohorts as most of those say that have made this peer's last step, this peer
        among them; if no other has, as most that are further, if they are enough to be followed."""
        mine, said = self._mine, dict[PeerId, ProgressSlot]()
        for name, one in self._seen.slots.items():
            peer = publisher_of(name)  # it has one vote, also if it publishes a sum
            counts_here = not one.slot.follows and one.slot.signature == mine.signature
            if counts_here and (peer == name or peer not in said):
                said[peer] = one.slot
        told = [one for one in said.values() if one.epoch]
        counts = Counter(
            one.cohorts for one in told if (one.epoch, one.history) == (mine.epoch, mine.history)
        )
        if counts:
            has_made_it = mine.epoch > 0 and not mine.follows
            counts[self._cohorts] += 1 if has_made_it else 0
        else:
            further = [one.cohorts for one in told if one.epoch > mine.epoch]
            has_fresh = len(said) > len(told)  # in a run's first epoch one liar is all that is told
            others = max(len(told), BACKERS if has_fresh else 0)
            counts.update(further if len(further) >= needed(others) else ())
        if not counts:
            return
        most = max(counts, key=lambda count: (counts[count], count == self._cohorts, count))
        if most != self._cohorts:
            log.info("the run has %d cohorts", most)
            self._divide(most)

    def _failed_for(self, clock: float) -> float | None:
        if self._waits_since is None:
            return None
        # one that says something else after each round holds this peer up for no longer
        is_over = clock - self._waits_since >= WAITS_FOR_MOST_SECONDS
        return math.inf if is_over else clock - self._failed_at

    def _needed(self, clock: float) -> int:
        """How many peers must be in the next step."""
        if not self._step_peers:  # this peer has fetched its state
            at = (self._mine.epoch, self._mine.history)
            told = [
                one.slot.step_peers
                for one in self._seen.slots.values()
                if (one.slot.epoch, one.slot.history) == at and one.slot.step_peers
            ]
            self._step_peers = median_low(told) if told else 0
        waits = self._waits_since is None or clock - self._waits_since < WAITS_FOR_MOST_SECONDS
        is_large = self._step_peers >= FEWEST_THAT_WAIT or self._cohorts > 1
        return self._step_peers // 2 + 1 if is_large and waits else 0

    def _sum(self) -> ProgressSlot:
        return self.estimate.sum or self._measured()

    def _sum_again_in(self, said: Said) -> float:
        found = replace(self.estimate, own_part=math.inf)
        return say_again_in(
            said, self._sum(), found, self._meter.largest_batch, trio.current_time()
        )

    def _reckon_once(self) -> None:
        self._adopt_cohorts()
        now, before = self._now(), self.estimate
        seen, said = self._seen, self.publishing.said
        clock = trio.current_time()
        if self._epoch_began is None and seen.number:
            self._came = came_after(seen.slots, self._mine, now)
            self._epoch_began = clock - self._came
            self._measured()
        began = self._epoch_began if self._came < 0.0 else None
        known = Known(
            self._credit,
            self._members,
            me=self._network.peer_id,
            said=None if said is None else Seen(said.slot, now - (clock - said.at)),
            epoch_began=None if began is None else now - (clock - began),
            step_seconds=self._step_seconds,
            head_start=self._head_start,
            may_wait_for_follower=self._newcomers.may_be_waited_for(clock),
            let_in=self._newcomers.let_in(clock),
            known_for=clock - self._known_since,
            cohorts=self._cohorts,
            idle_heads=self.idle_heads(),
            lost=seen.lost(),
            boasters=frozenset(head for head, until in self._boasters.items() if clock < until),
            rest=before.rest,
            sums_read_at=now - (clock - self._sums_heard_at),
            needs=self._needed(clock),
            reached=self._states.reached,
            shown=self._states.shown,
            settled=self._states.settled,
            refuted=self._states.refuted,
            silent=self._states.silent,
            failed_for=self._failed_for(clock),
            past=self._past,
            in_vain=self._in_vain,
        )
        found = estimate(seen.slots, self._mine, self._settings, now, known, number=seen.number)
        fork = self._patience.settled(found.fork, now, self._jitter)
        if fork is not None and self.estimate.fork is None and found.epoch:
            log.warning("%s The steps that only this side has made are given up.", fork.reason)
        reads = found.read_again_in_seconds
        if found.fork is not None or found.behind is not None:
            reads = min(reads, IDLE_SECONDS)
        is_new_head = found.sum is not None and before.sum is None
        if is_new_head and found.rest is not None and found.rest.told is not None:
            self._look_now()  # it has to tell its cohort what the others have
        self.estimate = replace(
            found,
            fork=fork,
            read_again_in_seconds=reads,
            silent_keepers=frozenset(seen.keepers) - frozenset(found.keepers),
            is_asked=self._was_asked,
            is_again=self._waits_since is not None
            and clock - self._waits_since < WAITS_FOR_MOST_SECONDS - FOR_MORE_SECONDS,
        )
        self._estimated_at = clock
        if found.boaster is not None:
            self._suspect(found.boaster, clock)
        self._states.note(found.unproved, clock)
        self.sums.set_away(is_away=found.sum is None)
        self.sums.say_soon()
        self._pause.deadline = min(self._pause.deadline, self._read_at + reads)
        self._complaints.do_not_count(self.estimate.ignored)
        self._reckoned.set()
        self._reckoned = trio.Event()

    def _suspect(self, head: PeerId, clock: float) -> None:
        """This head told of too much just now."""
        since, last = self._suspects.get(head, (clock, clock))
        if clock - last > BOASTING_SECONDS:
            since = clock
        self._suspects[head] = since, clock
        if clock - since >= BOASTING_SECONDS:
            self._boasters[head] = clock + BOASTER_SECONDS
            log.warning(
                "%s, the head of this peer's cohort, tells of more samples than the other cohorts "
                "have. For some minutes this peer reads their sums itself.",
                head,
            )


async def _shows_nothing(_peer: PeerId, _epoch: int) -> bytes | None:
    return None


class _Newcomers:
    """Remembers which newcomers the rounds have waited for, and whether they came.

    A wait counts as vain until one of the awaited newcomers is in a round. After a vain wait, no
    round waits for newcomers for `WAITED_AGAIN` times as long. All times are `trio.current_time`.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._awaited: frozenset[PeerId] = frozenset()  # since the last round ended
        self._held_back_since: float | None = None
        self._gathers_since: float | None = None  # the round that waits for them
        self._waits_again_at = -math.inf
        self._let_in: dict[PeerId, float] = {}

    def may_be_waited_for(self, now: float) -> bool:
        """Whether the last vain wait is long enough ago."""
        return now >= self._waits_again_at

    def let_in(self, now: float) -> frozenset[PeerId]:
        """The newcomers that were awaited recently, and came."""
        return frozenset(
            peer for peer, at in self._let_in.items() if now - at < FOLLOWER_AGAIN_SECONDS
        )

    def hold_back(self, followers: frozenset[PeerId], now: float) -> float:
        """A due round is held back for these newcomers. Returns for how many seconds by now."""
        if self._held_back_since is None:
            self._held_back_since = now
        self._awaited |= followers
        return now - self._held_back_since

    def hold_nothing_back(self, now: float) -> None:
        """No round is held back any more."""
        if self._held_back_since is not None:
            self._have_waited(now - self._held_back_since, now)
            self._held_back_since = None

    def round_begins(self, followers: frozenset[PeerId], now: float) -> None:
        """The round's list may stay open for these newcomers for the patience."""
        self._gathers_since = now if followers else None
        if followers:
            self._awaited |= followers
            self._have_waited(self._patience_seconds, now)

    def gathered(self, now: float) -> None:
        """The list is closed: it is known now how long it waited."""
        if self._gathers_since is not None:
            self._have_waited(now - self._gathers_since, now)
            self._gathers_since = None

    def round_ended(self, members: Container[PeerId], now: float) -> None:
        """These other peers were in the round."""
        came = [peer for peer in self._awaited if peer in members]
        if came:
            self._waits_again_at = -math.inf
            lately = {peer: self._let_in[peer] for peer in self.let_in(now)}
            self._let_in = lately | dict.fromkeys(came, now)
        self._awaited = frozenset()

    def _have_waited(self, seconds: float, now: float) -> None:
        if self._awaited:
            seconds = min(seconds, self._patience_seconds)
            self._waits_again_at = now + WAITED_AGAIN * seconds


def _share(peer: PeerId, run: str) -> float:
    """A number from 0 to 1, different for each peer."""
    return int.from_bytes(blake3(f"{run}/{peer}".encode()).digest(4), "big") / 2**32
