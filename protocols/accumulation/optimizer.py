"""The optimizer that many peers share: a drop-in around any torch optimizer.

    optimizer = CollaborativeOptimizer(model.named_parameters(), torch.optim.AdamW, bridge)
    for batch in batches:
        optimizer.zero_grad()
        with optimizer.autocast():
            loss = loss_of(model, batch)
        optimizer.scaled(loss).backward()
        optimizer.step(samples=len(batch), loss=loss)

`step` adds the gradients to those that this peer has for the epoch, and returns. When all peers
together have the target batch, it averages the gradients, weighted by samples, and steps the inner
optimizer: the same step at every peer, as one computer with the whole batch would make it. A new
optimizer first looks at the run, and fetches its state if the run is further; `step` does so
whenever this peer has fallen behind.

Promises: the gradients may be changed or freed as soon as `step` returns. `step` waits for the
network only in a round, while a state is fetched, while the next batch would be too late for the
round, and while all places in the rounds are taken. (With `delayed`, it waits for a round only if
this peer's part of the next one is computed before that round has ended.) Options that cannot work
together are refused with a named error when the optimizer is made.

Easy to get wrong: the loss is the *mean* over the batch's samples, and `samples` is their number.
The inner optimizer, its schedule and `max_norm` are those for the whole batch, and the schedule
counts the run's steps.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final, Literal, TypeGuard

import msgspec
import torch
from torch import Tensor

from protocols.accumulation.bridge import Bridge
from protocols.accumulation.driver import Driver
from protocols.accumulation.lifecycle import Mode
from protocols.accumulation.local_steps import LocalSteps
from protocols.accumulation.options import autocast_to, check_options, description_of, first_of
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.standing import Batch
from protocols.accumulation.state_manifest import StateRefused, read_manifest
from protocols.accumulation.steps import Factory, GradientSteps, Scheduler, Steps
from protocols.accumulation.training_state import TrainingState
from protocols.errors import ProtocolMisuse
from protocols.tensors import is_on_gpu, raw_bytes

# ---- a state on disk: a dictionary of two tensors
#
#   safetensors.torch.save_file(optimizer.state_dict(), path)
#   optimizer.load_state_dict(safetensors.torch.load_file(path))
#
# Easy to get wrong: what is read from disk may be damaged, or something else. It is checked against
# the digests in its own manifest before anything is taken from it.

MANIFEST, STREAM = "potluck manifest", "potluck state"


def to_saved(state: TrainingState) -> dict[str, Any]:
    """The state as a dictionary. It shares the state's memory."""
    return {
        MANIFEST: torch.frombuffer(bytearray(state.body), dtype=torch.uint8),
        STREAM: state.memory,
    }


def from_saved(saved: Mapping[str, Any]) -> TrainingState:
    """The state in a dictionary. StateRefused unless it is complete and undamaged."""
    manifest, memory = saved.get(MANIFEST), saved.get(STREAM)
    if not (_is_bytes(manifest) and _is_bytes(memory)):
        raise StateRefused(
            "This is no state of a collaborative optimizer.",
            why="It was not made by its state_dict().",
            advice="Load the state of a plain torch optimizer into a plain torch optimizer.",
        )
    body = bytes(raw_bytes(manifest))
    header = read_manifest(body)
    if header.stream_bytes != len(memory):
        raise StateRefused("The saved state is not whole: bytes of it are missing.")
    state = TrainingState(msgspec.structs.replace(header, pieces=b""), memory)
    if state.body != body:
        raise StateRefused("The saved state is damaged: its bytes are not those of its manifest.")
    return state


def _is_bytes(value: object) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.dtype is torch.uint8
        and value.dim() == 1
        and value.device.type == "cpu"
    )


__all__ = ["CollaborativeOptimizer", "Factory", "Precision", "Scheduler"]

Precision = Literal["float32", "bf16", "fp16"]

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
NEWS_SECONDS = 5.0  # the longest wait of an auxiliary peer between two checks


