"""How an averaging ended for this peer: committed, discarded, left out, or alone.

    match await averager.average(RoundRequest(vector, weight=32, epoch=7)):
        case Committed(result=result):    # the same bits at every member
            ...
        case Discarded(reason=reason):    # nobody's values changed; try again
            ...

A round's end is decided by its group, not by one peer (agreement.py); a `Committed` is never
taken back, and every peer that has one for the same round has the same members and the same bits.

An averaging over a grid has several rounds. It is `Committed` when at least one of them was; a
round of it that was discarded, left us out or found nobody does not end it: this peer keeps the
values and the weight that it had and goes on to the next round, and `rounds` says what happened
in each. When no round was committed, the outcome is that of the last one.

Easy to get wrong: `result` is a buffer that belongs to the averager and is valid until its next
`average` or `start`. Copy it, or unpack it (`Vector.unpack`), before. And `Discarded` with
`in_doubt` means that the group's decision could not be learned: others *may* have committed; this
peer did not, and the layer above should compare digests with others before it goes on.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from protocols.identity import PeerId
from protocols.moshpit.layout import ResultCut


@dataclass(frozen=True, eq=False)
class Committed:
    """The average that the whole group holds.

    `members` are those whose data is in it and `left_out` those of the roster whose data is not,
    both of the last round that was committed; `digest` is of the encoded result of that round,
    equal at all its members. `weight` is that of all whose data is in the result, over a grid as
    far as it has come through. `votes`: over a grid, the sum of what these peers gave as votes.
    `cut`: how the result was cut, by which others can check it against the digest; None where
    there was more than one round, for then it was not made by one group alone.
    """

    result: Tensor
    members: tuple[PeerId, ...]
    left_out: tuple[Excluded, ...]
    digest: bytes
    weight: float
    rounds: tuple[RoundStatistics, ...]
    cut: ResultCut | None = None
    votes: float | None = None


@dataclass(frozen=True, eq=False)
class Discarded:
    """No result: the vector is as it was. `in_doubt`: others may hold one all the same.
    `begun_without`: the members of a group that has started without this peer."""

    reason: str
    in_doubt: bool
    rounds: tuple[RoundStatistics, ...]
    begun_without: tuple[PeerId, ...] = ()


@dataclass(frozen=True, eq=False)
class LeftOut:
    """The group has committed a result without this peer, which was too slow, gone or lying.

    `members` hold the result with this digest; who needs it fetches the state from one of them.
    """

    members: tuple[PeerId, ...]
    digest: bytes
    rounds: tuple[RoundStatistics, ...]


@dataclass(frozen=True, eq=False)
class Alone:
    """Nobody else was there. The vector is as it was, and is the average of one."""

    rounds: tuple[RoundStatistics, ...]


Outcome = Committed | Discarded | LeftOut | Alone


# What is kept of every round: who, how long each phase, bytes, and failures with names.
#
#     for one in averager.statistics().recent:
#         print(one.verdict, one.members, one.matchmaking_seconds, one.excluded)
#
# Plain data, made when a round is over. The averager keeps the last `RECENT_ROUNDS` and running
# totals, so that nothing here grows with the number of rounds.
#
# Easy to get wrong: `exchange_seconds` is the sum over all attempts of this round, and
# `agreement_seconds` is what the round took beyond its exchanges and its matchmaking; `overhead`
# (what a bench calls round overhead) is therefore matchmaking and agreement together.


RECENT_ROUNDS = 64  # rounds whose whole statistics are kept


class Verdict(enum.Enum):
    """How one round ended for this peer."""

    COMMITTED = "committed"
    DISCARDED = "discarded"
    IN_DOUBT = "in doubt"
    LEFT_OUT = "left out"
    ALONE = "alone"
    NO_GROUP = "no group"


@dataclass(frozen=True)
class Excluded:
    """A peer of the roster whose data is not in the result, and why."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Failure:
    """What one peer (or this one, about itself) did to an attempt; it need not have excluded it."""

    peer: PeerId
    code: str
    text: str


@dataclass(frozen=True)
class RoundStatistics:
    """One round, as this peer saw it.

    `began`, `exchange_began`, `exchange_ended` and `ended` are moments of `trio.current_time`; the
    two in the middle are those of the last attempt, None where none was begun. `attempts` counts
    the exchanges that were begun. `members` are those who hold the result, the auxiliary ones
    among them; before a commit, and without one, those of the roster. `weights`: what each of
    them has signed that it brings, and `rates` (bytes per second up and down, 0: not known) what
    its owner allows or was measured, by which the plan was made. `averaged_bytes`: how much of
    the others' data each of them has averaged, as it travelled; empty without a result.
    """

    key: str
    epoch: int
    verdict: Verdict
    began: float
    ended: float
    reason: str = ""
    leader: PeerId | None = None
    exchange_began: float | None = None
    exchange_ended: float | None = None
    members: tuple[PeerId, ...] = ()
    weights: tuple[float, ...] = ()
    rates: tuple[tuple[int, int], ...] = ()
    averaged_bytes: tuple[int, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    failures: tuple[Failure, ...] = ()
    attempts: int = 0
    matchmaking_seconds: float = 0.0
    exchange_seconds: float = 0.0
    agreement_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class AveragerStatistics:
    """Everything since the averager was opened, and the last rounds in full."""

    rounds: int
    verdicts: dict[Verdict, int]
    took_part: int  # members of all rosters that this peer was in, itself not counted
    lost: int  # those of them whose data did not get into the result
    attempts: int
    bytes_sent: int
    bytes_received: int
    recent: tuple[RoundStatistics, ...]


@dataclass
class StatisticsKeeper:
    """Running totals, and a bounded memory of rounds."""

    verdicts: dict[Verdict, int] = field(default_factory=dict)
    took_part: int = 0
    lost: int = 0
    attempts: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    recent: deque[RoundStatistics] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))

    def add(self, one: RoundStatistics) -> None:
        self.verdicts[one.verdict] = self.verdicts.get(one.verdict, 0) + 1
        if one.leader is not None:
            self.took_part += len(one.members) + len(one.excluded) - 1
            self.lost += len(one.excluded)
        self.attempts += one.attempts
        self.bytes_sent += one.bytes_sent
        self.bytes_received += one.bytes_received
        self.recent.append(one)

    def statistics(self) -> AveragerStatistics:
        return AveragerStatistics(
            rounds=sum(self.verdicts.values()),
            verdicts=dict(self.verdicts),
            took_part=self.took_part,
            lost=self.lost,
            attempts=self.attempts,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            recent=tuple(self.recent),
        )
