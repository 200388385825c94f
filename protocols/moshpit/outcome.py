"""How an averaging ended for this peer: committed, discarded, left out, or alone.

    match await averager.average(vector, weight=32, epoch=7):
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

from dataclasses import dataclass

from torch import Tensor

from protocols.identity import PeerId
from protocols.moshpit.result_cut import ResultCut
from protocols.moshpit.round_statistics import Excluded, RoundStatistics


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