class CollaborativeOptimizer(torch.optim.Optimizer):
    """Make one for each bridge. All its methods are for one thread, the training thread.

    - `named_parameters`: of the model, in float32 or float64. Frozen ones are left as they are.
    - `factory`: makes the inner optimizer from (name, parameter) pairs, as torch's constructors do.
    - `scheduler`: makes its schedule, which is stepped once for each step of the run.
    - `delayed`: compute the next batch while the last one is averaged and stepped with, so that its
      gradients are exactly one step old. For links over which a round takes a good part of an
      epoch.
    - `local_steps`: with H > 1 each peer makes steps by itself, and the peers average how far they
      went (DiLoCo) when they have H target batches together. For links that are hundreds of times
      too slow.
    - `fragments`: with local steps and F > 1 the parameters are exchanged in F fragments, one after
      the other, beside the local steps (Streaming DiLoCo). A step of the run is then an exchange of
      one fragment, with H/F target batches. For the same links, and to make the best of them.
    - `max_norm`: clip the averaged gradient to this norm (with local steps: each peer's own).
    - `average_parameters_every`: after so many steps average the parameters, too, so that machines
      that round differently do not drift apart; 0: never.
    - `last_epoch`: the run is complete after so many steps, and makes no more; 0: it has no end.
    - `powersgd_rank`: send each gradient of a large matrix as two thin ones of so many columns
      (powersgd.py); 0: as it is. What these leave out is sent later.
    - `precision`: what `autocast` computes in; fp16 with a loss scale on which all peers agree.
    - `offload`: keep this peer's copies for averaging on the host, and nothing beyond what a plain
      optimizer needs on the device. Each batch's gradients are then added up on the host; with
      `delayed` the optimizer is there, too, and stepped by the processor. Local steps keep their
      copies on the host anyway. On a device, a step of the run leaves `.grad` None, unless it is
      `delayed`.
    - `auxiliary`: bring no gradients, but reduce for the others and make their steps (`assist`).
    - `buffers`: `model.named_buffers()`, if a newcomer needs them.
    - `further`: what else all peers of the run must have alike, by name, such as the settings of
      parts of the model that are not averaged; those whose words differ do not train together.
    - `batch`, `batch_seconds`: samples of one batch, and how long one takes, if that is known
      before the first: all peers plan the first steps with it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        factory: Factory,
        bridge: Bridge,
        *,
        scheduler: Scheduler | None = None,
        delayed: bool = False,
        local_steps: int = 1,
        fragments: int = 1,
        max_norm: float | None = None,
        average_parameters_every: int = 0,
        last_epoch: int = 0,
        powersgd_rank: int = 0,
        precision: Precision = "float32",
        auxiliary: bool = False,
        offload: bool = False,
        buffers: Iterable[tuple[str, Tensor]] = (),
        further: Mapping[str, str] = NOTHING,
        batch: int = 0,
        batch_seconds: float = 0.0,
    ) -> None:
        check_options(
            delayed=delayed,
            local_steps=local_steps,
            fragments=fragments,
            max_norm=max_norm,
            average_parameters_every=average_parameters_every,
            last_epoch=last_epoch,
            precision=precision,
            auxiliary=auxiliary,
            codec=bridge.settings.codec,
            powersgd_rank=powersgd_rank,
            approximate=bridge.settings.approximate,
        )
        settings = bridge.settings
        delayed = delayed or (fragments > 1 and not auxiliary)
        self._parameters = Parameters(named_parameters)
        self._precision, self._auxiliary = precision, auxiliary
        if local_steps > 1:
            self._steps: Steps = LocalSteps(
                self._parameters,
                factory,
                scheduler,
                max_norm=max_norm,
                codec=settings.codec,
                scales_loss=precision == "fp16",
                buffers=dict(buffers),
                fragments=fragments,
                delayed=delayed,
            )
        else:
            self._steps = GradientSteps(
                self._parameters,
                factory,
                scheduler,
                delayed=delayed,
                max_norm=max_norm,
                codec=settings.codec,
                scales_loss=precision == "fp16",
                buffers=dict(buffers),
                offload=offload,
                powersgd_rank=powersgd_rank,
            )
        self._inner = self._steps.inner.optimizer
        super().__init__(self._parameters.tensors, {})
        self._show_inner()
        mode = Mode(
            target_samples=settings.target_batch * local_steps // fragments,
            delayed=delayed,
            auxiliary=auxiliary,
            parameters_every=average_parameters_every,
            last_epoch=last_epoch,
        )
        description = description_of(
            self._steps,
            target_batch=settings.target_batch,
            local_steps=local_steps,
            fragments=fragments,
            max_norm=max_norm,
            average_parameters_every=average_parameters_every,
            group_size=settings.group_size,
            approximate=settings.approximate,
            powersgd_rank=powersgd_rank,
            further=further,
        )
        self._driver = Driver(
            bridge,
            self._steps,
            mode,
            history=first_of(self._steps, settings.run, description.digest),
            description=description,
            batch=batch,
            batch_seconds=batch_seconds,
            device=self._parameters.device.type,
        )
        self._driver.enter()
        self._show_inner()

    @property
    def epoch(self) -> int:
        """How many steps the run made to reach this state."""
        return self._driver.standing.at[0]

    @property
    def epoch_returned(self) -> int:
        """The epoch when the last call returned. With `delayed`, the run may be further by now."""
        return self._driver.epoch_returned

    @property
    def model_epoch(self) -> int:
        """The epoch of the parameters in the model. With `delayed`, they are one step older than
        the state from when a step is made until the peers' next batch is full. With `fragments`,
        the last step that the model has a part of for certain."""
        return self._driver.standing.model_epoch

    @property
    def history(self) -> bytes:
        """Sixteen bytes that are equal at peers that made the same steps."""
        return self._driver.standing.at[1]

    @property
    def waiting_samples(self) -> int:
        """How many samples this peer has counted that are in no step yet."""
        life = self._driver.standing.life
        return life.samples + life.in_round

    def autocast(self) -> AbstractContextManager[Any]:
        """torch.autocast to the chosen precision on the parameters' device."""
        return autocast_to(self._precision, self._parameters.device.type)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the agreed scale (fp16), or the loss itself. Call `backward` on it."""
        return loss * self._steps.loss_factor if self._steps.scales_loss else loss

    _step_supports_amp_scaling = True
    """Makes a torch.amp.GradScaler leave the batch to `step`, and set `grad_scale` and `found_inf`
    here before it calls `step`."""

    def step(  # type: ignore[override]
        self, closure: None = None, *, samples: int, loss: Tensor | float | None = None
    ) -> bool:
        """Count the gradients in `.grad`, the mean over this many samples. Returns whether the run
        has moved on since the last call: by a step, or by steps of others that this peer took over.

        The run's loss (`StepTaken.loss`) is the mean of the losses that all peers pass here. A
        batch whose loss or gradients are not finite does not count, and an event says so (for
        gradients, with the parameter's name). On a GPU without a loss scale neither is waited for:
        the event comes with the next batch, and a loss that is not finite is unknown.

        Raises CollaborationEnded when the collaboration has ended, and StateRefused when the run
        has another model, or another release of torch.
        """
        if closure is not None:
            raise ProtocolMisuse(
                "A closure was given to step().",
                why="It would be called once, although peers need not compute at the same time.",
                advice="Compute the gradients before, and give the number of samples.",
            )
        if vars(self).pop("found_inf", None) is not None:
            vars(self).pop("grad_scale")
            raise ProtocolMisuse(
                "A torch GradScaler does not go with a collaborative optimizer.",
                why="All peers have to agree on one loss scale, and on which batches overflowed: a "
                "scaler of one peer's own would skip its batches in silence.",
                advice='Take precision="fp16" when the optimizer is made, and call '
                "optimizer.scaled(loss).backward() and optimizer.step() without the scaler.",
            )
        if self._auxiliary:
            raise ProtocolMisuse(
                "An auxiliary peer has no gradients.", advice="Call assist() instead of step()."
            )
        if samples < 1:
            raise ProtocolMisuse(f"A batch of {samples} samples was given to step().")
        has_stepped = self._driver.contribute(self._batch_of(samples, loss))
        self._show_inner()
        return has_stepped

    def _batch_of(self, samples: int, loss: Tensor | float | None) -> Batch:
        if isinstance(loss, Tensor) and is_on_gpu(loss) and self._steps.launches:
            return Batch(samples, loss=loss.detach())  # to read it would be to wait for the batch
        value = float(loss.detach() if isinstance(loss, Tensor) else loss or 0.0)
        trouble = "" if math.isfinite(value) else f"The loss is {value}."
        return Batch(samples, trouble, None if loss is None else value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what the peers average is fixed when the optimizer is made."""
        if hasattr(self, "_driver"):
            raise ProtocolMisuse(
                "A param group cannot be added to a collaborative optimizer.",
                why="All peers average the same tensors, in the same order.",
                advice="Give all parameters when it is made, and their groups in the factory.",
            )
        # as it is without the wrapper that loads torch's compiler (models/uncompiled.py)
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch: drop the gradients of the last batch. Samples that were counted stay."""
        for one in self._parameters.tensors:
            if set_to_none or one.grad is None:
                one.grad = None
            else:
                one.grad.detach_().zero_()

    def assist(self, *, epochs: int | None = None, seconds: float = math.inf) -> None:
        """Auxiliary mode: reduce for the others and make their steps. Returns after this many
        epochs or seconds, when the round under way has ended. Raises CollaborationEnded when the
        collaboration ends."""
        if not self._auxiliary:
            raise ProtocolMisuse(
                "A peer that trains cannot only assist.",
                advice="Make the optimizer with auxiliary=True.",
            )
        first, until = self.epoch, time.monotonic() + seconds
        self._driver.go_on()
        while epochs is None or self.epoch < first + epochs:
            left = until - time.monotonic()
            if left <= 0.0:
                break
            self._driver.wait_for_news(min(NEWS_SECONDS, left))
            self._driver.go_on()
        self._show_inner()

    def finish(self) -> None:
        """Wait for a delayed step that is under way, and take it over into the model. Call it
        before the model is saved or evaluated. Without `delayed` there is nothing to wait for.

        With local steps, the model has this peer's own parameters afterwards; if the run is
        complete (`last_epoch`), those of the run. `state_dict` always has those of the run."""
        self._driver.finish()

    def see_out(self, seconds: float) -> bool:
        """Before leaving, bring the accumulated samples to the round that is nearly due, if it
        begins within this time. False if samples are left that will be in no step."""
        seen_out = self._driver.see_out(seconds)
        self._show_inner()
        return seen_out

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """A pause: inside the block the others do not count on this peer or wait for it, and it
        need not compute. Afterwards it looks at the run, and fetches its state if that is further.
        Otherwise the accumulated samples count."""
        with self._driver.away():
            yield
        self._show_inner()

    # -- the user's own checkpoints

    def capture(self) -> TrainingState:
        """A copy of the whole state, with the parameters. Checkpoints are made of it."""
        return self._driver.capture()

    def restore(self, state: TrainingState) -> None:
        """Go on from a captured state. If the run is further, its state is fetched afterwards."""
        self._driver.restore(state)
        self._show_inner()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, with the parameters, as two tensors of bytes, for safetensors."""
        return to_saved(self.capture())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. StateRefused if it is of another model."""
        self.restore(from_saved(state_dict))

    def _show_inner(self) -> None:
        """Show the inner optimizer's groups and statistics as this optimizer's. Torch replaces both
        whenever it loads a state, so they are looked up again after each change."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
