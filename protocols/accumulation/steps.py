"""The two ways to make a run's steps from what a round has averaged.

    GradientSteps   gradients are accumulated and averaged, and stepped with (DeDLOC)
    LocalSteps      each peer makes steps by itself; how far they went is averaged (DiLoCo)

Both hold the *state*: the tensors and statistics that all peers share at an epoch. Others fetch it,
and checkpoints keep it. With delayed or local steps, the model computes with other parameters than
the state's at times.

In this file: clipping by the global norm; `LossScale`, for fp16; `OuterStep`, of DiLoCo;
`InnerStep`, the step of the user's optimizer; `Steps`, the interface; then `GradientSteps`;
`LostValues`, what a coarse codec has lost of pseudo-gradients; `SparseTurns`, what a sparse codec
sends of them; and `LocalSteps`, all at once or in fragments.

Promises: from the same averaged bits every peer makes the same step, to the bit. With averaged
gradients this includes the clipping factor and the loss scale, without a message about them.

Easy to get wrong: `apply` and `restore` change the state. Call them with the lock held for changing
(state_lock.py).
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from protocols.accumulation.accumulator import (
    LOSS,
    LOSS_VALUES,
    Accumulator,
    Averageable,
    Contribution,
    FoundWrong,
    dense_gradients,
    loss_of,
    loss_values,
)
from protocols.accumulation.fragments import fragments_of
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.accumulation.powersgd import PowerSGD
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.training_state import LiveState, TrainingState, look, restore
from protocols.errors import PotluckError, ProtocolMisuse
from protocols.moshpit.layout import LARGEST_CARRIED, Layout, Segment, SentParts
from protocols.tensors import CODECS, ONE_IN, decode_into, encode_into, gpu_of, is_on_gpu, record

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


# ---- the outer step of local steps (DiLoCo, Douillard et al. 2023, algorithm 1)

OUTER_LEARNING_RATE = 0.7  # both are the paper's best: no run in its table did better
OUTER_MOMENTUM = 0.9
ALL = slice(None)


class OuterStep:
    """theta_start and the momentum, flat and in the parameters' precision.

        outer = OuterStep(start)                       # theta at the beginning of the epoch
        pseudo_gradient = outer.pseudo_gradient(local, out)    # line 12: theta_start - theta_local
        outer.step(averaged)                           # line 14: Nesterov's step from theta_start

    Between two rounds each peer makes steps with its own inner optimizer, whose statistics it never
    sends. The peers average how far the parameters went, and the outer optimizer takes the average
    as a gradient. With lr = 1 and momentum 0, that is plain averaging of parameters.

    Easy to get wrong: the outer step starts from theta_start, which is equal to the bit at all
    peers, and not from the peer's own parameters. So all peers have equal parameters after it.
    """

    def __init__(self, start: Tensor) -> None:
        self.start = start
        self.momentum = torch.zeros_like(start)

    def pseudo_gradient(self, local: Tensor, out: Tensor, place: slice = ALL) -> Tensor:
        """Write theta_start - theta_local into `out`: how far the local steps went. `place`: of
        these values in the flat tensors."""
        return torch.sub(self.start[place], local, out=out)

    def step(self, averaged: Tensor, place: slice = ALL) -> None:
        """Make Nesterov's step with the averaged pseudo-gradient."""
        # v <- 0.9 v + g;  theta <- theta - 0.7 (g + 0.9 v), as torch.optim.SGD(nesterov=True)
        start, momentum = self.start[place], self.momentum[place]
        momentum.mul_(OUTER_MOMENTUM).add_(averaged)
        start.add_(averaged, alpha=-OUTER_LEARNING_RATE)
        self.drift(start, momentum)

    @staticmethod
    def drift(parameters: Tensor, momentum: Tensor) -> None:
        """Change parameters as the step changes theta_start where the average is 0."""
        parameters.add_(momentum, alpha=-OUTER_LEARNING_RATE * OUTER_MOMENTUM)


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
        return _as_parameters(parameters, parameters.copy_into(parameters.buffer(on_host=True)))
    return Parameters(
        (name, torch.nn.Parameter(one.detach().clone()) if one.requires_grad else one)
        for name, one in parameters.everything
    )


