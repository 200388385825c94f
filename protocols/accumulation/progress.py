"""When the next step is due, by what the peers of a run say of themselves. Pure.

    found = estimate(seen, mine, settings, now)
    if found.is_due: ...                     # the samples of all together reach the target
    await trio.sleep(found.read_again_in_seconds)

Everybody adds up the samples of those who are in its own epoch and history, each carried forward
by its own rate since its slot was seen. So all peers come to the same conclusion at nearly the
same time without a message, and look more often the nearer the step is.

A group of averaging has so many places, and a run has one group. Where more peers take part, all
deal the places out by the same rule from the same slots (`_with_places`). The others follow the
run: nobody expects them in a round or counts their samples.

Easy to get wrong: time is that of this machine's clock that cannot be set, from the moment when a
slot was first seen here; what is carried forward ends after `CARRIED_SECONDS`, because a peer that
says nothing for that long may be gone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from blake3 import blake3

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


NOBODY: Final = PeerId("")  # a peer whose name does not matter


@dataclass(frozen=True)
class ProgressSettings:
    """What all peers of a run agree on.

    - `target_samples`: of one round: the target batch, times the local steps.
    - `carries_forward`: False counts only what peers have said, so that no step comes early by an
      estimate that was too high; it comes later by what a slot takes to travel.
    - `places`: how many peers may be in a round.
    """

    target_samples: int
    carries_forward: bool = True
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
    - `expected`: how many will come to the round, this peer included.
    - `awaited`: who of them is known by name to bring samples, or to help. Who has none yet is
      expected, but not waited for longer than the quiet of a group: it computes its first batch.
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
    read_again_in_seconds: float = 1.0
    expected: int = 1
    awaited: frozenset[PeerId] = frozenset()
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

    def is_due_with(self, own_samples: int) -> bool:
        """Whether the round is due now that this peer has so many: for the training thread, which
        has just added a batch and has no newer estimate."""
        return self.is_due or self.others_samples + own_samples >= self.target_samples

    def due_in_seconds_with(self, own_samples: int) -> float:
        """Until it is, now that this peer has so many."""
        if self.is_due_with(own_samples):
            return 0.0
        return _seconds_until(self.target_samples - self.others_samples - own_samples, self.rate)


@dataclass(frozen=True)
class Known:
    """What a peer remembers beside the slots. `members`: of the round that ended the last epoch:
    they are in this epoch, whether their slots say so yet or not. `me`: its own name."""

    credit: Credit
    members: frozenset[PeerId] = frozenset()
    me: PeerId = NOBODY


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
    is_due = _is_due(samples, believed, settings)
    due_in = _seconds_until(settings.target_samples - samples, rate)
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
    return Estimate(
        number=number,
        epoch=mine.epoch,
        history=mine.history,
        samples=samples,
        others_samples=others_samples,
        target_samples=settings.target_samples,
        rate=rate,
        is_due=is_due,
        due_in_seconds=0.0 if is_due else due_in,
        read_again_in_seconds=_read_again_in(due_in, is_due=is_due),
        expected=1 + sum(1 for one in believed if one.will_come) + len(moved),
        awaited=frozenset((*(one.peer for one in believed if one.is_awaited), *moved)),
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
        self.peer, self.slot = peer, slot
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
        one.peer: 0 if one.slot.role == "auxiliary" else one.slot.samples
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


def _is_due(samples: float, believed: Sequence[_Counted], settings: ProgressSettings) -> bool:
    """The samples reach the target; or others have begun, and this peer only sees a little less.

    Who stays away from a round that has begun is left out of it and loses what it has; who comes
    too early brings what it has, and the round's weight decides whether it makes a step.
    """
    begun = sum(1 for one in believed if one.slot.averaging)
    share = 1.0
    if 2 * begun > len(believed) + 1:
        share = BEGUN_BY_MOST_SHARE
    elif begun:
        share = BEGUN_SHARE
    return samples > 0 and samples >= share * settings.target_samples


def _seconds_until(missing: float, rate: float) -> float:
    if missing <= 0:
        return 0.0
    return missing / rate if rate > 0 else math.inf


def _read_again_in(due_in: float, *, is_due: bool) -> float:
    """The nearer the step, the more often: some ten looks in each epoch, however long it is."""
    if is_due:
        return READ_WHEN_DUE_SECONDS
    return min(LONGEST_READ_SECONDS, max(SHORTEST_READ_SECONDS, due_in / READS_BEFORE_DUE))
