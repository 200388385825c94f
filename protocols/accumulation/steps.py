"""Steps with averaged gradients: all accumulate them, and step with their mean (DeDLOC).

Local steps (local_steps.py) share `LossScale`, `InnerStep` and `Steps` with them. Both hold the
*state*: the tensors and statistics that all peers share at an epoch. Others fetch it, and
checkpoints keep it. With delayed or local steps, the model computes with other parameters than the
state's at times.

In this file: clipping by the global norm; `LossScale`, for fp16; `InnerStep`, the step of the
user's optimizer; `Steps`, the interface; then `GradientSteps`.

Promises: from the same averaged bits every peer makes the same step, to the bit. With averaged
gradients this includes the clipping factor and the loss scale, without a message about them.

Easy to get wrong: `apply` and `restore` change the state. Call them with the lock held for changing
(state_lock.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from protocols.accumulation.accumulator import (
    Accumulator,
    Contribution,
    FoundWrong,
    loss_of,
)
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.accumulation.powersgd import PowerSGD
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.training_state import LiveState, TrainingState, look, restore
from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import Layout, SentParts
from protocols.tensors import gpu_of, is_on_gpu, record

# ---- clipping
#
#     factor = clipping_factor(global_norm(averaged), max_norm)      # min(1, max_norm / norm)
#
# The norm is that of the averaged gradient, so a run clips as one computer with the whole batch
# would.
#
# Easy to get wrong: a float32 sum depends on the number of threads and the instructions of a
# machine, and peers whose factors differ in the last bit drift apart. So the squares are summed in
# double precision, and the factor keeps fewer digits than the sum has. Two machines would still
# differ only if the sum were within some 1e-16 of the boundary between two factors.

VALUES_AT_ONCE = 1 << 18
"""Values converted to double precision at a time: 2 MiB, which stays in a cache."""
VALUES_AT_ONCE_THERE = 1 << 24  # on a GPU: 128 MiB, a few launches for a large model

TORCH_EPSILON = 1e-6  # torch adds this to the norm

FACTOR_BITS = 44
"""Bits of the factor's mantissa: relative steps of 6e-14. That is small beside the 1e-12 that a run
in double precision is held to, and large beside what the order of a sum changes."""


def global_norm(values: Tensor) -> float:
    """The Euclidean norm of a flat tensor, in double precision."""
    if values.device.type == "cpu":
        total = 0.0
        for piece in torch.split(values, VALUES_AT_ONCE):
            wide = piece.double()
            total += float(torch.dot(wide, wide))
    else:
        pieces = torch.split(values, VALUES_AT_ONCE_THERE)
        norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in pieces]
        total = float(torch.stack(norms).square().sum())
    return math.sqrt(total)


def clipping_factor(norm: float, max_norm: float) -> float:
    """The factor for the gradient, as in torch.nn.utils.clip_grad_norm_; 1.0: no clipping."""
    factor = max_norm / (norm + TORCH_EPSILON)
    if factor >= 1.0:
        return 1.0
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(math.ldexp(mantissa, FACTOR_BITS)), exponent - FACTOR_BITS)


# ---- the loss scale of fp16

INITIAL_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24  # above it a gradient of 0.004 overflows
SMALLEST_SCALE = 2.0  # a run with gradients above 32,752 needs another model, not a scale

GROWTH_EPOCHS = 200
"""The scale is doubled after so many epochs without an overflow. An epoch is a step of a large
batch: a run makes thousands, where a single machine makes hundreds of thousands of small steps."""

TOLERATED = 1 / 64
"""If a smaller share of the batch overflows, it is an accident (one bad batch of one peer), and the
scale stays. Otherwise one broken machine could keep everybody's scale down for ever."""

ENOUGH = 0.5
"""A step is made if at least this share of the batch did not overflow. A step with a small rest
would be noise at a large batch's learning rate."""


