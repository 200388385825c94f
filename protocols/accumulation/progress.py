"""Estimates when the next step is due, from the peers' progress slots. Pure.

    found = estimate(seen, mine, settings, now, known)
    if found.is_due: ...                     # the samples of all together reach the target
    await trio.sleep(found.read_again_in_seconds)

Every peer plans the batches of the peers in its own epoch and history (batch_plan.py), and
extrapolates each by what its slot says about its batches. So all reach the same result at nearly
the same time without a message. They read more often the nearer the step is.

A group of averaging has a limited number of places. A run with more peers is divided into cohorts,
each with a group of its own (`_Cohorts`; moshpit/cohorts.py). All peers deal the places out by the
same rule from the same slots (`_with_places`). Peers without a place follow the run: nobody expects
them in a round or counts their samples.

In this file: the constants with their reasons; `Estimate`, the result, and its decisions for the
training thread; `Known`, what a peer remembers beside the slots; `estimate` itself; then its parts:
places, counted samples, `_Cohorts`, whose slots count, and `_Staff`, which turns slots into workers
of a plan.

Easy to get wrong: time is this machine's monotonic clock. A slot is as old as it says, counted from
the end of the round that began the epoch, if both peers were in that round; otherwise from when it
was first seen here. Extrapolation ends after `CARRIED_SECONDS`: a peer that is silent for that long
may be gone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from statistics import median_low
from typing import Final, Literal
from zlib import crc32

import msgspec
from blake3 import blake3

from protocols.accumulation.batch_plan import (
    FEWEST_PER_OCTAVE,
    MOST_SPARED,
    SHORTEST_BATCH_SECONDS,
    BatchPlan,
    Worker,
    paces_per_octave,
    plan_batches,
    rounded_times,
)
from protocols.accumulation.claims import CohortPlace, Credit, Past, Silence, absurd_rates
from protocols.accumulation.lineage import (
    BACKERS,
    BACKING_SHARE,
    Elsewhere,
    Lineage,
    Voter,
    behind,
    fork,
    left_alone,
    reached_by,
)
from protocols.accumulation.progress_slot import (
    LARGEST_SAMPLES,
    LONGEST_SECONDS,
    MOST_PEERS,
    REST,
    SAY_AGAIN_SECONDS,
    SLOT_SECONDS,
    ProgressSlot,
    is_sum,
    publisher_of,
)
from protocols.identity import PeerId
from protocols.moshpit.cohorts import (
    DECISIONS_SHOWN,
    FULL_SHARE,
    Cohort,
    cohort_of,
    in_order,
    turn_of,
)

CARRIED_SECONDS: Final = 2 * SAY_AGAIN_SECONDS
"""For how long a slot is extrapolated at its rate. A live peer has published a new one by then,
even if one of its writes was lost."""

EARLY_PATIENCES: Final = 2.0
"""A peer that computes beside rounds, and has its part, begins the round up to so many times the
patience before the others have theirs, rather than wait for their last batches. Its list waits for
them, and it computes meanwhile. They have the rest of the grace time, if they take longer than they
said."""

BEGUN_SHARE: Final = 0.9
"""The share of the target that is enough for a round that another peer has begun. A peer that lies
about having begun can make a round at most a tenth too small."""

BEGUN_BY_MOST_SHARE: Final = 0.5
"""The same if most have begun: they know something newer than this peer has read."""

SHORTEST_READ_SECONDS: Final = 0.1  # about one round trip
LONGEST_READ_SECONDS: Final = 3.0  # extrapolation is good for longer, but a fork waits this long
READ_WHEN_DUE_SECONDS: Final = 0.5
READ_WHEN_CROWDED_SECONDS: Final = 0.25
"""Measured on 108 first and second steps of simulated runs (2 to 8 peers, 5 to 16 batches): one was
more than 15 % off its target with this value, and no fewer with 0.1 s; three with 0.5 s, and four
with 1 s."""
READ_AS_HEAD_SECONDS: Final = 0.25
READ_IN_COHORT_SECONDS: Final = 1.0
"""The shortest by cohorts: there are two keys to read, and the head calls its members to the round.
"""
NEW_SECONDS: Final = 2.5
"""How long a peer that has come counts as new. Peers that began together are all there by then. Of
the same 108 steps, one was that far off with this value, and two with 0.5 to 1.5 s."""
READS_BEFORE_DUE: Final = 4  # each reading leaves three quarters of the time

PATIENCE_SECONDS: Final = 1.5
"""How much longer than the faster peers' batches a round waits for a slower one: a sixth of the
usual grace time, in which moshpit's lists wait for missing peers."""

ALMOST_SHARE: Final = 0.98
"""By cohorts, a step is large enough if the batches that are done or under way make up this share
of the target. The sums of many cohorts are never exact, and change when peers die. Without this, a
missing thousandth is planned for the few peers that do not average yet, and all others wait for
another batch of the slowest."""

LONG_STEP_SECONDS: Final = 6.0
"""By cohorts, no list waits for newcomers that follow if the peers compute for so long between two
rounds. These have the state by then, and are expected as all others are. In a run of a thousand
there is always one in some cohort, and all others would wait for the patience in each step."""

PLANNED_SHARE: Final = 0.25
"""Batches larger than this share of the target are not planned; everybody begins them. With two or
three batches in a step, a plan would leave most peers out of it."""

KNOWN_SECONDS: Final = 1.0
"""All others plan with a peer this long after it has published that it is there: with short
batches, slots are read no later than that (`READ_WHEN_DUE_SECONDS`)."""

BLIND_BATCHES: Final = 4
"""How many batches a peer may begin in that time, if nobody knows how long its batches take. Of 108
such steps, one was more than 15 % off with this value, and no fewer with 8; three with 2, and seven
with 1."""

OVERDUE_SHARE: Final = 0.25  # of a batch's usual time: when an overdue one is expected to be done

LATE_SHARE: Final = 0.5
"""The share of the patience that a peer may take for the rest of its part after others have begun
the round. If it needs longer, it comes with what it has."""

CLOSE_BEHIND: Final = 2  # epochs: a newcomer that follows step by step is never further back

WAITED_AGAIN: Final = 8.0
"""A round's list stays open for newcomers for about the patience. If none comes, no list stays open
for newcomers for this many times as long. So a peer that only claims to follow costs the run an
eighth of its time, however many names it has. (Another peer may lead and close the list at once;
then it was open for no time.)"""

FOLLOWER_AGAIN_SECONDS: Final = WAITED_AGAIN * PATIENCE_SECONDS
"""How long no round waits again for a newcomer that has come."""

SUMS_PER_STEP: Final = 16
"""Into how many batches the other cohorts divide a cohort's part of a step when they plan it."""
RESTS_PER_STEP: Final = 64  # the same of the part of all other cohorts together

ASKED_SECONDS: Final = 30.0
"""For so long after a round that failed, this peer makes no step beside one that says it is further
and has not answered yet when it was asked to show it. A head that died may have handed it on."""

BOASTED_SHARE: Final = 0.25
"""A head boasts if it tells of so much more than the other cohorts' sums say, and of as large a
part of a step more."""
FRESH_SECONDS: Final = SAY_AGAIN_SECONDS + 2.0
"""How old the sums may be with which it is compared: those that living heads said last, and a
member has read lately."""

BROKEN_CLAIM: Final = "It did not bring to the last rounds what it had claimed."

NOBODY: Final = PeerId("")  # a peer whose name does not matter


@dataclass(frozen=True)
class ProgressSettings:
    """Settings of a run. All its peers have the same, except for `delayed`.

    - `target_samples`: of one round: the target batch, times the local steps.
    - `patience_seconds`: how long a round waits for peers that are slower than the others.
    - `places`: how many peers may be in a round.
    - `delayed`: this peer computes for the next epoch beside the round that ends this one.
    - `run`: its name, from which follows who is in which cohort.
    """

    target_samples: int
    patience_seconds: float = PATIENCE_SECONDS
    places: int = MOST_PEERS
    delayed: bool = False
    run: str = ""


@dataclass(frozen=True)
class Seen:
    """A slot of another peer, and when this version was first seen here (monotonic)."""

    slot: ProgressSlot
    at: float


@dataclass(frozen=True)
class Ignored:
    """A peer whose slot or samples do not count. `kind` is a fixed word for programs; `reason` is
    for people."""

    peer: PeerId
    kind: Literal["model", "state", "rate", "past", "doubted"]
    reason: str


@dataclass(frozen=True)
class OtherCohorts:
    """What `cohorts` other cohorts have together. `told_by`: the head that says so, and `told`
    the slot in which it does; None if this peer knows it from their sums."""

    cohorts: int
    samples: float
    rate: float
    told_by: PeerId | None = None
    told: Seen | None = None


