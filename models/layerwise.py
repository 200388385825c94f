"""Optimizers that step layer by layer: the loop that LAMB and LARS share, and their common checks.

A layer is one tensor. Each optimizer has its paper's step of a layer. This module decides which
tensors are stepped, and refuses those that neither optimizer takes.

The closure of `step` computes gradients, while the steps must not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.errors import NotThisModel, WrongSettings
from models.uncompiled import Uncompiled


class Layerwise(Uncompiled, ABC):
    """An optimizer whose step of one tensor depends only on that tensor and its gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    name = type(self).__name__.upper()
                    raise NotThisModel(f"{name} cannot step along sparse gradients.")
                self._step_layer(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _step_layer(self, layer: Tensor, gradient: Tensor, group: dict[str, Any], /) -> None:
        """Move this layer, in place, by one step of the paper."""


def check_rate(lr: float) -> None:
    if not 0.0 <= lr < math.inf:
        raise WrongSettings(f"A learning rate of {lr} is not one.")
