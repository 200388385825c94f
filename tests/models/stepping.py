"""A few layers with seeded gradients, to step optimizers with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from models.initial import seeded

STEPS = 12


def layers(dtype: torch.dtype = torch.float64) -> list[Parameter]:
    generator = seeded(5)
    shapes = [(7, 3), (4,), (2, 3, 5)]
    return [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def slopes(step: int, parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of this step."""
    generator = seeded(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]


def take_steps(optimizer: Optimizer, parameters: Sequence[Tensor], steps: Iterable[int]) -> None:
    for step in steps:
        for parameter, slope in zip(parameters, slopes(step, parameters), strict=True):
            parameter.grad = slope
        optimizer.step()
