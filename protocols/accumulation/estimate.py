"""`Estimate`, a peer's view of its run at one moment, and what follows for it. Pure.

    if found.is_due_with(samples): ...           # the round that ends this epoch begins
    if found.wants_batch_after(samples): ...     # another batch for it comes first

progress.py makes it from the others' slots. The training thread asks it after each batch, with the
samples that this peer has by then, because no newer estimate is there at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from protocols.accumulation.claims import CohortPlace
from protocols.accumulation.known import NOBODY, PATIENCE_SECONDS, OtherCohorts
from protocols.accumulation.lineage import Elsewhere
from protocols.accumulation.progress_slot import CARRIED_SECONDS, MOST_PEERS, ProgressSlot
from protocols.identity import PeerId
from protocols.moshpit.cohorts import Cohort

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

LATE_SHARE: Final = 0.5
"""The share of the patience that a peer may take for the rest of its part after others have begun
the round. If it needs longer, it comes with what it has."""

BROKEN_CLAIM: Final = "It did not bring to the last rounds what it had claimed."


@dataclass(frozen=True)
class Ignored:
    """A peer whose slot or samples do not count. `kind` is a fixed word for programs; `reason` is
    for people."""

    peer: PeerId
    kind: Literal["model", "state", "rate", "past", "doubted"]
    reason: str


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
    - `is_waited_for`: by cohorts, this peer was in the last step, and most of the others that it
      expects in its cohort's round are in it already; no round of this epoch has failed, and none
      of them is proved to be further. Over slow links, some get a step long after others. False if
      a step has fewer than four batches of each peer: without those of all that are late it may
      have too few samples.
    - `spared`: in how many steps in a row this peer brought no samples.
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
    is_waited_for: bool = False
    spared: int = 0
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

    def comes_too_late_with(self, own_samples: int) -> bool:
        """Whether most others have begun the round or are further, and a batch that this peer, with
        so many samples, begins now is done long after it. Its samples are stale then, and it begins
        the next epoch late as well."""
        gone_on = self.begun | self.just_ahead | self.may_be_ahead
        are_most = 2 * len(gone_on) > 1 + len(gone_on | self.coming)
        is_in_time = self._may_come_with_one and not own_samples
        return are_most and self._takes_long and not is_in_time

    @property
    def _may_come_with_one(self) -> bool:
        """Whether the list stays open for a first batch of this peer."""
        return self.is_waited_for and 0.0 < self.own_batch_seconds <= self.patience_seconds

    @property
    def _takes_long(self) -> bool:
        return self.own_batch_seconds > LATE_SHARE * self.patience_seconds

    @property
    def is_spared(self) -> bool:
        """Whether this peer comes without any batch: those of the others make up the round, or a
        batch would hold up its cohort, which has begun it and waits."""
        holds_up = self.is_waited_for and self._takes_long
        is_owed_one = self.spared > 0 and self._may_come_with_one
        return self.own_part <= 0 or (holds_up and not is_owed_one)

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
        return seconds_to_compute(
            self.target_samples - self.others_samples - own_samples, self.rate
        )

    def _can_finish(self, own_samples: int) -> bool:
        """Whether this peer can finish its part while those that have begun the round wait."""
        if not self.own_batch or not self.own_batch_seconds or self.own_part == math.inf:
            return False
        batches = math.ceil((self.own_part - own_samples) / self.own_batch)
        share = LATE_SHARE + (EARLY_PATIENCES if self.early_seconds else 0.0)  # they may be early
        return batches * self.own_batch_seconds <= share * self.patience_seconds


def seconds_to_compute(missing: float, rate: float) -> float:
    """How long so many samples take at this rate; infinite if nobody computes."""
    if missing <= 0:
        return 0.0
    return missing / rate if rate > 0 else math.inf