@dataclass(frozen=True)
class Estimate:
    """This peer's view of the run at one moment.

    - `number`: grows with each reading of the directory; 0 is before the first.
    - `epoch`, `history`: of this peer, when the estimate was made.
    - `samples`: of all peers in this epoch and history, including this one, extrapolated.
    - `others_samples`: the same without this peer's.
    - `slack`: by how many samples fewer than the target are enough.
    - `rate`: of all of these together, in samples per second.
    - `is_due`: the round that ends this epoch should begin now.
    - `due_in_seconds`: until then, by these rates; infinite if nobody computes.
    - `own_part`: samples that this peer should bring, by the plan that all make (batch_plan.py);
      infinite if the known batches do not make up a round.
    - `part_beside`: samples of the next epoch that this peer should compute beside the round that
      ends this one (delayed), by the plan that all make when that round begins; infinite if
      unknown.
    - `own_batch`, `own_batch_seconds`: of one batch of this peer; 0 if unknown.
    - `done_by_others`: samples of the others' finished batches.
    - `others_ready_in_seconds`: until the others' parts of the plan are done; infinite if they make
      no round, or if that is unknown.
    - `early_seconds`: so long before the others' parts are done this peer may begin the round.
    - `patience_seconds`: as in the settings.
    - `expected`: how many peers will come to the round, this one included.
    - `coming`: the others of them, by name.
    - `lost`: those of them that seem to be gone. Nobody waits for one before it is heard again.
    - `awaited`: those of them that are known to bring samples, or to help. A peer that has no
      samples yet, and no batch of the plan under way, is expected, but nobody waits for it longer
      than for the quiet of a group; by cohorts it is not expected while a batch is under way that
      is too late for the plan, or there would be such a newcomer in every step of a large run.
    - `followers`: newcomers that follow the run and are one or two steps behind. A list that stays
      open for its usual time lets them in, so they are expected.
    - `holds_back`: this peer is alone, has no list, and begins no round while it waits for the
      followers.
    - `averaging`: others that have said lately that they are in the round that ends this epoch. (A
      peer that was killed in it says so no more.)
    - `begun`: those of them that are believed: it is time to come.
    - `is_asked`: another peer has asked this one into a round of this epoch that it is not in.
    - `company`: how many others are in this epoch and history and have not stayed away again and
      again, or are further, or have the state to which this peer will soon give way. While there
      are any, nobody makes a step alone.
    - `holders`: the living peers that are further, or that are here and have had a part in the
      run's steps; perhaps this peer, too. A step without most of them would split the run. If there
      are none, everybody here.
    - `needs`: how many peers must be in the next step: most of those in the last one. 0 in a small
      run, and when it has waited for them for long.
    - `is_again`: a round of this epoch has come to nothing, and this peer waits for so many for
      longer than a list stays open for them.
    - `me`: this peer.
    - `ahead`: others that claim to be further. By cohorts only those of whom it is proved.
    - `just_ahead`: those of whom it is proved that they are further by one epoch.
    - `may_be_ahead`: others that claim the same, and may be about to show it.
    - `made`: the histories that the step to the next epoch has made, by those that say they are
      there.
    - `behind`: others are ahead, and enough of them say so.
    - `may_be_behind`: this peer has no state of the run, and others may be about to be proved to be
      ahead.
    - `fork`: others have another history, and this peer is on the side that gives way.
    - `peers`: all others known to be alive and to fit, wherever they are. By cohorts those of this
      peer's own, and one head of each other.
    - `keepers`: those of them that keep the run's checkpoints.
    - `keepers_here`: the keepers in this epoch and history.
    - `silent_keepers`: keepers that do not count now and have not left: they may be back.
    - `ignored`: peers whose slots do not count, and why.
    - `places`: how many peers may be in a round.
    - `has_place`: this peer has one of the places; without one it follows the run.
    - `without_place`: the others that have none.
    - `is_crowded`: some peers have just come, and the batches that all may begin before they know
      of each other exceed the target.
    - `waits_to_be_known`: for that reason this peer begins no batch before the others know of it.
    - `cohort`: this peer's cohort, if the run has several. `expected`, `coming`, `awaited` and
      `followers` are then of the cohort, and `holders` are the heads of cohorts.
    - `sum`: if this peer is its cohort's head, what all of them have together.
    - `rest`: what all other cohorts have together, as this peer believes; None without cohorts.
    - `boaster`: the head of this cohort, if it tells of far more than their sums say.
    - `unproved`: by cohorts, the slots that name a later state than this peer's, or another one, of
      which there is no proof; each with its cohort. They are sums, those of peers that say the run
      is one group by now, and after a failed round those of this cohort.
    """

    number: int
    epoch: int
    history: bytes
    samples: float = 0.0
    others_samples: float = 0.0
    target_samples: int = 1
    slack: int = 0
    rate: float = 0.0
    is_due: bool = False
    due_in_seconds: float = math.inf
    own_part: float = math.inf
    part_beside: float = math.inf
    own_batch: int = 0
    own_batch_seconds: float = 0.0
    done_by_others: int = 0
    others_ready_in_seconds: float = math.inf
    early_seconds: float = 0.0
    patience_seconds: float = PATIENCE_SECONDS
    read_again_in_seconds: float = 1.0
    expected: int = 1
    coming: frozenset[PeerId] = frozenset()
    lost: frozenset[PeerId] = frozenset()
    awaited: frozenset[PeerId] = frozenset()
    followers: frozenset[PeerId] = frozenset()
    holds_back: bool = False
    averaging: frozenset[PeerId] = frozenset()
    begun: frozenset[PeerId] = frozenset()
    is_asked: bool = False
    company: int = 0
    holders: frozenset[PeerId] = frozenset()
    needs: int = 0
    is_again: bool = False
    me: PeerId = NOBODY
    ahead: frozenset[PeerId] = frozenset()
    just_ahead: frozenset[PeerId] = frozenset()
    may_be_ahead: frozenset[PeerId] = frozenset()
    made: frozenset[tuple[PeerId, bytes]] = frozenset()
    behind: Elsewhere | None = None
    may_be_behind: bool = False
    fork: Elsewhere | None = None
    peers: tuple[PeerId, ...] = ()
    keepers: tuple[PeerId, ...] = ()
    keepers_here: tuple[PeerId, ...] = ()
    silent_keepers: frozenset[PeerId] = frozenset()
    ignored: tuple[Ignored, ...] = ()
    places: int = MOST_PEERS
    has_place: bool = True
    without_place: frozenset[PeerId] = frozenset()
    is_crowded: bool = False
    waits_to_be_known: bool = False
    cohort: Cohort | None = None
    sum: ProgressSlot | None = None
    rest: OtherCohorts | None = None
    boaster: PeerId | None = None
    unproved: Mapping[PeerId, CohortPlace] = field(default_factory=dict)

    def wants_batch_after(self, own_samples: int) -> bool:
        """Whether this peer, with so many samples, should begin another batch for this round."""
        if self.holds_back and own_samples >= self.target_samples:
            return False
        return self.own_part - own_samples >= max(self.own_batch, 1) / 2

    @property
    def mean_part(self) -> float:
        """The target divided by all peers."""
        cohorts = 1 if self.cohort is None else self.cohort.count
        return self.target_samples / (self.expected * cohorts)

    @property
    def has_time_for_another(self) -> bool:
        """Whether a batch that this peer begins now is done about as soon as the others' parts: so
        soon after them that a round waits for this peer."""
        late = min(self.own_batch_seconds / 2, self.patience_seconds)
        return 0.0 < self.own_batch_seconds - late <= self.others_ready_in_seconds < math.inf

    def wants_batch_beside(self, own_samples: int) -> bool:
        """Whether this peer, with so many samples for the next epoch, should begin another batch
        for it, beside the round that ends this one (delayed)."""
        return self.part_beside - own_samples >= max(self.own_batch, 1) / 2

    def is_due_with(self, own_samples: int) -> bool:
        """Whether the round is due now that this peer has so many samples. For the training thread,
        which has just added a batch and has no newer estimate.

        It is due if the finished samples reach the target, or the plan's batches are done; or if
        this peer has its part, computes beside rounds, and the others are ready in a moment; or if
        others have begun, and this peer has its part, or no time to finish it. A peer that stays
        away from a round that has begun loses everything. One that comes too early brings what it
        has, and the weight of the round decides whether it makes a step.
        """
        return not self.holds_back and self.has_enough_with(own_samples)

    def has_enough_with(self, own_samples: int) -> bool:
        """The same, but regardless of newcomers that the round waits for."""
        done = self.done_by_others + own_samples
        together = self.others_samples + own_samples  # all that is known before the first batch
        enough = self.target_samples - self.slack
        if self.is_due or max(done, 0 if self.own_batch else together) >= enough:
            return True
        if not done:
            return False
        if not self.wants_batch_after(own_samples):
            return self.others_ready_in_seconds <= self.early_seconds or bool(self.begun)
        if not self.begun or self._can_finish(own_samples):
            return False
        by_most = 2 * len(self.begun) > self.expected
        share = BEGUN_BY_MOST_SHARE if by_most else BEGUN_SHARE
        return self.others_samples + own_samples >= share * self.target_samples

    @property
    def comes_too_late(self) -> bool:
        """Whether most others have begun the round or are further, and a batch that this peer
        begins now is done long after it. Its samples are stale then, and it begins the next epoch
        late as well."""
        gone_on = self.begun | self.just_ahead | self.may_be_ahead
        is_long = self.own_batch_seconds > LATE_SHARE * self.patience_seconds
        return is_long and 2 * len(gone_on) > 1 + len(gone_on | self.coming)

    @property
    def is_spared(self) -> bool:
        """Whether the others' batches make up the round, so that this peer comes without any."""
        return self.own_part <= 0

    @property
    def longest_wait_seconds(self) -> float:
        """How long a peer that has its part waits for the round: for the others' batches, plus the
        patience for peers that are slower than they said. For batches of unknown duration it waits
        no longer than one of its own takes, if it has computed one."""
        known, own = self.others_ready_in_seconds, self.own_batch_seconds
        batch = min(known, max(own, CARRIED_SECONDS)) if known < math.inf or not own else own
        return max(batch, 0.0) + self.patience_seconds

    def due_in_seconds_with(self, own_samples: int) -> float:
        """Until the round is due, now that this peer has so many samples."""
        if self.is_due_with(own_samples):
            return 0.0
        return _seconds_until(self.target_samples - self.others_samples - own_samples, self.rate)

    def _can_finish(self, own_samples: int) -> bool:
        """Whether this peer can finish its part while those that have begun the round wait."""
        if not self.own_batch or not self.own_batch_seconds or self.own_part == math.inf:
            return False
        batches = math.ceil((self.own_part - own_samples) / self.own_batch)
        share = LATE_SHARE + (EARLY_PATIENCES if self.early_seconds else 0.0)  # they may be early
        return batches * self.own_batch_seconds <= share * self.patience_seconds


