"""Many local steps and one exchange of how far they went (DiLoCo, Douillard et al. 2023).

    each batch:  theta <- inner step of this peer alone, with its own gradients
    each epoch:  theta <- outer step from theta_start with the average of (theta_start - theta)

A round is due when all peers together have computed H times the target batch, so that each has
made some H steps if they are alike; who made more counts more, by samples.

The state is theta_start with the outer momentum and the schedule: equal to the bit at all peers.
The statistics of the inner optimizer are each peer's own; a newcomer begins with fresh ones, as
in the paper.

Easy to get wrong: a failed round leaves the local steps in the parameters, and the next round takes
them all together; nothing is put back and nothing is lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protocols.accumulation.accumulator import (
    LOSS,
    LOSS_VALUES,
    Contribution,
    dense_gradients,
    loss_of,
    loss_values,
)
from protocols.accumulation.averageable import Averageable
from protocols.accumulation.gradient_steps import StepBuffers
from protocols.accumulation.inner_step import Factory, InnerStep, Scheduler, Stepped
from protocols.accumulation.loss_scale import LossScale
from protocols.accumulation.outer_step import OuterStep
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.accumulation.state import look, restore
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.errors import PotluckError
from protocols.moshpit.layout import Layout, Segment
from protocols.moshpit.vector import LARGEST_CARRIED


class Diverged(PotluckError):
    """A local step has made a parameter infinite or NaN: this peer's model is broken."""


class LocalSteps:
    """`Steps` (steps.py) by local steps and an outer one."""

    kind = "pseudo-gradients"

    def __init__(
        self,
        parameters: Parameters,
        factory: Factory,
        scheduler: Scheduler | None,
        *,
        max_norm: float | None,
        codec: Codecs,
        scales_loss: bool,
        buffers: dict[str, Tensor],
    ) -> None:
        self._own = parameters
        self.inner = InnerStep(parameters, factory, scheduler, max_norm)
        self.scale = LossScale()
        self.scales_loss = scales_loss
        self.layout = Layout(
            (
                *parameters.segments(codec),
                Segment(LOSS, LOSS_VALUES, parameters.codec_of("none")),
            )
        )
        cpu = torch.device("cpu")
        self._outer = OuterStep(parameters.copy_into(parameters.buffer(device=cpu)))
        self.shared = _as_parameters(parameters, self._outer.start)
        largest = [LARGEST_CARRIED["none"]] * len(parameters.names)
        self._averageable = Averageable(parameters, largest)
        self._difference = parameters.buffer(LOSS_VALUES, device=cpu)
        self._samples = 0
        self._loss_sums = torch.zeros(LOSS_VALUES, dtype=self._difference.dtype)
        self._buffers = StepBuffers(buffers)

    @property
    def loss_factor(self) -> float:
        return self.scale.scale if self.scales_loss else 1.0

    def add(self, samples: int, loss: float | None = None) -> str | None:
        gradients = dense_gradients(self._own)
        wrong = self._averageable.first_wrong(gradients)
        if wrong is not None and self.scale.is_smallest:
            return wrong
        if self.scales_loss:
            # Nothing of a local step is shared, so neither is its scale: it adapts at each of them.
            if wrong is None:
                self._divide(self.scale.scale)
            self.scale = self.scale.after(0.0 if wrong is None else 1.0)
            self._count(samples, loss)
            if wrong is None:
                self.inner.step_locally()
            return None
        if wrong is None:
            self.inner.step_locally()
            self._count(samples, loss)
        return wrong

    def take(self) -> Contribution:
        values, losses = self._parts(self._difference)
        self._own.copy_into(values)
        self._outer.pseudo_gradient(values, out=values)
        self._check_finite()
        samples = self._samples
        torch.div(self._loss_sums, max(samples, 1), out=losses)
        self._forget_samples()
        return Contribution(self._difference, samples)

    def put_back(self, contribution: Contribution) -> None:
        self._samples += contribution.samples
        self._loss_sums.add_(self._parts(contribution.values)[1], alpha=contribution.samples)

    def done_with(self, contribution: Contribution) -> None:
        """There is one buffer, and it stays."""

    def drop(self) -> None:
        self._forget_samples()
        self.take_over()

    def apply(self, averaged: Tensor) -> Stepped:
        values, losses = self._parts(averaged)
        self._outer.step(values)
        self.inner.epoch_ended()
        self._buffers.keep()
        self.take_over()
        return Stepped(overflowed=0.0, norm=None, loss=loss_of(*losses.tolist()))

    def take_over(self) -> None:
        self._own.copy_from(self._outer.start)

    def look(self, run: str, epoch: int, history: bytes) -> LiveState:
        return look(
            self.shared.everything,
            self._buffers.kept.items(),
            None,
            self.inner.scheduler,
            self.extra(),
            run=run,
            epoch=epoch,
            history=history,
        )

    def restore(self, state: TrainingState) -> None:
        own, momentum = self._outer.momentum, state.extra.get("outer_momentum")
        if (
            not isinstance(momentum, Tensor)
            or momentum.shape != own.shape
            or momentum.dtype is not own.dtype
        ):
            raise StateRefused("The state has no momentum of outer steps for this model.")
        restore(
            state, self.shared.everything, self._buffers.kept.items(), None, self.inner.scheduler
        )
        own.copy_(momentum)
        self._buffers.give_back()
        self._forget_samples()
        self.take_over()
        self._set_learning_rates()

    def extra(self) -> dict[str, Any]:
        return {"outer_momentum": self._outer.momentum}

    def _set_learning_rates(self) -> None:
        """The inner optimizer was not restored, and most schedules set its rates only by steps."""
        if self.inner.scheduler is not None:
            rates = self.inner.scheduler.get_last_lr()
            for group, rate in zip(self.inner.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _parts(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The parameters' values, and those of the loss behind them."""
        return flat[: self._own.values], flat[self._own.values :]

    def _count(self, samples: int, loss: float | None) -> None:
        self._samples += samples
        self._loss_sums.add_(
            torch.tensor(loss_values(loss), dtype=self._loss_sums.dtype), alpha=samples
        )

    def _forget_samples(self) -> None:
        self._samples = 0
        self._loss_sums.zero_()

    @torch.no_grad()
    def _divide(self, scale: float) -> None:
        torch._foreach_div_([one.grad for one in self._own.tensors if one.grad is not None], scale)

    def _check_finite(self) -> None:
        for name, view in zip(self._own.names, self._own.views(self._difference), strict=True):
            if not bool(torch.isfinite(view).all()):
                raise Diverged(
                    f"{name} is not finite any more.",
                    why="The local steps have diverged: the learning rate is too large, or a batch "
                    "was broken.",
                    advice="Clip (max_norm), or lower the inner learning rate, and start again: "
                    "the run's state is fetched from the others.",
                )


def _as_parameters(parameters: Parameters, flat: Tensor) -> Parameters:
    """Views of a flat tensor under the parameters' names; what is frozen is shared."""
    views = dict(zip(parameters.names, parameters.views(flat), strict=True))
    return Parameters(
        (name, torch.nn.Parameter(views[name]) if name in views else one)
        for name, one in parameters.everything
    )
