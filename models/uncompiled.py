"""torch's optimizers without torch's compiler, which potluck uses for models only, if at all.

The first step of an optimizer loads all of `torch._dynamo`: a second of work and 80 MB in each
process (torch 2.13), only to tell a compiler that does not run to leave the optimizer alone.
These classes call the functions that torch has wrapped for that. They compute the same, and have
the same names and states.

Easy to get wrong: these must not be compiled with `torch.compile`. A compiled model's loss is
(node/run/compiled_loss.py), and its optimizer is one of these as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    """An optimizer none of whose functions load the compiler. `step` is each class's own."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


def _step_of(kind: type[Optimizer]) -> Callable[..., Any]:
    plain = inspect.unwrap(kind.step)

    @torch.no_grad()
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        loss: float | None = plain(self, closure)
        return loss

    return step


class SGD(Uncompiled, torch.optim.SGD):
    step = _step_of(torch.optim.SGD)


class AdamW(Uncompiled, torch.optim.AdamW):
    step = _step_of(torch.optim.AdamW)
