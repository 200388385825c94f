"""Names the history of a state, and decides which of several states is the run's. Pure.

A history is sixteen bytes. They are equal at two peers that made the same steps:

    history = first_history(run, signature, digest_of_the_initial_parameters)
    history = next_history(history, epoch, committed.digest)
    history = history_after_parameters(history, epoch, committed.digest)

A committed result has the same bits at all its members, whatever their hardware. So peers whose own
arithmetic differs in the last bit have the same history. Peers that ended one epoch with different
rounds have different histories: that is a fork, and they never average with one another.

Easy to get wrong: the epoch alone does not tell states apart. The digest of the parameters tells
too many apart: on unlike machines it differs although nothing is wrong.
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

HISTORY_BYTES: Final = 16  # no attacker gains by finding two histories that collide

_FIRST = b"potluck history 1: first\0"
_STEP = b"potluck history 1: step\0"
_PARAMETERS = b"potluck history 1: parameters\0"


def first_history(run: str, signature: bytes, parameters_digest: bytes) -> bytes:
    """The history of a run before its first step."""
    return _digest(_FIRST, run, signature, parameters_digest)


def next_history(history: bytes, epoch: int, result_digest: bytes) -> bytes:
    """The history after the step that ended this epoch. `result_digest` is that of the step's
    result (results.py)."""
    return _digest(_STEP, history, epoch, result_digest)


def history_after_parameters(history: bytes, epoch: int, result_digest: bytes) -> bytes:
    """The history after the parameters were averaged, at the beginning of this epoch."""
    return _digest(_PARAMETERS, history, epoch, result_digest)


def _digest(domain: bytes, *content: object) -> bytes:
    return blake3(domain + encode(content)).digest(HISTORY_BYTES)


# ---- whose state is the run's
#
# Decides whose state is the run's, if peers have different ones. Pure.
#
#   behind(mine, voters)                    # a state that this peer should take, or None
#   fork(mine, voters) or left_alone(mine, voters)
#   patience.settled(found, now, jitter)    # the same, once the finding has lasted long enough
#
# There are three cases, decided by the slots of the run's live peers:
#
# - *behind*: enough of them are at a later epoch. At least two are needed, and a quarter of them;
#   or one, if there is only one other. So a single liar cannot make a peer fetch an invented state,
#   unless it is the only other peer.
# - *fork*: there are other histories at the same epoch. The side with fewer peers gives way; of two
#   equal sides, the one with the larger history. Each side counts the same slots by itself, and
#   reaches the same conclusion. Samples do not count, because they change while slots travel.
# - *left alone*: this peer is ahead, and too few others are, so nobody follows them. The others go
#   on without it; after a while it goes back to them.
#
# Some peers have no vote. A peer at epoch 0 follows any later epoch that a single peer proves by
# its state, so that a run can go on from one checkpoint. A peer that has taken its state from
# others *follows* them until it has made a step with it. Otherwise two newcomers, whose states are
# one step old when they arrive, could outvote the peer that gave them these states.
#
# Easy to get wrong: two sides must not take each other's state at the same time. So a fork must
# last `FORK_SECONDS` before any peer moves, each peer waits a little longer by a share of its own,
# and every peer that moves makes the winning side larger.
#
# By cohorts a voter stands for all peers of one, and any of them may speak for it. A sum that names
# another state than this peer's has a vote only if enough peers of its cohort have that state
# (`reached_by`).

BACKERS: Final = 2
BACKING_SHARE: Final = 4  # a quarter of the others

FORK_SECONDS: Final = 4.0
"""Longer than it takes to write and read the slots of all members after a round. Until then, old
slots may look like a fork."""

LEFT_ALONE_SECONDS: Final = 25.0
"""Longer than a slot lives, so that only live peers are counted against this one."""

START_SECONDS: Final = 0.0
"""At epoch 0, peers begin with parameters of their own and have nothing to lose. They take the
state with the smallest history at once."""


class Lineage(NamedTuple):
    """The steps that made a state."""

    epoch: int
    history: bytes


class Voter(NamedTuple):
    """`follows`: the peer has taken its state from others, and made no step with it since."""

    peer: PeerId
    at: Lineage
    follows: bool = False


class FindingKind(enum.Enum):
    BEHIND = "behind"
    FORK = "fork"
    LEFT_ALONE = "left alone"


@dataclass(frozen=True)
class Elsewhere:
    """A state that this peer should take instead of its own. `peers` have it: they are at this
    epoch or later. `history` is None if any history of a later epoch will do."""

    kind: FindingKind
    epoch: int
    history: bytes | None
    peers: tuple[PeerId, ...]
    reason: str
    seconds: float = 0.0
    """How long this finding must last before the peer acts on it."""


def needed(others: int) -> int:
    """How many of the others must be ahead for a peer to follow them."""
    if others <= 1:
        return 1
    return max(BACKERS, -(-others // BACKING_SHARE))


def reached_by(peers: Iterable[Voter]) -> tuple[Lineage, ...]:
    """The states that a quarter of these peers have, and first the one that a quarter have reached.
    Of few peers, one is enough. Those that have no state yet do not count."""
    votes = [one for one in peers if one.at.epoch > 0]
    if not votes:
        return ()
    enough = -(-len(votes) // BACKING_SHARE)
    epoch = sorted((one.at.epoch for one in votes), reverse=True)[enough - 1]
    first = _sides([one for one in votes if one.at.epoch == epoch])[0]
    counts = Counter(one.at for one in votes)
    held = sorted(at for at, count in counts.items() if count >= enough and at != first)
    return (first, *reversed(held))


def behind(mine: Lineage, voters: Iterable[Voter]) -> Elsewhere | None:
    """Whether enough others are at a later epoch, and where. If there are only followers, they
    count: the peers that gave them their state are gone."""
    later = [one for one in voters if one.at.epoch > 0]
    votes = [one for one in later if not one.follows] or later
    ahead = sorted((one.at.epoch for one in votes if one.at.epoch > mine.epoch), reverse=True)
    enough = needed(len(votes))
    if len(ahead) < enough:
        return None
    epoch = ahead[enough - 1]  # the latest epoch that enough have reached
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
    """Whether another side at this epoch has more peers, or as many and a smaller history.
    `follows`: as in `Voter`, for this peer."""
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
    """Whether this peer is ahead, and too few are for the others to follow them."""
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
    """The states, those with the most voters first; then later epochs, then smaller histories."""
    counts = Counter(one.at for one in voters)
    return sorted(counts, key=lambda at: (-counts[at], -at.epoch, at.history))


def _peers(voters: Iterable[Voter]) -> tuple[PeerId, ...]:
    return tuple(sorted(one.peer for one in voters))


class FindingPatience:
    """Lets a finding count once there has been one of its kind for its `seconds` without a gap. The
    epochs and histories in it may change meanwhile. Invariant: `_since` is when the gap ended."""

    def __init__(self) -> None:
        self._kind: FindingKind | None = None
        self._since = 0.0

    def settled(self, found: Elsewhere | None, now: float, jitter: float) -> Elsewhere | None:
        """`jitter`: this peer's own share, 0 to 1; it waits longer by this share of the time."""
        kind = None if found is None else found.kind
        if kind is not self._kind:
            self._kind, self._since = kind, now
        if found is None or now - self._since < found.seconds * (1.0 + jitter):
            return None
        return found
