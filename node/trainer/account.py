"""What a session gave, added up from what happened. Pure.

A sample counts as given when others have committed a round with it: `StepTaken` with more members
than this one, or a step that the others made of such a round and this one took over. Steps that a
peer makes alone (the organiser's first ones) count for the run and for its loss, but nobody has
accepted anything in them.

Easy to get wrong: what was dropped or held back was computed all the same; an owner who asks "am I
contributing?" has to see it.
"""

from __future__ import annotations

from collections import deque

from node.trainer.happenings import Happening, LossSeen
from node.trainer.view import LOSSES_KEPT, ContributionView
from protocols.accumulation.events import CaughtUp, GradientsDropped, HeldBack, SeenStep, StepTaken

SMOOTHING = 0.1
"""Of the newest loss in the smoothed one: ten steps are remembered, a few minutes of most runs."""


class Account:
    """Fed with everything that happens, in order."""

    def __init__(self) -> None:
        self.samples = 0
        self.steps = 0
        self.of_samples = 0.0
        self.lost_samples = 0
        self.epoch = 0
        self.loss: float | None = None
        self.losses: deque[float] = deque(maxlen=LOSSES_KEPT)

    def take(self, happening: Happening) -> bool:
        """Whether these are the first samples that others have accepted."""
        match happening:
            case StepTaken(members=members, own_samples=own):
                self.epoch = happening.epoch + 1
                if len(members) > 1:
                    return self._accepted(own, happening.samples)
            case GradientsDropped(samples=samples) | HeldBack(samples=samples):
                self.lost_samples += samples
            case CaughtUp(epoch=epoch, seen=seen):
                self.epoch = epoch
                firsts = [self._accepted_after_all(one) for one in seen if len(one.shares) > 1]
                return any(firsts)
            case LossSeen(loss=loss):
                before = loss if self.loss is None else self.loss
                self.loss = before + SMOOTHING * (loss - before)
                self.losses.append(loss)
            case _:
                pass
        return False

    def _accepted(self, own: int, of_samples: float) -> bool:
        if not own:
            return False
        self.samples += own
        self.steps += 1
        self.of_samples += of_samples
        return self.steps == 1

    def _accepted_after_all(self, seen: SeenStep) -> bool:
        """They were dropped as this peer did not make the step; the others made it with them."""
        self.lost_samples = max(0, self.lost_samples - seen.own_samples)
        return self._accepted(seen.own_samples, seen.samples)

    def contribution(self, samples_per_second: float | None) -> ContributionView:
        return ContributionView(
            samples=self.samples,
            steps=self.steps,
            of_samples=self.of_samples,
            lost_samples=self.lost_samples,
            samples_per_second=samples_per_second,
        )
