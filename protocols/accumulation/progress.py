"""When the next step is due, by what the peers of a run say of themselves. Pure.

    found = estimate(seen, mine, settings, now)
    if found.is_due: ...                     # the samples of all together reach the target
    await trio.sleep(found.read_again_in_seconds)

Everybody plans the batches of those who are in its own epoch and history (batch_plan.py), and
carries each forward by what its slot says of its batches. So all peers come to the same conclusion
at nearly the same time without a message, and look more often the nearer the step is.

A group of averaging has so many places, and a run has one group. Where more peers take part, all
deal the places out by the same rule from the same slots (`_with_places`). The others follow the
run: nobody expects them in a round or counts their samples.

Easy to get wrong: time is that of this machine's clock that cannot be set. A slot is as old as it
says, counted from the end of the round that began the epoch, where both were in that; else from
when it was first seen here. What is carried forward ends after `CARRIED_SECONDS`, because a peer
that says nothing for that long may be gone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median_low
from typing import Final, Literal
from zlib import crc32

import msgspec
from blake3 import blake3

from protocols.accumulation.batch_plan import (
    MOST_SPARED,
    SHORTEST_BATCH_SECONDS,
    BatchPlan,
    Worker,
    plan_batches,
    rounded_times,
)
from protocols.accumulation.claims import Credit, absurd_rates
from protocols.accumulation.forks import (
    Elsewhere,
    Lineage,
    Voter,
    behind,
    fork,
    left_alone,
)
from protocols.accumulation.progress_slot import (
    LONGEST_SECONDS,
    MOST_PEERS,
    SAY_AGAIN_SECONDS,
    SLOT_SECONDS,
    ProgressSlot,
)
from protocols.identity import PeerId

CARRIED_SECONDS: Final = 2 * SAY_AGAIN_SECONDS
"""For how long a slot is carried forward at its rate. A live peer has said something new by then,
even if one of its writes was lost."""

BEGUN_SHARE: Final = 0.9
"""Of the target: enough for a round that another peer has begun. A liar that says it has begun
makes a round a tenth too small."""

BEGUN_BY_MOST_SHARE: Final = 0.5
"""The same where most have begun: what they know is newer than what this peer has read."""

SHORTEST_READ_SECONDS: Final = 0.1  # round trips are as long
LONGEST_READ_SECONDS: Final = 3.0  # what is carried forward is good for longer; a fork waits so
READ_WHEN_DUE_SECONDS: Final = 0.5
READS_BEFORE_DUE: Final = 4  # each look leaves three quarters of the time

PATIENCE_SECONDS: Final = 1.5
"""A round waits for a batch that is done so much later than those of faster peers, and not longer:
a sixth of the usual grace time, within which moshpit's lists wait for who is missing."""

PLANNED_SHARE: Final = 0.25
"""Of the target: batches that are larger are begun by everybody, as the step will be what they make
it in any case. With two or three in a step, a plan would leave most peers out of it."""

OVERDUE_SHARE: Final = 0.25  # of a batch's usual time: in so much one is done that is overdue

LATE_SHARE: Final = 0.5
"""Of that patience: what a peer still has to do of its part when others have begun the round may
take so long; else it comes with what it has."""

CLOSE_BEHIND: Final = 2  # epochs: a newcomer that follows the run step by step is never further

FOLLOWER_AGAIN_SECONDS: Final = 8 * PATIENCE_SECONDS
"""A round's list stays open for a newcomer for about the patience, and so often at most: whoever
only says that it follows costs the run an eighth of its time, however many names it has."""

NOBODY: Final = PeerId("")  # a peer whose name does not matter


@dataclass(frozen=True)
class ProgressSettings:
    """What all peers of a run agree on.

    - `target_samples`: of one round: the target batch, times the local steps.
    - `carries_forward`: False counts only what peers have said, so that no step comes early by an
      estimate that was too high; it comes later by what a slot takes to travel.
    - `patience_seconds`: so long a round waits for those who are slower than the others.
    - `places`: how many peers may be in a round.
    """

    target_samples: int
    carries_forward: bool = True
    patience_seconds: float = PATIENCE_SECONDS
    places: int = MOST_PEERS


@dataclass(frozen=True)
class Seen:
    """A slot of another peer, and when this version of it was first seen here (monotonic)."""

    slot: ProgressSlot
    at: float


