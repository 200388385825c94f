"""Steps that a round has decided and that this peer may not make itself. Pure.

    decided.note(decided_step(outcome, before, own_samples))    # whenever a round has ended
    decided.clear()                                             # this peer has made its step
    seen = decided.passed(lineages)                             # it has caught up by these

A round may be committed and its result not applied: where some who live were not in it, another
part of the run may have made the step (lifecycle.py, `_lacking`), and two members may see that
differently. Who did not apply it takes the step over from those who did, a moment later. It was a
member all the same, with the signed list in its hands; and where only one other was in the round,
nobody else can tell of it.

Promise: a step is in `passed` only where this peer has held its result as a member of the round,
and the history of the run, which is a hash over all results in their order, leads through it.

Easy to get wrong: a committed round that nobody applied was no step. And who was left out of the
result knows its members from a single other's word: it has seen nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from protocols.accumulation.events import SeenStep
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.results import lineage_after
from protocols.accumulation.round_endings import shares_of
from protocols.moshpit.outcome import Committed, Outcome

MOST_DECIDED: Final = 8  # rounds of one epoch that were not applied; more of them forget the oldest


def decided_step(outcome: Outcome, before: Lineage, own_samples: int) -> SeenStep | None:
    """The step that this round makes at whoever applies it; None where this peer has not seen it.
    Over a grid nobody has: each knows its own group."""
    if not isinstance(outcome, Committed) or len(outcome.rounds) > 1:
        return None
    history = lineage_after(before, "step", outcome.digest).history
    return SeenStep(before.epoch, history, outcome.weight, own_samples, shares_of(outcome))


class DecidedSteps:
    """Of the epoch that this peer is in. One thread at a time."""

    def __init__(self) -> None:
        self._steps: deque[SeenStep] = deque(maxlen=MOST_DECIDED)

    def note(self, step: SeenStep | None) -> None:
        if step is not None:
            self._steps.append(step)

    def clear(self) -> None:
        self._steps.clear()

    def passed(self, lineages: Collection[Lineage]) -> tuple[SeenStep, ...]:
        """Those of them that lead to one of these; all are forgotten."""
        found = tuple(one for one in self._steps if Lineage(one.epoch + 1, one.history) in lineages)
        self._steps.clear()
        return found