# ---- local steps (DiLoCo)


class LostValues:
    """What encoding has lost of this peer's pseudo-gradients: error feedback (Seide et al. 2014).

        lost.add_to(values)                    # g <- g + e, before a round
        lost.keep(values, sent)                # e <- g - decoded(encoded(g)), when g is in a step

    A codec of few bits rounds small values of a block away, in each round again. With this they
    add up until they are sent. Only coarse codecs lose enough to be worth a copy of the parameters,
    which is made when there is something to keep.

    What a peer lost is its own: it is no part of the state, and the step is made from the bits that
    all have. It is forgotten together with the local steps: when they are dropped, when a state was
    fetched, and when nobody knows whether, or how, they came into a step. One round's rounding is
    lost then, as without feedback. If a round fails, it is kept, and the next one takes it again.

    Reducers encode the averages once more, and what is lost there is not fed back. Who reduces a
    part changes from round to round, with the members and their links: a peer would keep what it
    lost for a part that it may not reduce again for hours, or ever.

    Easy to get wrong: a member's values of the part that it reduces itself are not encoded.
    """

    def __init__(self, layout: Layout, values: int) -> None:
        self._layout, self._values = layout, values
        self._is_coarse = any(CODECS[one.codec].is_coarse for one in layout.segments)
        self._lost: Tensor | None = None

    def add_to(self, values: Tensor) -> None:
        """Add what was lost to the values that are sent next."""
        if self._lost is not None:
            values.add_(self._lost)

    def keep(self, contribution: Tensor, sent: SentParts) -> None:
        """Keep what was lost of these values, in place of what was kept before."""
        if not self._is_coarse:
            return
        lost = self._lost = torch.zeros(self._values) if self._lost is None else self._lost.zero_()
        for chunk in sent.chunks(self._layout):
            if CODECS[chunk.codec].is_coarse:
                of_chunk = slice(chunk.start, chunk.stop)
                encoded = bytearray(chunk.encoded_bytes)
                encode_into(contribution[of_chunk], chunk.codec, encoded, name="what was sent")
                decode_into(lost[of_chunk], chunk.codec, encoded, "float32")
                torch.sub(contribution[of_chunk], lost[of_chunk], out=lost[of_chunk])

    def forget(self) -> None:
        if self._lost is not None:
            self._lost.zero_()