@dataclass(frozen=True)
class Ignored:
    """A peer whose slot or samples do not count, and why: as a word that stays, and in words."""

    peer: PeerId
    kind: Literal["model", "state", "rate", "past", "doubted"]
    reason: str


@dataclass(frozen=True)
class Estimate:
    """What is believed of the run at one moment.

    - `number`: grows with every reading of the directory; 0 is before the first.
    - `epoch`, `history`: of this peer, when the estimate was made.
    - `samples`: of all in this epoch and history, own ones included, carried forward.
    - `others_samples`: the same without this peer's own.
    - `rate`: of all of these together, in samples per second.
    - `is_due`: the round that ends this epoch should begin now.
    - `due_in_seconds`: until it is, by these rates; infinite where nobody computes.
    - `own_part`: samples that this peer is to bring by the plan that all make (batch_plan.py);
      infinite where the known batches do not make up a round.
    - `own_batch`, `own_batch_seconds`: of one batch of this peer; 0 where that is not known.
    - `done_by_others`: samples of others' batches that are done.
    - `others_ready_in_seconds`: until the others' parts of the plan are done; infinite where that
      is no round, or not known.
    - `patience_seconds`: as in the settings.
    - `expected`: how many will come to the round, this peer included.
    - `awaited`: who of them is known by name to bring samples, or to help. Who has none yet and
      says nothing of a batch that the plan has is expected, but not waited for longer than the
      quiet of a group.
    - `waits_for_follower`: one of the expected is none of these, but a newcomer that follows the
      run and is a step or two behind: a list that stays open for as long as a list does lets it in.
    - `averaging`: others who are in the round that ends this epoch.
    - `company`: others in this epoch and history who have not failed to come again and again,
      all who are further, and those to whose state this peer will soon give way: while there are
      any, nobody makes a step alone.
    - `holders`: who is further, or here and has had a part in the run's steps, as far as they live,
      this peer perhaps among them: a step without most of them would be one of a side of its own.
      Where there are none, all who are here. `me`: this peer.
    - `ahead`: others who say to be further.
    - `behind`: others are ahead, and enough of them say so.
    - `fork`: others have another history, and this peer is on the side that gives way.
    - `peers`: all others that are known to live and fit, wherever they are.
    - `keepers`: those of them who keep the run's checkpoints; `keepers_here`, who of these is in
      this epoch and history.
    - `ignored`: whose slots do not count, and why.
    - `places`: how many peers may be in a round. `has_place`: this peer is one of them; without a
      place it follows the run. `without_place`: others that do.
    """

    number: int
    epoch: int
    history: bytes
    samples: float = 0.0
    others_samples: float = 0.0
    target_samples: int = 1
    rate: float = 0.0
    is_due: bool = False
    due_in_seconds: float = math.inf
    own_part: float = math.inf
    own_batch: int = 0
    own_batch_seconds: float = 0.0
    done_by_others: int = 0
    others_ready_in_seconds: float = math.inf
    patience_seconds: float = PATIENCE_SECONDS
    read_again_in_seconds: float = 1.0
    expected: int = 1
    awaited: frozenset[PeerId] = frozenset()
    waits_for_follower: bool = False
    averaging: frozenset[PeerId] = frozenset()
    company: int = 0
    holders: frozenset[PeerId] = frozenset()
    me: PeerId = NOBODY
    ahead: frozenset[PeerId] = frozenset()
    behind: Elsewhere | None = None
    fork: Elsewhere | None = None
    peers: tuple[PeerId, ...] = ()
    keepers: tuple[PeerId, ...] = ()
    keepers_here: tuple[PeerId, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    places: int = MOST_PEERS
    has_place: bool = True
    without_place: frozenset[PeerId] = frozenset()

    def wants_batch_after(self, own_samples: int) -> bool:
        """Whether this peer, which has so many, should begin another batch for this round."""
        return self.own_part - own_samples >= max(self.own_batch, 1) / 2

    def is_due_with(self, own_samples: int) -> bool:
        """Whether the round is due now that this peer has so many: for the training thread, which
        has just added a batch and has no newer estimate.

        The samples that are done reach the target, or the plan's batches are done; or others have
        begun, and this peer has its part, or has no time for the rest of it: staying away from a
        round that has begun loses everything. Coming too early brings what there is, and the
        round's weight decides whether it makes a step.
        """
        done = self.done_by_others + own_samples
        together = self.others_samples + own_samples  # all that is known before the first batch
        if self.is_due or max(done, 0 if self.own_batch else together) >= self.target_samples:
            return True
        if not done:
            return False
        if not self.wants_batch_after(own_samples):
            return self.others_ready_in_seconds <= 0.0 or bool(self.averaging)
        if not self.averaging or self._can_finish(own_samples):
            return False
        by_most = 2 * len(self.averaging) > self.expected
        share = BEGUN_BY_MOST_SHARE if by_most else BEGUN_SHARE
        return self.others_samples + own_samples >= share * self.target_samples

    def is_spared_with(self, own_samples: int) -> bool:
        """Whether the others' batches make up the round, so that this peer comes without any."""
        return not own_samples and self.own_part <= 0

    @property
    def longest_wait_seconds(self) -> float:
        """So long a peer that has its part waits for the round: for the batches of the others, and
        for those who are slower than they said. Of batches whose time nobody knows it waits for
        none that takes longer than its own."""
        known = self.others_ready_in_seconds
        usual = max(self.own_batch_seconds, CARRIED_SECONDS)
        batch = min(known, usual) if known < math.inf else self.own_batch_seconds
        return max(batch, 0.0) + self.patience_seconds

    def due_in_seconds_with(self, own_samples: int) -> float:
        """Until it is, now that this peer has so many."""
        if self.is_due_with(own_samples):
            return 0.0
        return _seconds_until(self.target_samples - self.others_samples - own_samples, self.rate)

    def _can_finish(self, own_samples: int) -> bool:
        """Whether those who have begun the round wait until this peer has its part."""
        if not self.own_batch or not self.own_batch_seconds or self.own_part == math.inf:
            return False
        batches = math.ceil((self.own_part - own_samples) / self.own_batch)
        return batches * self.own_batch_seconds <= LATE_SHARE * self.patience_seconds


@dataclass(frozen=True)
class Known:
    """What a peer remembers beside the slots.

    - `members`: of the round that ended the last epoch: they are in this epoch, whether their slots
      say so yet or not.
    - `me`: its own name.
    - `said`: what it has said last, and when: what the others plan with.
    - `epoch_began`: when that round ended; None where this peer was not in it.
    - `may_wait_for_follower`: whether the last round that has waited for one is long enough ago.
    """

    credit: Credit
    members: frozenset[PeerId] = frozenset()
    me: PeerId = NOBODY
    said: Seen | None = None
    epoch_began: float | None = None
    may_wait_for_follower: bool = False


def estimate(
    seen: Mapping[PeerId, Seen],
    mine: ProgressSlot,
    settings: ProgressSettings,
    now: float,
    known: Known,
    *,
    number: int = 1,
) -> Estimate:
    """What these slots amount to at this moment, for the peer whose own slot is `mine`."""
    alive = {peer: one for peer, one in seen.items() if now - one.at <= SLOT_SECONDS}
    fitting, ignored = _fitting(alive, mine, known.credit, now)
    placed = _with_places(fitting, mine, settings.places, now, known.me)
    there = {
        peer: one
        for peer, one in fitting.items()
        if (one.slot.epoch, one.slot.history) == (mine.epoch, mine.history)
    }
    here = [_Counted(peer, one, settings, now) for peer, one in there.items() if peer in placed]
    ignored += _samples_of_the_past(fitting, mine, known.members)
    believed = []
    for one in here:
        if known.credit.is_doubted(one.peer, mine.epoch):
            reason = "It did not bring to the last rounds what it had claimed."
            ignored.append(Ignored(one.peer, "doubted", reason))
        else:
            believed.append(one)
    moved = [
        peer
        for peer, one in fitting.items()
        if peer in known.members
        and peer in placed
        and one.slot.epoch == mine.epoch - 1
        and not known.credit.is_doubted(peer, mine.epoch)
    ]
    others_samples = sum(one.samples for one in believed)
    rates = [one.rate for one in believed] + [
        fitting[peer].slot.samples_per_second for peer in moved
    ]
    own_rate = mine.samples_per_second if mine.role == "trains" else 0.0
    rate = sum(rates) + own_rate
    samples = others_samples + mine.samples
    staff = _Staff([one.slot for one in believed], mine, settings, now, known)
    others = [staff.worker(one.peer, one.seen) for one in believed]
    others += [staff.moved(peer, fitting[peer].slot) for peer in moved]
    own = staff.own()
    plan = plan_batches(
        [*others, own],
        settings.target_samples,
        lambda peer: crc32(f"{mine.epoch}/{peer}".encode()),
        patience_seconds=settings.patience_seconds,
    )
    knows_own = mine.batch > 0 or mine.role != "trains" or mine.samples_per_second > 0.0
    is_fine = max(one.batch for one in (*others, own)) <= PLANNED_SHARE * settings.target_samples
    is_planned = plan.is_full and knows_own and is_fine
    own_part = plan.parts[own.peer] if is_planned else math.inf
    done_by_others = sum(one.done_by(now, plan.parts[one.peer]) for one in others)
    voters = [
        Voter(peer, Lineage(one.slot.epoch, one.slot.history), one.slot.follows)
        for peer, one in fitting.items()
    ]
    at = Lineage(mine.epoch, mine.history)
    lost = fork(at, voters, follows=mine.follows) or left_alone(at, voters, follows=mine.follows)
    beside = {one.peer for one in here if not known.credit.is_given_up(one.peer, mine.epoch)}
    beside.update(moved)
    # One who is further is not followed where others are not (forks.py); but a step that is made
    # alone beside it would be a fork. And what is about to be given up is not added to.
    ahead = frozenset(peer for peer, one in fitting.items() if one.slot.epoch > mine.epoch)
    beside.update(ahead)
    company = beside.union(lost.peers if lost is not None else ())
    comes = [
        one.peer for one in believed if one.under_way and plan.parts[one.peer] > one.slot.samples
    ]
    waits_for_follower = (
        known.may_wait_for_follower
        and bool(believed or moved)
        and any(_is_close_behind(one, mine, now) for peer, one in fitting.items() if peer in placed)
    )
    found = Estimate(
        number=number,
        epoch=mine.epoch,
        history=mine.history,
        samples=samples,
        others_samples=others_samples,
        target_samples=settings.target_samples,
        rate=rate,
        due_in_seconds=_seconds_until(settings.target_samples - samples, rate),
        own_part=own_part,
        own_batch=mine.batch,
        own_batch_seconds=mine.batch_seconds,
        done_by_others=done_by_others,
        others_ready_in_seconds=_others_ready_in(others, plan, now),
        patience_seconds=settings.patience_seconds,
        expected=1 + sum(1 for one in believed if one.will_come) + len(moved) + waits_for_follower,
        waits_for_follower=waits_for_follower,
        awaited=frozenset((*(one.peer for one in believed if one.is_awaited), *comes, *moved)),
        averaging=frozenset(peer for peer, one in there.items() if one.slot.averaging),
        company=len(company),
        holders=_holders(fitting, placed, moved, mine, known),
        me=known.me,
        ahead=ahead,
        behind=behind(at, voters),
        fork=lost,
        peers=tuple(fitting),
        keepers=tuple(peer for peer, one in fitting.items() if one.slot.keeps),
        keepers_here=tuple(peer for peer, one in there.items() if one.slot.keeps),
        ignored=tuple(ignored),
        places=settings.places,
        has_place=known.me in placed,
        without_place=frozenset(fitting) - placed,
    )
    is_due = found.is_due_with(mine.samples)
    due_in = 0.0 if is_due else found.due_in_seconds
    is_new = any(
        slot.under_way >= 0.0 and not slot.batch_seconds
        for slot in (mine, *(one.slot for one in believed))
    )
    read_again_in = _read_again_in(due_in, is_due=is_due, is_new=is_new)
    return replace(found, is_due=is_due, due_in_seconds=due_in, read_again_in_seconds=read_again_in)


def _with_places(
    fitting: Mapping[PeerId, Seen], mine: ProgressSlot, places: int, now: float, me: PeerId
) -> frozenset[PeerId]:
    """Who may be in a round, this peer perhaps among them.

    Where all fit, everybody. Else first those by whom the run's steps were made, then those who
    have taken its state, then the rest; among equals a hash decides. A peer that has said nothing
    for `CARRIED_SECONDS` has no place: its replacement takes it.

    All peers deal the places out by the same slots. Slots travel, so two peers may differ about the
    last places for a moment: a leader lists no more than fit (moshpit/lead_or_follow.py), and
    whoever it has no room for is told that the group has begun without it.
    """
    if 1 + len(fitting) <= places:
        return frozenset((me, *fitting))
    slots = {peer: one.slot for peer, one in fitting.items() if now - one.at <= CARRIED_SECONDS}
    slots[me] = mine
    return frozenset(
        sorted(slots, key=lambda one: (_seniority(slots[one]), _lot(mine.signature, one)))[:places]
    )


def _seniority(slot: ProgressSlot) -> int:
    """The smaller comes first."""
    if slot.epoch == 0:
        return 2
    return 1 if slot.follows else 0


@lru_cache(maxsize=2 * MOST_PEERS)  # of some runs: it is asked some ten times a second
def _lot(signature: bytes, peer: PeerId) -> bytes:
    return blake3(signature + peer.encode()).digest()


class _Counted:
    """A peer of this epoch and history, and how many samples of it count now."""

    def __init__(self, peer: PeerId, seen: Seen, settings: ProgressSettings, now: float) -> None:
        slot, target = seen.slot, float(settings.target_samples)
        self.peer, self.slot, self.seen = peer, slot, seen
        trains = slot.role == "trains"
        self.rate = slot.samples_per_second if trains and not slot.averaging else 0.0
        carried = self.rate * min(max(0.0, now - seen.at), CARRIED_SECONDS)
        if not settings.carries_forward:
            carried = 0.0
        # No peer counts for more than the whole of a round: more says nothing more.
        self.samples = min(slot.samples + carried, target) if trains else 0.0
        self.will_come = now - seen.at <= CARRIED_SECONDS
        """Who is here and was heard of lately is waited for, also with nothing yet: it computes
        its first batch, and without it in the round it would never catch up. Who is waited for and
        does not come is in doubt from then on (claims.py)."""
        self.is_awaited = self.will_come and (slot.samples > 0 or not trains)
        is_waited_out = slot.under_way >= 0.0 and slot.batch_seconds > 0.0
        self.under_way = slot.batch if is_waited_out and not slot.averaging else 0
        """Of a batch for which the round waits: who claims one has to bring it."""


def _is_close_behind(seen: Seen, mine: ProgressSlot, now: float) -> bool:
    """Whether it fetches the state of this epoch now, as it did with that of the last one or two:
    it may need a moment more than the others need for a step, and would never be in one."""
    slot, behind = seen.slot, mine.epoch - seen.slot.epoch
    return slot.follows and 1 <= behind <= CLOSE_BEHIND and now - seen.at <= CARRIED_SECONDS


def _holders(
    fitting: Mapping[PeerId, Seen],
    placed: Container[PeerId],
    moved: Sequence[PeerId],
    mine: ProgressSlot,
    known: Known,
) -> frozenset[PeerId]:
    """Of those who have a place and are not behind, this peer among them, who has had a part in the
    steps so far; also in others than this peer's: while there is a fork, only its larger side goes
    on. A peer that is further counts also as a follower: it may be of the round that made that
    step."""
    present, here = {*moved}, {known.me, *moved}
    for peer, one in fitting.items():
        if peer not in placed:
            continue
        if one.slot.epoch < mine.epoch or known.credit.is_given_up(peer, mine.epoch):
            continue
        here.add(peer)
        is_of_the_run = one.slot.epoch > 0 and not one.slot.follows
        if is_of_the_run or one.slot.epoch > mine.epoch:
            present.add(peer)
    if mine.epoch > 0 and not mine.follows:
        present.add(known.me)
    return frozenset(present or here)


def expected_of(
    seen: Mapping[PeerId, Seen],
    mine: ProgressSlot,
    settings: ProgressSettings,
    now: float,
    without_place: Container[PeerId] = (),
) -> dict[PeerId, int]:
    """Who is expected in a round that begins now, and with how many samples at least."""
    here = (
        _Counted(peer, one, settings, now)
        for peer, one in seen.items()
        if (one.slot.epoch, one.slot.history) == (mine.epoch, mine.history)
        and one.slot.signature == mine.signature
        and peer not in without_place
    )
    return {
        one.peer: 0 if one.slot.role == "auxiliary" else one.slot.samples + one.under_way
        for one in here
        if one.will_come
    }


def _fitting(
    alive: Mapping[PeerId, Seen], mine: ProgressSlot, credit: Credit, now: float
) -> tuple[dict[PeerId, Seen], list[Ignored]]:
    """Whose slots count at all, and who else says what."""
    ignored = []
    for peer, one in alive.items():
        refusal = credit.refusal(peer, now)
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
    """Whoever still gathers for a round that is over. One epoch is a slot under way; and who was
    in the last round has brought those samples, whatever its slot says."""
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
    """The peers as workers of a plan. What is not known of a peer's batches is taken to be as
    usual among the others; where nobody has computed any yet, all are alike."""

    def __init__(
        self,
        slots: Sequence[ProgressSlot],
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

    def own(self) -> Worker:
        """This peer as the others see it."""
        said, mine = self._known.said, self._mine
        at = (mine.epoch, mine.history)
        if said is None or not said.slot.batch or (said.slot.epoch, said.slot.history) != at:
            said = Seen(mine, self._now)
        return self.worker(self._known.me, said)

    def worker(self, peer: PeerId, seen: Seen) -> Worker:
        """One whose slot is of this epoch."""
        slot, target = seen.slot, self._settings.target_samples
        began, said_at = self._known.epoch_began, seen.at
        if began is not None and slot.epoch_seconds >= 0.0:
            said_at = min(began + slot.epoch_seconds, self._now)
        since = slot.epoch_seconds if slot.epoch_seconds >= 0.0 else said_at - (began or 0.0)
        samples = min(slot.samples, target) if slot.role == "trains" else 0
        found = self._computing(peer, slot, samples, said_at, since)
        if self._now - said_at <= CARRIED_SECONDS:
            return found
        return Worker(peer, found.done_by(said_at + CARRIED_SECONDS, target))

    def moved(self, peer: PeerId, slot: ProgressSlot) -> Worker:
        """One that was in the last round, and says nothing of this epoch yet."""
        began = self._now if self._known.epoch_began is None else self._known.epoch_began
        spared = 0 if slot.samples else min(slot.spared + 1, MOST_SPARED)
        slot = msgspec.structs.replace(slot, averaging=False, under_way=-1.0, spared=spared)
        samples = min(slot.beside, self._settings.target_samples)
        found = self._computing(peer, slot, samples, began, 0.0)
        if self._now - began <= found.seconds + self._settings.patience_seconds:
            return found
        return Worker(peer, samples)  # a batch would be done and said by now: it may be dead

    def _computing(
        self, peer: PeerId, slot: ProgressSlot, samples: int, said_at: float, since: float
    ) -> Worker:
        if slot.role != "trains" or slot.averaging or slot.leaves:
            return Worker(peer, samples)
        batch, seconds, is_busy = slot.batch, slot.batch_seconds, slot.under_way >= 0.0
        is_guessed = not seconds
        if not batch and slot.samples_per_second > 0.0:  # it does not say in which batches
            batch, seconds = 1, 1.0 / slot.samples_per_second
            is_busy, is_guessed = True, False
        elif is_busy and not batch:
            batch = self._usual_batch
        if not batch:
            return Worker(peer, samples)
        seconds = seconds or batch * self._usual_pace or self._settings.patience_seconds
        seconds = min(max(seconds, SHORTEST_BATCH_SECONDS), LONGEST_SECONDS)
        # A batch that takes longer than usual is done soon, and not before this was said.
        ahead = max(seconds - max(slot.under_way, 0.0), OVERDUE_SHARE * seconds) if is_busy else 0.0
        if is_guessed and said_at + ahead + self._settings.patience_seconds < self._now:
            return Worker(peer, samples)
        return Worker(
            peer,
            samples,
            min(batch, self._settings.target_samples),
            seconds,
            said_at + ahead,
            is_busy,
            *rounded_times(since + ahead, seconds),
            is_guessed=is_guessed or not self._settings.carries_forward,
            spared=slot.spared,
        )


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


def _read_again_in(due_in: float, *, is_due: bool, is_new: bool) -> float:
    """The nearer the step, the more often: some ten looks in each epoch, however long it is; and
    often as long as it is not known (`is_new`) how fast everybody is."""
    if is_due:
        return READ_WHEN_DUE_SECONDS
    longest = READ_WHEN_DUE_SECONDS if is_new else LONGEST_READ_SECONDS
    return min(longest, max(SHORTEST_READ_SECONDS, due_in / READS_BEFORE_DUE))
