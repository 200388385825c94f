"""Translates the outcome of a round (moshpit/outcome.py) into the lifecycle's events. Pure.

Easy to get wrong: over a grid, only the members of the last group share the bits of a result. So
its digest does not name a history, unless a part of the grid failed: then the results differ by
more than rounding.
"""

from __future__ import annotations

import secrets

from torch import Tensor

from protocols.accumulation.claims import Brought
from protocols.accumulation.events import Share
from protocols.accumulation.lifecycle import Averaged, Ending, ParametersRoundEnded
from protocols.accumulation.progress import Estimate
from protocols.accumulation.results import Made, ResultsKept, lone_step
from protocols.accumulation.state_messages import NONCE_BYTES
from protocols.identity import PeerId
from protocols.moshpit.outcome import Alone, Committed, Discarded, LeftOut, Outcome, Verdict

OVER_A_GRID = b"over a grid"
"""Used in place of a digest if several groups each hold nearly the same average."""


def made_of(outcome: Outcome, own: Tensor, results: ResultsKept) -> Made | None:
    """The source of a step after this outcome, if one may follow. `own`: this peer's values."""
    match outcome:
        case Committed():
            return Made("step", outcome.digest, outcome.cut)
        case Alone():
            # No other peer has these bytes: a step that is made alone begins a history of its own.
            nonce = secrets.token_bytes(NONCE_BYTES)
            return lone_step(own, results.layouts, nonce, followed=results.is_followed)
        case _:
            return None


def averaged(outcome: Outcome, made: Made | None = None) -> Averaged:
    """The event for this outcome. `made`: what a step would be made of."""
    match outcome:
        case Committed():
            over_a_grid = len(outcome.rounds) > 1
            return Averaged(
                Ending.COMMITTED,
                weight=outcome.weight,
                digest=OVER_A_GRID if over_a_grid and _is_whole(outcome) else outcome.digest,
                members=outcome.members,
                left_out=left_out_of(outcome),
                votes=outcome.votes,
                peers=outcome.peers,
                handed_down=outcome.handed_down,
            )
        case LeftOut():
            return Averaged(Ending.LEFT_OUT, digest=outcome.digest, members=outcome.members)
        case Alone():
            return Averaged(Ending.ALONE, digest=b"" if made is None else made.digest)
        case Discarded():
            return Averaged(
                Ending.DISCARDED,
                reason=outcome.reason,
                members=outcome.rounds[-1].members if outcome.in_doubt else (),
                begun_without=outcome.begun_without,
                in_doubt=outcome.in_doubt,
            )


def _is_whole(outcome: Committed) -> bool:
    """Whether every round of the grid was committed with all of its group. If not, this group's
    result differs from the others' by more than rounding. Its history must differ, too, or its
    members would go on with other parameters than the others, unnoticed."""
    return all(one.verdict is Verdict.COMMITTED and not one.excluded for one in outcome.rounds)


def parameters_averaged(outcome: Outcome) -> ParametersRoundEnded:
    """The same for an averaging of the parameters."""
    ended = averaged(outcome)
    return ParametersRoundEnded(ended.ending, ended.digest, ended.members)


def left_out_of(outcome: Committed) -> tuple[PeerId, ...]:
    """The peers that were in the group and are not in its result."""
    return tuple(one.peer for one in outcome.left_out)


def lacks_somebody(outcome: Outcome, found: Estimate) -> bool:
    """Whether peers outside the round may make another step of this epoch, or have made it."""
    match outcome:
        case Alone():
            return True
        case Committed(handed_down=True):
            return False
        case Committed():
            if outcome.votes is not None:
                return outcome.votes < len(found.holders)
            if found.cohort is not None and found.sum is None:
                return True  # it went in its head's place, and knows only old sums
            return not found.holders <= {found.me, *outcome.members, *left_out_of(outcome)}
        case _:
            return False


def brought_to(outcome: Outcome) -> Brought:
    """What the members of the (first) group have signed, and the heads of the cohorts."""
    if not outcome.rounds:
        return Brought()
    first = outcome.rounds[0]
    return Brought(
        dict(zip(first.members, first.weights, strict=False)),
        outcome.heads if isinstance(outcome, Committed) else {},
        is_weighed=first.verdict in (Verdict.COMMITTED, Verdict.ALONE),
    )


def shares_of(outcome: Committed) -> tuple[Share, ...]:
    """The share of each member of the (first) group; empty if that group committed nothing."""
    first = outcome.rounds[0]
    if first.verdict is not Verdict.COMMITTED:
        return ()
    averaged = first.averaged_bytes or (0,) * len(first.members)
    members = zip(first.members, first.weights, averaged, first.rates, strict=True)
    return tuple(Share(peer, samples, size, *rates) for peer, samples, size, rates in members)
