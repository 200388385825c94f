"""The task of `scripts/bench size`: a model of a given number of parameters, and passes of a given
length.

On a GPU a pass is real: a chain of matrix products in bf16 over all parameters, forward and
backward. On its double (lab/gpu_double.py) the pass takes a given time, and the gradients are those
of a loss that is as quickly computed: a multiple of the sum of the squares. The values there are
equal in blocks, so that the double can pack them: those of a vector are, too, if their number is a
multiple of a block's.

On the processor, which is for benches of other things than the size, gradients of one value are
there at once, and the thread sleeps for the rest of the pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lab import gpu_double
from models.uncompiled import SGD, AdamW

WIDTH = 1024  # of the square matrices; the rest of the parameters is one vector
SEED = 0
LEARNING_RATE = 1e-4
SPREAD = 0.02  # of the initial values
DECAY = 1e-2  # the smallest gradient on the double, as a part of its parameter
FORWARD = 1 / 3  # of a pass there; backward is twice as much work
DIFFERENT = 5  # batches that follow each other there


@dataclass(frozen=True)
class SizeTask:
    """`batch`: the samples of a pass. `tokens`: the rows of a real pass, which say how long it
    takes. `pass_seconds`: how long one takes on the double; on the processor the peer's manner says
    that."""

    parameters: int
    batch: int
    tokens: int
    device: str = "cpu"
    pass_seconds: float = 0.0
    sgd: bool = False
    """Whether steps are those of SGD, which take little of the processor's time: those of AdamW
    would be a GPU's work where a pass stands for one."""

    @property
    def of_one_matrix(self) -> SizeTask:
        """For a first step, of which torch's imports take seconds. A whole model would leave holes
        in the host's memory, of up to a copy of the parameters, where nothing else fits in."""
        return replace(self, parameters=min(self.parameters, WIDTH * WIDTH))

    def model(self) -> SizedModel:
        """The same initial parameters in every process."""
        return SizedModel(self.parameters, self.tokens, self.device, self.pass_seconds)

    def optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        if self.sgd:
            return SGD(named_parameters, lr=LEARNING_RATE)
        return AdamW(named_parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))

    def samples(self) -> NoSamples:
        return NoSamples()


class NoSamples:
    """In place of numbered samples, which a pass of this task does not need: their numbers."""

    def batch(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers)

    def held_out(self) -> Tensor:
        return torch.zeros(1)


class SizedModel(torch.nn.Module):
    def __init__(
        self, parameters: int, tokens: int, device: str, pass_seconds: float = 0.0
    ) -> None:
        super().__init__()
        self._is_double = device == gpu_double.NAME
        if self._is_double:
            gpu_double.register()
        generator = torch.Generator().manual_seed(SEED)
        squares, rest = divmod(parameters, WIDTH * WIDTH)
        shapes = [(WIDTH, WIDTH)] * squares + [(rest,)] * bool(rest)
        self._tokens, self._pass_seconds = tokens, pass_seconds
        on_device = torch.device(device).type != "cpu"
        host = torch.empty(math.prod(max(shapes, key=math.prod)))
        weights = []
        for shape in shapes:
            weight = torch.empty(shape, device=device)
            values = host[: weight.numel()].view(shape) if on_device else weight
            self._draw(values.view(-1), generator)
            weights.append(torch.nn.Parameter(weight.copy_(values) if on_device else weight))
        self.weights = torch.nn.ParameterList(weights)
        self._given = None if on_device else [torch.full_like(one, 1e-3) for one in self.weights]

    def _draw(self, values: Tensor, generator: torch.Generator) -> None:
        """Write the initial values into this memory, so that none other is left behind."""
        if not self._is_double or len(values) % gpu_double.REPEATS:
            torch.randn(len(values), generator=generator, out=values).mul_(SPREAD)
        else:
            one_of_each = torch.randn(len(values) // gpu_double.REPEATS, generator=generator)
            values.view(-1, gpu_double.REPEATS).copy_(one_of_each.mul_(SPREAD)[:, None])

    def loss(self, samples: Tensor) -> Tensor:
        if self._is_double:
            factor = DECAY * (1 + int(samples[0]) // len(samples) % DIFFERENT)
            of_double: Tensor = _ModelledPass.apply(self._pass_seconds, factor, *self.weights)  # type: ignore[no-untyped-call]
            return of_double
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


class _ModelledPass(torch.autograd.Function):
    """A pass on the double. Its gradients are the weights times a factor."""

    @staticmethod
    def forward(ctx: Any, seconds: float, factor: float, *weights: Tensor) -> Tensor:
        ctx.factor, ctx.weights = factor, weights
        ctx.seconds = seconds * (1.0 - FORWARD)
        with gpu_double.passing(seconds * FORWARD):
            return torch.ones((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> Any:
        weights = ctx.weights
        with gpu_double.passing(ctx.seconds), torch.no_grad():
            found = torch._foreach_mul(list(weights), of_loss[0] * ctx.factor)
        if weights[0].grad is None:
            for one, gradient in zip(weights, found, strict=True):
                one.grad = gradient
        else:  # torch would do this for each parameter by itself, which costs this double too much
            torch._foreach_add_([one.grad for one in weights], found)
        return None, None, *[None] * len(weights)


class _GivenGradients(torch.autograd.Function):
    """A loss whose gradients are these."""

    @staticmethod
    def forward(ctx: Any, given: list[Tensor], *_weights: Tensor) -> Tensor:
        ctx.given = given
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.given
