"""Experts in this process that behave as if they were far away: late, and sometimes not there.

`LocalExperts` keeps the promises of `protocols.experts.Experts` without a network. An expert has an
optimizer of its own and does as a server does: forward changes nothing; backward computes the
forward again with the parameters of now, and makes a step; requests that wait at the same time are
one batch. So updates are as stale as they would be. It computes in trio's thread, which has
nothing else to do here: one device.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import trio
from torch import Tensor, nn

from protocols.errors import DeadlineExceeded, Unreachable
from protocols.experts import Uid

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class LocalExperts:
    """The experts of one grid.

    - `optimizer`: made for each expert.
    - `examples_per_step`: an expert makes a step when it has the gradients of so many examples.
    - `delay_seconds`: every call takes an exponential time with this mean.
    - `failure_rate`: the share of calls that fail after their delay, before the expert has them.
    """

    def __init__(
        self,
        modules: Mapping[Uid, nn.Module],
        optimizer: Optimizer,
        *,
        examples_per_step: int = 1,
        delay_seconds: float = 0.0,
        failure_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.modules = dict(modules)
        self.calls = self.failures = self.steps = 0
        self._optimizers = {uid: optimizer(own.parameters()) for uid, own in modules.items()}
        self._uids = list(modules)
        self._cells = torch.tensor([uid.cells for uid in self._uids])  # (experts, dimensions)
        self._examples_per_step, self._examples = examples_per_step, Counter[Uid]()
        self._delay_seconds, self._failure_rate = delay_seconds, failure_rate
        self._random = random.Random(seed)
        self._waiting: dict[tuple[Uid, bool], list[_Request]] = {}

    async def select(self, scores: Sequence[Tensor], k: int) -> list[list[Uid]]:
        """All experts are compared: there are few."""
        await trio.lowlevel.checkpoint()
        parts = [own[:, self._cells[:, number]] for number, own in enumerate(scores)]
        total = torch.stack(parts).sum(dim=0)  # (examples, experts)
        best = total.topk(min(k, len(self._uids)), dim=1).indices.tolist()
        return [[self._uids[number] for number in own] for own in best]

    async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
        await self._travel(uid, timeout)
        return await self._in_a_batch(uid, inputs, None)

    async def backward(self, uid: Uid, inputs: Tensor, grads: Tensor, timeout: float) -> Tensor:
        await self._travel(uid, timeout)
        return await self._in_a_batch(uid, inputs, grads)

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

    async def _in_a_batch(self, uid: Uid, inputs: Tensor, grads: Tensor | None) -> Tensor:
        """Compute this request with the others that have come for the same expert in the same
        direction, while the device was busy."""
        request = _Request(inputs, grads)
        batch = self._waiting.setdefault((uid, grads is not None), [])
        batch.append(request)
        if batch[0] is not request:
            await request.done.wait()
            return request.result
        with trio.CancelScope(shield=True):  # the others rely on it
            await trio.lowlevel.checkpoint()
        del self._waiting[uid, grads is not None]
        results = torch.split(self._compute(uid, batch), [len(one.inputs) for one in batch])
        for one, result in zip(batch, results, strict=True):
            one.result = result
            one.done.set()
        return results[0]

    def _compute(self, uid: Uid, batch: Sequence[_Request]) -> Tensor:
        module = self.modules[uid]
        inputs = torch.cat([one.inputs for one in batch])
        grads = [one.grads for one in batch if one.grads is not None]
        if not grads:
            with torch.no_grad():
                outputs: Tensor = module(inputs)
            return outputs
        with torch.enable_grad():
            inputs.requires_grad_()
            module(inputs).backward(torch.cat(grads))
        self._examples[uid] += len(inputs)
        if self._examples[uid] >= self._examples_per_step:
            del self._examples[uid]
            self._optimizers[uid].step()
            self._optimizers[uid].zero_grad()
            self.steps += 1
        assert inputs.grad is not None
        return inputs.grad

    def nearby(self) -> LocalExperts:
        """The same experts without delays and failures, for looking at the model."""
        near = object.__new__(LocalExperts)
        near.__dict__.update(self.__dict__, _delay_seconds=0.0, _failure_rate=0.0, _waiting={})
        return near


class _Request:
    def __init__(self, inputs: Tensor, grads: Tensor | None) -> None:
        self.inputs, self.grads = inputs, grads
        self.done, self.result = trio.Event(), Tensor()