@dataclass(frozen=True)
class LossScale:
    """The loss scale of an epoch, and for how many epochs nothing has overflowed.

        scale = scale.after(overflowed)      # the fraction of the epoch's samples that overflowed

    In fp16, small gradients vanish unless the loss is multiplied by a scale, and too large a scale
    overflows. Each peer counts the samples whose gradients overflowed (they add nothing), and the
    fraction is one value of the averaged vector. So all peers have the same fraction, to the bit,
    and `after` gives all the same scale.

    The averaged gradient is a mean over all samples, with overflowed ones as zeros. Divided by
    (1 - overflowed), it is the mean over the others; the step is made with that.

    A peer that computes in another precision also keeps the scale, because fp16 peers may fetch the
    state from it.

    Easy to get wrong: the epoch advances even if no step was made with the gradients, because the
    scale is part of the state and changes with the epoch.
    """

    scale: float = INITIAL_SCALE
    epochs_without: int = 0

    def after(self, overflowed: float) -> LossScale:
        """The scale of the next epoch, if this fraction of the samples overflowed."""
        if overflowed >= TOLERATED:
            return LossScale(max(self.scale / 2.0, SMALLEST_SCALE), 0)
        if self.epochs_without + 1 >= GROWTH_EPOCHS:
            return LossScale(min(self.scale * 2.0, LARGEST_SCALE), 0)
        return LossScale(self.scale, self.epochs_without + 1)

    @property
    def is_smallest(self) -> bool:
        """At the smallest scale an overflow is not the scale's fault: its batch is held back."""
        return self.scale <= SMALLEST_SCALE

    def as_extra(self) -> dict[str, Any]:
        """The scale as part of a state."""
        return {"scale": self.scale, "epochs_without": self.epochs_without}

    @staticmethod
    def from_extra(extra: Mapping[str, Any]) -> LossScale:
        """The scale of a state. StateRefused for anything that `as_extra` never returns."""
        scale, epochs = extra.get("scale"), extra.get("epochs_without")
        if (
            not isinstance(scale, float)
            or type(epochs) is not int
            or not (SMALLEST_SCALE <= scale <= LARGEST_SCALE and 0 <= epochs < GROWTH_EPOCHS)
        ):
            raise StateRefused(f"The state has no loss scale: {scale!r:.40}, {epochs!r:.40}.")
        return LossScale(scale, epochs)


# ---- the step of the user's optimizer

Factory = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
"""Makes the inner optimizer from (name, parameter) pairs, as torch's constructors take them. With
delayed steps, it is called with shadows of the model's parameters, under the same names."""

Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step. `norm`: before clipping; None without clipping. `loss`: the mean over
    all samples of the step; None if no peer reported one. `learning_rate`: of the optimizer's first
    group; None if it has none."""

    overflowed: float
    norm: float | None
    loss: float | None
    learning_rate: float | None


class InnerStep:
    """The user's optimizer and scheduler. Steps with the averaged values as gradients.

        inner = InnerStep(parameters, factory, scheduler, max_norm=1.0)
        stepped = inner.apply(averaged)                # flat: gradients, used, loss, overflowed

    From the same averaged bits every peer decides the same: which parameters had a gradient, how
    much of the batch overflowed, and the clipping factor. The scheduler steps once for each epoch
    of the run, whatever this peer brought to it.

    The gradients are not copied on the CPU: while the optimizer steps, each parameter's `.grad` is
    a view of the flat result. Afterwards the user's own `.grad` is back. On another device they are
    in a buffer that is kept there. To `offload`, they take the place of the user's own, which are
    dropped.

    Easy to get wrong: the averaged values may be changed in place (divided, clipped).
    """

    def __init__(
        self,
        parameters: Parameters,
        factory: Factory,
        scheduler: Scheduler | None,
        max_norm: float | None,
        *,
        offload: bool = False,
    ) -> None:
        self.parameters = parameters
        self.optimizer = factory(list(parameters.trained))
        _check_steps_only_with(self.optimizer, parameters)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self._max_norm = max_norm
        self._keeps_none = offload and parameters.device.type != "cpu"
        self._on_device: Tensor | None = None

    @torch.no_grad()
    def apply(self, averaged: Tensor) -> StepOutcome:
        """Step with an averaged contribution (accumulator.py describes its contents)."""
        parameters = self.parameters
        tail = averaged[parameters.values :].tolist()
        *used, loss, loss_known, overflowed = tail
        here = averaged[: parameters.values]
        gradients = self._there(here)
        norm = None
        if 1.0 - overflowed >= ENOUGH:
            norm = self._prepare(here, gradients, overflowed)
        else:
            used = [0.0] * len(used)  # the optimizer and the scheduler see a step without gradients
        views = parameters.views(gradients)
        given = [view if part > 0.0 else None for view, part in zip(views, used, strict=True)]
        if self._keeps_none:
            for one in parameters.tensors:
                one.grad = None
            given = [None if view is None else view.to(parameters.device) for view in given]
        with gradients_are(parameters.tensors, given):
            self.optimizer.step()
        rate = self.epoch_ended()
        return StepOutcome(overflowed, norm, loss_of(loss, loss_known), rate)

    def step_locally(self) -> None:
        """A step with this peer's own gradients: one of many between two outer steps."""
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.tensors, self._max_norm)
        self.optimizer.step()

    def epoch_ended(self) -> float | None:
        """Let the scheduler take its step. Returns the learning rate of the epoch that ended."""
        rate = self.optimizer.param_groups[0].get("lr")
        ended_with = None if rate is None else float(rate)
        if self.scheduler is not None:
            with warnings.catch_warnings():
                # A peer that fetched its state has not stepped in this process: torch warns.
                warnings.filterwarnings("ignore", ".*lr_scheduler.step.*", UserWarning)
                self.scheduler.step()
        return ended_with

    def _prepare(self, here: Tensor, gradients: Tensor, overflowed: float) -> float | None:
        """Turn the mean over all samples into the mean over those that did not overflow, and clip
        it. `here` has the same values on the CPU: not every device has double precision."""
        factor = 1.0 / (1.0 - overflowed)
        norm = None
        if self._max_norm is not None:
            norm = global_norm(gradients if is_on_gpu(gradients) else here) * factor
            factor *= clipping_factor(norm, self._max_norm)
        if factor != 1.0:
            gradients.mul_(factor)
        return norm

    def _there(self, gradients: Tensor) -> Tensor:
        """The values on the parameters' device, if they have a buffer there."""
        if self._keeps_none or self.parameters.device.type == "cpu":
            return gradients
        if self._on_device is None:
            self._on_device = self.parameters.buffer()
        return self._on_device.copy_(gradients)