@dataclass(frozen=True)
class Known:
    """The facts that a peer knows besides the others' slots.

    - `credit`: how much of the others' claims is believed.
    - `members`: the members of the round that ended the last epoch. They are in this epoch, whether
      their slots say so yet or not.
    - `me`: this peer's name.
    - `said`: what it has published last, and when: the others plan with that.
    - `epoch_began`: when that round ended; None if this peer was not in it.
    - `step_seconds`: how long this peer, and all others in that round, had computed for it; 0 if
      unknown.
    - `head_start`: how many seconds earlier this peer, and all others in that round, began to
      compute for this epoch (delayed).
    - `may_wait_for_follower`: the last round that waited for one in vain is long enough ago.
    - `let_in`: newcomers that were awaited recently, and came.
    - `known_for`: how many seconds ago this peer published that it is there.
    - `cohorts`: how many the run has in this epoch.
    - `idle_heads`: peers of this cohort that were its head and did nothing.
    - `lost`: peers whose link was lost, and that have published nothing since.
    - `boasters`: peers of this cohort that boasted lately, as its head.
    - `rest`: what the other cohorts had by the last estimate.
    - `sums_read_at`: when it began to read the sums that it has read last.
    - `needs`: as in the estimate.
    - `reached`: the states that peers of these cohorts have, by their own slots.
    - `shown`: slots whose publishers have shown a step, and where that leads to.
    - `settled`: slots that have been without a proof for long.
    - `refuted`: those whose cohorts do not have the states that they name.
    - `silent`: who could not show its step.
    - `failed_for`: how many seconds ago the last round of this epoch failed; None if none has.
      Then those that say they are further are asked to show their step.
    - `past`: what the last steps were made of.
    - `in_vain`: the last round of its cohort had no samples at all, though others claim enough for
      a step; and it has done none since. Then it believes no other cohort, and computes, unless a
      member has samples by now.
    """

    credit: Credit
    members: frozenset[PeerId] = frozenset()
    me: PeerId = NOBODY
    said: Seen | None = None
    epoch_began: float | None = None
    step_seconds: float = 0.0
    head_start: float = 0.0
    may_wait_for_follower: bool = False
    let_in: frozenset[PeerId] = frozenset()
    known_for: float = math.inf
    cohorts: int = 1
    idle_heads: frozenset[PeerId] = frozenset()
    lost: frozenset[PeerId] = frozenset()
    boasters: frozenset[PeerId] = frozenset()
    rest: OtherCohorts | None = None
    sums_read_at: float = -math.inf
    needs: int = 0
    reached: Mapping[CohortPlace, tuple[Lineage, ...]] = field(default_factory=dict)
    shown: Mapping[PeerId, Lineage] = field(default_factory=dict)
    settled: frozenset[PeerId] = frozenset()
    refuted: frozenset[PeerId] = frozenset()
    silent: Container[Silence] = ()
    failed_for: float | None = None
    past: Past = field(default_factory=Past)
    in_vain: bool = False