class SparseTurns:
    """What a sparse codec sends of pseudo-gradients: one value in `ONE_IN`, by turns.

        turns.keep_only_due(values, turn)             # g <- those whose turn it is, else 0
        turns.keep_lost(values, sent)                 # r <- g - decoded(encoded(g))
        turns.mix(own, theirs, r, momentum, turn, keeps=0.5)

    In each round all peers send the same places of each tensor, so that a sum has no more places
    than what each of them sent, and the reducer sends it back in as few bytes. Nothing else would
    fit an exchange in which reducers sum: the largest values of several peers are in different
    places, and their sum would be cut once more. `turn` counts the rounds of these tensors. With F
    fragments, it is not the epoch but the epoch divided by F: if F is 4, a fragment would send the
    same places for ever.

    What was not sent stays in the peer's own parameters, where it goes on being trained, and is in
    its next pseudo-gradients. That is error feedback as well, for the rounding to one bit, and it
    needs no memory. It is no part of the state: a peer that leaves, drops its local steps or
    fetches the state loses up to ONE_IN - 1 rounds of it.

    Easy to get wrong: a member's values of the part that it reduces itself are not encoded.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.is_sparse = [CODECS[one.codec].is_sparse for one in layout.segments]
        ends = accumulate(one.values for one in layout.segments)
        self._sparse = [
            slice(end - one.values, end)
            for one, end, is_sparse in zip(layout.segments, ends, self.is_sparse, strict=True)
            if is_sparse
        ]

    def __bool__(self) -> bool:
        return bool(self._sparse)

    def keep_only_due(self, values: Tensor, turn: int) -> None:
        """Set the values of sparse tensors to zero, except those that go in this round."""
        for tensor in self._sparse:
            for place in range(ONE_IN):
                if place != turn % ONE_IN:
                    values[tensor][place::ONE_IN].zero_()

    def keep_lost(self, values: Tensor, sent: SentParts | None) -> None:
        """Replace the values that were brought to a round by what encoding has lost of them.
        Without `sent`, nothing. The other tensors' values mean nothing afterwards."""
        if sent is None:
            values.zero_()
            return
        for part in sent.cut.parts:
            if part.reducer == sent.own:
                values[part.start : part.stop].zero_()
        for chunk in sent.chunks(self._layout):
            if CODECS[chunk.codec].is_sparse:
                brought = values[chunk.start : chunk.stop]
                encoded, arrived = bytearray(chunk.encoded_bytes), torch.empty_like(brought)
                encode_into(brought, chunk.codec, encoded, name="what was sent")
                decode_into(arrived, chunk.codec, encoded, "float32")
                brought.sub_(arrived)

    @staticmethod
    @torch.no_grad()
    def mix(
        own: Tensor, theirs: Tensor, lost: Tensor, momentum: Tensor, turn: int, keeps: float
    ) -> None:
        """Take a step over into this peer's own values of one tensor.

        own: of any shape and device; theirs (theta_start), lost, momentum: [values]

        Where it was their turn, they are mixed with theta_start: `keeps` of the own ones, without
        what was lost of them, which is put back afterwards. The others are not in the average, and
        move as far as theta_start does.
        """
        due = slice(turn % ONE_IN, None, ONE_IN)
        flat = own.flatten()  # a view of it, unless its memory is in another order
        mixed = flat[due].lerp((theirs[due] - lost[due]).to(own.device), 1.0 - keeps)
        OuterStep.drift(flat, momentum.to(own.device))
        flat[due] = mixed
        own.copy_(flat.view(own.shape))

    @staticmethod
    @torch.no_grad()
    def follow(own: Tensor, averaged: Tensor, momentum: Tensor) -> None:
        """Move this peer's own values of one tensor as far as theta_start went, because it has
        brought none of them to the round.

        own: of any shape and device; averaged, momentum: [values]
        """
        own.add_(averaged.view(own.shape).to(own.device), alpha=-OUTER_LEARNING_RATE)
        OuterStep.drift(own, momentum.view(own.shape).to(own.device))


class Diverged(PotluckError):
    """A parameter is infinite or NaN after local steps: this peer's model is broken."""


