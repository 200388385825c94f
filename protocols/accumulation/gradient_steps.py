"""Steps with the averaged gradients of all peers (DeDLOC, section 3.1): the usual way.

    theta_{t+1} = step(theta_t, g_t(theta_t))              # as one process with the whole batch
    theta_{t+1} = step(theta_t, g_t(theta_{t-1}))          # delayed: g_t is computed meanwhile

Delayed, the optimizer works on a shadow of the parameters while the model goes on computing with
the ones of the epoch before, and `take_over` copies the shadow into the model. So the staleness is
exactly one step, whenever the shadow was done.

Easy to get wrong: the shadow is the state; the model lags behind it. The factory makes the
optimizer for the shadow, whose parameters have the same names. And the step may change the loss
scale in the middle of a batch: what the batch is computed with, like the parameters, changes only
when the shadow is taken over, or its gradients would be divided by another scale than their loss
was multiplied by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protocols.accumulation.accumulator import Accumulator, Contribution
from protocols.accumulation.inner_step import Factory, InnerStep, Scheduler, Stepped
from protocols.accumulation.loss_scale import LossScale
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.accumulation.state import look, restore
from protocols.accumulation.training_state import LiveState, TrainingState

MOST = 0.5


class GradientSteps:
    """`Steps` (steps.py) by averaged gradients. Invariant: unless something waits to be taken
    over, the shadow equals the model's parameters."""

    kind = "gradients"

    def __init__(
        self,
        parameters: Parameters,
        factory: Factory,
        scheduler: Scheduler | None,
        *,
        delayed: bool,
        max_norm: float | None,
        codec: Codecs,
        scales_loss: bool,
        buffers: dict[str, Tensor],
    ) -> None:
        self._own = parameters
        self.shared = _shadow_of(parameters) if delayed else parameters
        self.inner = InnerStep(self.shared, factory, scheduler, max_norm)
        self.scale = LossScale()
        self.scales_loss = scales_loss
        self.loss_factor = self.scale.scale if scales_loss else 1.0
        self._accumulator = Accumulator(parameters, codec)
        self.layout = self._accumulator.layout
        self._buffers = StepBuffers(buffers)
        self._own_overflowed = 0.0
        self._is_odd = False

    def add(self, samples: int, loss: float | None = None) -> str | None:
        wrong = self._accumulator.add(samples, self.loss_factor, loss)
        if wrong is None:
            self._is_odd = False
        elif self.scales_loss and not (self._is_odd or self.scale.is_smallest):
            self._accumulator.add_overflowed(samples, loss)
            return None
        return wrong

    def take(self) -> Contribution:
        contribution = self._accumulator.take()
        self._own_overflowed = float(contribution.values[-1])
        return contribution

    def put_back(self, contribution: Contribution) -> None:
        self._accumulator.put_back(contribution)

    def done_with(self, contribution: Contribution) -> None:
        self._accumulator.done_with(contribution)

    def drop(self) -> None:
        self._accumulator.drop()

    def apply(self, averaged: Tensor) -> Stepped:
        stepped = self.inner.apply(averaged)
        # All of this peer's batches overflowed and most of the others' did not: then it is not the
        # scale, and until one is finite they are held back instead of pressing it down.
        self._is_odd = self._own_overflowed == 1.0 and stepped.overflowed < MOST
        self.scale = self.scale.after(stepped.overflowed)
        self._buffers.keep()
        if self.shared is self._own:
            self.take_over()
        return stepped

    @torch.no_grad()
    def take_over(self) -> None:
        if self.scales_loss:
            self.loss_factor = self.scale.scale
        if self.shared is not self._own:
            torch._foreach_copy_(list(self._own.tensors), list(self.shared.tensors))

    def look(self, run: str, epoch: int, history: bytes) -> LiveState:
        return look(
            self.shared.everything,
            self._buffers.kept.items(),
            self.inner.optimizer,
            self.inner.scheduler,
            self.extra(),
            run=run,
            epoch=epoch,
            history=history,
        )

    def restore(self, state: TrainingState) -> None:
        scale = LossScale.from_extra(state.extra)
        restore(
            state,
            self.shared.everything,
            self._buffers.kept.items(),
            self.inner.optimizer,
            self.inner.scheduler,
        )
        self.scale = scale
        self._buffers.give_back()
        self.take_over()

    def extra(self) -> dict[str, Any]:
        return self.scale.as_extra()


class StepBuffers:
    """The model's buffers as they were at the last step: a forward pass may change the model's own
    at any moment (batch norm counts what it sees), and the state must not change between steps."""

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self._own = buffers
        self.kept = {name: one.detach().clone() for name, one in buffers.items()}

    @torch.no_grad()
    def keep(self) -> None:
        for name, one in self._own.items():
            self.kept[name].copy_(one)

    @torch.no_grad()
    def give_back(self) -> None:
        for name, one in self._own.items():
            one.copy_(self.kept[name])


def _shadow_of(parameters: Parameters) -> Parameters:
    """The same names with tensors of their own; what is frozen is shared."""
    return Parameters(
        (name, torch.nn.Parameter(one.detach().clone()) if one.requires_grad else one)
        for name, one in parameters.everything
    )
