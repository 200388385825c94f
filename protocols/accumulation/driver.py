"""Carries out the lifecycle's effects in the training thread.

    driver.enter()                          # look at the run; fetch its state if it is further
    driver.contribute(Batch(32))            # a batch is done: count it, and go on
    driver.go_on()                          # do whatever is due now

`Driver` is a loop: report the newest estimate to the lifecycle, carry out the effects in order, and
repeat until there are none. rounds.py carries out rounds and steps; standing.py reports events and
carries out the effects that take no time. `NextBatch`, at the end, decides when this peer may begin
its next batch.

Promises: only the lifecycle decides what is applied, kept or dropped. The training thread waits for
the network only when a round is due, while a state is fetched, while the next batch would be too
late for the round, while all places in the rounds are taken, or until there is a run to join.

Easy to get wrong: after a failed fetch the run may have moved, or ended. Nothing is fetched before
a fresh look at the others.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from protocols.accumulation.bridge import Bridge, FetchCut, FetchWanted, OptimizerEntry, Rest
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.events import (
    CaughtUp,
    FellBehind,
    FetchingFailed,
    NoRunFound,
    PlaceFree,
    PlacesTaken,
    TooSlowToCatchUp,
)
from protocols.accumulation.keeping_up import TooSlow
from protocols.accumulation.lifecycle import (
    Average,
    Effect,
    Estimated,
    Fetch,
    Fetched,
    Life,
    LookAgain,
    Mode,
    Phase,
    Restored,
    StateFetchFailed,
)
from protocols.accumulation.lineage import BACKERS, needed
from protocols.accumulation.rounds import Rounds
from protocols.accumulation.standing import Batch, Standing
from protocols.accumulation.state_fetching import FetchedState
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.state_pace import ServingCost
from protocols.accumulation.steps import Steps
from protocols.accumulation.training_description import TrainingDescription, how_it_differs
from protocols.accumulation.training_state import TrainingState
from protocols.errors import MalformedMessage, PotluckError
from protocols.identity import PeerId

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 8.0
"""The wait after a failed fetch, and between two failed rounds of an epoch; it doubles each time.
Sources that have just stepped publish a digest within a second. A group that has begun without this
peer takes seconds to end."""

NO_RUN_SECONDS = 15.0
"""Peers report progress every few seconds, so by then somebody has, if anybody is there."""

UNPROVED_SECONDS = 30.0  # a claim is proved or refuted after some twelve

TOO_SLOW_SECONDS = 30.0
"""The wait after the run was too fast for this peer's link. Each attempt costs the others' uplinks,
so it is long."""

SHORTEST_WAIT_SECONDS = 0.05  # between two looks at a round that is nearly due

EXTRA_SHARE: Final = 1 / 8
"""By how much of a mean part a peer may exceed its own rather than wait for the others (delayed).
Parts are whole batches, so some peers have one more than others that are as fast, and these would
wait for up to a batch in each step: 9 % of the time with twelve batches. Of the mean part, so that
peers with a batch more or less in their parts decide alike."""


BESIDE: Final = frozenset({Phase.AVERAGING, Phase.STEPPING, Phase.AVERAGING_PARAMETERS})
"""In these phases a batch belongs to the next epoch (delayed)."""


class OtherModel(PotluckError):
    """The run trains another model, or steps it in another way."""


class Driver:
    """Serves one optimizer. Used only by its training thread."""

    def __init__(
        self,
        bridge: Bridge,
        steps: Steps,
        mode: Mode,
        *,
        history: bytes,
        description: TrainingDescription,
        batch: int = 0,
        batch_seconds: float = 0.0,
        device: str = "",
    ) -> None:
        """`batch`, `batch_seconds`: the samples of the first batch and its duration, if known.
        `device`: what computes them, for others to read."""
        self._description, signature = description, description.digest
        self.standing = Standing(
            bridge, steps, mode, history=history, signature=signature, device=device
        )
        self.standing.is_to_compute(batch, batch_seconds)
        kept = None if bridge.keeper is None else bridge.keeper.newest()
        if kept is not None:
            self.standing.begin_from(kept)
        self._bridge, self._steps, self._mode = bridge, steps, mode
        self._rounds = Rounds(bridge, steps, mode, self.standing)
        self._to_do: deque[Effect] = deque()
        self.epoch_returned = 0
        """The epoch at the end of the last call."""
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._serving_cost = ServingCost()
        self._next_batch = NextBatch(mode)
        self._has_place = True

    def enter(self) -> None:
        """Announce this peer, look at the run, and fetch its state if it is elsewhere."""
        standing = self.standing
        self._bridge.enter(
            OptimizerEntry(
                standing.slot(),
                standing.look,
                standing.lock,
                self._mode,
                standing.results,
                self._description,
                None if self._mode.auxiliary else self._serving_cost,
            )
        )
        if self._bridge.keeper is not None:
            self._bridge.keeper.entered(standing, self._bridge.tell)
        self._check_model()
        self.go_on()
        self._wait_for_a_run()
        self._wait_for_a_place()
        if not self._mode.auxiliary:
            self._wait_while_no_batch_is_wanted()
        self._batch_begins()
        self.epoch_returned = self.standing.at[0]

    def contribute(self, batch: Batch) -> bool:
        """Count a batch whose gradients are in `.grad`. Returns whether the epoch is a later one
        than at the end of the last call. With `delayed`, a step may be made between two calls."""
        self._rounds.raise_failure()
        self._to_do.extend(self.standing.count(batch))
        self._serving_cost.computed()  # a GPU may have computed until now
        self.go_on()
        self._wait_for_a_place()
        self._wait_while_no_batch_is_wanted()
        self._batch_begins(is_waited_for=not self._next_batch.is_extra)
        epoch_before, self.epoch_returned = self.epoch_returned, self.standing.at[0]
        return self.epoch_returned > epoch_before

    def go_on(self) -> None:
        """Report the estimate and carry out what follows, until nothing is left to do."""
        while True:
            self._do_what_is_left()
            found = self._bridge.estimate
            self._to_do.extend(self.standing.tell(Estimated(found)))
            if self.standing.life.phase is not Phase.BEHIND:
                self._tell_of_place(found)
            if not self._to_do:
                if self.standing.life.phase is not Phase.BEHIND:
                    return
                self._look_again()

    def wait_for_news(self, seconds: float) -> None:
        """Wait for an estimate with news, but no longer than this."""
        with self._bridge.waiting():
            self._bridge.wait_for_news(seconds).wait()

    def finish(self) -> None:
        """Wait for the round that is under way, and take its step over into the model. When the
        run is complete, the model has its parameters afterwards, as at all other peers."""
        self._rounds.join()
        self._do_what_is_left()
        self._rounds.join()
        self.standing.take_over()
        self.epoch_returned = self.standing.at[0]
        if self._is_complete():
            self._steps.reset()

    def see_out(self, seconds: float) -> bool:
        """Without computing more, bring the accumulated samples to the round that ends the epoch,
        if it begins within this time. Returns whether no samples are left."""
        until = time.monotonic() + seconds
        self.finish()
        self.standing.computes_no_more()
        self.go_on()
        self._rounds.join()
        while self.standing.life.samples:  # also if the round of them made no step
            left = until - time.monotonic()
            due_in = self._bridge.estimate.due_in_seconds_with(self.standing.life.samples)
            if left <= 0.0 or due_in > left or not self._bridge.estimate.peers:
                return False
            self.wait_for_news(max(min(due_in, left), SHORTEST_WAIT_SECONDS))
            self.go_on()
            self._rounds.join()
        self.finish()
        return True

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside the block nobody counts on this peer. The accumulated samples stay, and count if
        the run is still in this epoch when the block ends."""
        self.finish()
        self._bridge.set_away(is_away=True)
        try:
            yield
        finally:
            self._bridge.set_away(is_away=False)
        with self._bridge.waiting():
            self._bridge.look_again(self._bridge.estimate.number).wait()
        self.go_on()
        self._batch_begins()

    def capture(self) -> TrainingState:
        """A copy of the state."""
        with self.standing.lock.reading():
            return self.standing.look().copy()

    def restore(self, state: TrainingState) -> None:
        """Go on from a checkpoint of this peer."""
        self.finish()
        self.standing.take_state(state)
        self._to_do.extend(self.standing.tell(Restored(state.epoch, state.history)))
        self.epoch_returned = state.epoch

    def _batch_begins(self, *, is_waited_for: bool = True) -> None:
        self.standing.begin_batch(is_waited_for=is_waited_for)
        self._serving_cost.computes()

    # -- carrying out effects

    def _do_what_is_left(self) -> None:
        self._rounds.raise_failure()
        while self._to_do or self._rounds.left:
            effect = self._rounds.left.popleft() if self._rounds.left else self._to_do.popleft()
            self._to_do.extend(self._do(effect))

    def _do(self, effect: Effect) -> list[Effect]:
        match effect:
            case Average():
                return self._rounds.begin(effect)
            case Fetch():
                return self._fetch(effect)
            case LookAgain():
                self._look_again()
                return []
            case _:
                raise AssertionError(f"{effect} is done where it comes about")

    def _fetch(self, effect: Fetch) -> list[Effect]:
        """Fetch the run's state, unless the owner wants this peer to rest."""
        bridge, standing = self._bridge, self.standing
        epoch, rest = standing.life.epoch, bridge.rest
        if rest is not None and rest.is_wanted():
            return self._see_out(rest)
        bridge.tell(FellBehind(epoch, effect.at_least_epoch, effect.reason))
        wanted = FetchWanted(
            standing.look(),
            effect.peers,
            effect.at_least_epoch,
            effect.history,
            standing.results.layouts,
            lambda error: bridge.tell(_told_too_slow(epoch, error)),
            (lambda: False) if rest is None else rest.is_wanted,
            effect.seconds,
        )
        named_by = frozenset(effect.peers)
        try:
            with bridge.waiting():
                fetched = bridge.fetch(wanted).wait()
            state = None
            if isinstance(fetched, FetchedState):
                state, named_by = fetched.state, fetched.named_by
            seen, losses = standing.take_state(state, fetched.results)
        except CollaborationEnded:
            raise
        except FetchCut:
            assert rest is not None
            return self._see_out(rest)
        except PotluckError as error:
            if isinstance(error, StateRefused | MalformedMessage):
                if isinstance(error, StateRefused):
                    named_by = error.named_by or named_by
                if self._is_of_the_run(named_by):
                    raise  # no other source will do
                bridge.state_refused(named_by, error.what)
            bridge.tell(FetchingFailed(epoch, str(error)))
            if isinstance(error, TooSlow):
                with bridge.waiting():
                    bridge.sleep(TOO_SLOW_SECONDS).wait()
            return standing.tell(StateFetchFailed())
        self._retry_seconds = FIRST_RETRY_SECONDS
        now_at, history = standing.at
        bridge.tell(
            CaughtUp(
                epoch=now_at,
                history=history,
                seconds=fetched.seconds,
                fetched_bytes=sum(fetched.bytes_from.values()),
                sources=tuple(fetched.bytes_from),
                liars=dict(fetched.liars),
                replayed=len(fetched.results),
                leads_on=state is None,
                seen=seen,
                losses=losses,
            )
        )
        return standing.tell(Fetched(now_at, history))

    def _see_out(self, rest: Rest) -> list[Effect]:
        """Rest, withdrawn from the run, and look at the run afterwards. The part of a state that
        has arrived is kept."""
        self._bridge.set_away(is_away=True)
        with self._bridge.waiting():
            rest.see_out()
        self._bridge.set_away(is_away=False)
        self._retry_seconds = FIRST_RETRY_SECONDS
        return self.standing.tell(StateFetchFailed())

    def _is_of_the_run(self, named_by: frozenset[PeerId]) -> bool:
        """Whether so many name this state that this peer would follow them. If so, and it cannot
        be taken, it is the run's, and this peer does not fit. Fewer may have forged it to get rid
        of this peer."""
        return len(named_by) >= needed(len(self._bridge.estimate.peers))

    def _look_again(self) -> None:
        """Look at the others again. After a failed fetch, and from the second failed round in a
        row, wait first: the obstacle is likely still there."""
        life, failed = self.standing.life, self.standing.rounds_failed
        is_behind = life.phase is Phase.BEHIND
        if self._mode.delayed and not is_behind:
            self._bridge.look_again(life.looked_past)  # and meanwhile the next batch
            return
        with self._bridge.waiting():
            if is_behind or failed > 1:
                self._pause(self._retry_seconds)
                self._retry_seconds = min(2.0 * self._retry_seconds, LONGEST_RETRY_SECONDS)
            else:
                self._retry_seconds = FIRST_RETRY_SECONDS
            self._bridge.look_again(life.looked_past).wait()

    def _pause(self, seconds: float) -> None:
        """Wait this long; or, after the shortest pause, until different peers are in the way."""
        before, until = in_the_way(self._bridge.estimate), time.monotonic() + seconds
        self._bridge.sleep(min(seconds, FIRST_RETRY_SECONDS)).wait()
        while in_the_way(self._bridge.estimate) == before:
            left = until - time.monotonic()
            if left <= 0.0:
                return
            self._bridge.wait_for_news(max(left, SHORTEST_WAIT_SECONDS)).wait()

    def _wait_while_no_batch_is_wanted(self) -> None:
        while True:
            life, found = self.standing.life, self._bridge.estimate
            seconds = self._next_batch.waits(life, found, time.monotonic())
            if seconds <= 0.0:
                return
            if life.phase is Phase.ACCUMULATING:
                self.wait_for_news(seconds)
            else:
                self._rounds.join()
            self.go_on()

    def _wait_for_a_run(self) -> None:
        """A peer that does not begin runs waits for a run, or for a peer that keeps its
        checkpoints. A few peers that began anew would outvote the keeper when it returns. While
        others may be further it waits for their proof, but not for one claim after the other."""
        began, told = time.monotonic(), False
        while True:
            waited, found = time.monotonic() - began, self._bridge.estimate
            is_unsure = found.may_be_behind and waited < UNPROVED_SECONDS
            begins = self._bridge.settings.begins or self.standing.at[0] or found.keepers
            if begins and not is_unsure:
                return
            self.wait_for_news(LONGEST_RETRY_SECONDS)
            self.go_on()
            waited = time.monotonic() - began
            if waited >= NO_RUN_SECONDS and not (told or self._bridge.estimate.keepers):
                told = True
                self._bridge.tell(NoRunFound(waited))

    def _wait_for_a_place(self) -> None:
        """While all places in the rounds are taken, follow the run's steps and compute nothing."""
        while not (self._has_place or self._is_complete()):
            rest = self._bridge.rest
            if rest is not None and rest.is_wanted():
                with self.away():
                    rest.see_out()
            self.wait_for_news(LONGEST_RETRY_SECONDS)
            self.go_on()

    def _tell_of_place(self, found: Estimate) -> None:
        """Tell the owner when this peer gets a place in the run's rounds, before it takes part in
        one, and when it loses it."""
        had_place, self._has_place = self._has_place, found.has_place
        if had_place and not found.has_place:
            self._bridge.tell(PlacesTaken(self.standing.at[0], found.places))
        elif found.has_place and not had_place:
            self._bridge.tell(PlaceFree(self.standing.at[0]))

    def _is_complete(self) -> bool:
        return self._mode.is_complete_at(self.standing.at[0])

    def _check_model(self) -> None:
        """Raise OtherModel if all other peers in the run have another model. A single one does not
        keep the peer that has the run's checkpoints from going on."""
        found = self._bridge.estimate
        others = [one.peer for one in found.ignored if one.kind == "model"]
        enough = 1 if self._bridge.keeper is None else BACKERS
        if len(others) < enough or found.peers:
            return
        with self._bridge.waiting():
            theirs = self._bridge.describe(others).wait()
        differences = [] if theirs is None else how_it_differs(self._description, theirs)
        words = f": {'; '.join(differences)}" if differences else ""
        count = len(others)
        train = f"All {count} other peers train" if count > 1 else "The only other peer trains"
        raise OtherModel(
            f"{train} something else in the run {self._bridge.settings.run}{words}.",
            why="Peers average only what is alike, and then step alike: model, optimizer and its "
            "settings, batch, codec and clipping belong to the run.",
            advice="Build all of it as the run's organiser says, or take another name for a run of "
            "your own.",
        )


