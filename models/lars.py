"""LARS (You et al. 2017, algorithm 1): SGD with momentum whose rate is local to each layer.

    local = trust |w| / (|g| + decay |w|)
    v = momentum v + lr local (g + decay w)
    w = w - v

A layer is one tensor. Without it, large batches need rates at which some layers' steps are larger
than the layers themselves, while others hardly move.

The rate is inside the momentum, unlike in torch's SGD. After a schedule has lowered the rate,
earlier steps continue at the rate they were made with.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from models.errors import WrongSettings
from models.layerwise import Layerwise, check_rate
from models.norms import norm_of


class Lars(Layerwise):
    """- `trust`: the paper's eta, how far a layer trusts its gradient: about the fraction of its
      norm by which a layer moves at a rate of one.
    - `adapt`: False takes the local rate for one; `parameter_groups` sets it for biases and norms.

    The paper's rate decays by a polynomial of power 2: `Schedule` has it. The state of a parameter
    is named as torch's SGD does: momentum_buffer.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust: float = 1e-3,
        adapt: bool = True,
    ) -> None:
        check_rate(lr)
        if not 0.0 <= momentum < 1.0:
            raise WrongSettings(f"A momentum of {momentum} is not at least 0 and below 1.")
        if not 0.0 <= weight_decay < math.inf or not 0.0 < trust < math.inf:
            raise WrongSettings(f"Weight decay {weight_decay} and trust {trust} cannot be right.")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def _step_layer(self, w: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[w]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(w, memory_format=torch.preserve_format)
        v = state["momentum_buffer"]

        update = gradient.add(w, alpha=group["weight_decay"])  # g + decay w
        if group["adapt"]:
            update.mul_(_local_rate(w, gradient, group["trust"], group["weight_decay"]))
        v.mul_(group["momentum"]).add_(update, alpha=group["lr"])
        w.sub_(v)


def _local_rate(w: Tensor, gradient: Tensor, trust: float, decay: float) -> Tensor:
    """Equation 6, as a scalar on the device; one if it would be zero, or 0 / 0."""
    size, slope = norm_of(w), norm_of(gradient)
    below = slope + decay * size
    moves = (size > 0) & (below > 0)
    return torch.where(moves, trust * size / below, torch.ones_like(size))
