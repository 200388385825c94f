"""The figures of a run's steps, for `/metrics` and for trackers. Pure.

    figures = RunFigures()
    figures.take(happening)                      # every event, in order
    figures.rows(happening, view)                # [StepFigures(312, {"train/loss": 2.07, ...})]

`RunFigures` has what both show, so both show the same. A row has the figures of one step of the
run, under names that users of trackers know; docs/organisers.md lists them. A figure that is
unknown, or not finite, is left out.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from node.core.training_view import TrainerView
from node.training.happenings import Happening
from protocols.accumulation.events import CaughtUp, RoundFailed, StepTaken

STEP: Final = "train/global_step"
"""Trackers that have no step of their own get it as a figure of this name."""


class StepFigures(msgspec.Struct, frozen=True):
    """The figures of the run's `step`th step."""

    step: int
    values: dict[str, float]


class RunFigures:
    """Counts over this session, and the newest figures of a step."""

    def __init__(self) -> None:
        self.steps = 0
        """Of the run, those that this peer was in."""
        self.samples = 0.0
        """Of everybody, in those steps."""
        self.failed_rounds = 0
        self.loss: float | None = None
        self.learning_rate: float | None = None

    def take(self, happening: Happening) -> None:
        match happening:
            case StepTaken(samples=samples):
                self.steps += 1
                self.samples += samples
                self.learning_rate = happening.learning_rate
                if happening.loss is not None:
                    self.loss = happening.loss
            case RoundFailed():
                self.failed_rounds += 1
            case CaughtUp(losses=losses) if losses:
                self.loss = losses[-1].loss
            case _:
                pass

    def rows(self, happening: Happening, view: TrainerView) -> list[StepFigures]:
        """The rows that an event gives, after `take`: one for a step, and one for each step of the
        others that this peer hears of when it has caught up."""
        match happening:
            case StepTaken(epoch=epoch):
                return [_row(epoch + 1, self._of_step(happening, view))]
            case CaughtUp(losses=losses):
                return [_row(one.epoch + 1, {"train/loss": one.loss}) for one in losses]
            case _:
                return []

    def _of_step(self, step: StepTaken, view: TrainerView) -> dict[str, float | None]:
        own = view.contribution
        return {
            "train/loss": step.loss,
            "train/learning_rate": step.learning_rate,
            "train/grad_norm": step.norm,
            "train/samples": self.samples,
            "train/step_samples": step.samples,
            "train/samples_per_second": view.batch.samples_per_second,
            "run/peers": len(view.peers) + 1.0,
            "run/step_peers": step.peers or len(step.members),
            "run/failed_rounds": self.failed_rounds,
            "own/samples": own.samples + own.alone_samples,
            "own/samples_per_second": own.samples_per_second,
            "time/accumulating_seconds": step.accumulating_seconds,
            "time/averaging_seconds": step.averaging_seconds,
            "time/waiting_seconds": step.waiting_seconds,
            "time/stepping_seconds": step.stepping_seconds,
        }


def _row(step: int, values: dict[str, float | None]) -> StepFigures:
    known = {
        name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }
    return StepFigures(step, known)
