"""Remembers steps that a round has decided and that this peer may not make itself. Pure.

    decided.note(decided_step(outcome, before, own_samples))    # whenever a round has ended
    decided.clear()                                             # this peer has made its step
    seen = decided.passed(lineages)                             # it has caught up through these

A round may be committed and its result not applied: if some live peers were not in it, another part
of the run may have made the step (lifecycle.py, `_lacking`), and two members may judge that
differently. A member that did not apply the result takes the step over from those that did, a
moment later. It was a member all the same, and has the signed list. If only one other peer was in
the round, no third peer can report it.

Promise: a step is in `passed` only if this peer held its result as a member of the round, and the
history of the run, which is a hash over all results in their order, leads through it.

Easy to get wrong: a committed round that no member applied was no step. A peer that was left out of
the result has only another peer's word for its members, so its steps do not count as seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from protocols.accumulation.events import SeenStep, Share
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.results import lineage_after
from protocols.moshpit.outcome import Committed, Outcome, Verdict

MOST_DECIDED: Final = 8  # rounds of one epoch that were not applied; the oldest is forgotten


def decided_step(outcome: Outcome, before: Lineage, own_samples: int) -> SeenStep | None:
    """The step that peers make if they apply this round; None if this peer has not seen it. Over a
    grid and by cohorts no peer has: each knows only its own group."""
    if not isinstance(outcome, Committed) or outcome.is_of_several_groups:
        return None
    history = lineage_after(before, "step", outcome.digest).history
    return SeenStep(before.epoch, history, outcome.weight, own_samples, shares_of(outcome))


def shares_of(outcome: Committed) -> tuple[Share, ...]:
    """The share of each member of the (first) group; empty if that group committed nothing."""
    first = outcome.rounds[0]
    if first.verdict is not Verdict.COMMITTED:
        return ()
    averaged = first.averaged_bytes or (0,) * len(first.members)
    members = zip(first.members, first.weights, averaged, first.rates, strict=True)
    return tuple(Share(peer, samples, size, *rates) for peer, samples, size, rates in members)


class DecidedSteps:
    """The decided steps of the epoch that this peer is in. One thread at a time."""

    def __init__(self) -> None:
        self._steps: deque[SeenStep] = deque(maxlen=MOST_DECIDED)

    def note(self, step: SeenStep | None) -> None:
        if step is not None:
            self._steps.append(step)

    def clear(self) -> None:
        self._steps.clear()

    def passed(self, lineages: Collection[Lineage]) -> tuple[SeenStep, ...]:
        """The decided steps that lead to one of these lineages. Then all are forgotten."""
        found = tuple(one for one in self._steps if Lineage(one.epoch + 1, one.history) in lineages)
        self._steps.clear()
        return found
