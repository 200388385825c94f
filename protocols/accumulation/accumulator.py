"""The gradients of this peer's samples of an epoch: their mean, in one flat buffer.

    accumulator = Accumulator(parameters)
    accumulator.add(32, loss=2.1)                   # from the parameters' .grad, which may go now
    contribution = accumulator.take()               # values to average with weight .samples
    accumulator.put_back(contribution)              # the round failed: nothing is lost

A peer's contribution is the mean of its samples' gradients, and its weight is their number (DeDLOC,
3.1). The weighted mean over the peers is then the mean gradient of the whole batch. The mean is
kept as a running one, m <- m + (g - m) n / (N + n), so it can be averaged at any moment, and a
failed round leaves nothing to undo.

A few more values follow the parameters', and are averaged with them:

- for each parameter, the fraction of samples that had a gradient for it. If that is 0 at all peers,
  the optimizer sees None, as in a single process, and not a gradient of zeros;
- the loss, and the fraction of samples that had one, so that all peers know the same loss of a
  step, over exactly the samples in it;
- the fraction of samples whose gradients overflowed in fp16 (steps.py).

In this file: `Averageable`, which checks gradients; `Contribution` and `Accumulator`; the loss.

Promises: `.grad` is read within `add` and never kept, in one pass, after one that checks that it is
finite. A gradient that is not finite adds nothing, and is named.

A GPU is not waited for: both passes are only launched, and it is the GPU that leaves out a
gradient which is not finite. What it found is read when the next batch is added, or when the mean
is taken. Then `samples` are right again, and `found_wrong` says which batch counts no more. It
copies a contribution to the host beside the next passes.

Easy to get wrong: `.grad` must be the *mean* over the batch's samples, as torch's losses give by
default. A sum would count too much, by a factor of the batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from protocols.accumulation.parameters import Codecs, Parameters
from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import LARGEST_CARRIED, Layout, Segment
from protocols.tensors import GPUS, gpu_of, is_on_gpu, record

# ---- whether gradients can be averaged

SCRATCH_VALUES = 1 << 18  # 1 MB of float32; larger tensors are read in place


@dataclass(frozen=True, eq=False)
class _Group:
    """Parameters, by their numbers, that are checked together. `scratch` has a view for each; None
    for a single one that is read in place."""

    numbers: tuple[int, ...]
    scratch: Tensor | None
    views: tuple[Tensor, ...] = ()


class Averageable:
    """Checks that gradients are finite and within what their codec carries, for one model.

        check = Averageable(parameters, largest)
        name = check.first_wrong(gradients)            # None if all is well, as it nearly always is

    A small model has many small tensors, and a check of each costs more than reading its values. So
    small ones are gathered in a scratch that stays in the processor's cache, and checked in one
    pass; on a GPU all are checked by one call. Only if something is wrong is the parameter found.

    Invariant: each parameter that has values is in exactly one group.

    Easy to get wrong: NaN has no order. It must fail `value <= bound`; it would not fulfil
    `value > bound`.
    """

    def __init__(self, parameters: Parameters, largest: Sequence[float]) -> None:
        self._names, self._largest = parameters.names, largest
        self._bounds: Tensor | None = None
        self._is_here = parameters.device.type == "cpu"
        self._bound = min(largest)
        sizes = [one.numel() for one in parameters.tensors]
        at_most = SCRATCH_VALUES if self._is_here else 0
        gathered = [n for n, size in enumerate(sizes) if 0 < size <= at_most]
        alone = [n for n, size in enumerate(sizes) if size > at_most]
        room = min(at_most, sum(sizes[n] for n in gathered))
        scratch = torch.empty(room, dtype=parameters.dtype, device=parameters.device)
        self._groups = [_Group((n,), None) for n in alone]
        while gathered:
            numbers, end, views = [], 0, []
            while gathered and end + sizes[gathered[0]] <= room:
                n = gathered.pop(0)
                view = scratch[end : end + sizes[n]].view(parameters.tensors[n].shape)
                numbers.append(n)
                views.append(view)
                end += sizes[n]
            self._groups.append(_Group(tuple(numbers), scratch[:end], tuple(views)))

    @torch.no_grad()
    def first_wrong(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> str | None:
        """The first parameter whose gradient has a value that is beyond its codec, or NaN.

        The gradients are `scale` times as large as the values to be averaged.
        """
        values = (one for group in self._groups for one in _values(group, gradients))
        if self._is_here:  # one after the other: several are gathered in the same scratch
            ends = [end for one in values for end in torch.aminmax(one)]
        else:  # few launches: the device has nothing else to do meanwhile
            all_of_them = list(values)
            ends = list(torch._foreach_norm(all_of_them, math.inf)) if all_of_them else []
        if not ends:
            return None
        # The largest magnitude; NaN comes out as NaN. One wait for the device.
        found = torch.stack(ends).abs_().max().item()
        return None if found <= _scaled(self._bound, scale) else self._name(gradients, scale)

    @torch.no_grad()
    def launch(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The same without waiting for the device: the largest magnitude of each gradient, and
        whether one is wrong (1.0, else 0.0), both still on the device."""
        if self._bounds is None:
            self._bounds = torch.tensor(
                [min(one, torch.finfo(gradients[0].dtype).max) for one in self._largest],
                dtype=gradients[0].dtype,
            ).to(gradients[0].device)
        found = torch.stack(torch._foreach_norm(list(gradients), math.inf))
        return found, (found <= self._bounds).logical_not_().any().float()

    def wrong_in(self, found: Sequence[float]) -> str | None:
        """The first parameter that is wrong, by what `launch` found."""
        for name, one, bound in zip(self._names, found, self._largest, strict=True):
            if not one <= bound:
                return name
        return None

    def _name(self, gradients: Sequence[Tensor | None], scale: float) -> str | None:
        """Check one by one. None may be wrong after all, because bounds differ within a group."""
        for name, one, bound in zip(self._names, gradients, self._largest, strict=True):
            if one is not None and one.numel():
                furthest = torch.stack(torch.aminmax(one)).abs_().max().item()
                if not furthest <= _scaled(bound, scale):
                    return name
        return None


