"""Adds up what a session gave, from its events. Pure.

A sample counts as given when others have committed a round with it: a `StepTaken` with more members
than this one, or a step that the others made from such a round and this peer took over. Steps that
a peer makes alone (the organiser's first ones) belong to the run, too. They are counted apart,
because nobody else has seen their samples.

Samples that were dropped or held back were computed all the same. They are shown to an owner who
asks "am I contributing?".
"""

from __future__ import annotations

from collections import deque
from typing import Final

from node.core.training_view import ContributionView
from node.training.happenings import Happening
from node.training.loss_curve import LossCurve
from protocols.accumulation.events import CaughtUp, GradientsDropped, HeldBack, SeenStep, StepTaken

PACE_STEPS: Final = 64
"""Steps for the estimate of the time left: enough that one slow round does not matter."""

LEAST_PACE_STEPS: Final = 3  # fewer give no estimate


class SessionAccount:
    """Takes all events, in order."""

    def __init__(self) -> None:
        self.samples = 0
        self.steps = 0
        self.of_samples = 0.0
        self.lost_samples = 0
        self.alone_samples = 0
        self.alone_steps = 0
        self.epoch = 0
        self.loss: float | None = None  # the run's, in the newest step that this peer knows of
        self.loss_step = 0
        self.curve = LossCurve()
        self._alone_lately = (0, 0)  # samples and steps, since the last step with others
        self._has_stepped = False
        self._moments: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)

    def take(self, happening: Happening) -> bool:
        """Add an event; True for the first samples that others have accepted."""
        match happening:
            case StepTaken(members=members, own_samples=own):
                self.epoch = happening.epoch + 1
                self._has_stepped = True
                self._note_loss(happening.epoch, happening.loss)
                if len(members) > 1:
                    self._alone_lately = (0, 0)
                    return self._accepted(own, happening.samples)
                if own:
                    self._count_alone(own, 1)
            case GradientsDropped(samples=samples) | HeldBack(samples=samples):
                self.lost_samples += samples
            case CaughtUp(epoch=epoch, seen=seen):
                self.epoch = epoch
                if not happening.leads_on:
                    self._give_up_alone()
                for one in happening.losses:
                    self._note_loss(one.epoch, one.loss)
                firsts = [self._accepted_after_all(one) for one in seen if len(one.shares) > 1]
                return any(firsts)
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
        """This peer did not make the step and dropped its samples; the others made it with them."""
        self.lost_samples = max(0, self.lost_samples - seen.own_samples)
        return self._accepted(seen.own_samples, seen.samples)

    def note_moment(self, now: float) -> None:
        """The run is at `epoch` now. The pace is known after this peer's first step."""
        if not self._has_stepped:
            return
        newest = self._moments[-1][0] if self._moments else -1
        if newest > self.epoch:  # it is lower after a return to a checkpoint
            self._moments.clear()
        if newest != self.epoch:
            self._moments.append((self.epoch, now))

    def seconds_left(self, steps: int, now: float) -> float | None:
        """Until the run has made this many steps, at its present pace; None if that is not
        known."""
        if not 0 < self.epoch < steps or not self._moments:
            return None
        (first, began), (last, ended) = self._moments[0], self._moments[-1]
        if last - first < LEAST_PACE_STEPS:
            return None
        step_seconds = (ended - began) / (last - first)
        return max(0.0, step_seconds * (steps - last) - (now - ended))

    def _count_alone(self, samples: int, steps: int) -> None:
        self.alone_samples += samples
        self.alone_steps += steps
        before = self._alone_lately
        self._alone_lately = (before[0] + samples, before[1] + steps)

    def _give_up_alone(self) -> None:
        """This peer took the others' state, so the steps it made alone before are not the run's."""
        samples, steps = self._alone_lately
        self._count_alone(-samples, -steps)
        self.lost_samples += samples

    def _note_loss(self, epoch: int, loss: float | None) -> None:
        if loss is not None:
            self.loss, self.loss_step = loss, epoch + 1
            self.curve.note(epoch + 1, loss)

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """The run's curve up to its present step. If the run was begun anew, an earlier session may
        have kept losses of later steps; they are left out."""
        return tuple(point for point in self.curve.points if point[0] <= self.epoch)

    def contribution(self, samples_per_second: float | None) -> ContributionView:
        return ContributionView(
            samples=self.samples,
            steps=self.steps,
            of_samples=self.of_samples,
            alone_samples=self.alone_samples,
            alone_steps=self.alone_steps,
            lost_samples=self.lost_samples,
            samples_per_second=samples_per_second,
        )
