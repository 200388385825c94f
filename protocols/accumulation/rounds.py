"""Carries out rounds and their steps, in the training thread or beside it.

    rounds = Rounds(bridge, steps, mode, standing)
    effects = rounds.begin(average)              # without `delayed`: it has ended on return
    effects = rounds.step(step, one)

Without `delayed`, the training thread waits for the round and makes the step. With it, a thread for
this round waits for the outcome and makes the step on the shadow (steps.py), while the training
thread computes the next batches. The next `begin` takes the shadow over into the model, exactly one
step late. Local steps that are exchanged in fragments are delayed, too: the thread steps the state,
and the training thread mixes it in. The thread may not touch the model; it puts the effects that do
into `left`, for the training thread.

In this file: `Rounds`, and functions that say in the lifecycle's words how a round has ended.

Promises: the thread ends with its round, or as soon as the collaboration does. An error in it is
raised in the training thread, at its next call.

Easy to get wrong: if a delayed round takes longer than an epoch, the training thread waits for it
once its part of the next epoch is computed, or would grow beyond the target (driver.py).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import nullcontext

from torch import Tensor

from protocols.accumulation.batch_plan import MOST_SPARED
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.claims import Brought
from protocols.accumulation.decided_steps import decided_step, shares_of
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.events import (
    MOST_BATCHES,
    NoBatchFits,
    ParametersAveraged,
    ScaleChanged,
    StepTaken,
)
from protocols.accumulation.lifecycle import (
    Average,
    Averaged,
    AverageParameters,
    Effect,
    Ending,
    Mode,
    ParametersRoundEnded,
    Step,
    StepAlone,
    Stepped,
)
from protocols.accumulation.lineage import Lineage, history_after_parameters
from protocols.accumulation.results import Made, ResultsKept, lone_step
from protocols.accumulation.standing import OwnRound, Standing
from protocols.accumulation.state_messages import NONCE_BYTES
from protocols.accumulation.steps import Steps
from protocols.guest import GuestCall
from protocols.identity import PeerId
from protocols.moshpit.layout import Layout, Vector
from protocols.moshpit.outcome import Alone, Committed, Discarded, LeftOut, Outcome, Verdict
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.roster import LARGEST_WEIGHT


class Rounds:
    """Invariant: at most one round is under way, and with `delayed` one thread."""

    def __init__(self, bridge: Bridge, steps: Steps, mode: Mode, standing: Standing) -> None:
        self._bridge, self._steps, self._mode = bridge, steps, mode
        self._standing = standing
        self._thread: threading.Thread | None = None
        self._beside: OwnRound | None = None
        self._spared = 0  # steps in a row without samples of this peer
        self._failure: BaseException | None = None
        self.left: deque[Effect] = deque()
        """Effects that a round's thread leaves to the training thread."""

    def begin(self, effect: Average) -> list[Effect]:
        """Average: together the peers have the target batch (DeDLOC, section 3.1)."""
        if self._mode.delayed:
            self.join()  # the last round has ended, or there would be no other
            self._standing.take_over()
        one = self._standing.begin_round(effect.expected)
        layout = self._standing.results.layouts.of("step", effect.epoch)
        request = RoundRequest(
            Vector(layout, one.contribution.memory, one.contribution.arrive),
            weight=float(one.contribution.samples),  # fewer if the last batch was not finite
            most_weight=min(float(MOST_BATCHES * self._mode.target_samples), LARGEST_WEIGHT),
            epoch=effect.epoch,
            topic=f"{effect.history.hex()}.{self._steps.kind}",
            expected=effect.expected,
            awaited=effect.awaited,
            coming=effect.coming,
            lost=effect.lost,
            votes=float(self._standing.life.me in self._standing.life.holders),
            cohort=effect.cohort,
            fewest=effect.needs,
            is_again=effect.is_again,
            follows=self._standing.life.follows,
            confirms=True,
        )
        averaging = self._bridge.average(request)
        if self._mode.delayed:
            self._beside = one
            self._thread = threading.Thread(
                target=self._end_beside, args=(one, averaging), name="potluck delayed step"
            )
            self._thread.start()
            return []
        one.waiting_since = one.began
        with self._bridge.waiting():
            outcome = averaging.wait()
        return self._end(one, outcome)

    def join(self) -> None:
        """Wait for the thread of a delayed round, and raise its error, if any."""
        thread, one = self._thread, self._beside
        if thread is not None and one is not None:
            if thread.is_alive() and one.waiting_since is None:
                one.waiting_since = time.monotonic()
            with self._bridge.waiting():
                thread.join()
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def step(self, effect: Step | StepAlone, one: OwnRound) -> list[Effect]:
        """theta_{t+1} = step(theta_t, averaged), with the same bits at all members."""
        standing, began, scale = self._standing, time.monotonic(), self._steps.scale.scale
        together = one.outcome if isinstance(effect, Step) else None
        assert together is None or isinstance(together, Committed)
        values = one.contribution.values if together is None else together.result
        with standing.lock.changing():
            assert one.made is not None
            standing.results.add(Lineage(*standing.at), one.made, values)
            stepped = self._steps.apply(values)
            standing.at = (effect.epoch + 1, effect.history)
            if not self._mode.delayed:
                standing.model_epoch = effect.epoch + 1
        standing.is_in_step(one)
        self._tell_if_spared(effect.epoch, one.contribution.samples)
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
                shares=() if together is None else shares_of(together),
                over_a_grid=together is not None and together.is_of_several_groups,
                peers=1 if together is None else together.peers or len(together.members),
                loss=stepped.loss,
                learning_rate=stepped.learning_rate,
            )
        )
        now = self._steps.scale.scale
        if now != scale and self._steps.scales_loss:
            self._bridge.tell(ScaleChanged(effect.epoch + 1, now, stepped.overflowed))
        return standing.tell(Stepped())

    def _tell_if_spared(self, epoch: int, own_samples: int) -> None:
        """After each MOST_SPARED steps in a row without samples of this peer, tell its owner."""
        self._spared = 0 if own_samples or self._mode.auxiliary else self._spared + 1
        if self._spared and self._spared % MOST_SPARED == 0:
            found = self._bridge.estimate
            self._bridge.tell(
                NoBatchFits(epoch, self._spared, found.own_batch, found.own_batch_seconds)
            )

    def average_parameters(self, effect: AverageParameters) -> list[Effect]:
        """Average parameters that drifted apart because different machines round differently. All
        peers have the same weight."""
        shared, standing = self._steps.shared, self._standing
        own = shared.copy_into(shared.buffer(on_host=True))
        found = self._bridge.estimate
        request = RoundRequest(
            Vector(Layout(shared.segments("none")), own),
            weight=1.0,
            most_weight=1.0,
            epoch=effect.epoch,
            topic=f"{effect.history.hex()}.parameters",
            expected=effect.expected if found.cohort is None else found.expected,
            cohort=found.cohort,
        )
        averaging = self._bridge.average(request)
        with nullcontext() if self._mode.delayed else self._bridge.waiting():
            outcome = averaging.wait()
        ended = parameters_averaged(outcome, effect.expected)
        if isinstance(outcome, Committed) and ended.ending is Ending.COMMITTED:
            with standing.lock.changing():
                made = Made("parameters", outcome.digest, outcome.cut)
                standing.results.add(Lineage(*standing.at), made, outcome.result)
                shared.copy_from(outcome.result)
                history = history_after_parameters(effect.history, effect.epoch, ended.digest)
                standing.at = (effect.epoch, history)
            drift = float(own.sub_(outcome.result).abs_().max())  # no further copy of the model
            self._bridge.tell(ParametersAveraged(effect.epoch, outcome.members, drift))
            self._bridge.state_advanced()
        return standing.tell(ended)

    def _end(self, one: OwnRound, outcome: Outcome) -> list[Effect]:
        """Report how the round ended, and make the step that follows, if any."""
        one.outcome, one.ended = outcome, time.monotonic()
        life, own = self._standing.life, one.contribution.samples
        one.made = made_of(outcome, one.contribution.values, life.epoch, self._standing.results)
        before = Lineage(life.epoch, life.history)
        self._standing.decided.note(decided_step(outcome, before, own))
        if lacks_somebody(outcome, self._bridge.estimate, life.passed_by):
            # only a fresh look shows what became of them
            self._bridge.look_again(self._bridge.estimate.number).wait()
        effects = deque(self._standing.end_round(averaged(outcome, one.made), brought_to(outcome)))
        rest: list[Effect] = []
        while effects:
            match effects.popleft():
                case Step() | StepAlone() as step:
                    effects.extend(self.step(step, one))
                case AverageParameters() as parameters:
                    effects.extend(self.average_parameters(parameters))
                case effect:
                    rest.append(effect)
        return rest

    def _end_beside(self, one: OwnRound, averaging: GuestCall[Outcome]) -> None:
        """In the round's own thread: end a delayed round, and make its step."""
        try:
            self.left.extend(self._end(one, averaging.wait()))
        except BaseException as error:  # noqa: BLE001 - raised in the training thread
            self._failure = error


