"""The run's line of steps: the history of a state, and which of several states is the run's. Pure.

A history is sixteen bytes, equal at two peers that made the same steps:

    history = first_history(run, signature, digest_of_the_initial_parameters)
    history = next_history(history, epoch, committed.digest)
    history = history_after_parameters(history, epoch, committed.digest)

A committed result has the same bits at all its members, whatever their hardware; so peers whose
own arithmetic differs in the last bit have the same history, and peers that took different rounds
as the end of one epoch do not: that is a fork, and they never average with one another.

Easy to get wrong: the epoch is not enough to tell states apart, and the digest of the parameters
is too much: on unlike machines it differs although nothing is wrong.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Final, NamedTuple

from blake3 import blake3

from protocols.identity import PeerId
from protocols.rpc import encode

HISTORY_BYTES: Final = 16  # nobody gains by finding two histories that collide

_FIRST = b"potluck history 1: first\0"
_STEP = b"potluck history 1: step\0"
_PARAMETERS = b"potluck history 1: parameters\0"


def first_history(run: str, signature: bytes, parameters_digest: bytes) -> bytes:
    """Of a run before its first step."""
    return _digest(_FIRST, run, signature, parameters_digest)


def next_history(history: bytes, epoch: int, result_digest: bytes) -> bytes:
    """After the step that ended this epoch. `result_digest` is empty for a peer that was alone
    (then nobody shares its history; chance makes it unique only through what came before)."""
    return _digest(_STEP, history, epoch, result_digest)


def history_after_parameters(history: bytes, epoch: int, result_digest: bytes) -> bytes:
    """After the parameters themselves were averaged, at the beginning of this epoch."""
    return _digest(_PARAMETERS, history, epoch, result_digest)


def _digest(domain: bytes, *content: object) -> bytes:
    return blake3(domain + encode(content)).digest(HISTORY_BYTES)


# ---- whose state is the run's
#
# Whose state is the run's, when peers are at different ones. Pure.
#
#   behind(mine, voters)                    # a state that this peer should take, or None
#   fork(mine, voters) or left_alone(mine, voters)
#   patience.settled(found, now, jitter)    # the same, once it has been so for long enough
#
# Three cases, by what the live peers of the run say:
#
# - *behind*: enough of them are at a later epoch. Enough is two, and a quarter of them; or one,
#   where there is only one. A single liar can therefore send nobody after a state of its
#   invention, but where it is the only other peer.
# - *fork*: at the same epoch there are other histories. The side with fewer peers gives way; of
#   two equal ones, the larger history. Both sides count the same slots, each by itself, and come
#   to the same conclusion; numbers of samples are left out of it, for they change while slots
#   travel.
# - *left alone*: this peer is ahead, and not enough others are to be followed. They go on without
#   it; after a while it goes back to them.
#
# Who has nothing of its own at stake has no vote: who is at epoch 0 follows any later epoch that a
# single peer proves by its state, so that a run goes on from one checkpoint; and who has taken its
# state from others *follows* them until it has made a step with it. Two newcomers, whose states
# are one step old by the time they have them, would otherwise outvote the peer that they had them
# from.
#
# Easy to get wrong: two sides must not take each other's state at once. So a fork has to last
# `FORK_SECONDS` before anybody moves, each waits a little longer by a share of its own, and every
# peer that has moved makes the winning side larger.

BACKERS: Final = 2
BACKING_SHARE: Final = 4  # one in so many of the others

FORK_SECONDS: Final = 4.0
"""Longer than all slots of a round need to be written and read, so that what looks like a fork
between two of them is none."""

LEFT_ALONE_SECONDS: Final = 25.0
"""Longer than a slot lives: who is counted against this peer is alive."""

START_SECONDS: Final = 0.0
"""At epoch 0 peers begin with parameters of their own, have nothing to lose, and take at once
those of whoever has the smallest history."""


class Lineage(NamedTuple):
    """Which steps a state has had."""

    epoch: int
    history: bytes


class Voter(NamedTuple):
    """`follows`: it has taken its state from others, and made no step with it since."""

    peer: PeerId
    at: Lineage
    follows: bool = False


class FindingKind(enum.Enum):
    BEHIND = "behind"
    FORK = "fork"
    LEFT_ALONE = "left alone"


@dataclass(frozen=True)
class Elsewhere:
    """A state that this peer should take instead of its own: that of `peers`, who are at this
    epoch or later. `history` is None where any of a later epoch will do."""

    kind: FindingKind
    epoch: int
    history: bytes | None
    peers: tuple[PeerId, ...]
    reason: str
    seconds: float = 0.0
    """For how long it has to be so before anybody acts on it."""


def needed(others: int) -> int:
    """How many of so many others have to be ahead for a peer to follow them."""
    if others <= 1:
        return 1
    return max(BACKERS, -(-others // BACKING_SHARE))


def behind(mine: Lineage, voters: Iterable[Voter]) -> Elsewhere | None:
    """Whether enough others are at a later epoch, and where. Followers count where there is nobody
    else: the peers that they had their state from are gone."""
    later = [one for one in voters if one.at.epoch > 0]
    votes = [one for one in later if not one.follows] or later
    ahead = sorted((one.at.epoch for one in votes if one.at.epoch > mine.epoch), reverse=True)
    enough = needed(len(votes))
    if len(ahead) < enough:
        return None
    epoch = ahead[enough - 1]  # the latest that so many have reached
    sides = _sides([one for one in votes if one.at.epoch >= epoch])
    there = [one for one in later if one.at.epoch >= epoch]
    contested = len({one.at.history for one in there if one.at.epoch == epoch}) > 1
    best = sides[0]
    if contested:
        epoch, there = best.epoch, [one for one in there if one.at == best]
    return Elsewhere(
        FindingKind.BEHIND,
        epoch,
        best.history if contested else None,
        _peers(there),
        f"{_of_others(ahead, votes, 'is', 'are')} ahead, at epoch {epoch} and this peer at "
        f"{mine.epoch}.",
    )


def fork(mine: Lineage, voters: Iterable[Voter], *, follows: bool = False) -> Elsewhere | None:
    """Whether another side at this epoch has more peers, or as many and the smaller history.
    `follows`: as in `Voter`, of this peer."""
    here = [one for one in voters if one.at.epoch == mine.epoch]
    counts = Counter(one.at.history for one in here if not one.follows)
    if not follows:
        counts[mine.history] += 1
    elif not counts:
        counts = Counter((mine.history, *(one.at.history for one in here)))
    winner = min(counts, key=lambda history: (-counts[history], history))
    if winner == mine.history:
        return None
    return Elsewhere(
        FindingKind.FORK,
        mine.epoch,
        winner,
        _peers(one for one in here if one.at.history == winner),
        f"At epoch {mine.epoch} {counts[winner]} have made other steps than this peer, and "
        f"{max(0, counts[mine.history] - (not follows))} the same.",
        FORK_SECONDS if mine.epoch else START_SECONDS,
    )


def left_alone(
    mine: Lineage, voters: Iterable[Voter], *, follows: bool = False
) -> Elsewhere | None:
    """Whether this peer is ahead, and those who are not have too few before them to follow."""
    others = list(voters)
    votes = [one for one in others if one.at.epoch > 0]
    if not follows or any(not one.follows for one in votes):
        votes = [one for one in votes if not one.follows]
    back = [one for one in votes if one.at.epoch < mine.epoch]
    if not back:
        return None
    best = _sides(back)[0]
    they = next(one for one in back if one.at == best)
    theirs = [*(one for one in others if one is not they), Voter(PeerId(""), mine, follows)]
    if behind(best, theirs) is not None:
        return None
    return Elsewhere(
        FindingKind.LEFT_ALONE,
        best.epoch,
        best.history,
        _peers(one for one in back if one.at == best),
        f"{_of_others(back, votes, 'goes', 'go')} on from epoch {best.epoch} without the steps "
        f"that this peer has made up to {mine.epoch}.",
        LEFT_ALONE_SECONDS,
    )


def _of_others(some: Sized, all_others: Sized, does: str, do: str) -> str:
    if len(all_others) == 1:
        return f"the only other {does}"
    return f"{len(some)} of {len(all_others)} others {does if len(some) == 1 else do}"


def _sides(voters: Sequence[Voter]) -> list[Lineage]:
    """The states that there are, that of the most first; then the later, the smaller history."""
    counts = Counter(one.at for one in voters)
    return sorted(counts, key=lambda at: (-counts[at], -at.epoch, at.history))


def _peers(voters: Iterable[Voter]) -> tuple[PeerId, ...]:
    return tuple(sorted(one.peer for one in voters))


class FindingPatience:
    """Lets a finding count once there has been one of its kind for its time, without a gap: the
    epochs and histories in it move on meanwhile. Invariant: `_since` is when the gap ended."""

    def __init__(self) -> None:
        self._kind: FindingKind | None = None
        self._since = 0.0

    def settled(self, found: Elsewhere | None, now: float, jitter: float) -> Elsewhere | None:
        """`jitter`: this peer's own share, 0 to 1: so much longer it waits, of the same time."""
        kind = None if found is None else found.kind
        if kind is not self._kind:
            self._kind, self._since = kind, now
        if found is None or now - self._since < found.seconds * (1.0 + jitter):
            return None
        return found
