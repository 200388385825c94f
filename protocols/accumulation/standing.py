"""Where this peer stands in the run: its lifecycle, its state's epoch, and what others are told.

    standing = Standing(bridge, steps, mode, history=first, signature=signature)
    effects = standing.count(batch)                 # the gradients in `.grad`
    effects = standing.tell(Estimated(...))         # the effects that are left to carry out

Two threads report events to the lifecycle: the training thread, and that of a delayed round.
Effects on the accumulated gradients (keep, drop, put back) are carried out here at once, under the
lock of the report, and this peer's progress is published. Effects that take long are returned to
the caller: rounds, steps, fetching.

Easy to get wrong: the epoch and history that others read with the state (`at`) are those of its
tensors. They change together with the tensors, under the state's lock. The `Life` is ahead of them
while a step is being made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocols.accumulation.accumulator import Contribution
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.claims import Brought
from protocols.accumulation.decided_steps import DecidedSteps
from protocols.accumulation.events import (
    GradientsDropped,
    HeldBack,
    RoundFailed,
    SeenStep,
    StepLoss,
)
from protocols.accumulation.lifecycle import (
    Announce,
    Averaged,
    Contributed,
    DropGradients,
    Effect,
    Estimated,
    Event,
    FoundNotFinite,
    HoldBack,
    KeepGradients,
    Life,
    Lifecycle,
    Mode,
    Phase,
    Step,
    StepAlone,
)
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.progress_slot import (
    LARGEST_SAMPLES,
    LONGEST_DEVICE,
    LONGEST_SECONDS,
    LONGEST_TORCH,
    ProgressSlot,
)
from protocols.accumulation.results import CommittedResult, Made, ResultLayouts, ResultsKept
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.steps import Steps
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.moshpit.layout import Layout
from protocols.moshpit.outcome import Committed, Outcome


@dataclass(eq=False)
class OwnRound:
    """One round of this peer, from taking its contribution to the end of its step."""

    contribution: Contribution
    expected: int
    began: float
    accumulating_seconds: float
    waiting_since: float | None = None
    """Since when the training thread waited for its end, if it did."""
    ended: float = 0.0
    outcome: Outcome | None = None
    made: Made | None = None
    """The source of the step, if one follows."""

    def waited_seconds(self) -> float:
        return 0.0 if self.waiting_since is None else time.monotonic() - self.waiting_since


@dataclass(frozen=True)
class Batch:
    """Samples whose mean gradient is in `.grad`. `trouble`: why they cannot count. `loss`: their
    mean loss, if known: on the device only if the steps need not wait for it."""

    samples: int
    trouble: str = ""
    loss: float | Tensor | None = None


class Standing:
    """Invariant: the accumulated gradients, and those in `_round`, are of as many samples as the
    `Life` says. (On a GPU a batch that is not finite counts until the next one, or until the round
    takes the samples.)"""

    def __init__(
        self,
        bridge: Bridge,
        steps: Steps,
        mode: Mode,
        *,
        history: bytes,
        signature: bytes,
        device: str = "",
    ) -> None:
        self._bridge, self._steps, self._mode = bridge, steps, mode
        self._signature = signature
        self._device = "" if mode.auxiliary else device[:LONGEST_DEVICE]
        self._lifecycle = Lifecycle(mode, epoch=0, history=history)
        self._telling = threading.Lock()
        self._round: OwnRound | None = None
        self._epoch_began = time.monotonic()
        self.lock = StateLock()
        self.results = ResultsKept(
            ResultLayouts(steps.layouts, Layout(steps.shared.segments("none")))
        )
        """The results that the last steps were made of, for peers that follow."""
        self.at = (0, history)
        """Epoch and history of the state."""
        self.model_epoch = 0
        """The epoch of the model's parameters. With delayed steps it is behind the state's."""
        self.rounds_failed = 0
        """Failed rounds in a row, of this epoch."""
        self._batch, self._computes, self._leaves = 0, False, False
        self._batch_seconds = 0.0
        self.decided = DecidedSteps()
        """Steps that this epoch's rounds decided, and that perhaps only others have made."""

    @property
    def life(self) -> Life:
        return self._lifecycle.life

    # -- reporting events

    def count(self, batch: Batch) -> list[Effect]:
        """Count a batch. If it is not finite it does not count, and an event says why."""
        parameter, trouble = "", batch.trouble
        with self._telling:
            self._batch, self._computes = batch.samples, False
            if not trouble and self.life.counts_batches:
                parameter = self._steps.add(batch.samples, batch.loss) or ""
                trouble = _not_finite(parameter) if parameter else ""
            contributed = Contributed(batch.samples, finite=not trouble)
            effects = self._rest(self._lifecycle.take(contributed))
            self._uncount_what_was_found_wrong(in_round=False)
            self._bridge.note(self.slot())
        if any(isinstance(one, HoldBack) for one in effects):
            self._bridge.tell(HeldBack(self.life.epoch, batch.samples, trouble, parameter))
        return [one for one in effects if not isinstance(one, HoldBack)]

    def _uncount_what_was_found_wrong(self, *, in_round: bool) -> None:
        wrong = self._steps.found_wrong()
        if wrong is None:
            return
        self._lifecycle.take(FoundNotFinite(wrong.samples, in_round))
        trouble = _not_finite(wrong.parameter)
        self._bridge.note(self.slot())
        self._bridge.tell(HeldBack(self.life.epoch, wrong.samples, trouble, wrong.parameter))

    def is_to_compute(self, samples: int, seconds: float) -> None:
        """Set the samples and the duration of a batch, as known before the first; 0: unknown."""
        self._batch, self._batch_seconds = samples, seconds

    def begin_batch(self, *, is_waited_for: bool = True) -> None:
        """This peer begins to compute the next batch. The others are told of it only if a round is
        to wait for it."""
        with self._telling:
            self._computes, self._leaves = is_waited_for and not self._mode.auxiliary, False
            self._bridge.note(self.slot())

    def computes_no_more(self) -> None:
        """This peer computes no more batches, and only brings what it has."""
        with self._telling:
            self._computes, self._leaves = False, True
            self._bridge.note(self.slot(), at_once=True)

    def tell(self, event: Event) -> list[Effect]:
        with self._telling:
            return self._rest(self._lifecycle.take(event))

    def end_round(self, ended: Averaged, brought: Brought) -> list[Effect]:
        """Report how a round ended, with what each member brought to it."""
        with self._telling:
            self._lifecycle.take(Estimated(self._bridge.estimate))
            effects = self._lifecycle.take(ended)
            applied = any(isinstance(effect, Step | StepAlone) for effect in effects)
            self._bridge.round_ended(ended, brought, applied=applied)
            return self._rest(effects)

    def _rest(self, effects: tuple[Effect, ...]) -> list[Effect]:
        return [effect for effect in effects if not self._done_at_once(effect)]

    def _done_at_once(self, effect: Effect) -> bool:
        match effect:
            case KeepGradients(reason=reason, samples=samples):
                if self._round is not None:
                    self._steps.put_back(self._round.contribution)
                    self._round = None
                self.rounds_failed += 1
                self._bridge.tell(RoundFailed(self.life.epoch, samples, reason))
            case DropGradients(reason=reason, samples=samples):
                if self._round is not None:
                    self._steps.done_with(self._round.contribution)
                    self._round = None
                self._steps.drop()
                self._bridge.tell(GradientsDropped(self.life.epoch, samples, reason))
            case Announce():
                self._bridge.note(self.slot(), at_once=True)
            case _:
                return False
        return True

    # -- the round that is under way

    def begin_round(self, expected: int) -> OwnRound:
        """Begin a round with everything accumulated."""
        now = time.monotonic()
        with self._telling:
            contribution = self._steps.take()
            self._uncount_what_was_found_wrong(in_round=True)
            self._round = OwnRound(contribution, expected, now, now - self._epoch_began)
        self._epoch_began = now
        return self._round

    def is_in_step(self, one: OwnRound) -> None:
        """The round's samples are in the parameters now."""
        with self._telling:
            self.rounds_failed = 0
            self.decided.clear()
            self._round = None
        sent = one.outcome.sent if isinstance(one.outcome, Committed) else None
        # What was lost of a large model takes seconds to compute, and the training thread goes on.
        self._steps.done_with(one.contribution, sent)

    # -- the state

    def look(self) -> LiveState:
        """The live state, not copied. Call it with the lock held for reading."""
        return self._steps.look(self._bridge.settings.run, *self.at)

    def begin_from(self, state: TrainingState) -> None:
        """Begin from this state instead of the model's own, before anything was published."""
        self._steps.restore(state)
        self.at = (state.epoch, state.history)
        self.model_epoch = state.epoch
        self._lifecycle = Lifecycle(self._mode, epoch=state.epoch, history=state.history)

    def take_state(
        self, state: TrainingState | None, results: Sequence[CommittedResult] = ()
    ) -> tuple[tuple[SeenStep, ...], tuple[StepLoss, ...]]:
        """Replace the state, if one is given, and make the steps that the run has made since from
        their `results`: the same steps as at all others. Returns the steps in whose rounds this
        peer was, and the losses of all of them."""
        losses: list[StepLoss] = []
        passed = [one.after for one in results]
        with self.lock.changing():
            self.results.take_over(results)
            if state is not None:
                self._steps.restore(state)
                self.at = (state.epoch, state.history)
                passed.append(Lineage(*self.at))
            for one in results:
                values = one.values(self.results.layouts)
                if one.kind == "parameters":
                    self._steps.shared.copy_from(values)
                else:
                    loss = self._steps.apply(values).loss
                    if loss is not None:
                        losses.append(StepLoss(one.before.epoch, loss))
                self.at = one.after
            self._steps.reset()
            self.model_epoch = self.at[0]
        with self._telling:
            seen = self.decided.passed(passed)
        self.rounds_failed = 0
        self._epoch_began = time.monotonic()
        self._bridge.state_advanced()
        return seen, tuple(losses)

    def take_over(self) -> None:
        """Let the model compute with the newest step."""
        self._steps.take_over()
        self.model_epoch = self.at[0]

    # -- what others are told

    def slot(self) -> ProgressSlot:
        """This peer's progress. Trio's side adds the state's digest, the rate and the times."""
        life = self.life
        is_averaging = life.phase is Phase.AVERAGING
        return ProgressSlot(
            epoch=life.epoch,
            history=life.history,
            samples=life.published_samples,
            samples_per_second=0.0,
            signature=self._signature,
            role="auxiliary" if self._mode.auxiliary else "trains",
            torch=torch.__version__[:LONGEST_TORCH],
            averaging=is_averaging,
            # one that lost its checkpoints may not begin the run, and others may not begin with it
            keeps=self._bridge.keeper is not None
            and (self._bridge.settings.begins or life.epoch > 0),
            follows=life.follows,
            batch=min(self._batch, LARGEST_SAMPLES),
            batch_seconds=min(self._batch_seconds, LONGEST_SECONDS),
            under_way=0.0 if self._computes and life.counts_batches else -1.0,
            beside=life.samples if is_averaging else 0,
            leaves=self._leaves,
            device=self._device,
        )


def _not_finite(parameter: str) -> str:
    return f"{parameter}.grad is not finite."