class NextBatch:
    """Decides when a peer may begin its next batch.

    It may begin at once if the batch is in the plan. If the batch would exceed the target, or end
    too late for the round, it may begin when that round has ended; so it does if most of the others
    are in that round already, or further, unless their list stays open for its first batch. The
    same holds for a batch that is computed beside a round, by the plan of the next round. With
    `delayed`, a peer with a part of many batches computes one more rather than wait for the others'
    last ones (`is_extra`). Others are not told of that one, or they would compute another
    meanwhile: they begin the round, and this peer comes a moment later.

    A peer waits in vain at most once in an epoch, and not much longer than the others' batches
    take. A round that has not begun by then may be claimed to be nearly due for ever. A round that
    has begun ends by itself.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._in_vain, self._epoch, self._until = -1, -1, math.inf
        self._is_too_late = False
        self.is_extra = False
        """Whether the batch that may begin now is beyond this peer's part."""
        self._extra_epoch, self._extra = -1, 0
        """The samples beyond its part that this peer has computed or begun in an epoch."""

    def waits(self, life: Life, found: Estimate, now: float) -> float:
        """How many seconds to wait before asking again; 0: begin a batch."""
        self.is_extra = False
        seconds = self._waits(life, found, now)
        if seconds <= 0.0:
            self._epoch = -1
        return seconds

    def _waits(self, life: Life, found: Estimate, now: float) -> float:
        is_complete = self._mode.is_complete_at(life.epoch)
        if is_complete:
            return 0.0
        if life.phase in BESIDE:
            return 0.0 if _wants_batch_beside(life, found) else LONGEST_RETRY_SECONDS
        if life.epoch == self._in_vain or life.phase is not Phase.ACCUMULATING:
            return 0.0
        if self._mode.delayed and life.begun_without:
            return 0.0  # the others began without it: compute the next epoch's batches meanwhile
        if life.epoch != self._epoch:
            self._epoch, self._until, self._is_too_late = life.epoch, math.inf, False
        seconds = SHORTEST_WAIT_SECONDS
        if (found.epoch, found.history) == (life.epoch, life.history):
            longest = found.longest_wait_seconds
            if found.comes_too_late_with(life.samples):
                seconds = LONGEST_RETRY_SECONDS
                longest = found.own_batch_seconds + found.patience_seconds
                if not self._is_too_late:  # until now it waited for the others' batches
                    self._is_too_late, self._until = True, math.inf
            elif found.wants_batch_after(life.samples) or self._takes_another(life, found):
                return 0.0
            else:
                seconds = max(found.others_ready_in_seconds, SHORTEST_WAIT_SECONDS)
            if not found.waits_to_be_known:
                self._until = min(self._until, now + longest)
        if now >= self._until:
            self._in_vain = life.epoch
            return 0.0
        return min(seconds, LONGEST_RETRY_SECONDS)

    def _takes_another(self, life: Life, found: Estimate) -> bool:
        """Whether this peer, which has its part, computes another batch while the others finish
        theirs."""
        extra = found.own_batch + (self._extra if life.epoch == self._extra_epoch else 0)
        if (
            not (self._mode.delayed and life.samples)  # one without samples is not awaited
            or extra > EXTRA_SHARE * found.mean_part
            or not found.has_time_for_another
        ):
            return False
        self._extra_epoch, self._extra, self.is_extra = life.epoch, extra, True
        return True


def _wants_batch_beside(life: Life, found: Estimate) -> bool:
    """Whether to compute another batch beside the round. Once the round has ended, the `Life` may
    be an epoch ahead of the estimate."""
    if life.phase is Phase.AVERAGING or found.epoch < life.epoch:
        return found.wants_batch_beside(life.samples)
    return found.wants_batch_after(life.samples)


def in_the_way(found: Estimate) -> tuple[object, ...]:
    """The peers that must take part in a step or are further, and whether this one is asked to
    come. A failed round or fetch is tried again early when that changes."""
    return found.company, found.holders, found.ahead, found.behind, found.fork, found.is_asked


def _told_too_slow(epoch: int, error: TooSlow) -> TooSlowToCatchUp:
    return TooSlowToCatchUp(
        epoch, error.bytes_per_second, error.needed_bytes_per_second, str(error)
    )
