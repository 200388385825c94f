"""The outer step of DiLoCo (Douillard et al. 2023, algorithm 1): many local steps, one exchange.

    outer = OuterStep(start)                       # theta at the beginning of the epoch, flat
    pseudo_gradient = outer.pseudo_gradient(local, out)      # line 12: theta_start - theta_local
    start = outer.step(averaged)                   # line 14: Nesterov's step from theta_start

Between two exchanges each peer makes its own steps with its own inner optimizer, whose statistics
it never exchanges. What is averaged is how far the parameters went, and the outer optimizer takes
that average for a gradient: with lr = 1 and momentum 0 it would be plain averaging of parameters.

Easy to get wrong: the outer step begins at theta_start, which all peers share to the bit, and not
at the peer's own parameters; so those of all peers are equal after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

OUTER_LEARNING_RATE = 0.7  # both are the paper's; no run of its table did better with others
OUTER_MOMENTUM = 0.9


class OuterStep:
    """theta_start and the momentum, flat and in the parameters' precision."""

    def __init__(self, start: Tensor) -> None:
        self.start = start
        self.momentum = torch.zeros_like(start)

    def pseudo_gradient(self, local: Tensor, out: Tensor) -> Tensor:
        """How far the local steps went: theta_start - theta_local, written into `out`."""
        return torch.sub(self.start, local, out=out)

    def step(self, averaged: Tensor) -> Tensor:
        """Nesterov's step with the averaged pseudo-gradient; the new theta_start."""
        # v <- 0.9 v + g;  theta <- theta - 0.7 (g + 0.9 v), as torch.optim.SGD(nesterov=True)
        self.momentum.mul_(OUTER_MOMENTUM).add_(averaged)
        self.start.add_(averaged, alpha=-OUTER_LEARNING_RATE)
        self.start.add_(self.momentum, alpha=-OUTER_LEARNING_RATE * OUTER_MOMENTUM)
        return self.start