# ---- how a round ended
#
# From the outcome of a round (moshpit/outcome.py) to the lifecycle's events. Pure.
#
# Easy to get wrong: over a grid, only the members of the last group share the bits of a result. So
# its digest does not name a history, unless a part of the grid failed: then the results differ by
# more than rounding.


OVER_A_GRID = b"over a grid"
"""Used in place of a digest if several groups each hold nearly the same average."""


def made_of(outcome: Outcome, own: Tensor, epoch: int, results: ResultsKept) -> Made | None:
    """The source of a step after this outcome of a round of this epoch, if one may follow. `own`:
    this peer's values."""
    match outcome:
        case Committed():
            return Made("step", outcome.digest, outcome.cut)
        case Alone():
            # No other peer has these bytes: a step that is made alone begins a history of its own.
            nonce = secrets.token_bytes(NONCE_BYTES)
            return lone_step(own, results.layouts, epoch, nonce, followed=results.is_followed)
        case _:
            return None


def averaged(outcome: Outcome, made: Made | None = None) -> Averaged:
    """The event for this outcome. `made`: what a step would be made of."""
    match outcome:
        case Committed():
            over_a_grid = len(outcome.rounds) > 1
            return Averaged(
                Ending.COMMITTED,
                weight=outcome.weight,
                digest=OVER_A_GRID if over_a_grid and _is_whole(outcome) else outcome.digest,
                members=outcome.members,
                left_out=left_out_of(outcome),
                votes=outcome.votes,
                peers=outcome.peers,
                handed_down=outcome.handed_down,
            )
        case LeftOut():
            return Averaged(
                Ending.LEFT_OUT,
                weight=outcome.weight,
                digest=outcome.digest,
                members=outcome.members,
                peers=outcome.peers,
            )
        case Alone():
            return Averaged(Ending.ALONE, digest=b"" if made is None else made.digest)
        case Discarded():
            return Averaged(
                Ending.DISCARDED,
                reason=outcome.reason,
                members=outcome.rounds[-1].members if outcome.in_doubt else (),
                begun_without=outcome.begun_without,
                in_doubt=outcome.in_doubt,
            )


