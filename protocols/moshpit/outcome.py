"""The outcomes of an averaging for this peer: committed, discarded, left out, or alone.

    match await averager.average(RoundRequest(vector, weight=32, epoch=7)):
        case Committed(result=result):    # the same bits at every member
            ...
        case Discarded(reason=reason):    # nobody's values changed; try again
            ...

The group decides how a round ends, not one peer (agreement.py). A `Committed` is never taken back,
and all peers that have one for the same round have the same members and the same bits.

An averaging over a grid has several rounds. It is `Committed` if at least one of them was. If a
round was discarded, left us out or found no other peer, this peer keeps its values and weight and
goes on to the next round; `rounds` says what happened in each. If no round was committed, the
outcome is that of the last one.

Easy to get wrong: `result` is a buffer of the averager, and valid only until its next `average`.
Copy or unpack it (`Vector.unpack`) before. `Discarded` with `in_doubt` means that this peer could
not learn the group's decision. It has not committed, but others *may* have, so the layer above
should compare digests with others before it goes on.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from protocols.identity import PeerId
from protocols.moshpit.layout import ResultCut, SentParts


@dataclass(frozen=True, eq=False)
class Committed:
    """The average that the whole group holds.

    Of the last committed round: the data of `members` is in the result, that of `left_out`, also in
    the roster, is not; `digest` is of the encoded result, equal at all its members. `weight`: of
    all whose data is in the result; over a grid, as far as it has come through. `votes`: over a
    grid, the sum of these peers' votes. `cut`: how the result was cut, with which others can check
    it against the digest; None after several rounds, because then no single group made it. `sent`:
    how this peer's own values, if it has brought any, went to their reducers; by cohorts, to those
    of its cohort. None over a grid.
    `peers`: of how many peers the data is in the result, with those of whole cohorts; 0 over a
    grid. By cohorts, `heads` are the weights that the heads have signed; `handed_down`: the head of
    this peer's cohort has applied it.
    """

    result: Tensor
    members: tuple[PeerId, ...]
    left_out: tuple[Excluded, ...]
    digest: bytes
    weight: float
    rounds: tuple[RoundStatistics, ...]
    cut: ResultCut | None = None
    sent: SentParts | None = None
    votes: float | None = None
    peers: int = 0
    heads: Mapping[PeerId, float] = field(default_factory=dict)
    handed_down: bool = False

    @property
    def is_of_several_groups(self) -> bool:
        """Whether the first group was not all: over a grid, or by cohorts."""
        return len(self.rounds) > 1 or self.peers > len(self.rounds[0].members)


@dataclass(frozen=True, eq=False)
class Discarded:
    """No result: the vector is unchanged. `in_doubt`: others may still hold one.
    `begun_without`: the members of a group that has started without this peer."""

    reason: str
    in_doubt: bool
    rounds: tuple[RoundStatistics, ...]
    begun_without: tuple[PeerId, ...] = ()


@dataclass(frozen=True, eq=False)
class LeftOut:
    """The group has committed a result without this peer, which was too slow, gone or lying.

    `members` hold the result with this digest; fetch the state from one of them, unless so much
    `weight`, or so few `peers`, are too little for a step. (0: over a grid it is not known.)
    """

    members: tuple[PeerId, ...]
    digest: bytes
    rounds: tuple[RoundStatistics, ...]
    weight: float
    peers: int


@dataclass(frozen=True, eq=False)
class Alone:
    """No other peer was there. The vector is unchanged: it is the average of one."""

    rounds: tuple[RoundStatistics, ...]


Outcome = Committed | Discarded | LeftOut | Alone


# The statistics of every round: its peers, the time of each phase, bytes, and named failures.
#
#     for one in averager.statistics().recent:
#         print(one.verdict, one.members, one.matchmaking_seconds, one.excluded)
#
# Plain data, made when a round is over. The averager keeps the last `RECENT_ROUNDS` and running
# totals, so nothing here grows with the number of rounds.
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
    """A fault of one peer (or of this one) in an attempt. It may not have been excluded for it."""

    peer: PeerId
    code: str
    text: str


@dataclass(frozen=True)
class RoundStatistics:
    """One round, as this peer saw it.

    `began`, `exchange_began`, `exchange_ended` and `ended` are moments of `trio.current_time`; the
    two in the middle are of the last attempt, None if none was begun. `attempts`: how many
    exchanges were begun. `members` hold the result, with the auxiliary ones; without a commit, they
    are those of the roster. `weights`: what each of them has signed. `rates` (bytes per second up
    and down, 0: not known): the owner's limit or a measurement, with which the plan was made.
    `averaged_bytes`: how much of the others' data each has averaged, as encoded; empty without a
    result.
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
    took_part: int  # members of all rosters that this peer was in, without itself
    lost: int  # the members among them whose data did not get into the result
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
