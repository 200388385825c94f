"""What a round's outcome means to the lifecycle, in its words. Pure.

Easy to get wrong: over a grid the bits of a result are shared only within the last group, so its
digest names no history, unless a part of the grid failed: what came of that is no rounding.
"""

from __future__ import annotations

import secrets

from torch import Tensor

from protocols.accumulation.committed_result import Made, ResultLayouts, lone_step
from protocols.accumulation.lifecycle_events import Averaged, Ending, ParametersAveraged
from protocols.accumulation.share import Share
from protocols.accumulation.state_messages import NONCE_BYTES
from protocols.identity import PeerId
from protocols.moshpit.outcome import Alone, Committed, Discarded, LeftOut, Outcome
from protocols.moshpit.round_statistics import Verdict

OVER_A_GRID = b"over a grid"
"""In place of a digest where several groups each hold an average that is nearly the same."""


def made_of(outcome: Outcome, own: Tensor, layouts: ResultLayouts) -> Made | None:
    """What the step is made of that may follow; `own` is what this peer has brought."""
    match outcome:
        case Committed():
            return Made("step", outcome.digest, outcome.cut)
        case Alone():
            # Nobody else has these bytes: a step that is made alone makes a history of its own.
            return lone_step(own, layouts, secrets.token_bytes(NONCE_BYTES))
        case _:
            return None


def averaged(outcome: Outcome, made: Made | None = None) -> Averaged:
    """`made`: what a step would be made of."""
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
    """Whether every round of the grid was committed with all of its group. Else this group's result
    is another than that of the others, not by rounding alone; and so must its history be, or its
    members would go on beside the others with other parameters and nobody would know."""
    return all(one.verdict is Verdict.COMMITTED and not one.excluded for one in outcome.rounds)


def parameters_averaged(outcome: Outcome) -> ParametersAveraged:
    """The same for an averaging of the parameters."""
    ended = averaged(outcome)
    return ParametersAveraged(ended.ending, ended.digest, ended.members)


def left_out_of(outcome: Committed) -> tuple[PeerId, ...]:
    """Who was in the group and is not in its result."""
    return tuple(one.peer for one in outcome.left_out)


def brought_to(outcome: Outcome) -> dict[PeerId, float]:
    """What each of the (first) group has signed that it brings."""
    first = outcome.rounds[0] if outcome.rounds else None
    return {} if first is None else dict(zip(first.members, first.weights, strict=False))


def shares_of(outcome: Committed) -> tuple[Share, ...]:
    """What each of the (first) group brought; empty if that group has committed nothing."""
    first = outcome.rounds[0]
    if first.verdict is not Verdict.COMMITTED:
        return ()
    averaged = first.averaged_bytes or (0,) * len(first.members)
    members = zip(first.members, first.weights, averaged, first.rates, strict=True)
    return tuple(Share(peer, samples, size, *rates) for peer, samples, size, rates in members)
