"""Experts in this process that behave as if they were far away: late, and sometimes not there.

`LocalExperts` keeps the promises of `protocols.experts.Experts` without a network. An expert has an
optimizer of its own and treats every call as a server does: forward changes nothing, backward
computes the forward again with the parameters of now, and makes one step. So updates are as stale
as they would be. It computes in trio's thread, which has nothing else to do here: one device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import trio
from torch import Tensor, nn

from protocols.errors import DeadlineExceeded, Unreachable
from protocols.experts import Uid

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class FeedForward(nn.Module):
    """width → hidden → hidden → width, with layer norm and ReLU between: the block of the paper's
    section 4.1."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def quarter_of(width: int, hidden: int) -> int:
    """The hidden size of a FeedForward with a quarter of the multiplications."""
    quarter = (2 * width * hidden + hidden * hidden) / 4
    return round(math.sqrt(width * width + quarter) - width)


class LocalExperts:
    """The experts of one grid.

    - `optimizer`: made for each expert.
    - `delay_seconds`: every call takes an exponential time with this mean.
    - `failure_rate`: the share of calls that fail after their delay, before the expert has them.
    """

    def __init__(
        self,
        modules: Mapping[Uid, nn.Module],
        optimizer: Optimizer,
        *,
        delay_seconds: float = 0.0,
        failure_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.modules = dict(modules)
        self.calls = self.failures = 0
        self._optimizers = {uid: optimizer(own.parameters()) for uid, own in modules.items()}
        self._uids = list(modules)
        self._cells = torch.tensor([uid.cells for uid in self._uids])  # (experts, dimensions)
        self._delay_seconds, self._failure_rate = delay_seconds, failure_rate
        self._random = random.Random(seed)

    def nearby(self) -> LocalExperts:
        """The same experts without delays and failures, for looking at the model."""
        near = object.__new__(LocalExperts)
        near.__dict__.update(self.__dict__, _delay_seconds=0.0, _failure_rate=0.0)
        return near

    async def select(self, scores: Sequence[Tensor], k: int) -> list[list[Uid]]:
        """All experts are compared: there are few."""
        await trio.lowlevel.checkpoint()
        parts = [own[:, self._cells[:, number]] for number, own in enumerate(scores)]
        total = torch.stack(parts).sum(dim=0)  # (examples, experts)
        best = total.topk(min(k, len(self._uids)), dim=1).indices.tolist()
        return [[self._uids[number] for number in own] for own in best]

    async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
        await self._travel(uid, timeout)
        with torch.no_grad():
            outputs: Tensor = self.modules[uid](inputs)
        return outputs

    async def backward(self, uid: Uid, inputs: Tensor, grads: Tensor, timeout: float) -> Tensor:
        await self._travel(uid, timeout)
        optimizer = self._optimizers[uid]
        optimizer.zero_grad()
        with torch.enable_grad():
            inputs = inputs.detach().requires_grad_()
            self.modules[uid](inputs).backward(grads)
        optimizer.step()
        assert inputs.grad is not None
        return inputs.grad

    async def _travel(self, uid: Uid, timeout: float) -> None:
        self.calls += 1
        mean = self._delay_seconds
        delay = self._random.expovariate(1.0 / mean) if mean else 0.0
        await trio.sleep(min(delay, timeout))
        if delay > timeout:
            raise DeadlineExceeded(f"The call did not end within {timeout:g} s.")
        if self._random.random() < self._failure_rate:
            self.failures += 1
            raise Unreachable(f"The connection to the host of {uid} was lost.")
