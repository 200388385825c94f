"""One step of the run: the inner optimizer, with what all peers have averaged as its gradients.

    inner = InnerStep(parameters, factory, scheduler, max_norm=1.0)
    stepped = inner.apply(averaged, scale)         # flat: gradients, used, loss, overflowed

From the same averaged bits every peer takes the same decisions: which parameters had a gradient,
how much of the batch overflowed, by what factor it is clipped. The scheduler steps once for each
epoch of the run, whatever this peer brought to it.

Promises: no copy of the gradients on the CPU: while the inner optimizer steps, each parameter's
`.grad` is a view of the flat result; then the user's own `.grad` is back.

Easy to get wrong: the averaged values are changed in place (divided, clipped).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from protocols.accumulation.accumulator import loss_of
from protocols.accumulation.clipping import clipping_factor, global_norm
from protocols.accumulation.loss_scale import is_step_worth_it
from protocols.accumulation.parameters import Parameters
from protocols.errors import ProtocolMisuse

Factory = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
"""Makes the inner optimizer of (name, parameter) pairs, as torch's own constructors take them. It
is called with shadows of the model's parameters (of the same names) when the step is delayed."""

Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True)
class Stepped:
    """What came of an averaged gradient. `norm` is before clipping, None if nothing clips. `loss`
    is the mean over all samples of the step; None if no peer has said one."""

    overflowed: float
    norm: float | None
    loss: float | None


class InnerStep:
    """The inner optimizer and its scheduler, over the parameters that it was made with."""

    def __init__(
        self,
        parameters: Parameters,
        factory: Factory,
        scheduler: Scheduler | None,
        max_norm: float | None,
    ) -> None:
        self.parameters = parameters
        self.optimizer = factory(list(parameters.trained))
        _check_steps_only_with(self.optimizer, parameters)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self._max_norm = max_norm
        self._on_device: Tensor | None = None

    @torch.no_grad()
    def apply(self, averaged: Tensor) -> Stepped:
        """Step with an averaged contribution (accumulator.py says what lies in it)."""
        parameters = self.parameters
        tail = averaged[parameters.values :].tolist()
        *used, loss, loss_known, overflowed = tail
        gradients = averaged[: parameters.values]
        norm = None
        if is_step_worth_it(overflowed):
            norm = self._prepare(gradients, overflowed)
        else:
            used = [0.0] * len(used)  # the optimizer and the scheduler see a step without gradients
        views = parameters.views(self._there(gradients))
        given = [view if part > 0.0 else None for view, part in zip(views, used, strict=True)]
        with gradients_are(parameters.tensors, given):
            self.optimizer.step()
        self.epoch_ended()
        return Stepped(overflowed, norm, loss_of(loss, loss_known))

    def step_locally(self) -> None:
        """A step with this peer's own gradients: one of many between two outer steps."""
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.tensors, self._max_norm)
        self.optimizer.step()

    def epoch_ended(self) -> None:
        """Let the scheduler take its step."""
        if self.scheduler is not None:
            with warnings.catch_warnings():
                # A peer that fetched its state has not stepped in this process, and torch wonders.
                warnings.filterwarnings("ignore", ".*lr_scheduler.step.*", UserWarning)
                self.scheduler.step()

    def _prepare(self, gradients: Tensor, overflowed: float) -> float | None:
        """Make the mean of all into the mean of those that did not overflow, and clip it."""
        factor = 1.0 / (1.0 - overflowed)
        norm = None
        if self._max_norm is not None:
            norm = global_norm(gradients) * factor
            factor *= clipping_factor(norm, self._max_norm)
        if factor != 1.0:
            gradients.mul_(factor)
        return norm

    def _there(self, gradients: Tensor) -> Tensor:
        """The values on the parameters' device."""
        if self.parameters.device.type == "cpu":
            return gradients
        if self._on_device is None:
            self._on_device = self.parameters.buffer()
        return self._on_device.copy_(gradients)


def _check_steps_only_with(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    """ProtocolMisuse where it has tensors that nobody averages: each peer would step them by its
    own gradients, and the peers' models would drift apart without a word."""
    averaged = {id(one) for one in parameters.tensors}
    others = [
        one
        for group in optimizer.param_groups
        for one in group["params"]
        if id(one) not in averaged
    ]
    if others:
        raise ProtocolMisuse(
            f"The optimizer that the factory made has {len(others)} tensors that it was not given; "
            f"the first is of shape {tuple(others[0].shape)}.",
            why="Only what is given to it is averaged, and with delayed=True those are not the "
            "model's own tensors.",
            advice="Let the factory use the (name, parameter) pairs that it is called with, and "
            "give all that is to be trained as named_parameters.",
        )


@contextmanager
def gradients_are(
    parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Tensor | None]
) -> Iterator[None]:
    """Within the block these are the parameters' gradients; then what was there before."""
    before = [one.grad for one in parameters]
    try:
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient
        yield
    finally:
        for one, gradient in zip(parameters, before, strict=True):
            one.grad = gradient