MIXING = 0.5
"""The share of its own parameters that a peer keeps when it takes over an exchanged fragment. The
Streaming DiLoCo paper takes 0.5: 1 would take over nothing, and 0 would lose the steps that were
made beside the exchange."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """What one round averages: some of the model's parameters.

    - `layout`: of the round.
    - `place`: in the flat tensors of the outer step.
    - `lost`: what a coarse codec has lost of them.
    - `turns`: which of them a sparse codec sends.
    """

    parameters: Parameters
    layout: Layout
    place: slice
    lost: LostValues
    turns: SparseTurns


class LocalSteps:
    """Many local steps, then one round that averages how far they went.

        each batch:  theta <- inner step of this peer alone, with its own gradients
        each epoch:  theta <- outer step from theta_start with the average of (theta_start - theta)

    A round is due when all peers together have computed H times the target batch: if they are
    alike, each has made some H steps. A peer's weight is its samples.

    With F > 1 fragments (fragments.py), the round of epoch e averages only fragment p = e mod F,
    and is due F times as often. It goes on beside the next local steps (`delayed`). When its step
    is made, the peer mixes the fragment with its own, at the end of the batch that it computes
    (Streaming DiLoCo, algorithm 2):

        theta_m,p <- alpha theta_m,p + (1 - alpha) theta_p

    theta_m is this peer's own, theta_p is theta_start of the fragment after its outer step, and
    alpha is MIXING. The paper's tau, how many local steps go on beside an exchange, is not set: a
    fragment is mixed in as soon as it is there, and before the next round begins, so after H/F
    target batches at most.

    The state is theta_start with the outer momentum and the schedule: equal to the bit at all
    peers. The inner optimizer's statistics belong to each peer; a newcomer begins with fresh ones,
    as in the paper.

    A pseudo-gradient that travels in a coarse codec goes with what was lost of the ones before
    (`LostValues`). With a sparse codec, peers keep what was not sent in their own parameters, which
    then differ also after a step without fragments, and mix in only what was exchanged
    (`SparseTurns`).

    Invariant: `_epoch` is the state's.

    Easy to get wrong: after a failed round the local steps stay in the parameters, and the next
    round takes them all together. Nothing is lost. A delayed round makes its step in a thread of
    its own, which may not touch the model; and the schedule is stepped there, while the training
    thread may use the learning rates.
    """

    kind = "pseudo-gradients"
    launches = False

    def __init__(
        self,
        parameters: Parameters,
        factory: Factory,
        scheduler: Scheduler | None,
        *,
        max_norm: float | None,
        codec: Codecs,
        scales_loss: bool,
        buffers: dict[str, Tensor],
        fragments: int = 1,
        delayed: bool = False,
    ) -> None:
        """`delayed`: rounds go on beside the next local steps."""
        self._own = parameters
        self.inner = InnerStep(parameters, factory, scheduler, max_norm)
        self.scale = LossScale()
        self.scales_loss = scales_loss
        self._fragments = _fragments(parameters, codec, fragments)
        self.layouts: Sequence[Layout] = tuple(one.layout for one in self._fragments)
        placed = parameters if fragments == 1 else _in_order(parameters, self._fragments)
        self._outer = OuterStep(placed.copy_into(placed.buffer(on_host=True)))
        self.shared = _as_parameters(placed, self._outer.start)
        largest = [LARGEST_CARRIED["none"]] * len(parameters.names)
        self._averageable = Averageable(parameters, largest)
        longest = max((one.parameters for one in self._fragments), key=lambda one: one.values)
        self._difference = longest.buffer(LOSS_VALUES, on_host=True)
        self._epoch = 0
        self._taken, self._has_brought = self._fragments[0], False
        self._delayed = delayed
        self._keeps = MIXING if delayed else 0.0
        self._stepped: int | None = None
        self._to_mix: list[int] = []
        self._is_given_up = False
        self._scheduling = threading.Lock()
        self._samples = 0
        self._loss_sums = torch.zeros(LOSS_VALUES, dtype=self._difference.dtype)
        self._buffers = StepBuffers(buffers)

    @property
    def loss_factor(self) -> float:
        return self.scale.scale if self.scales_loss else 1.0

    def add(self, samples: int, loss: float | Tensor | None = None) -> str | None:
        loss = None if loss is None else float(loss)
        if self._is_given_up:
            self.reset()  # or what this batch adds would be given up with the batches before it
        gradients = dense_gradients(self._own)
        wrong = self._averageable.first_wrong(gradients)
        if wrong is not None and (not self.scales_loss or self.scale.is_smallest):
            return wrong
        if self.scales_loss:
            # Local steps are not shared, so neither is their scale: it adapts at each of them.
            if wrong is None:
                self._divide(self.scale.scale)
            self.scale = self.scale.after(0.0 if wrong is None else 1.0)
        if wrong is None:
            self._step_locally()
        self._count(samples, loss)
        return None

    def found_wrong(self) -> FoundWrong | None:
        return None

    def take(self) -> Contribution:
        self._taken, turn = self._at(self._epoch)
        fragment = self._taken
        difference = self._difference[: fragment.layout.values]
        values, losses = _parts(difference)
        fragment.parameters.copy_into(values)
        self._outer.pseudo_gradient(values, out=values, place=fragment.place)
        fragment.lost.add_to(values)
        _check_finite(fragment.parameters, values)
        fragment.turns.keep_only_due(values, turn)
        samples = self._samples
        self._has_brought = samples > 0
        torch.div(self._loss_sums, max(samples, 1), out=losses)
        self._forget_samples()
        return Contribution(difference, samples)

    def put_back(self, contribution: Contribution) -> None:
        self._samples += contribution.samples
        self._loss_sums.add_(_parts(contribution.values)[1], alpha=contribution.samples)

    def done_with(self, contribution: Contribution, sent: SentParts | None = None, /) -> None:
        if sent is None:
            self._taken.lost.forget()
        elif contribution.samples:  # without samples nothing was sent
            self._taken.lost.keep(contribution.values, sent)
        if self._taken.turns and contribution.samples:
            self._taken.turns.keep_lost(contribution.values, sent)
        if self._stepped is not None:
            self._to_mix.append(self._stepped)
            self._stepped = None
            if not self._delayed:
                self.take_over()

    def drop(self) -> None:
        self._forget()
        if self._delayed:
            self._is_given_up = True  # until the training thread takes over
        else:
            self.reset()

    def apply(self, averaged: Tensor) -> StepOutcome:
        fragment, _ = self._at(self._epoch)
        values, losses = _parts(averaged)
        self._outer.step(values, fragment.place)
        if fragment.turns and not self._has_brought:
            self._difference[: len(values)].copy_(values)  # for `_mix`; nobody got what was there
        with self._scheduling:
            rate = self.inner.epoch_ended()
        self._buffers.keep()
        self._stepped = self._epoch  # `done_with` says what was lost of what this peer brought
        self._epoch += 1
        if not (self._delayed or fragment.turns):
            self.reset()
        return StepOutcome(0.0, norm=None, loss=loss_of(*losses.tolist()), learning_rate=rate)

    def take_over(self) -> None:
        if self._is_given_up:
            self.reset()
        while self._to_mix:
            self._mix(*self._at(self._to_mix.pop()))

    def _at(self, epoch: int) -> tuple[Fragment, int]:
        """What the round of an epoch averages, and how many rounds have averaged it before."""
        turn, place = divmod(epoch, len(self._fragments))
        return self._fragments[place], turn

    @torch.no_grad()
    def _mix(self, fragment: Fragment, turn: int) -> None:
        """theta_m,p <- alpha theta_m,p + (1 - alpha) theta_p, for what was exchanged."""
        own, outer, place = fragment.parameters, self._outer, fragment.place
        flat = (outer.start[place], self._difference[: own.values], outer.momentum[place])
        views = zip(*map(own.views, flat), strict=True)
        for one, is_sparse, (theirs, kept, momentum) in zip(
            own.tensors, fragment.turns.is_sparse, views, strict=False
        ):
            if is_sparse and not self._has_brought:
                SparseTurns.follow(one, kept, momentum)
            elif is_sparse:
                rows = theirs.view(-1), kept.view(-1), momentum.view(-1)
                SparseTurns.mix(one, *rows, turn, self._keeps)
            else:
                one.lerp_(theirs.to(one.device), 1.0 - self._keeps)

    def reset(self) -> None:
        self._is_given_up, self._stepped = False, None
        self._to_mix.clear()
        for one in self._fragments:
            one.parameters.copy_from(self._outer.start[one.place])

    def look(self, run: str, epoch: int, history: bytes) -> LiveState:
        return look(
            self.shared.everything,
            self._buffers.kept.items(),
            None,
            self.inner.scheduler,
            self.extra(),
            run=run,
            epoch=epoch,
            history=history,
        )

    def restore(self, state: TrainingState) -> None:
        own, momentum = self._outer.momentum, state.extra.get("outer_momentum")
        if (
            not isinstance(momentum, Tensor)
            or momentum.shape != own.shape
            or momentum.dtype is not own.dtype
        ):
            raise StateRefused("The state has no momentum of outer steps for this model.")
        restore(
            state, self.shared.everything, self._buffers.kept.items(), None, self.inner.scheduler
        )
        own.copy_(momentum)
        self._epoch = state.epoch
        self._buffers.give_back()
        self._forget()
        self.reset()
        self._set_learning_rates()

    def extra(self) -> dict[str, Any]:
        return {"outer_momentum": self._outer.momentum}

    def _set_learning_rates(self) -> None:
        """Set the rates by hand: the inner optimizer was not restored, and most schedules set its
        rates only when they step."""
        if self.inner.scheduler is not None:
            rates = self.inner.scheduler.get_last_lr()
            for group, rate in zip(self.inner.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _step_locally(self) -> None:
        """An inner step; then take over a fragment that came meanwhile."""
        with self._scheduling:
            self.inner.step_locally()
        self.take_over()

    def _count(self, samples: int, loss: float | None) -> None:
        self._samples += samples
        self._loss_sums.add_(
            torch.tensor(loss_values(loss), dtype=self._loss_sums.dtype), alpha=samples
        )

    def _forget_samples(self) -> None:
        self._samples = 0
        self._loss_sums.zero_()

    def _forget(self) -> None:
        self._forget_samples()
        for one in self._fragments:
            one.lost.forget()

    @torch.no_grad()
    def _divide(self, scale: float) -> None:
        torch._foreach_div_([one.grad for one in self._own.tensors if one.grad is not None], scale)


def _fragments(parameters: Parameters, codec: Codecs, count: int) -> list[Fragment]:
    sizes = [(name, one.numel()) for name, one in parameters.trained]
    tensors, segments = dict(parameters.trained), {}
    for one in parameters.segments(codec):
        segments[one.name] = one
    losses = Segment(LOSS, LOSS_VALUES, parameters.codec_of("none"))
    found: list[Fragment] = []
    for names in fragments_of(sizes, count):
        own = Parameters((name, tensors[name]) for name in names)
        layout = Layout((*(segments[name] for name in names), losses))
        start = found[-1].place.stop if found else 0
        place = slice(start, start + own.values)
        lost, turns = LostValues(layout, own.values), SparseTurns(layout)
        found.append(Fragment(own, layout, place, lost, turns))
    return found


def _in_order(parameters: Parameters, fragments: Sequence[Fragment]) -> Parameters:
    """The same parameters, fragment by fragment, and the frozen ones."""
    trained = [pair for one in fragments for pair in one.parameters.trained]
    frozen = [(name, one) for name, one in parameters.everything if not one.requires_grad]
    return Parameters([*trained, *frozen])


def _parts(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The parameters' values of a round, and the loss values behind them."""
    return flat[:-LOSS_VALUES], flat[-LOSS_VALUES:]


def _check_finite(parameters: Parameters, values: Tensor) -> None:
    for name, view in zip(parameters.names, parameters.views(values), strict=True):
        if not bool(torch.isfinite(view).all()):
            raise Diverged(
                f"{name} is not finite any more.",
                why="The local steps have diverged: the learning rate is too large, or a batch "
                "was broken.",
                advice="Clip (max_norm), or lower the inner learning rate, and start again: "
                "the run's state is fetched from the others.",
            )


def _as_parameters(parameters: Parameters, flat: Tensor) -> Parameters:
    """Views of a flat tensor under the parameters' names. Frozen tensors are shared."""
    views = dict(zip(parameters.names, parameters.views(flat), strict=True))
    return Parameters(
        (name, torch.nn.Parameter(views[name]) if name in views else one)
        for name, one in parameters.everything
    )