def _check_steps_only_with(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    """Raise ProtocolMisuse if the optimizer has tensors that nobody averages. Each peer would step
    them with its own gradients, and the models would silently drift apart."""
    averaged = {id(one) for one in parameters.tensors}
    others = [
        one
        for group in optimizer.param_groups
        for one in group["params"]
        if id(one) not in averaged
    ]
    if others:
        raise ProtocolMisuse(
            f"The optimizer that the factory made has {len(others)} tensors that it was not given; "
            f"the first is of shape {tuple(others[0].shape)}.",
            why="Only what is given to it is averaged, and with delayed=True those are not the "
            "model's own tensors.",
            advice="Let the factory use the (name, parameter) pairs that it is called with, and "
            "give all that is to be trained as named_parameters.",
        )


@contextmanager
def gradients_are(
    parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Tensor | None]
) -> Iterator[None]:
    """Replace the parameters' gradients by these within the block."""
    before = [one.grad for one in parameters]
    try:
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient
        yield
    finally:
        for one, gradient in zip(parameters, before, strict=True):
            one.grad = gradient


# ---- the interface


class Steps(Protocol):
    """Makes the steps of one peer and one model."""

    kind: str
    """A word for what is averaged: part of the topic under which peers meet."""
    layouts: Sequence[Layout]
    """The layouts of what is averaged: the round of an epoch has `layouts[epoch % len(layouts)]`.
    """
    shared: Parameters
    """The state's tensors."""
    inner: InnerStep
    scale: LossScale
    scales_loss: bool
    """Whether this peer computes in fp16, and multiplies its losses by the scale."""
    launches: bool
    """Whether `add` need not wait for the device (accumulator.py). Then it takes a loss that is
    there as it is."""

    @property
    def loss_factor(self) -> float:
        """The factor for the loss of the batch that is being computed."""

    def add(self, samples: int, loss: float | Tensor | None = None) -> str | None:
        """Count a batch by the parameters' `.grad`. Returns the name of a parameter whose gradient
        is not finite, so that the batch does not count; else None. `loss`: its mean, if known. One
        that `launches` counts the batch until `found_wrong` says otherwise."""

    def found_wrong(self) -> FoundWrong | None:
        """The batch that was added before and turned out not to be finite since the last call, if
        any. Ask after `add` and after `take`."""

    def take(self) -> Contribution:
        """Take the contribution to the round that begins. It must be passed to `put_back` or
        `done_with` afterwards."""

    def put_back(self, contribution: Contribution) -> None:
        """The round made no step: the contribution counts for the next one."""

    def done_with(self, contribution: Contribution, sent: SentParts | None = None, /) -> None:
        """The contribution is in a step, or is dropped. `sent`: how it went to the others of the
        round, if it is in a step and that is known."""

    def drop(self) -> None:
        """Drop what was counted and is in no round."""

    def apply(self, averaged: Tensor) -> StepOutcome:
        """Step with what the round has averaged. May write to its memory."""

    def take_over(self) -> None:
        """Let the model compute with the newest step from now on. Only for the training thread."""

    def reset(self) -> None:
        """Let the model compute with the state itself, so that steps that this peer made alone are
        given up. Only for the training thread."""

    def look(self, run: str, epoch: int, history: bytes) -> LiveState:
        """The live state, not copied."""

    def restore(self, state: TrainingState) -> None:
        """Replace the state, and let the model compute with the new one."""