def _is_whole(outcome: Committed) -> bool:
    """Whether every round of the grid was committed with all of its group. If not, this group's
    result differs from the others' by more than rounding. Its history must differ, too, or its
    members would go on with other parameters than the others, unnoticed."""
    return all(one.verdict is Verdict.COMMITTED and not one.excluded for one in outcome.rounds)


def parameters_averaged(outcome: Outcome, peers: int) -> ParametersRoundEnded:
    """The same for an averaging of the parameters after a step of so many peers. Without most of
    them it counts for nothing: the others may have another one."""
    ended = averaged(outcome)
    if 0 < 2 * ended.peers <= peers:
        return ParametersRoundEnded(Ending.DISCARDED)
    return ParametersRoundEnded(ended.ending, ended.digest, ended.members)


def left_out_of(outcome: Committed) -> tuple[PeerId, ...]:
    """The peers that were in the group and are not in its result."""
    return tuple(one.peer for one in outcome.left_out)


def lacks_somebody(
    outcome: Outcome, found: Estimate, passed_by: Collection[PeerId] = frozenset()
) -> bool:
    """Whether peers outside the round may make another step of this epoch, or have made it.
    `passed_by`: as in `Life`.

    If a step needs most of the peers in the last one, those that are missing cannot make another,
    and a look at them changes nothing. It would take long when many of them have just been cut off:
    some of those that keep the slots are on the other side. Meanwhile a head's cohort waits for it.
    """
    match outcome:
        case Alone():
            return True
        case Committed(handed_down=True):
            return False
        case Committed(votes=None) if found.needs and not passed_by:
            return False
        case Committed():
            if outcome.votes is not None:
                return outcome.votes < len(found.holders)
            if found.cohort is not None and found.sum is None:
                return True  # it went in its head's place, and knows only old sums
            return not found.holders <= {found.me, *outcome.members, *left_out_of(outcome)}
        case _:
            return False


def brought_to(outcome: Outcome) -> Brought:
    """What the members of the (first) group have signed, and the heads of the cohorts."""
    if not outcome.rounds:
        return Brought()
    first = outcome.rounds[0]
    return Brought(
        dict(zip(first.members, first.weights, strict=False)),
        outcome.heads if isinstance(outcome, Committed) else {},
        is_weighed=first.verdict in (Verdict.COMMITTED, Verdict.ALONE),
    )