def estimate(
    seen: Mapping[PeerId, Seen],
    mine: ProgressSlot,
    settings: ProgressSettings,
    now: float,
    known: Known,
    *,
    number: int = 1,
) -> Estimate:
    """The estimate from these slots at this moment, for the peer whose own slot is `mine`."""
    alive = {peer: one for peer, one in seen.items() if now - one.at <= SLOT_SECONDS}
    fitting, ignored = _fitting(alive, mine, known.credit, now)
    cohorts = _Cohorts(fitting, mine, settings, known, now)
    fitting = cohorts.fitting
    own_slots = {peer: one for peer, one in fitting.items() if not is_sum(peer)}
    placed = _with_places(own_slots, mine, settings.places, now, known.me) | cohorts.others
    there = {
        peer: one
        for peer, one in fitting.items()
        if (one.slot.epoch, one.slot.history) == (mine.epoch, mine.history)
    }
    here = [
        _Counted(peer, one, settings, now, known.epoch_began, cohorts.most_of(peer))
        for peer, one in there.items()
        if peer in placed
    ]
    ignored += _samples_of_the_past(fitting, mine, known.members)
    ignored += cohorts.refuted() + cohorts.doubted()
    believed = []
    for one in here:
        is_doubted = known.credit.is_doubted(one.peer, mine.epoch, now)
        if is_doubted and one.peer not in cohorts.vouched_for:
            ignored.append(Ignored(one.peer, "doubted", BROKEN_CLAIM))
        else:
            believed.append(one)
    idle_cohort = known.in_vain and not any(
        one.slot.samples for one in believed if not is_sum(one.peer)
    )
    if idle_cohort:
        believed = [one for one in believed if not is_sum(one.peer)]
    moved = [
        peer
        for peer, one in fitting.items()
        if peer in placed
        and not (idle_cohort and is_sum(peer))
        and _has_moved(cohorts.teller if peer == REST else peer, one, mine, known)
        and not known.credit.is_doubted(peer, mine.epoch, now)
    ]
    others_samples = sum(one.samples for one in believed)
    rates = [one.rate for one in believed] + [
        fitting[peer].slot.samples_per_second for peer in moved
    ]
    own_rate = mine.samples_per_second if mine.role == "trains" else 0.0
    rate = sum(rates) + own_rate
    samples = others_samples + mine.samples
    slots = [one.slot for one in believed]
    staff = _Staff(slots, 1 + len(believed) + len(moved), mine, settings, now, known)
    others = [staff.worker(one.peer, fitting[one.peer]) for one in believed]
    others += [staff.moved(peer, fitting[peer]) for peer in moved]
    own = staff.own()
    enough = settings.target_samples
    plan_for = partial(
        plan_batches,
        [*others, own],
        order=partial(_turn, mine.epoch),
        patience_seconds=settings.patience_seconds,
    )
    plan = plan_for(enough)
    if cohorts.mine is not None:
        begun = sum(
            max(one.samples + one.under_way, one.done_by(now, plan.parts[one.peer]))
            for one in (*others, own)
        )
        if ALMOST_SHARE * enough <= begun < enough:
            enough, plan = begun, plan_for(begun)
    knows_own = mine.batch > 0 or mine.role != "trains" or mine.samples_per_second > 0.0
    largest = max(one.batch for one in (*others, own))
    is_planned = plan.is_full and knows_own and may_be_planned(largest, settings.target_samples)
    own_part = plan.parts[own.peer] if is_planned else math.inf
    part_beside = math.inf
    if settings.delayed and mine.batch:
        comers = [(one.peer, fitting[one.peer]) for one in believed if one.will_come]
        comers += [(peer, fitting[peer]) for peer in moved]
        part_beside = staff.part_beside(comers, plan)
    is_new = known.known_for < NEW_SECONDS or any(
        _has_just_begun(one, now)
        for one in (Seen(mine, now), *(fitting[one.peer] for one in believed))
    )
    is_crowded = is_new and _is_crowded(believed, others, own, settings.target_samples)
    begins_first = not mine.samples and mine.under_way < 0.0
    others_ready_in = _others_ready_in(others, plan, now)
    is_known = known.known_for >= KNOWN_SECONDS or not others
    waits_to_be_known = is_crowded and begins_first and not is_known
    if waits_to_be_known:
        own_part, others_ready_in = 0.0, math.inf
    done_by_others = sum(one.done_by(now, plan.parts[one.peer]) for one in others)
    at, voters = mine.at, cohorts.voters()
    lost = fork(at, voters, follows=mine.follows) or left_alone(at, voters, follows=mine.follows)
    beside = {one.peer for one in here if not known.credit.is_given_up(one.peer, mine.epoch, now)}
    beside.update(moved)
    # A single peer that is further is not followed if the others are not there (lineage.py), but a
    # step alone beside it would be a fork. Nor is a step added to a state about to be given up.
    further = [peer for peer, one in cohorts.said.items() if one.slot.epoch > mine.epoch]
    beside.update(map(publisher_of, further))
    company = beside.union(lost.peers if lost is not None else ())
    ahead = [peer for peer in further if peer not in cohorts.unproved]
    just_ahead = [
        peer
        for peer in ahead
        if cohorts.said[peer].slot.epoch == mine.epoch + 1 or peer in known.shown
    ]
    may_be_ahead = list[PeerId]()
    if cohorts.mine is None:
        # In one group nobody can show a step. A member of this peer's last round is believed
        # (lifecycle.py); of others one may lie.
        ahead, just_ahead = further, just_ahead if len(just_ahead) >= BACKERS else []
    elif known.failed_for is not None and known.failed_for < ASKED_SECONDS:
        may_be_ahead = [
            one
            for one in further
            if one in cohorts.unproved
            and cohorts.said[one].slot.epoch <= mine.epoch + DECISIONS_SHOWN
            and (one, at, cohorts.said[one].slot.at) not in known.silent
        ]
    comes = [
        one.peer for one in believed if one.under_way and plan.parts[one.peer] > one.slot.samples
    ]
    ours = [one for one in believed if not is_sum(one.peer)]
    moved_ours = [peer for peer in moved if not is_sum(peer)]
    followers = frozenset(
        peer
        for peer, one in fitting.items()
        if known.may_wait_for_follower
        and (cohorts.mine is None or known.step_seconds < LONG_STEP_SECONDS)
        and peer in placed
        and not is_sum(peer)
        and peer not in known.let_in
        and peer not in known.lost
        and peer not in moved  # it made that step with us, and its slot has not arrived yet
        and _is_close_behind(one, mine, now)
    )
    is_alone = not (believed or moved)
    comes_later = {
        one.peer
        for one in others
        if cohorts.mine is not None
        and one.is_busy
        and one.free_at > now + settings.patience_seconds
        and not plan.parts[one.peer]
    }
    coming = {one.peer for one in ours if one.will_come and one.peer not in comes_later}.union(
        moved_ours, () if is_alone else followers
    )
    found = Estimate(
        number=number,
        epoch=mine.epoch,
        history=mine.history,
        samples=samples,
        others_samples=others_samples,
        target_samples=settings.target_samples,
        slack=settings.target_samples - enough,
        rate=rate,
        due_in_seconds=_seconds_until(enough - samples, rate),
        own_part=own_part,
        part_beside=part_beside,
        own_batch=mine.batch,
        own_batch_seconds=mine.batch_seconds,
        done_by_others=done_by_others,
        others_ready_in_seconds=others_ready_in,
        early_seconds=_early_seconds(mine, settings),
        patience_seconds=settings.patience_seconds,
        expected=1 + len(coming),
        coming=frozenset(coming),
        lost=known.lost & coming,
        followers=followers,
        holds_back=is_alone and bool(followers),
        awaited=frozenset(
            peer
            for peer in (*(one.peer for one in believed if one.is_awaited), *comes, *moved)
            if not is_sum(peer)
        ),
        averaging=frozenset(
            publisher_of(peer)
            for peer, one in there.items()
            if one.slot.averaging and now - one.at <= CARRIED_SECONDS
        ),
        begun=frozenset(
            publisher_of(one.peer) for one in believed if one.slot.averaging and one.will_come
        ),
        company=len(company),
        holders=_holders(cohorts, placed, {*moved, *cohorts.moved}, mine, known, now),
        needs=known.needs,
        me=known.me,
        ahead=frozenset(map(publisher_of, ahead)),
        just_ahead=frozenset(map(publisher_of, just_ahead)),
        may_be_ahead=frozenset(map(publisher_of, may_be_ahead)),
        made=frozenset(
            (publisher_of(peer), cohorts.said[peer].slot.history)
            for peer in further
            if cohorts.said[peer].slot.epoch == mine.epoch + 1
        ),
        behind=behind(at, cohorts.followed(voters)),
        may_be_behind=mine.epoch == 0 and cohorts.is_open,
        fork=lost,
        peers=tuple(dict.fromkeys(map(publisher_of, cohorts.known))),
        keepers=_keepers(cohorts.known),
        keepers_here=_keepers(
            {
                peer: one
                for peer, one in cohorts.known.items()
                if (one.slot.epoch, one.slot.history) == at or peer in cohorts.moved
            }
        ),
        ignored=tuple(ignored),
        places=settings.places,
        has_place=known.me in placed,
        without_place=frozenset(own_slots) - placed,
        is_crowded=is_crowded,
        waits_to_be_known=waits_to_be_known,
        cohort=cohorts.mine,
        sum=cohorts.sum(ours, moved_ours, plan),
        rest=cohorts.rest(believed, moved),
        boaster=cohorts.boaster,
        unproved=cohorts.unproved,
    )
    is_due = found.is_due_with(mine.samples)
    due_in = 0.0 if is_due else found.due_in_seconds
    longest = LONGEST_READ_SECONDS
    if is_new:
        longest = READ_WHEN_CROWDED_SECONDS if is_crowded else READ_WHEN_DUE_SECONDS
    read_again_in = _read_again_in(due_in, longest, is_due=is_due)
    if found.cohort is not None:
        shortest = READ_IN_COHORT_SECONDS if found.sum is None else READ_AS_HEAD_SECONDS
        read_again_in = max(read_again_in, shortest)
    return replace(found, is_due=is_due, due_in_seconds=due_in, read_again_in_seconds=read_again_in)


def _early_seconds(mine: ProgressSlot, settings: ProgressSettings) -> float:
    """How long before the others' parts are done this peer may begin the round: no longer than one
    of its batches, because if they need that long, it computes another one for this round."""
    if not settings.delayed or not mine.batch:
        return 0.0
    return min(mine.batch_seconds, EARLY_PATIENCES * settings.patience_seconds)


def may_be_planned(largest_batch: int, target: int) -> bool:
    """Whether a step with this target is planned if no batch is larger."""
    return largest_batch <= PLANNED_SHARE * target


def _has_moved(peer: PeerId | None, seen: Seen, mine: ProgressSlot, known: Known) -> bool:
    """Whether this peer was in the last round, and its slot is still of an earlier epoch. With
    short steps that may be even older than the round, if it was read before the round ended."""
    if peer not in known.members:
        return False
    epoch, ended = seen.slot.epoch, known.epoch_began
    is_older = epoch < mine.epoch and ended is not None and seen.at <= ended
    return epoch == mine.epoch - 1 or is_older


def _turn(epoch: int, peer: PeerId) -> int:
    """The order of peers that would be done at the same time: the smallest comes first."""
    return crc32(f"{epoch}/{peer}".encode())


def _with_places(
    fitting: Mapping[PeerId, Seen], mine: ProgressSlot, places: int, now: float, me: PeerId
) -> frozenset[PeerId]:
    """The peers that may be in a round, perhaps this one among them.

    If all fit, everybody may. Otherwise the peers that made the run's steps come first, then those
    that fetched its state, then the rest; a hash decides among equals. A peer that has been silent
    for `CARRIED_SECONDS` has no place, so that another can take it.

    All peers deal the places out from the same slots. Slots take time to arrive, so two peers may
    disagree about the last places for a moment. A leader lists no more than fit
    (moshpit/gathering.py), and tells the others that the group has begun without them.
    """
    if 1 + len(fitting) <= places:
        return frozenset((me, *fitting))
    slots = {peer: one.slot for peer, one in fitting.items() if now - one.at <= CARRIED_SECONDS}
    slots[me] = mine
    return frozenset(
        sorted(slots, key=lambda one: (_seniority(slots[one]), _lot(mine.signature, one)))[:places]
    )


def _seniority(slot: ProgressSlot) -> int:
    """The smallest comes first."""
    if slot.epoch == 0:
        return 2
    return 1 if slot.follows else 0


@lru_cache(maxsize=2 * MOST_PEERS)  # of some runs: it is asked some ten times a second
def _lot(signature: bytes, peer: PeerId) -> bytes:
    return blake3(signature + peer.encode()).digest()


def _at_rate(slot: ProgressSlot, rate: float, batch: int) -> ProgressSlot:
    """The slot of many peers, as one that computes batches of this size at this rate."""
    batch = max(1, batch) if rate else 0
    seconds = min(batch / rate, LONGEST_SECONDS) if rate else 0.0
    return msgspec.structs.replace(
        slot, samples_per_second=rate, batch=batch, batch_seconds=seconds
    )