# ---- averaged gradients (DeDLOC, section 3.1)

MOST = 0.5


class _Beside:
    """Lets a GPU copy a result and step a shadow with it while it computes the passes of the next
    step. A shadow is not written to before it has been taken over."""

    def __init__(self, gpu: Any, device: torch.device) -> None:
        self._gpu, self._device = gpu, device
        self._stream, self._event = gpu.Stream(device), gpu.Event()
        self.taken_over()

    def taken_over(self) -> None:
        """What was launched so far reads the shadow, and no more."""
        record(self._event, self._device)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """What the block launches has been done when it ends."""
        self._stream.wait_event(self._event)
        with self._gpu.stream(self._stream):
            yield
        self._stream.synchronize()


class GradientSteps:
    """Steps with the averaged gradients of all peers: the usual way.

        theta_{t+1} = step(theta_t, g_t(theta_t))          # as one process with the whole batch
        theta_{t+1} = step(theta_t, g_t(theta_{t-1}))      # delayed: g_t is computed meanwhile

    With delayed steps, the optimizer works on a shadow of the parameters, while the model computes
    with those of the epoch before. `take_over` copies the shadow into the model. So the staleness
    is exactly one step, whenever the shadow is done.

    To `offload` is to keep everything but the model, its gradients and the optimizer's statistics
    on the host. A shadow is there with its statistics, and stepped by the processor.

    Invariant: unless something waits to be taken over, the shadow equals the model's parameters.

    Easy to get wrong: the shadow is the state; the model lags behind it. A step may change the loss
    scale in the middle of a batch, so the scale that batches use changes only in `take_over`, like
    the parameters. Otherwise gradients would be divided by another scale than their loss was
    multiplied by.
    """

    kind = "gradients"

    def __init__(
        self,
        parameters: Parameters,
        factory: Factory,
        scheduler: Scheduler | None,
        *,
        delayed: bool,
        max_norm: float | None,
        codec: Codecs,
        scales_loss: bool,
        buffers: dict[str, Tensor],
        offload: bool = False,
        powersgd_rank: int = 0,
    ) -> None:
        self._own = parameters
        self.shared = _shadow_of(parameters, on_host=offload) if delayed else parameters
        self.inner = InnerStep(self.shared, factory, scheduler, max_norm, offload=offload)
        gpu = gpu_of(self.shared.device) if delayed else None
        self._beside = None if gpu is None else _Beside(gpu, self.shared.device)
        self.scale = LossScale()
        self.scales_loss = scales_loss
        self.loss_factor = self.scale.scale if scales_loss else 1.0
        self._accumulator = Accumulator(parameters, codec, offload=offload)
        self.launches = self._accumulator.launches and not scales_loss
        layout, self._powersgd = self._accumulator.layout, None
        if powersgd_rank:
            self._powersgd = PowerSGD(parameters, layout, powersgd_rank)
            layout = self._powersgd.layout
        self.layouts: Sequence[Layout] = (layout,)
        self._buffers = StepBuffers(buffers)
        self._own_overflowed = 0.0
        self._is_odd = False

    def add(self, samples: int, loss: float | Tensor | None = None) -> str | None:
        wrong = self._accumulator.add(samples, self.loss_factor, loss)
        if wrong is None:
            self._is_odd = False
        elif self.scales_loss and not (self._is_odd or self.scale.is_smallest):
            self._accumulator.add_overflowed(samples, loss)
            return None
        return wrong

    def found_wrong(self) -> FoundWrong | None:
        return self._accumulator.found_wrong()

    def take(self) -> Contribution:
        contribution = self._accumulator.take()
        self._own_overflowed = float(contribution.memory[-1])
        return contribution if self._powersgd is None else self._powersgd.shortened(contribution)

    def put_back(self, contribution: Contribution) -> None:
        whole = contribution if self._powersgd is None else self._powersgd.put_back()
        self._accumulator.put_back(whole)

    def done_with(self, contribution: Contribution, _: SentParts | None = None, /) -> None:
        free = contribution if self._powersgd is None else self._powersgd.done_with()
        self._accumulator.done_with(free)

    def drop(self) -> None:
        self._accumulator.drop()
        if self._powersgd is not None:
            self._powersgd.forget()

    def apply(self, averaged: Tensor) -> StepOutcome:
        if self._powersgd is not None:
            averaged = self._powersgd.decoded(averaged)
        with nullcontext() if self._beside is None else self._beside.passes():
            stepped = self.inner.apply(averaged)
        # If all of this peer's batches overflowed and most of the others' did not, the scale is not
        # the cause. Until one is finite they are held back, so that they do not lower the scale.
        self._is_odd = self._own_overflowed == 1.0 and stepped.overflowed < MOST
        self.scale = self.scale.after(stepped.overflowed)
        self._buffers.keep()
        if self.shared is self._own:
            self.take_over()
        return stepped

    @torch.no_grad()
    def take_over(self) -> None:
        if self.scales_loss:
            self.loss_factor = self.scale.scale
        if self.shared is not self._own:
            torch._foreach_copy_(list(self._own.tensors), list(self.shared.tensors))
        if self._beside is not None:
            self._beside.taken_over()

    def reset(self) -> None:
        self.take_over()

    def look(self, run: str, epoch: int, history: bytes) -> LiveState:
        return look(
            self.shared.everything,
            self._buffers.kept.items(),
            self.inner.optimizer,
            self.inner.scheduler,
            self.extra(),
            run=run,
            epoch=epoch,
            history=history,
        )

    def restore(self, state: TrainingState) -> None:
        extra, sends = state.extra, self._powersgd
        scale = LossScale.from_extra(extra)
        factors = None if sends is None else sends.from_extra(extra)
        restore(
            state,
            self.shared.everything,
            self._buffers.kept.items(),
            self.inner.optimizer,
            self.inner.scheduler,
        )
        self.scale = scale
        if sends is not None and factors is not None:
            sends.restore(factors)
        self._buffers.give_back()
        self.take_over()

    def extra(self) -> dict[str, Any]:
        factors = {} if self._powersgd is None else self._powersgd.extra()
        return self.scale.as_extra() | factors