def _scaled(bound: float, scale: float) -> float:
    """The bound times the scale; always finite, so that infinity is beyond it."""
    return min(bound * scale, sys.float_info.max)


def _values(group: _Group, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors to check for a group, if any."""
    if group.scratch is None:
        gradient = gradients[group.numbers[0]]
        return [] if gradient is None else [gradient.detach()]
    views, values = [], []
    for n, view in zip(group.numbers, group.views, strict=True):
        gradient = gradients[n]
        if gradient is None:
            view.zero_()
        else:
            views.append(view)
            values.append(gradient)
    if not values:
        return []
    torch._foreach_copy_(views, values)
    return [group.scratch]


# ---- accumulating

USED = "/used"  # no parameter's name has a slash
LOSS = "/loss"
LOSS_VALUES: Final = 2
OVERFLOWED = "/overflowed"

LARGEST_LOSS: Final = 1e30  # far below what float32 holds, so that sums are finite, too


@dataclass(frozen=True)
class FoundWrong:
    """A batch of so many samples that was launched and counts no more, because the gradient of this
    parameter is not finite."""

    parameter: str
    samples: int


@dataclass(eq=False)
class Contribution:
    """A mean over `samples`, on the CPU. A round averages it. `copied`: an event of a GPU, which
    copies the parameters' values into `memory` beside the next passes."""

    memory: Tensor
    samples: int
    copied: Any = None

    def arrive(self) -> None:
        """Wait until all is there."""
        if self.copied is not None:
            self.copied.synchronize()

    @property
    def values(self) -> Tensor:
        self.arrive()
        return self.memory


@dataclass(eq=False)
class _Buffer:
    """A flat tensor, and a view of it for each parameter."""

    flat: Tensor
    views: list[Tensor]


STAGED_VALUES: Final = 1 << 22  # 16 MB of float32, which a GPU copies in a millisecond


@dataclass(eq=False)
class _Launched:
    """A batch that a GPU adds. `told`: on the host, once `event` has happened: the largest
    magnitude of each gradient, and the loss. `part`: of the mean that the batch makes up."""

    samples: int
    part: float
    told: Tensor
    has_loss: bool
    event: Any


class Accumulator:
    """Keeps at most two buffers on the CPU: one being filled, and one being averaged. With an
    accelerator, one more is filled there instead, unless it is to `offload`.

    Invariant: `_mean` and `_extra`, the values that follow the parameters', are the mean over
    `samples`, those of `_launched` included; with 0 samples their contents mean nothing.
    """

    def __init__(
        self, parameters: Parameters, codec: Codecs = "none", *, offload: bool = False
    ) -> None:
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
        self._on_host = offload or parameters.device.type == "cpu"
        self.launches = parameters.device.type in GPUS and not offload
        """Whether a batch without a loss scale is added without waiting for the device."""
        self._staged: Tensor | None = None
        largest = [LARGEST_CARRIED[segment.codec] for segment in segments]
        self._averageable = Averageable(parameters, largest)
        self._mean: _Buffer | None = None
        self._spare: Tensor | None = None
        extra = len(parameters.names) + LOSS_VALUES + 1
        self._extra = torch.zeros(extra, dtype=parameters.dtype)
        self._launched: _Launched | None = None
        self._told: Tensor | None = None
        self._copying: Any = None  # a stream beside that of the passes
        self._copied: Any = None
        self._wrong: FoundWrong | None = None

    @torch.no_grad()
    def add(
        self, samples: int, scale: float = 1.0, loss: float | Tensor | None = None
    ) -> str | None:
        """Count the gradients. If one is not finite, or beyond its codec, return its name instead.

        Gradients that were computed with a loss scale are divided by it, in place. Without one, a
        GPU is not waited for: these gradients count until `found_wrong` says otherwise. A loss that
        is on the GPU need not be waited for either.
        """
        gradients = dense_gradients(self._parameters)
        self._settle()
        if scale == 1.0 and self.launches and (there := _alike(self._parameters, gradients)):
            self._launch(there, samples, loss)
            return None
        wrong = self._averageable.first_wrong(gradients, scale)
        if wrong is None:
            known = None if loss is None else float(loss)
            self._mix(gradients, samples, scale, known, overflowed=False)
        return wrong

    def found_wrong(self) -> FoundWrong | None:
        """The launched batch that was found wrong since the last call, if any. Ask after `add` and
        after `take`: there is at most one in between."""
        wrong, self._wrong = self._wrong, None
        return wrong

    @torch.no_grad()
    def add_overflowed(self, samples: int, loss: float | Tensor | None = None) -> None:
        """Count samples whose gradients overflowed: as zeros, and in the overflowed fraction."""
        self._settle()
        known = None if loss is None else float(loss)
        self._mix([None] * len(self._parameters.names), samples, 1.0, known, overflowed=True)

    def take(self) -> Contribution:
        """The mean and its weight (zeros with weight 0). A new mean begins.

        Pass the contribution to `put_back` or `done_with` before the next is taken.
        """
        self._settle()
        samples, self.samples = self.samples, 0
        mean, copied = self._filling().flat, None
        if not samples:
            mean.zero_()
            self._extra.zero_()
        if self._on_host:
            self._mean = None
        else:
            host, self._spare = self._spare, None
            if host is None:
                host = torch.empty(mean.shape, dtype=mean.dtype, pin_memory=is_on_gpu(mean))
            copied = self._fetch(mean, host)
            mean = host
        mean[self._parameters.values :] = self._extra
        return Contribution(mean, samples, copied)

    def _fetch(self, mean: Tensor, host: Tensor) -> Any:
        """Copy the parameters' values to the host, by a GPU beside the next passes: it returns an
        event for that. The mean is not written to before."""
        values, gpu = slice(self._parameters.values), gpu_of(mean.device)
        if gpu is None:
            host[values].copy_(mean[values])
            return None
        if self._copying is None:
            self._copying = gpu.Stream(mean.device)
        self._copying.wait_stream(gpu.current_stream(mean.device))
        with gpu.stream(self._copying):
            host[values].copy_(mean[values], non_blocking=True)
            self._copied = gpu.Event()
            self._copied.record()
        return self._copied

    @torch.no_grad()
    def put_back(self, contribution: Contribution) -> None:
        """Count a taken contribution again, with the samples accumulated meanwhile."""
        self._settle()
        extra = contribution.values[self._parameters.values :]
        if self._on_host and not self.samples:
            values, self.samples = contribution.values, contribution.samples
            if self._mean is not None:
                self._spare = self._mean.flat
            self._mean = _Buffer(values, self._parameters.views(values))
            self._extra.copy_(extra)
            return
        if contribution.samples:
            mean = self._filling().flat
            total = self.samples + contribution.samples
            if self.samples:
                part = contribution.samples / total
                pieces = (torch.split(one, STAGED_VALUES) for one in (mean, contribution.values))
                for into, values in zip(*pieces, strict=True):  # a GPU has no room for all
                    into.lerp_(values.to(mean.device), part)
                self._extra.lerp_(extra, part)
            else:
                mean.copy_(contribution.values)
                self._extra.copy_(extra)
            self.samples = total
        self.done_with(contribution)

    def done_with(self, contribution: Contribution) -> None:
        """A taken contribution is in a step, or is dropped: its memory can be used again."""
        self._spare = contribution.values

    def drop(self) -> None:
        """Drop what was accumulated."""
        self._settle()
        self.samples, self._wrong = 0, None

    def _filling(self) -> _Buffer:
        """The buffer being filled; another one if the last was taken. A GPU does not write to it
        before that was copied."""
        if self._copied is not None:
            device = self._parameters.device
            gpu_of(device).current_stream(device).wait_event(self._copied)
            self._copied = None
        if self._mean is None:
            flat, self._spare = self._spare, None
            if flat is None:
                flat = self._parameters.buffer(len(self._extra), on_host=self._on_host)
            self._mean = _Buffer(flat, self._parameters.views(flat))
        return self._mean

    def _launch(
        self, gradients: Sequence[Tensor], samples: int, loss: float | Tensor | None
    ) -> None:
        """Let the GPU check and add a batch, without waiting for it."""
        mean, is_first = self._filling(), self.samples == 0
        self.samples += samples
        part = samples / self.samples
        found, is_wrong = self._averageable.launch(gradients)
        if is_first:
            mean.flat.zero_()  # what is there may be NaN, of which no part can be taken
        # m <- m - lr (g + weight_decay m), unless `found_inf`: with -part and -1 it is our mean
        torch._fused_sgd_(
            mean.views,
            list(gradients),
            [],
            weight_decay=-1.0,
            momentum=0.0,
            lr=-part,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=is_wrong,
        )
        gpu = gpu_of(found.device)
        if self._told is None:
            size = len(found) + 1
            self._told = torch.empty(size, dtype=found.dtype, pin_memory=gpu is not None)
        self._told[:-1].copy_(found, non_blocking=True)
        event = None
        if isinstance(loss, Tensor):
            self._told[-1].copy_(loss.detach().reshape(()), non_blocking=True)
        elif loss is not None:
            self._told[-1] = loss
        if gpu is not None:
            event = gpu.Event()
            record(event, found.device)
        self._launched = _Launched(samples, part, self._told, loss is not None, event)

    def _settle(self) -> None:
        """Read what the GPU found in the batch that was launched, if any."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        if launched.event is not None:
            launched.event.synchronize()
        *found, loss = launched.told.tolist()
        wrong = self._averageable.wrong_in(found)
        if wrong is not None:
            self._wrong = FoundWrong(wrong, launched.samples)
            self.samples -= launched.samples
            return
        known = loss_values(loss if launched.has_loss else None)
        self._mix_extra([1.0] * len(found), known, 0.0, launched.part)

    def _mix(
        self,
        gradients: Sequence[Tensor | None],
        samples: int,
        scale: float,
        loss: float | None,
        *,
        overflowed: bool,
    ) -> None:
        """m <- m + (g - m) n / (N + n). The first gradients are copied."""
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
            elif self._on_host and self._parameters.device.type != "cpu":
                for view, one in zip(views, values, strict=True):
                    self._mix_offloaded(view, one, part)
            else:
                torch._foreach_lerp_(views, values, part)
        if missing:
            torch._foreach_mul_(missing, 1.0 - part) if not is_first else torch._foreach_zero_(
                missing
            )
        used = [float(one is not None) for one in gradients]
        self._mix_extra(used, loss_values(loss), float(overflowed), part)

    def _mix_extra(
        self, used: Sequence[float], loss: tuple[float, float], overflowed: float, part: float
    ) -> None:
        now = torch.tensor([*used, *loss, overflowed], dtype=self._extra.dtype)
        self._extra.copy_(now) if part == 1.0 else self._extra.lerp_(now, part)

    def _mix_offloaded(self, mean: Tensor, gradient: Tensor, part: float) -> None:
        """The same for one parameter, with a mean on the host and a gradient on the device."""
        if self._staged is None:
            largest = max(one.numel() for one in self._parameters.tensors)
            self._staged = torch.empty(
                min(STAGED_VALUES, largest), dtype=mean.dtype, pin_memory=is_on_gpu(gradient)
            )
        flat = (torch.split(one.reshape(-1), STAGED_VALUES) for one in (mean, gradient))
        for into, piece in zip(*flat, strict=True):
            into.lerp_(self._staged[: piece.numel()].copy_(piece), part)


def _alike(parameters: Parameters, gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The gradients, if all are there and lie in memory as the mean does. One call adds such."""
    there = [
        one.detach()
        for one, parameter in zip(gradients, parameters.tensors, strict=True)
        if one is not None and one.numel() and one.dtype == parameter.dtype and one.is_contiguous()
    ]
    return there if len(there) == len(gradients) else None


def loss_values(loss: float | None) -> tuple[float, float]:
    """The two values that are averaged for a batch's loss: the loss, and whether it is known."""
    if loss is None or not abs(loss) <= LARGEST_LOSS:
        return 0.0, 0.0
    return loss, 1.0


def loss_of(averaged: float, known: float) -> float | None:
    """The mean loss of the samples that had one; None if none had."""
    loss = averaged / known if known > 0.0 else math.nan
    return loss if math.isfinite(loss) else None


def dense_gradients(parameters: Parameters) -> list[Tensor | None]:
    """Each parameter's `.grad`. Raises ProtocolMisuse, with the name, for a sparse one."""
    for name, one in parameters.trained:
        if one.grad is not None and one.grad.layout is not torch.strided:
            raise ProtocolMisuse(
                f"The gradient of {name} is sparse ({one.grad.layout}).",
                why="Peers average one flat buffer, in which every value has its place.",
                advice="Make the embedding with sparse=False.",
            )
    return [one.grad for one in parameters.tensors]