def _said_at(seen: Seen, began: float | None, now: float) -> float:
    """When this slot of this peer's epoch, which `began` then, was made: see the module."""
    if began is None or not seen.slot.was_in_round:
        return seen.at
    return min(began + seen.slot.epoch_seconds, seen.at + LONGEST_READ_SECONDS, now)


class _Counted:
    """A peer of this epoch and history, and how many of its samples count now."""

    def __init__(
        self,
        peer: PeerId,
        seen: Seen,
        settings: ProgressSettings,
        now: float,
        began: float | None = None,
        most: float = math.inf,
    ) -> None:
        slot, target = seen.slot, float(settings.target_samples)
        self.peer, self.slot = peer, slot
        # a sum that is right may be read for the first time long after it was made
        is_read_seldom = is_sum(peer) and peer != REST
        self._said_at = _said_at(seen, began, now) if is_read_seldom else seen.at
        trains = slot.role == "trains"
        self.rate = slot.samples_per_second if trains and not slot.averaging else 0.0
        carried = self.rate * min(max(0.0, now - self._said_at), CARRIED_SECONDS)
        # No peer counts for more than a whole round.
        self.samples = min(slot.samples + carried, target, most) if trains else 0.0
        self.will_come = now - seen.at <= CARRIED_SECONDS
        """A peer that was heard from lately is expected, even without samples: it is computing its
        first batch, and would never catch up if rounds went on without it. A peer that claims
        samples and does not come is doubted from then on (claims.py)."""
        self.is_awaited = self.will_come and (slot.samples > 0 or not trains)
        is_waited_out = slot.under_way >= 0.0 and slot.batch_seconds > 0.0
        self.under_way = slot.batch if is_waited_out and not slot.averaging else 0
        """Samples of a batch that the round waits for. A peer that claims one has to bring it."""

    def begun_by(self, now: float) -> int:
        """Samples of all batches that it has begun by this moment, if it keeps its pace."""
        slot = self.slot
        if not self.under_way:
            return slot.samples
        seconds = slot.under_way + min(max(0.0, now - self._said_at), CARRIED_SECONDS)
        return slot.samples + slot.batch * (1 + int(seconds / slot.batch_seconds))


def _is_close_behind(seen: Seen, mine: ProgressSlot, now: float) -> bool:
    """Whether this newcomer follows the run one or two epochs behind. It may need a moment longer
    to fetch a state than the others need for a step, and would then never be in one."""
    slot, behind = seen.slot, mine.epoch - seen.slot.epoch
    return slot.follows and 1 <= behind <= CLOSE_BEHIND and now - seen.at <= CARRIED_SECONDS


def _holders(
    cohorts: _Cohorts,
    placed: Container[PeerId],
    moved: Iterable[PeerId],
    mine: ProgressSlot,
    known: Known,
    now: float,
) -> frozenset[PeerId]:
    """Of the peers that have a place and are not behind (this one included), those that have had a
    part in steps so far. Their steps may be of another history: while there is a fork, only its
    larger side goes on. A peer that is further counts even as a follower: it may have been in the
    round that made that step. By cohorts, only their heads count."""
    voting = cohorts.voting
    present, here = set[PeerId](), set[PeerId]()
    for peer in moved:
        if peer in voting:
            present.add(publisher_of(peer))
    for peer, one in voting.items():
        if peer not in placed and not is_sum(peer):
            continue
        if one.slot.epoch < mine.epoch or known.credit.is_given_up(peer, mine.epoch, now):
            continue
        here.add(publisher_of(peer))
        is_of_the_run = one.slot.epoch > 0 and not one.slot.follows
        if is_of_the_run or one.slot.epoch > mine.epoch:
            present.add(publisher_of(peer))
    here |= present
    if cohorts.has_vote:
        here.add(known.me)
        if mine.epoch > 0 and not mine.follows:
            present.add(known.me)
    return frozenset(present or here)


def _keepers(slots: Mapping[PeerId, Seen]) -> tuple[PeerId, ...]:
    return tuple(dict.fromkeys(publisher_of(peer) for peer, one in slots.items() if one.slot.keeps))


def _voter(peer: PeerId, seen: Seen) -> Voter:
    return Voter(publisher_of(peer), seen.slot.at, seen.slot.follows)


def _head_turn(slot: ProgressSlot) -> int:
    return turn_of(follows=slot.follows, uplink=slot.uplink)