class StepBuffers:
    """The model's buffers as of the last step. A forward pass may change the model's own at any
    time (batch norm counts what it sees), but the state must not change between steps."""

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self._own = buffers
        self.kept = {name: one.detach().clone() for name, one in buffers.items()}

    @torch.no_grad()
    def keep(self) -> None:
        for name, one in self._own.items():
            self.kept[name].copy_(one)

    @torch.no_grad()
    def give_back(self) -> None:
        for name, one in self._own.items():
            one.copy_(self.kept[name])


def _shadow_of(parameters: Parameters, *, on_host: bool) -> Parameters:
    """Copies of the parameters under the same names. Frozen tensors are shared, not copied."""
    if on_host:
        return as_parameters(parameters, parameters.copy_into(parameters.buffer(on_host=True)))
    return Parameters(
        (name, torch.nn.Parameter(one.detach().clone()) if one.requires_grad else one)
        for name, one in parameters.everything
    )


def as_parameters(parameters: Parameters, flat: Tensor) -> Parameters:
    """Views of a flat tensor under the parameters' names. Frozen tensors are shared."""
    views = dict(zip(parameters.names, parameters.views(flat), strict=True))
    return Parameters(
        (name, torch.nn.Parameter(views[name]) if name in views else one)
        for name, one in parameters.everything
    )
