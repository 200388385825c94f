"""LAMB (You et al. 2020, algorithm 2): Adam whose step is, in each layer, a fraction of its norm.

    m = b1 m + (1 - b1) g                       v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    x = x - lr * phi(|x|) / |r + decay x| * (r + decay x)        phi(z) = min(max(z, low), high)

A layer is one tensor. With batches of tens of thousands of samples, where plain Adam diverges, the
rate means the same for each layer: the fraction of its norm by which it moves.

If the layer or its update is zero, the ratio is one; otherwise a layer that begins at zero would
never leave it.
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


class Lamb(Layerwise):
    """- `betas`, `eps`, `weight_decay`: as in the paper's algorithm; the decay is not in m and v.
    - `norm_bounds`: the `low` and `high` of phi; without bounds it is the norm itself.
    - `adapt`: False takes the ratio for one; `parameter_groups` sets it for biases and norms.

    The state of a parameter has the same names as in torch's Adam: step, exp_avg, exp_avg_sq.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        norm_bounds: tuple[float, float] = (0.0, math.inf),
        adapt: bool = True,
    ) -> None:
        check_rate(lr)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise WrongSettings(f"The betas {betas} are not both at least 0 and below 1.")
        if not 0.0 < eps < math.inf or not 0.0 <= weight_decay < math.inf:
            raise WrongSettings(f"eps {eps} and weight decay {weight_decay} cannot be right.")
        if not 0.0 <= norm_bounds[0] <= norm_bounds[1] or norm_bounds[1] == 0.0:
            raise WrongSettings(f"The norm bounds {norm_bounds} are not a lower and an upper one.")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_bounds": norm_bounds,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def _step_layer(self, x: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[x]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(x, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(x, memory_format=torch.preserve_format)
        state["step"] += 1
        t, m, v = int(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]

        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
        update = (m / (1 - beta1**t)).div_(denominator)  # r
        update.add_(x, alpha=group["weight_decay"])  # r + decay x
        if group["adapt"]:
            update.mul_(_trust_ratio(x, update, group["norm_bounds"]))
        x.sub_(update, alpha=group["lr"])


def _trust_ratio(x: Tensor, update: Tensor, bounds: tuple[float, float]) -> Tensor:
    """phi(|x|) / |update|, a scalar that stays on the device, so that nothing waits for it."""
    size, change = norm_of(x), norm_of(update)
    moves = (size > 0) & (change > 0)
    return torch.where(moves, size.clamp(*bounds) / change, torch.ones_like(size))