class _Cohorts:
    """The slots that matter to this peer, and who speaks for which cohort.

    - `known`: the own slots of its cohort, and the newest sum of each other cohort.
    - `said`: these, and those without a proof.
    - `fitting`: those whose samples count. If the head of this peer's cohort tells what all other
      cohorts have together, that is `REST`, and their sums may be old. If it has died, its last
      word counts until the next one tells, or this peer has read the sums. A peer that has come
      into this epoch reads the sums itself: it cannot know whether the head has just died.
    - `others`: the names of those that are not of its cohort.
    - `teller`: the head that tells it, in the slot `told`; `boaster`: the head, if it tells of too
      much.
    - `voting`: the slots that decide whose state is the run's: of all peers, or the sums.
    - `has_vote`: this peer is one of those that decide it.
    - `unproved`: as in the estimate.
    - `moved`: the sums of heads that made the last step, and whose slots of this epoch have not
      arrived.
    - `vouched_for`: the sums of doubted heads whose cohorts were in all of the last steps. They
      count for what these brought to each.
    """

    def __init__(
        self,
        fitting: Mapping[PeerId, Seen],
        mine: ProgressSlot,
        settings: ProgressSettings,
        known: Known,
        now: float,
    ) -> None:
        self._slot, self._settings, self._known, self._now = mine, settings, known, now
        self._me, self._count, self._run = known.me, known.cohorts, settings.run
        self.teller: PeerId | None = None
        self.boaster: PeerId | None = None
        self.moved: frozenset[PeerId] = frozenset()
        self._heads: frozenset[PeerId] = frozenset()
        self._at = mine.at
        self._doubted = frozenset(
            one for one in fitting if is_sum(one) and known.credit.is_doubted(one, mine.epoch, now)
        )
        self.vouched_for = frozenset(
            one
            for one in self._doubted
            if known.epoch_began is not None and known.past.least_rate_of(self._number_of(one))
        )
        sums = {
            peer: self._credible_sum(peer, one) for peer, one in fitting.items() if is_sum(peer)
        }
        own_slots = {peer: one for peer, one in fitting.items() if not is_sum(peer)}
        self._reached, self._shown = dict(known.reached), {*known.shown.values()}
        self._lone: Mapping[PeerId, Seen] = {}
        if self._count == 1:
            # a run by cohorts that this peer has not reached yet
            further = {peer: one for peer, one in sums.items() if one.slot.epoch > mine.epoch}
            self.number, self.others, self.has_vote = 0, frozenset[PeerId](), True
            self.voting = self.fitting = self.known = self.said = {**own_slots, **further}
            self.unproved = self._without_proof(further)
            self._is_head = False
            return
        self.number = number = self._number_of(self._me)
        ours = {
            peer: self._credible(peer, one)
            for peer, one in own_slots.items()
            if self._number_of(peer) == self.number
        }
        own = reached_by(_voter(peer, one) for peer, one in ours.items())
        if own:
            self._reached[CohortPlace(self._count, number, self._count, number)] = own
        self.unproved = self._without_proof(sums)
        if known.failed_for is not None:
            further = {peer: one for peer, one in ours.items() if one.slot.epoch > mine.epoch}
            self.unproved |= self._without_proof(further)
        newest: dict[int, PeerId] = {}
        doubted = self._doubted
        turns = {publisher_of(one): _head_turn(said.slot) for one, said in sums.items()}
        in_turn = in_order(self._run, turns, turns)
        places = {one: at for at, one in enumerate(in_turn)}

        def claim(one: PeerId) -> tuple[object, ...]:
            """Of two that were said lately, the first in order is of the head."""
            said = sums[one]
            is_late = now - said.at > SAY_AGAIN_SECONDS or publisher_of(one) in known.lost
            place = 0 if is_late else -places[publisher_of(one)]
            credit = one not in self.unproved, one not in doubted
            return credit, said.slot.epoch, not is_late, place, said.at

        for peer in sorted(sums, key=claim):
            slot = sums[peer].slot
            if slot.cohorts == self._count or slot.epoch != mine.epoch:
                newest[self._number_of(peer)] = peer
        head = self._head_among(ours)
        self._is_head = head == self._me
        before = newest.get(number)
        if self._is_head and before is not None and sums[before].slot.epoch <= mine.epoch:
            del newest[number]  # but one that is further counts: it has made a step
        self.has_vote = self._is_head
        # the run is one group again, and this peer has not reached that step yet
        further = {
            peer: one
            for peer, one in own_slots.items()
            if one.slot.cohorts == 1 and one.slot.epoch > mine.epoch
        }
        self._lone = further
        back = (sums[peer].slot for peer in newest.values())
        most = FULL_SHARE * settings.places  # so many peers a cohort has on average, or fewer
        self._back = sum(min(one.peers, most) for one in back if one.epoch <= mine.epoch)
        if not self._are_enough(further):
            self.unproved |= self._without_proof(further)
        self.voting = {peer: sums[peer] for peer in newest.values()} | further
        of_others = {
            peer: self._computing(peer, sums[peer]) for one, peer in newest.items() if one != number
        }
        self.known = {**ours, **further, **of_others}
        self.said = {peer: fitting[peer] for peer in self.unproved} | self.known
        self.moved = frozenset(
            peer
            for peer, one in self.voting.items()
            if is_sum(peer) and peer not in doubted and _has_moved(peer, one, mine, known)
        )
        there = frozenset(
            peer
            for peer, one in of_others.items()
            if (one.slot.epoch, one.slot.history) == (mine.epoch, mine.history)
            and now - one.at <= CARRIED_SECONDS
        )
        self._heads = frozenset(
            map(publisher_of, (self.moved & of_others.keys()) | (there - doubted))
        )
        self._doubted_heads = frozenset(map(publisher_of, there & self.vouched_for))
        self.told: Seen | None = None
        if known.epoch_began is not None:
            if head is not None:
                self.teller, self.told = head, self._told_by(head, ours)
            has_gone_on = any(one.epoch > mine.epoch for one in own)
            if self.told is None and not has_gone_on:
                self.teller, self.told = self._told_last()
            if self.told is not None and self._is_boasted(self.told, of_others):
                self.boaster, self.told = self.teller, None
        if self.told is None:
            self.teller = None
        else:
            of_others = {REST: self.told}
        self.others = frozenset(of_others)
        self.fitting = {**ours, **further, **of_others}

    def _computing(self, peer: PeerId, seen: Seen) -> Seen:
        """This sum, but one of an earlier epoch with the rate that its cohort had there on average:
        at the end of a step most peers wait."""
        slot = seen.slot
        most = self._known.past.rate_of(self._number_of(peer))
        rate = min(self._mean_rate(slot.samples), most)
        if slot.epoch >= self._at.epoch or rate <= slot.samples_per_second:
            return seen
        return replace(seen, slot=_at_rate(slot, rate, self._largest_batch))

    @property
    def _largest_batch(self) -> int:
        return self._settings.target_samples // (self._count * SUMS_PER_STEP)

    def _mean_rate(self, samples: float) -> float:
        """Samples per second of cohorts that brought so many to the last step; 0 if this peer does
        not know how long that took."""
        seconds = self._known.step_seconds
        return min(samples, self._settings.target_samples) / seconds if seconds > 0.0 else 0.0

    def _credible(self, peer: PeerId, seen: Seen) -> Seen:
        """This slot of a peer of the same cohort, with no more samples than it can have, nor a
        larger batch than it can bring."""
        slot, most = seen.slot, self.most_of(peer)
        is_here = slot.epoch == self._slot.epoch
        samples = slot.samples if is_here else slot.beside  # of this epoch
        if samples + slot.batch <= most:
            return seen
        samples = min(samples, int(most))
        batch = max(1, int(most) - samples) if slot.batch else 0
        seconds = slot.batch_seconds * batch / slot.batch if slot.batch else 0.0
        slot = msgspec.structs.replace(
            slot,
            samples=samples if is_here else slot.samples,
            beside=slot.beside if is_here else samples,
            batch=batch,
            batch_seconds=seconds,
        )
        return replace(seen, slot=slot)

    def _credible_sum(self, peer: PeerId, seen: Seen) -> Seen:
        """This sum, with no more samples than the cohort can have, nor a higher rate. Batches of a
        cohort are only a way to tell its rate."""
        slot, number, past = seen.slot, self._number_of(peer), self._known.past
        if slot.cohorts != self._count and slot.epoch >= self._slot.epoch:
            return seen
        rate = past.least_rate_of(number) if peer in self.vouched_for else past.rate_of(number)
        rate, samples = min(rate, slot.samples_per_second), slot.samples
        if slot.epoch == self._slot.epoch:
            said_at = _said_at(seen, self._known.epoch_began, self._now)
            samples = int(min(self.most_of(peer, said_at), samples))
        slot = _at_rate(slot, rate, self._largest_batch)
        slot = msgspec.structs.replace(slot, samples=samples, under_way=-1.0, beside=0)
        return replace(seen, slot=slot)

    def most_of(self, name: PeerId, now: float | None = None) -> float:
        """How many samples this peer of the same cohort, or the cohort of this sum, may have now,
        or may have had at another moment, by what it has brought before."""
        known = self._known
        if self._count == 1 or name == REST:
            return math.inf
        since = None  # for how long all have computed for this epoch
        if known.epoch_began is not None:
            seconds = (self._now if now is None else now) - known.epoch_began
            since = known.head_start + max(0.0, seconds)
        if is_sum(name):
            number = self._number_of(name)
            if since is not None and name in self.vouched_for:
                return known.past.least_rate_of(number) * since
            return known.past.most_of_cohort(number, since)
        if since is None or not known.step_seconds:
            return math.inf
        return known.past.most_of(name, since / known.step_seconds)

    def _number_of(self, name: PeerId) -> int:
        return cohort_of(self._run, publisher_of(name), self._count)

    def _place_of(self, name: PeerId, slot: ProgressSlot) -> CohortPlace:
        number = cohort_of(self._run, publisher_of(name), slot.cohorts)
        return CohortPlace(slot.cohorts, number, self._count, self._number_of(name))

    def _are_enough(self, lone: Sized) -> bool:
        """Whether so many peers are believed that say the run is one group by now: then hardly any
        peer is in a cohort any more."""
        return len(lone) * BACKING_SHARE >= len(lone) + self._back

    def _without_proof(self, sums: Mapping[PeerId, Seen]) -> dict[PeerId, CohortPlace]:
        return {
            peer: self._place_of(peer, one.slot)
            for peer, one in sums.items()
            if self._is_strange(one.slot) and self._proved(peer, one.slot) is None
        }

    def _is_strange(self, slot: ProgressSlot) -> bool:
        """Whether a peer that believes it would give up its own state."""
        return slot.epoch >= self._at.epoch and slot.at != self._at

    def _proved(self, peer: PeerId, slot: ProgressSlot) -> Lineage | None:
        """What is proved of the state that this slot names: that one, or an earlier one that is
        still later than this peer's."""
        said, alone = slot.at, slot.cohorts == 1 < self._count
        reached = () if alone else self._reached.get(self._place_of(peer, slot), ())
        if said in self._shown or said in reached:
            return said
        shown = self._known.shown.get(peer)
        if shown is not None and self._at.epoch < shown.epoch <= said.epoch:
            return shown  # it made that step; whether it has made more is not known
        return reached[0] if reached and reached[0].epoch > self._at.epoch else None

    def refuted(self) -> list[Ignored]:
        return [
            Ignored(
                publisher_of(peer),
                "state",
                "It says that its cohort has a state that the peers there do not have.",
            )
            for peer in sorted(self.unproved.keys() & self._known.refuted)
            if is_sum(peer)
        ]

    def doubted(self) -> list[Ignored]:
        """Those of which no more is believed than what their cohorts have brought to the last
        steps, and those in whose place another head is believed."""
        return [
            Ignored(publisher_of(peer), "doubted", BROKEN_CLAIM)
            for peer in sorted(self._doubted)
            if peer in self.vouched_for or peer not in self.fitting
        ]

    def voters(self) -> list[Voter]:
        """Those that decide whose state is the run's."""
        found = []
        for peer, one in self.voting.items():
            voter = _voter(peer, one)
            if peer in self.moved:
                voter = voter._replace(at=self._at)
            elif is_sum(peer) and self._is_strange(one.slot):
                proved = self._proved(peer, one.slot)
                if proved is None:
                    continue
                voter = voter._replace(at=proved)
            found.append(voter)
        return found

    @property
    def is_open(self) -> bool:
        """Whether there are claims of which a proof may come."""
        return bool(self.unproved.keys() - self._known.settled)

    def followed(self, voters: Sequence[Voter]) -> list[Voter]:
        """Those of them whose later state this peer takes, if they are enough."""
        further = {one.peer for one in voters if one.at.epoch > self._at.epoch}
        further -= self._lone.keys() & self.unproved.keys()
        has_much_to_lose = self._at.epoch > 0
        if self.is_open and has_much_to_lose and len(further) < BACKERS:
            further = set()
        return [one for one in voters if one.at.epoch <= self._at.epoch or one.peer in further]

    def _head_among(self, ours: Mapping[PeerId, Seen]) -> PeerId | None:
        """The first of this cohort that is there and can be dialled. A peer that is really an epoch
        behind is none: a later one may have gone to the heads' round in its place, and all others
        must see that it has made a step."""
        mine, gone = self._slot, self._known.idle_heads | self._known.lost
        there = [
            peer
            for peer, one in ours.items()
            if (one.slot.epoch == mine.epoch or _has_moved(peer, one, mine, self._known))
            and self._now - one.at <= CARRIED_SECONDS
            and not one.slot.client
            and peer not in gone
        ]
        turns = {peer: _head_turn(ours[peer].slot) for peer in there}
        if not mine.client:
            turns[self._me] = _head_turn(mine)
        return in_order(self._run, turns, turns)[0] if turns else None

    def _told_by(self, head: PeerId, ours: Mapping[PeerId, Seen]) -> Seen | None:
        """The slot of all other cohorts together, as this head tells it."""
        seen, mine = ours.get(head), self._slot
        if seen is None or head in self._known.boasters:
            return None
        slot = seen.slot
        is_here = (slot.epoch, slot.history) == (mine.epoch, mine.history)
        has_moved = _has_moved(head, seen, mine, self._known)
        if not (slot.rest_cohorts and (is_here or has_moved)):
            return None
        rate = slot.rest_per_second
        if has_moved:
            rate = max(rate, self._mean_rate(slot.rest_samples))
        told = msgspec.structs.replace(
            _at_rate(slot, rate, self._settings.target_samples // RESTS_PER_STEP),
            samples=slot.rest_samples,
            role="trains",
            averaging=False,
            keeps=False,
            leaves=False,
            client=False,
            under_way=-1.0,
            spared=0,
            beside=0,
            name="",
            peers=1,
        )
        return replace(seen, slot=told)

    def _told_last(self) -> tuple[PeerId | None, Seen | None]:
        """Which head told this peer last in this epoch, and how, if that is still the newest that
        it knows of the other cohorts."""
        rest, at = self._known.rest, self._at
        if rest is None or rest.told is None or rest.told_by in self._known.boasters:
            return None, None
        told = rest.told
        counts = (
            (told.slot.at, told.slot.cohorts) == (at, self._count)
            and self._known.sums_read_at <= told.at
            and self._now - told.at <= SLOT_SECONDS
        )
        return (rest.told_by, told) if counts else (None, None)

    def _is_boasted(self, told: Seen, sums: Mapping[PeerId, Seen]) -> bool:
        """Whether the sums say something else. A cohort whose sum is older, or of another epoch,
        may have as much as is believed of it. If the head counts one without a sum here, that may
        have as much as the others: its own head may have died."""
        at = (self._slot.epoch, self._slot.history)
        if (told.slot.epoch, told.slot.history) != at:
            return False
        settings, now, began = self._settings, self._now, self._known.epoch_began
        counted, cohorts = 0.0, 0
        for peer, one in sums.items():
            if (one.slot.epoch, one.slot.history) == at and now - one.at <= FRESH_SECONDS:
                counted += _Counted(peer, one, settings, now, began, self.most_of(peer)).samples
            else:
                counted += self.most_of(peer)
            cohorts += 1
        if not cohorts:
            return False
        counted *= max(1.0, min(told.slot.rest_cohorts, self._count - 1) / cohorts)
        claimed = _Counted(REST, told, settings, now).samples
        most = (1.0 + BOASTED_SHARE) * counted + BOASTED_SHARE * settings.target_samples
        return claimed > most

    @property
    def mine(self) -> Cohort | None:
        """This peer's cohort, with the heads of the others that will come."""
        if self._count == 1:
            return None
        return Cohort(self.number, self._count, self._heads, self._doubted_heads)

    def rest(self, believed: Sequence[_Counted], moved: Sequence[PeerId]) -> OtherCohorts | None:
        """What all other cohorts have together. Those whose sums of this epoch have not arrived go
        on as in the last one, for as long as a plan counts on them."""
        if self._count == 1:
            return None
        sums = [one for one in believed if is_sum(one.peer)]
        late = [self.fitting[peer].slot.samples_per_second for peer in moved if is_sum(peer)]
        settings, began, since = self._settings, self._known.epoch_began, 0.0
        if began is not None:
            here = min(max(0.0, self._now - began), settings.patience_seconds)
            since = self._known.head_start + here
        count = len(sums) + len(late) if self.told is None else self.told.slot.rest_cohorts
        return OtherCohorts(
            count,
            sum(one.samples for one in sums)
            + sum(min(since * rate, float(settings.target_samples)) for rate in late),
            sum(one.rate for one in sums) + sum(late),
            self.teller,
            self.told,
        )

    def sum(
        self, ours: Sequence[_Counted], moved: Sequence[PeerId], plan: BatchPlan
    ) -> ProgressSlot | None:
        """What the cohort has together, if this peer is its head: in the plans of the other
        cohorts, that is one peer with small batches."""
        if not self._is_head:
            return None
        mine, now = self._slot, self._now
        busy = [one for one in ours if one.slot.under_way >= 0.0]
        rate = sum(one.rate for one in busy)
        if mine.under_way >= 0.0:
            rate += mine.samples_per_second
        # Batches under way count in full, as in every plan: they cannot be stopped.
        samples = mine.samples + (mine.batch if mine.under_way >= 0.0 else 0)
        samples += sum(min(one.begun_by(now), plan.parts[one.peer]) for one in ours)
        for peer in moved:  # its slot of this epoch has not arrived, and it computes already
            slot = self.fitting[peer].slot
            samples += min(slot.batch, plan.parts[peer])
            rate += slot.samples_per_second
        seconds, began = mine.epoch_seconds, self._known.epoch_began
        if began is not None:  # as of now, like the samples
            seconds = min(max(0.0, now - began), LONGEST_SECONDS)
        return msgspec.structs.replace(
            _at_rate(mine, rate, self._largest_batch),
            epoch_seconds=seconds,
            samples=min(samples, LARGEST_SAMPLES),
            under_way=-1.0,
            keeps=mine.keeps or any(one.slot.keeps for one in ours),
            spared=0,
            beside=0,
            name="",
            cohorts=self._count,
            peers=1 + len(ours) + len(moved),
            rest_cohorts=0,
            rest_samples=0,
            rest_per_second=0.0,
        )


def expected_of(
    seen: Mapping[PeerId, Seen],
    mine: ProgressSlot,
    settings: ProgressSettings,
    now: float,
    without_place: Container[PeerId] = (),
) -> dict[PeerId, int]:
    """The peers expected in a round that begins now, each with its minimum of samples."""
    here = (
        _Counted(peer, one, settings, now)
        for peer, one in seen.items()
        if (one.slot.epoch, one.slot.history) == (mine.epoch, mine.history)
        and one.slot.signature == mine.signature
        and peer not in without_place
        and not is_sum(peer)
    )
    return {
        one.peer: 0 if one.slot.role == "auxiliary" else one.slot.samples + one.under_way
        for one in here
        if one.will_come
    }


def _fitting(
    alive: Mapping[PeerId, Seen], mine: ProgressSlot, credit: Credit, now: float
) -> tuple[dict[PeerId, Seen], list[Ignored]]:
    """The peers whose slots count, and the ones that are ignored."""
    ignored = []
    for peer, one in alive.items():
        refusal = credit.refusal(publisher_of(peer), now)
        if one.slot.signature != mine.signature:
            reason = "It has another model, or another kind of optimizer."
            ignored.append(Ignored(peer, "model", reason))
        elif refusal is not None:
            ignored.append(Ignored(peer, "state", refusal))
    against = {one.peer for one in ignored}
    slots = {peer: one.slot for peer, one in alive.items() if peer not in against}
    absurd = absurd_rates(slots, mine.samples_per_second)
    ignored += [Ignored(peer, "rate", reason) for peer, reason in absurd.items()]
    fitting = {peer: alive[peer] for peer in slots if peer not in absurd}
    return fitting, ignored


def _samples_of_the_past(
    fitting: Mapping[PeerId, Seen], mine: ProgressSlot, members: frozenset[PeerId]
) -> list[Ignored]:
    """Peers that still collect samples for a round that is over. One epoch behind may only mean a
    slot that has not arrived yet; and members of the last round have brought their samples,
    whatever their slots say."""
    return [
        Ignored(
            peer,
            "past",
            f"Its {one.slot.samples:,} samples are of epoch {one.slot.epoch}, which is over: "
            f"this peer is at {mine.epoch}.",
        )
        for peer, one in fitting.items()
        if one.slot.samples and one.slot.epoch < mine.epoch - 1 and peer not in members
    ]


class _Staff:
    """Turns peers into workers of a plan. If something about a peer's batches is unknown, the usual
    value among the others is taken. If nobody has computed any yet, all peers are alike."""

    def __init__(
        self,
        slots: Sequence[ProgressSlot],
        number: int,
        mine: ProgressSlot,
        settings: ProgressSettings,
        now: float,
        known: Known,
    ) -> None:
        self._mine, self._settings, self._now, self._known = mine, settings, now, known
        measured = [one for one in (*slots, mine) if one.batch and one.batch_seconds]
        self._usual_batch = median_low([one.batch for one in measured]) if measured else mine.batch
        paces = [one.batch_seconds / one.batch for one in measured]
        self._usual_pace = median_low(paces) if paces else 0.0
        per_step = number * self._usual_batch
        batches = settings.target_samples / per_step if per_step else 0.0
        self._per_octave = paces_per_octave(batches)

    def own(self) -> Worker:
        """This peer as the others see it."""
        return self.worker(self._known.me, self._said())

    def _said(self) -> Seen:
        said, mine = self._known.said, self._mine
        at = (mine.epoch, mine.history)
        if said is None or not said.slot.batch or (said.slot.epoch, said.slot.history) != at:
            return Seen(mine, self._now)
        return said

    def part_beside(self, others: Iterable[tuple[PeerId, Seen]], plan: BatchPlan) -> float:
        """Samples of the next epoch that this peer should compute (delayed), if these others are in
        the round that ends this one with the parts of the plan, and all begin to compute for the
        next epoch together with that round."""
        me, target = self._known.me, self._settings.target_samples
        workers = []
        for peer, seen in (*others, (me, self._said())):
            slot = msgspec.structs.replace(
                seen.slot,
                samples=0,
                averaging=False,
                under_way=-1.0,
                epoch_seconds=0.0,
                came_seconds=-1.0,
                spared=0 if plan.parts[peer] else min(seen.slot.spared + 1, MOST_SPARED),
            )
            workers.append(self._computing(peer, slot, 0, self._now, 0.0))
        part = plan_batches(
            workers,
            target,
            partial(_turn, self._mine.epoch + 1),
            patience_seconds=self._settings.patience_seconds,
        ).parts[me]
        if may_be_planned(max(one.batch for one in workers), target):
            return part
        return max(part, self._mine.batch)  # everybody begins batches of this size

    def worker(self, peer: PeerId, seen: Seen) -> Worker:
        """A peer whose slot is of this epoch."""
        slot, target = seen.slot, self._settings.target_samples
        began, since = self._known.epoch_began, slot.epoch_seconds
        said_at = _said_at(seen, began, self._now)
        if began is not None and not slot.was_in_round:
            # It has come since then, and took the time from slots that were much older.
            since = max(since, said_at - began)
        samples = min(slot.samples, target) if slot.role == "trains" else 0
        found = self._computing(peer, slot, samples, said_at, since)
        if self._now - said_at <= CARRIED_SECONDS:
            return found
        return Worker(peer, found.done_by(said_at + CARRIED_SECONDS, target))

    def moved(self, peer: PeerId, seen: Seen) -> Worker:
        """A peer that was in the last round, and whose slot is not of this epoch yet."""
        slot, now = seen.slot, self._now
        ended = now if self._known.epoch_began is None else self._known.epoch_began
        began = ended - self._known.head_start
        spared = 0 if slot.samples else min(slot.spared + 1, MOST_SPARED)
        samples, under_way, said_at = 0, -1.0, began
        is_newest = slot.averaging and slot.epoch == self._mine.epoch - 1
        if is_newest and (slot.beside or slot.under_way >= 0.0):
            # Its slot says how far it is with the samples that it computes beside the round.
            samples, under_way = min(slot.beside, self._settings.target_samples), slot.under_way
            said_at = seen.at if under_way >= 0.0 else ended
        slot = msgspec.structs.replace(
            slot,
            samples=samples,
            averaging=False,
            under_way=under_way,
            epoch_seconds=0.0,
            came_seconds=-1.0,
            spared=spared,
        )
        found = self._computing(peer, slot, samples, said_at, said_at - ended)
        if now - ended <= found.seconds + self._settings.patience_seconds:
            return found
        return Worker(peer, samples)  # it would have published a batch by now: it may be dead

    def _computing(
        self, peer: PeerId, slot: ProgressSlot, samples: int, said_at: float, since: float
    ) -> Worker:
        if slot.role != "trains" or slot.averaging or slot.leaves:
            return Worker(peer, samples)
        batch, seconds, is_busy = slot.batch, slot.batch_seconds, slot.under_way >= 0.0
        is_guessed = not seconds or not slot.has_begun
        if self._known.epoch_began is not None and slot.came_seconds >= 0.0 and not slot.has_begun:
            return Worker(peer, samples)  # planned once it begins, which it may never do
        if not batch and slot.samples_per_second > 0.0:  # it does not say how large its batches are
            batch, seconds = 1, 1.0 / slot.samples_per_second
            is_busy, is_guessed = True, False
        elif is_busy and not batch:
            batch = self._usual_batch
        if not batch:
            return Worker(peer, samples)
        seconds = seconds or batch * self._usual_pace or self._settings.patience_seconds
        seconds = min(max(seconds, SHORTEST_BATCH_SECONDS), LONGEST_SECONDS)
        # A batch that takes longer than usual is done soon, but not before its slot was published.
        ahead = max(seconds - max(slot.under_way, 0.0), OVERDUE_SHARE * seconds) if is_busy else 0.0
        first_seconds = ahead if is_busy else seconds
        if is_guessed and said_at + first_seconds + self._settings.patience_seconds < self._now:
            return Worker(peer, samples)
        return Worker(
            peer,
            samples,
            min(batch, self._settings.target_samples),
            seconds,
            said_at + ahead,
            is_busy,
            *self._order(slot, since + ahead, batch, seconds),
            is_guessed=is_guessed,
            spared=slot.spared,
        )

    def _order(
        self, slot: ProgressSlot, free_at: float, batch: int, seconds: float
    ) -> tuple[float, float]:
        """When it can begin, and how long a batch takes, in a form that peers can compare.

        For a peer that was not in the round that began the epoch, that is only when it came and how
        many batches it has begun: what its slot says about times has travelled to it and back, and
        its pace is only roughly known in its first batches. In delayed mode, too, only the number
        of batches can be compared: peers begin the round at different moments, and have computed
        since.
        """
        begun = math.ceil(slot.samples / batch) + (slot.under_way >= 0.0)
        if slot.was_in_round and self._settings.delayed:
            return rounded_times(begun * seconds, seconds, self._per_octave)
        knows_time = slot.has_begun and self._known.epoch_began is not None
        if slot.was_in_round:
            return rounded_times(free_at, seconds, self._per_octave)
        if knows_time and self._per_octave > FEWEST_PER_OCTAVE:
            return free_at, rounded_times(0.0, seconds, self._per_octave)[1]
        usual = batch * self._usual_pace or seconds
        pace = usual * 2.0 ** round(math.log2(seconds / usual))
        return max(slot.came_seconds, 0.0) + begun * pace, pace


def came_after(seen: Mapping[PeerId, Seen], mine: ProgressSlot, now: float) -> float:
    """How long after the beginning of its epoch this peer came into it, by what the others say; 0
    if they do not know either."""
    at = (mine.epoch, mine.history)
    told = [
        one.slot.epoch_seconds + max(0.0, now - one.at)
        for one in seen.values()
        if (one.slot.epoch, one.slot.history) == at and one.slot.epoch_seconds >= 0.0
    ]
    return min(median_low(told), LONGEST_SECONDS) if told else 0.0


def _has_just_begun(seen: Seen, now: float) -> bool:
    """Whether it computes its first batch, so that nobody knows yet how long its batches take."""
    slot = seen.slot
    is_first = slot.under_way >= 0.0 and not slot.samples_per_second
    return is_first and now - seen.at + slot.under_way < NEW_SECONDS


def _is_crowded(
    believed: Sequence[_Counted], others: Sequence[Worker], own: Worker, target: int
) -> bool:
    """Whether a batch of this peer, plus all those that the others may begin before they know of a
    peer that has just come, exceed the target."""
    blind = {one.peer for one in believed if not one.slot.batch_seconds}
    may_begin = sum(_at_most(one, is_known=one.peer not in blind) for one in others)
    return own.batch + may_begin > target


def _at_most(worker: Worker, *, is_known: bool) -> int:
    """The most samples that it may have begun after `KNOWN_SECONDS`. `is_known`: the duration of
    its batches is known."""
    if not worker.batch:
        return worker.samples
    batches = math.ceil(KNOWN_SECONDS / worker.seconds) if is_known else BLIND_BATCHES
    return worker.samples + worker.under_way + batches * worker.batch


def _others_ready_in(others: Sequence[Worker], plan: BatchPlan, now: float) -> float:
    if not plan.is_full:
        return math.inf
    parts = plan.parts
    missing = [one for one in others if one.done_by(now, parts[one.peer]) < parts[one.peer]]
    if any(one.is_guessed for one in missing):
        return math.inf
    return max((one.ready_at(parts[one.peer]) - now for one in missing), default=0.0)


def _seconds_until(missing: float, rate: float) -> float:
    if missing <= 0:
        return 0.0
    return missing / rate if rate > 0 else math.inf


def _read_again_in(due_in: float, longest: float, *, is_due: bool) -> float:
    """Read more often the nearer the step is: some ten times in each epoch, however long it is; and
    often while peers that do not know of each other are coming."""
    if is_due:
        return READ_WHEN_DUE_SECONDS
    return min(longest, max(SHORTEST_READ_SECONDS, due_in / READS_BEFORE_DUE))
