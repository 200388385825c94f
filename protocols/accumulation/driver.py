"""Carries out, in the training thread, what the lifecycle of a peer says.

    driver.enter()                          # look at the run; take its state if it is further
    driver.contribute(samples, held_back)   # a batch is done: count it, and go on
    driver.go_on()                          # whatever is to be done now

The loop is the whole of it: tell the lifecycle how the run is, do what comes back in order, until
nothing does. Without `delayed` a round and its step happen within; with it they happen in a thread
of their own, and the training thread waits for that one only when its next round would be full.

Promises: the lifecycle alone decides what is applied, kept or dropped. The epoch and history that
others read with the state are changed together with it, under its lock.

Easy to get wrong: two threads tell the lifecycle things. Whatever they tell, and whatever follows
from it for the accumulated gradients, happens under one lock; what takes long (the exchange, the
step) happens outside of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from protocols.accumulation.accumulator import Contribution
from protocols.accumulation.bridge import Bridge, Entry, FetchWanted, Wanted
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.events import (
    CaughtUp,
    FellBehind,
    FetchingFailed,
    GradientsDropped,
    HeldBack,
    ParametersAveraged,
    RoundFailed,
    ScaleChanged,
    StepTaken,
)
from protocols.accumulation.history import history_after_parameters
from protocols.accumulation.lifecycle import Lifecycle, Mode, Phase
from protocols.accumulation.lifecycle_events import (
    Announce,
    Average,
    AverageParameters,
    Contributed,
    DropGradients,
    Effect,
    Estimated,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    HoldBack,
    KeepGradients,
    LookAgain,
    Restored,
    Step,
    StepAlone,
    Stepped,
)
from protocols.accumulation.progress_slot import LONGEST_TORCH, ProgressSlot
from protocols.accumulation.round_endings import (
    averaged,
    brought_to,
    left_out_of,
    parameters_averaged,
)
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.steps import Steps
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.accumulation.waiting import Answer
from protocols.errors import PotluckError
from protocols.moshpit.layout import Layout
from protocols.moshpit.outcome import Alone, Committed, Outcome
from protocols.moshpit.vector import Vector

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 8.0
"""How long is waited after a state could not be fetched, doubling: its sources may just have
stepped, and a digest is named within a second."""

SHORTEST_WAIT_SECONDS = 0.05  # between two looks at whether a round is due that nearly is


class OtherModel(PotluckError):
    """The run trains another model, or makes its steps in another way."""


@dataclass(eq=False)
class Round:
    """One round of this peer, from taking its contribution to the end of its step."""

    contribution: Contribution
    expected: int
    began: float
    accumulating_seconds: float
    waiting_since: float | None = None
    """From when on the training thread waited for its end, if it did."""
    ended: float = 0.0
    outcome: Outcome | None = None

    def waited_seconds(self) -> float:
        return 0.0 if self.waiting_since is None else time.monotonic() - self.waiting_since


class Driver:
    """For one optimizer."""

    def __init__(
        self,
        bridge: Bridge,
        steps: Steps,
        mode: Mode,
        *,
        history: bytes,
        signature: bytes,
    ) -> None:
        self.steps_taken = 0
        """Of the run, with this peer, since it came."""
        self._bridge, self._steps, self._mode = bridge, steps, mode
        self._signature = signature
        self._lifecycle = Lifecycle(mode, epoch=0, history=history)
        self._telling = threading.Lock()
        self._state_lock = StateLock()
        self._at = (0, history)
        self.model_epoch = 0
        """Of the parameters that the model computes with: delayed, it is behind the state."""
        self._to_do: deque[Effect] = deque()
        """For the training thread; that of a delayed round only adds to it."""
        self._round: Round | None = None
        self._thread: threading.Thread | None = None
        self._full_at = 1
        self._failure: BaseException | None = None
        self._epoch_began = time.monotonic()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._batch_seconds, self._last_batch = 0.0, time.monotonic()

    @property
    def at(self) -> tuple[int, bytes]:
        """Epoch and history of the state; the life is ahead of it while a step is being made."""
        return self._at

    # -- for the training thread

    def enter(self) -> None:
        """Say who we are, look at the run, and take its state if it is elsewhere."""
        slot = self._slot()
        entry = Entry(slot, self.look, self._state_lock, self._mode.target_samples)
        self._bridge.enter(entry)
        self._check_model()
        self.go_on()
        self._last_batch = time.monotonic()

    def _check_model(self) -> None:
        """OtherModel where everybody else in the run has another one."""
        found = self._bridge.estimate
        others = [one.peer for one in found.ignored if one.kind == "model"]
        if others and not found.peers:
            raise OtherModel(
                f"All {len(others)} peers of the run {self._bridge.run} train something else.",
                why="Their model has other tensors or another dtype, or their optimizer is of "
                "another kind, or they make another number of local steps.",
                advice="Build the model and the optimizer as the run's organiser says, or take "
                "another name for a run of your own.",
            )

    def contribute(self, samples: int, held_back: str = "") -> bool:
        """A batch is done and its gradients lie in `.grad`; whether the run has stepped since.

        `held_back`: why it cannot count, if it cannot.
        """
        self._raise_failure()
        steps_before, parameter = self.steps_taken, ""
        with self._telling:
            if not held_back and self._is_contributing:
                parameter = self._steps.add(samples) or ""
            held_back = held_back or (f"{parameter}.grad is not finite." if parameter else "")
            epoch = self._lifecycle.life.epoch
            effects = self._lifecycle.take(Contributed(samples, finite=not held_back))
            rest = [one for one in effects if not self._done_at_once(one)]
        if any(isinstance(one, HoldBack) for one in rest):
            self._bridge.tell(HeldBack(epoch, samples, held_back, parameter))
        self._note(at_once=False)
        self._measure_batch()
        self._wait_while_full()
        self.go_on()
        self._wait_if_the_next_batch_is_too_late()
        return self.steps_taken > steps_before

    def go_on(self) -> None:
        """Tell how the run is and do what follows, until nothing does."""
        self._raise_failure()
        while True:
            while self._to_do:
                self._do(self._to_do.popleft())
            self._to_do.extend(self._tell(Estimated(self._bridge.estimate)))
            if not self._to_do:
                if self._lifecycle.life.phase is not Phase.BEHIND:
                    return
                self._look_again()

    def _measure_batch(self) -> None:
        now = time.monotonic()
        self._batch_seconds, self._last_batch = now - self._last_batch, now

    def _wait_if_the_next_batch_is_too_late(self) -> None:
        """A batch that ends when the others have long gone without this peer is better not begun:
        then all that it has would be dropped, and a state fetched."""
        while True:
            late = self._batch_seconds - self._bridge.grace_seconds
            due_in = self._bridge.estimate.due_in_seconds
            accumulates = self._lifecycle.life.phase is Phase.ACCUMULATING
            if not (accumulates and self._lifecycle.life.samples and due_in < late):
                self._last_batch = time.monotonic()
                return
            self.wait_for_news(max(due_in, SHORTEST_WAIT_SECONDS))
            self.go_on()

    def wait_for_news(self, seconds: float) -> None:
        """Until the run has changed, or so long."""
        with self._bridge.waiting():
            self._bridge.wait_for_news(seconds).wait()

    def finish(self) -> None:
        """Wait for the round that is under way, and let the model have its step."""
        self._join()
        while self._to_do:
            self._do(self._to_do.popleft())
        self._take_over()

    def look(self) -> LiveState:
        """The state as it is; in a worker thread, under the lock for reading."""
        return self._steps.look(self._bridge.run, *self._at)

    def capture(self) -> TrainingState:
        """A copy of the state."""
        with self._state_lock.reading():
            return self.look().copy()

    def restore(self, state: TrainingState) -> None:
        """Go on from a state of this peer's own: from a checkpoint."""
        self.finish()
        self._take(state)
        self._to_do.extend(self._tell(Restored(state.epoch, state.history)))

    # -- telling the lifecycle, and doing what it says

    @property
    def _is_contributing(self) -> bool:
        return self._lifecycle.life.phase not in (Phase.BEHIND, Phase.FETCHING)

    def _tell(self, event: Event) -> list[Effect]:
        """What is to be done now, apart from what is done already: whatever concerns the
        gradients, which has to happen before anybody tells anything else."""
        with self._telling:
            effects = self._lifecycle.take(event)
            return [effect for effect in effects if not self._done_at_once(effect)]

    def _done_at_once(self, effect: Effect) -> bool:
        match effect:
            case KeepGradients(reason=reason, samples=samples):
                if self._round is not None:
                    self._steps.put_back(self._round.contribution)
                    self._round = None
                self._bridge.tell(RoundFailed(self._lifecycle.life.epoch, samples, reason))
            case DropGradients(reason=reason, samples=samples):
                if self._round is not None:
                    self._steps.done_with(self._round.contribution)
                    self._round = None
                self._steps.drop()
                self._bridge.tell(GradientsDropped(self._lifecycle.life.epoch, samples, reason))
            case Announce():
                self._note(at_once=True)
            case _:
                return False
        return True

    def _do(self, effect: Effect) -> None:
        """In the training thread."""
        match effect:
            case Average():
                self._begin_round(effect)
            case Step() | StepAlone():
                self._to_do.extend(self._step(effect))
            case AverageParameters():
                with self._bridge.waiting():
                    self._to_do.extend(self._average_parameters(effect))
            case Fetch():
                self._to_do.extend(self._fetch(effect))
            case LookAgain():
                self._look_again()
            case _:
                raise AssertionError(f"{effect} should have been done at once")

    # -- rounds and steps

    def _begin_round(self, effect: Average) -> None:
        """The peers together have the target batch: average (DeDLOC, section 3.1)."""
        if self._mode.delayed:
            self._join()  # the last round has ended, or there would be no other
            self._take_over()
        now = time.monotonic()
        with self._telling:
            contribution = self._steps.take()
            self._round = one = Round(contribution, effect.expected, now, now - self._epoch_began)
        self._epoch_began = now
        self._full_at = max(effect.weight, self._mode.target_samples // effect.expected, 1)
        wanted = Wanted(
            Vector(self._steps.layout, contribution.values),
            weight=float(effect.weight),
            epoch=effect.epoch,
            topic=f"{effect.history.hex()}.{self._steps.kind}",
            expected=effect.expected,
        )
        answer = self._bridge.start_averaging(wanted)
        if self._mode.delayed:
            self._thread = threading.Thread(
                target=self._end_beside, args=(one, answer), name="potluck delayed step"
            )
            self._thread.start()
            return
        one.waiting_since = now
        with self._bridge.waiting():
            outcome = answer.wait()
        self._to_do.extend(self._end_round(one, outcome))

    def _end_beside(self, one: Round, answer: Answer[Outcome]) -> None:
        """In a thread of its own: the end of a delayed round, and its step."""
        try:
            effects = deque(self._end_round(one, answer.wait()))
            while effects:
                match effects.popleft():
                    case Step() | StepAlone() as step:
                        effects.extend(self._step(step))
                    case AverageParameters() as wanted:
                        effects.extend(self._average_parameters(wanted))
                    case effect:
                        self._to_do.append(effect)  # the model is the training thread's
        except BaseException as error:  # noqa: BLE001 - raised in the training thread
            self._failure = error

    def _end_round(self, one: Round, outcome: Outcome) -> list[Effect]:
        one.outcome, one.ended = outcome, time.monotonic()
        if isinstance(outcome, Alone):  # whether that is so, only a look from now on can tell
            self._bridge.look_again(self._bridge.estimate.number).wait()
        ended, brought = averaged(outcome, one.expected), brought_to(outcome)
        with self._telling:
            self._lifecycle.take(Estimated(self._bridge.estimate))
            effects = self._lifecycle.take(ended)
            applied = any(isinstance(effect, Step | StepAlone) for effect in effects)
            self._bridge.round_ended(ended.ending, brought, applied=applied)
            return [effect for effect in effects if not self._done_at_once(effect)]

    def _step(self, effect: Step | StepAlone) -> list[Effect]:
        """theta_{t+1} = step(theta_t, averaged), at all members with the same bits."""
        one, began = self._round, time.monotonic()
        assert one is not None
        together = one.outcome if isinstance(effect, Step) else None
        assert together is None or isinstance(together, Committed)
        values = one.contribution.values if together is None else together.result
        scale = self._steps.scale
        with self._state_lock.changing():
            stepped = self._steps.apply(values)
            self._at = (effect.epoch + 1, effect.history)
            if not self._mode.delayed:
                self.model_epoch = effect.epoch + 1
        self.steps_taken += 1
        with self._telling:
            self._round = None
            self._steps.done_with(one.contribution)
        effects = self._tell(Stepped())
        self._bridge.state_advanced()
        self._bridge.tell(
            StepTaken(
                epoch=effect.epoch,
                samples=one.contribution.samples if together is None else together.weight,
                own_samples=one.contribution.samples,
                members=() if together is None else together.members,
                left_out=() if together is None else left_out_of(together),
                history=effect.history,
                accumulating_seconds=one.accumulating_seconds,
                averaging_seconds=one.ended - one.began,
                waiting_seconds=one.waited_seconds(),
                stepping_seconds=time.monotonic() - began,
                norm=stepped.norm,
            )
        )
        if self._steps.scale.scale != scale.scale:
            self._bridge.tell(
                ScaleChanged(effect.epoch + 1, self._steps.scale.scale, stepped.overflowed)
            )
        return effects

    def _average_parameters(self, effect: AverageParameters) -> list[Effect]:
        """Unlike machines round unlike: what has drifted apart is averaged, every peer alike."""
        shared = self._steps.shared
        own = shared.copy_into(shared.buffer(device=torch.device("cpu")))
        wanted = Wanted(
            Vector(Layout(shared.segments("none")), own),
            weight=1.0,
            epoch=effect.epoch,
            topic=f"{effect.history.hex()}.parameters",
            expected=effect.expected,
        )
        outcome = self._bridge.start_averaging(wanted).wait()
        ended = parameters_averaged(outcome)
        if isinstance(outcome, Committed):
            with self._state_lock.changing():
                shared.copy_from(outcome.result)
                history = history_after_parameters(effect.history, effect.epoch, ended.digest)
                self._at = (effect.epoch, history)
            drift = float((own - outcome.result).abs().max())
            self._bridge.tell(ParametersAveraged(effect.epoch, outcome.members, drift))
            self._bridge.state_advanced()
        return self._tell(ended)

    # -- other states

    def _fetch(self, effect: Fetch) -> list[Effect]:
        """The run is elsewhere: take its state."""
        bridge, epoch = self._bridge, self._lifecycle.life.epoch
        bridge.tell(FellBehind(epoch, effect.at_least_epoch, effect.reason))
        wanted = FetchWanted(self.look(), effect.peers, effect.at_least_epoch, effect.history)
        try:
            with bridge.waiting():
                fetched = bridge.fetch(wanted).wait()
        except (CollaborationEnded, StateRefused):
            raise  # of another model: no other source will do
        except PotluckError as error:
            bridge.tell(FetchingFailed(epoch, str(error)))
            return self._tell(FetchFailed(str(error)))
        state = fetched.state
        self._take(state)
        self._retry_seconds = FIRST_RETRY_SECONDS
        bridge.tell(
            CaughtUp(
                epoch=state.epoch,
                history=state.history,
                seconds=fetched.seconds,
                fetched_bytes=sum(fetched.bytes_from.values()),
                sources=tuple(fetched.bytes_from),
                liars=dict(fetched.liars),
            )
        )
        return self._tell(Fetched(state.epoch, state.history))

    def _take(self, state: TrainingState) -> None:
        with self._state_lock.changing():
            self._steps.restore(state)
            self._at = (state.epoch, state.history)
            self.model_epoch = state.epoch
        self._epoch_began = time.monotonic()
        self._bridge.state_advanced()

    def _look_again(self) -> None:
        """A fresh look at the others; after a failed fetch only after a while, or with news."""
        with self._bridge.waiting():
            if self._lifecycle.life.phase is Phase.BEHIND:
                self._bridge.wait_for_news(self._retry_seconds).wait()
                self._retry_seconds = min(2.0 * self._retry_seconds, LONGEST_RETRY_SECONDS)
            self._bridge.look_again(self._lifecycle.life.looked_past).wait()

    def _take_over(self) -> None:
        self._steps.take_over()
        self.model_epoch = self._at[0]

    # -- how this peer is

    def _note(self, *, at_once: bool) -> None:
        self._bridge.note(self._slot(), at_once=at_once)

    def _slot(self) -> ProgressSlot:
        """What the far side completes by the digest of the state."""
        life = self._lifecycle.life
        return ProgressSlot(
            epoch=life.epoch,
            history=life.history,
            samples=life.published_samples,
            samples_per_second=0.0,  # measured by the tracker
            signature=self._signature,
            role="auxiliary" if self._mode.auxiliary else "trains",
            torch=torch.__version__[:LONGEST_TORCH],
            averaging=life.phase is Phase.AVERAGING,
        )

    # -- the thread of a delayed round

    def _wait_while_full(self) -> None:
        """Delayed, the next round must not grow beyond a batch while the last one lasts."""
        thread, life = self._thread, self._lifecycle.life
        if thread is not None and thread.is_alive() and life.samples >= self._full_at:
            if self._round is not None:
                self._round.waiting_since = time.monotonic()
            self._join()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            with self._bridge.waiting():
                thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
