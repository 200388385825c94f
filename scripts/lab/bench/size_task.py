"""The task of `scripts/bench size`: a model of a given number of parameters, and passes of a given
length.

On a GPU a pass is real: a chain of matrix products in bf16 over all parameters, forward and
backward. On the processor it stands for one on a device: the gradients are there at once and the
thread sleeps for the rest of the pass, as it does while a GPU computes.

The time of accumulating is that of the processor's memory then, and much longer than a GPU's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.uncompiled import SGD, AdamW

WIDTH = 1024  # of the square matrices; the rest of the parameters is one vector
SEED = 0
LEARNING_RATE = 1e-4
SPREAD = 0.02  # of the initial values


@dataclass(frozen=True)
class SizeTask:
    """`batch`: the samples of a pass. `tokens`: the rows of a real pass, which say how long it
    takes; the length of one that stands for it is in the peer's manner."""

    parameters: int
    batch: int
    tokens: int
    device: str = "cpu"
    sgd: bool = False
    """Whether steps are those of SGD, which take little of the processor's time: those of AdamW
    would be a GPU's work where a pass stands for one."""

    def model(self) -> SizedModel:
        """The same initial parameters in every process."""
        return SizedModel(self.parameters, self.tokens, self.device)

    def optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        if self.sgd:
            return SGD(named_parameters, lr=LEARNING_RATE)
        return AdamW(named_parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))

    def samples(self) -> NoSamples:
        return NoSamples()


class NoSamples:
    """In place of numbered samples: a pass of this task needs none."""

    def batch(self, numbers: Sequence[int]) -> Tensor:
        return torch.zeros(len(numbers))

    def held_out(self) -> Tensor:
        return torch.zeros(1)


class SizedModel(torch.nn.Module):
    def __init__(self, parameters: int, tokens: int, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        squares, rest = divmod(parameters, WIDTH * WIDTH)
        shapes = [(WIDTH, WIDTH)] * squares + [(rest,)] * bool(rest)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter((torch.randn(shape, generator=generator) * SPREAD).to(device))
            for shape in shapes
        )
        self._tokens = tokens
        on_device = torch.device(device).type != "cpu"
        self._given = None if on_device else [torch.full_like(one, 1e-3) for one in self.weights]

    def loss(self, _samples: Tensor) -> Tensor:
        if self._given is not None:
            loss: Tensor = _GivenGradients.apply(self._given, *self.weights)  # type: ignore[no-untyped-call]
            return loss
        with torch.autocast("cuda", torch.bfloat16):
            values = torch.ones(self._tokens, WIDTH, device=self.weights[0].device)
            for one in self.weights:
                if one.dim() == 2:
                    values = torch.nn.functional.layer_norm(values @ one, (WIDTH,))
            total: Tensor = values.float().square().mean()
        for one in self.weights:
            if one.dim() == 1:
                total = total + one.square().mean()
        return total


class _GivenGradients(torch.autograd.Function):
    """A loss whose gradients are these."""

    @staticmethod
    def forward(ctx: Any, given: list[Tensor], *_weights: Tensor) -> Tensor:
        ctx.given = given
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.given
