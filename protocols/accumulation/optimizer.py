"""The optimizer that many peers share: a drop-in around any torch optimizer.

    optimizer = CollaborativeOptimizer(model.named_parameters(), torch.optim.AdamW, bridge)
    for batch in batches:
        optimizer.zero_grad()
        with optimizer.autocast():
            loss = loss_of(model, batch)
        optimizer.scaled(loss).backward()
        optimizer.step(samples=len(batch), loss=loss)

`step` adds the gradients to what this peer has for the epoch, and returns. When the peers together
have the target batch it averages, weighted by samples, and steps the inner optimizer: the same step
at every peer, as one computer with the whole batch would have made it. Making the optimizer looks
at the run first, and takes its state if it is further; `step` does so whenever this peer fell
behind.

Promises: the gradients may be changed or freed as soon as `step` returns. It waits for the network
when the batch is full (with `delayed` only if the round before lasts longer than an epoch), and
while a state is fetched. What cannot work together is refused, by name, when it is made.

Easy to get wrong: the loss is the *mean* over the batch's samples, and `samples` their number; the
inner optimizer, its schedule and `max_norm` are those of the whole batch, and the schedule counts
the run's steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from protocols.accumulation.bridge import Bridge
from protocols.accumulation.driver import Driver
from protocols.accumulation.gradient_steps import GradientSteps
from protocols.accumulation.inner_step import Factory, Scheduler
from protocols.accumulation.life import Mode
from protocols.accumulation.local_steps import LocalSteps
from protocols.accumulation.options import autocast_to, check_options, description_of, first_of
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.saved import from_saved, to_saved
from protocols.accumulation.standing import Batch
from protocols.accumulation.steps import Steps
from protocols.accumulation.training_state import TrainingState
from protocols.errors import ProtocolMisuse

__all__ = ["CollaborativeOptimizer", "Factory", "Precision", "Scheduler"]

Precision = Literal["float32", "bf16", "fp16"]

NEWS_SECONDS = 5.0  # after which an auxiliary peer looks up although nothing new was heard


class CollaborativeOptimizer(torch.optim.Optimizer):
    """One for each bridge. Everything in it is for one thread, the training thread.

    - `named_parameters`: of the model, in float32 (or float64); frozen ones are left as they are.
    - `factory`: makes the inner optimizer of (name, parameter) pairs, as torch's own take them.
    - `scheduler`: makes its schedule, which is stepped once for each step of the run.
    - `delayed`: the next batch is computed while the last one is averaged and stepped with, so
      that its gradients are exactly one step old. For links on which a round takes a good part
      of an epoch.
    - `local_steps`: H > 1 lets each peer step by itself, and averages how far it went (DiLoCo) when
      the peers have H target batches together. For links that are hundreds of times too slow.
    - `max_norm`: the averaged gradient is clipped to it (with local steps: each peer's own).
    - `average_parameters_every`: after so many steps the parameters are averaged too, so that
      machines that round unlike do not drift apart; 0 is never.
    - `last_epoch`: the run is complete with so many steps, and no other is made; 0: it has no end.
    - `precision`: what `autocast` computes in; fp16 with a loss scale on which all peers agree.
    - `auxiliary`: brings no gradients, reduces for the others and makes their steps (`assist`).
    - `buffers`: `model.named_buffers()`, where they belong to what a newcomer needs.
    - `batch`: samples of one batch, where that is known before the first: others plan with it.
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
        max_norm: float | None = None,
        average_parameters_every: int = 0,
        last_epoch: int = 0,
        precision: Precision = "float32",
        auxiliary: bool = False,
        buffers: Iterable[tuple[str, Tensor]] = (),
        batch: int = 0,
    ) -> None:
        check_options(
            delayed=delayed,
            local_steps=local_steps,
            max_norm=max_norm,
            average_parameters_every=average_parameters_every,
            last_epoch=last_epoch,
            precision=precision,
            auxiliary=auxiliary,
        )
        self._parameters = Parameters(named_parameters)
        self._precision, self._auxiliary = precision, auxiliary
        if local_steps > 1:
            self._steps: Steps = LocalSteps(
                self._parameters,
                factory,
                scheduler,
                max_norm=max_norm,
                codec=bridge.codec,
                scales_loss=precision == "fp16",
                buffers=dict(buffers),
            )
        else:
            self._steps = GradientSteps(
                self._parameters,
                factory,
                scheduler,
                delayed=delayed,
                max_norm=max_norm,
                codec=bridge.codec,
                scales_loss=precision == "fp16",
                buffers=dict(buffers),
            )
        self._inner = self._steps.inner.optimizer
        super().__init__(self._parameters.tensors, {})
        self._show_inner()
        mode = Mode(
            target_samples=bridge.target_batch * local_steps,
            delayed=delayed,
            auxiliary=auxiliary,
            parameters_every=average_parameters_every,
            last_epoch=last_epoch,
        )
        description = description_of(
            self._steps,
            target_batch=bridge.target_batch,
            local_steps=local_steps,
            max_norm=max_norm,
            average_parameters_every=average_parameters_every,
            group_size=bridge.group_size,
            approximate=bridge.approximate,
        )
        self._driver = Driver(
            bridge,
            self._steps,
            mode,
            history=first_of(self._steps, bridge.run, description.digest),
            description=description,
            batch=batch,
        )
        self._driver.enter()
        self._show_inner()

    @property
    def epoch(self) -> int:
        """How many steps the run had made when it had this state."""
        return self._driver.standing.at[0]

    @property
    def model_epoch(self) -> int:
        """That of the parameters in the model. `delayed`, they are a step older than the state
        from the moment that the step is made until the next batch of all peers is full."""
        return self._driver.standing.model_epoch

    @property
    def history(self) -> bytes:
        """Sixteen bytes that are equal at two peers that made the same steps."""
        return self._driver.standing.at[1]

    def autocast(self) -> AbstractContextManager[Any]:
        """torch.autocast to the chosen precision on the parameters' device."""
        return autocast_to(self._precision, self._parameters.device.type)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the agreed scale (fp16), or the loss itself. Call `backward` on it."""
        return loss * self._steps.loss_factor if self._steps.scales_loss else loss

    _step_supports_amp_scaling = True
    """So that a torch.amp.GradScaler leaves it to `step` what becomes of the batch, and sets
    `grad_scale` and `found_inf` here before it calls that."""

    def step(  # type: ignore[override]
        self, closure: None = None, *, samples: int, loss: Tensor | float | None = None
    ) -> bool:
        """Count the gradients in `.grad`, the mean over so many samples; whether the run stepped.

        The run's loss (`StepTaken.loss`) is the mean of what all peers give here. One that is not
        finite is held back, as gradients are that are not finite: the batch does not count, and an
        event says so with the parameter's name.

        Raises CollaborationEnded when the collaboration has ended; StateRefused when the run has
        another model, or another release of torch.
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
        value = float(loss.detach() if isinstance(loss, Tensor) else loss or 0.0)
        trouble = "" if math.isfinite(value) else f"The loss is {value}."
        known = None if loss is None else value
        has_stepped = self._driver.contribute(Batch(samples, trouble, known))
        self._show_inner()
        return has_stepped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what peers average is decided when the optimizer is made."""
        if hasattr(self, "_driver"):
            raise ProtocolMisuse(
                "A param group cannot be added to a collaborative optimizer.",
                why="All peers average the same tensors, in the same order.",
                advice="Give all parameters when it is made, and their groups in the factory.",
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch: forget the gradients of the last batch. What was counted stays."""
        for one in self._parameters.tensors:
            if set_to_none or one.grad is None:
                one.grad = None
            else:
                one.grad.detach_().zero_()

    def assist(self, *, epochs: int | None = None, seconds: float = math.inf) -> None:
        """Auxiliary mode: reduce for the others and make their steps, until the collaboration ends
        (then CollaborationEnded), until the run has made so many more, or for so long; a round
        that is under way then is seen out."""
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
            self._driver.tell_of_place()
        self._show_inner()

    def finish(self) -> None:
        """Wait for a delayed step that is under way and take it into the model: before the model
        is saved or evaluated. Without `delayed` there is nothing to wait for."""
        self._driver.finish()

    def see_out(self, seconds: float) -> bool:
        """Before leaving: bring what was accumulated to the round that is nearly due, if it begins
        within so many seconds. False if samples are left that will be in no step."""
        seen_out = self._driver.see_out(seconds)
        self._show_inner()
        return seen_out

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """While this is entered the others do not count on this peer, or wait for it, and it has
        to compute nothing: a pause. Then the run is looked at, and its state taken if it is
        further; if it is not, what was accumulated counts."""
        with self._driver.away():
            yield
        self._show_inner()

    # -- the user's own checkpoints

    def capture(self) -> TrainingState:
        """A copy of the whole state, with the parameters: what checkpoints are made of."""
        return self._driver.capture()

    def restore(self, state: TrainingState) -> None:
        """Go on from a captured state. Where the run is further, its state is taken then."""
        self._driver.restore(state)
        self._show_inner()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, with the parameters, as two tensors of bytes: safetensors takes it."""
        return to_saved(self.capture())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; StateRefused, by name, if it is of another model."""
        self.restore(from_saved(state_dict))

    def _show_inner(self) -> None:
        """Its groups and statistics are what a user sees here. Torch makes new ones of both
        whenever it loads a state, so they have to be looked up again after each."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
