"""The gradients of this peer's samples of an epoch: their mean, in one flat buffer.

    accumulator = Accumulator(parameters)
    accumulator.add(32, loss=2.1)                   # from the parameters' .grad, which may go now
    contribution = accumulator.take()               # values to average with weight .samples
    accumulator.put_back(contribution)              # the round failed: nothing is lost

Equation (DeDLOC, 3.1): a peer's contribution is the mean of its samples' gradients, and its weight
their number; the weighted mean over peers is then the mean gradient of the whole batch. The mean
is kept as a running one, m <- m + (g - m) n / (N + n), so that it is ready to be averaged at any
moment and a failed round leaves nothing to undo.

Behind the parameters' values lie a few more, which are averaged with them:
- for each parameter, the fraction of samples that had a gradient for it. Where that is 0 at
  everybody, the optimizer sees None, as in a single process, and not a gradient of zeros;
- the loss, and the fraction of samples that had one: so all peers know the same loss of a step, of
  the very samples that are in it;
- the fraction of samples whose gradients overflowed in fp16 (loss_scale.py).

Promises: `.grad` is read within `add` and never kept; one pass over it, and one to see that it is
finite (averageable.py). What is not finite adds nothing, and is named.

Easy to get wrong: `.grad` must be the *mean* over the samples of the batch, as every loss of torch
gives it; a sum counts too much by a factor of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocols.accumulation.averageable import Averageable
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import Layout, Segment
from protocols.moshpit.vector import LARGEST_CARRIED

USED = "/used"  # no parameter's name has a slash
LOSS = "/loss"
LOSS_VALUES: Final = 2
OVERFLOWED = "/overflowed"

LARGEST_LOSS: Final = 1e30  # far below what float32 holds: a sum of such is still finite


@dataclass(eq=False)
class Contribution:
    """A mean over so many samples, on the CPU: what a round averages."""

    values: Tensor
    samples: int


@dataclass(eq=False)
class _Buffer:
    """A flat tensor, and each parameter's stretch of it."""

    flat: Tensor
    views: list[Tensor]


class Accumulator:
    """At most two buffers on the CPU: one that fills, and one that is being averaged (and on an
    accelerator one more there, which fills instead).

    Invariant: `_mean` is the mean over `samples`; with 0 samples its contents mean nothing.
    """

    def __init__(self, parameters: Parameters, codec: Codecs = "none") -> None:
        segments = parameters.segments(codec)
        plain = parameters.codec_of("none")
        self.layout = Layout(
            (
                *segments,
                Segment(USED, len(parameters.names), plain),
                Segment(LOSS, LOSS_VALUES, plain),
                Segment(OVERFLOWED, 1, plain),
            )
        )
        self.samples = 0
        self._parameters = parameters
        largest = [LARGEST_CARRIED[segment.codec] for segment in segments]
        self._averageable = Averageable(parameters, largest)
        self._mean: _Buffer | None = None
        self._spare: Tensor | None = None

    @torch.no_grad()
    def add(self, samples: int, scale: float = 1.0, loss: float | None = None) -> str | None:
        """Count the gradients, unless one is not finite (or beyond its codec): then its name.

        Gradients that were computed with a loss scale are divided by it, in place.
        """
        gradients = dense_gradients(self._parameters)
        wrong = self._averageable.first_wrong(gradients, scale)
        if wrong is None:
            self._mix(gradients, samples, scale, loss, overflowed=False)
        return wrong

    @torch.no_grad()
    def add_overflowed(self, samples: int, loss: float | None = None) -> None:
        """Count samples whose gradients overflowed: as zeros, and as overflowed."""
        self._mix([None] * len(self._parameters.names), samples, 1.0, loss, overflowed=True)

    def take(self) -> Contribution:
        """The mean and its weight (0: zeros); from now on another one is accumulated.

        It comes back by `put_back` or `done_with`, before the next is taken.
        """
        samples, self.samples = self.samples, 0
        mean = self._filling().flat
        if not samples:
            mean.zero_()
        if mean.device.type == "cpu":
            self._mean = None
            return Contribution(mean, samples)
        host, self._spare = self._spare, None
        if host is None:
            host = torch.empty(mean.shape, dtype=mean.dtype, pin_memory=mean.is_cuda)
        return Contribution(host.copy_(mean), samples)

    @torch.no_grad()
    def put_back(self, contribution: Contribution) -> None:
        """What was taken counts again, with what was accumulated meanwhile."""
        if contribution.samples:
            mean = self._filling().flat
            total = self.samples + contribution.samples
            if self.samples:
                mean.lerp_(contribution.values.to(mean.device), contribution.samples / total)
            else:
                mean.copy_(contribution.values)
            self.samples = total
        self.done_with(contribution)

    def done_with(self, contribution: Contribution) -> None:
        """What was taken is in a step, or is dropped; its memory can be used again."""
        self._spare = contribution.values

    def drop(self) -> None:
        """Forget what was accumulated."""
        self.samples = 0

    def _filling(self) -> _Buffer:
        """The buffer that fills. Where it was taken, another."""
        if self._mean is None:
            flat, self._spare = self._spare, None
            if flat is None:
                flat = self._parameters.buffer(len(self._parameters.names) + LOSS_VALUES + 1)
            self._mean = _Buffer(flat, self._parameters.views(flat))
        return self._mean

    def _mix(
        self,
        gradients: Sequence[Tensor | None],
        samples: int,
        scale: float,
        loss: float | None,
        *,
        overflowed: bool,
    ) -> None:
        """m <- m + (g - m) n / (N + n); the first ones are copied."""
        mean, is_first = self._filling(), self.samples == 0
        self.samples += samples
        part = samples / self.samples
        pairs = list(zip(mean.views, gradients, strict=True))
        there = [(view, one.detach()) for view, one in pairs if one is not None]
        missing = [view for view, one in pairs if one is None]
        if there:
            views, values = [view for view, _ in there], [one for _, one in there]
            if scale != 1.0:
                torch._foreach_div_(values, scale)
            if is_first:
                torch._foreach_copy_(views, values)
            else:
                torch._foreach_lerp_(views, values, part)
        if missing:
            torch._foreach_mul_(missing, 1.0 - part) if not is_first else torch._foreach_zero_(
                missing
            )
        extra = mean.flat[self._parameters.values :]
        now = torch.tensor(
            [*(float(one is not None) for one in gradients), *loss_values(loss), float(overflowed)],
            dtype=extra.dtype,
        ).to(extra.device)
        extra.copy_(now) if is_first else extra.lerp_(now, part)


def loss_values(loss: float | None) -> tuple[float, float]:
    """What is averaged of a batch's loss: it, and whether it is known."""
    if loss is None or not abs(loss) <= LARGEST_LOSS:
        return 0.0, 0.0
    return loss, 1.0


def loss_of(averaged: float, known: float) -> float | None:
    """The mean loss of the samples that had one; None where none had."""
    loss = averaged / known if known > 0.0 else math.nan
    return loss if math.isfinite(loss) else None


def dense_gradients(parameters: Parameters) -> list[Tensor | None]:
    """Each parameter's `.grad`. ProtocolMisuse, by name, for a sparse one."""
    for name, one in parameters.trained:
        if one.grad is not None and one.grad.layout is not torch.strided:
            raise ProtocolMisuse(
                f"The gradient of {name} is sparse ({one.grad.layout}).",
                why="Peers average one flat buffer, in which every value has its place.",
                advice="Make the embedding with sparse=False.",
            )
    return [one.grad for one in parameters.tensors]
