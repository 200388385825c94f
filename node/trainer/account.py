"""What a session gave, added up from what happened. Pure.

A sample counts as given when others have committed a round with it: `StepTaken` with more members
than this one. Steps that a peer makes alone (the organiser's first ones) count for the run and for
its loss, but nobody has accepted anything in them.

Easy to get wrong: what was dropped or held back was computed all the same; an owner who asks "am I
contributing?" has to see it.
"""

from __future__ import annotations

from collections import deque

from node.trainer.happenings import Happening, LossSeen
from node.trainer.view import LOSSES_KEPT, ContributionView
from protocols.accumulation.events import CaughtUp, GradientsDropped, HeldBack, StepTaken

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
                if own and len(members) > 1:
                    self.samples += own
                    self.steps += 1
                    self.of_samples += happening.samples
                    return self.steps == 1
            case GradientsDropped(samples=samples) | HeldBack(samples=samples):
                self.lost_samples += samples
            case CaughtUp(epoch=epoch):
                self.epoch = epoch
            case LossSeen(loss=loss):
                before = loss if self.loss is None else self.loss
                self.loss = before + SMOOTHING * (loss - before)
                self.losses.append(loss)
            case _:
                pass
        return False

    def contribution(self, samples_per_second: float | None) -> ContributionView:
        return ContributionView(
            samples=self.samples,
            steps=self.steps,
            of_samples=self.of_samples,
            lost_samples=self.lost_samples,
            samples_per_second=samples_per_second,
        )
