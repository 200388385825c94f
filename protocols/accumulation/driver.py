"""Carries out, in the training thread, what the lifecycle of a peer says.

    driver.enter()                          # look at the run; take its state if it is further
    driver.contribute(Batch(32))            # a batch is done: count it, and go on
    driver.go_on()                          # whatever is to be done now

The loop is the whole of it: tell the lifecycle how the run is, do what comes back in order, until
nothing does. Rounds and steps are in rounds.py; what is told and by whom is in standing.py.

Promises: the lifecycle alone decides what is applied, kept or dropped. The training thread waits
for the network only where a round is due, a state is fetched, or its next batch would be too late.

Easy to get wrong: after a failed fetch the run may be elsewhere again, or nowhere; nothing is
fetched before a fresh look has said so.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from protocols.accumulation.bridge import Bridge, Entry, FetchCut, FetchWanted, Rest
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.events import (
    CaughtUp,
    FellBehind,
    FetchingFailed,
    PlaceFree,
    PlacesTaken,
    TooSlowToCatchUp,
)
from protocols.accumulation.keeping_up import TooSlow
from protocols.accumulation.life import Mode, Phase
from protocols.accumulation.lifecycle_events import (
    Average,
    Effect,
    Estimated,
    Fetch,
    Fetched,
    FetchFailed,
    LookAgain,
    Restored,
)
from protocols.accumulation.progress import Estimate
from protocols.accumulation.rounds import Rounds
from protocols.accumulation.standing import Batch, Standing
from protocols.accumulation.state_fetching import Fetched as StateFetched
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.state_pace import ServingCost
from protocols.accumulation.steps import Steps
from protocols.accumulation.training_description import TrainingDescription, how_it_differs
from protocols.accumulation.training_state import TrainingState
from protocols.errors import MalformedMessage, PotluckError

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 8.0
"""How long is waited after a state could not be fetched, and between two failed rounds of an epoch,
doubling: sources may just have stepped, and name a digest within a second; a group that has begun
without this peer takes seconds to end."""

TOO_SLOW_SECONDS = 30.0
"""After the run has been too fast for this peer's link: what it tries costs the others' uplinks."""

SHORTEST_WAIT_SECONDS = 0.05  # between two looks at whether a round is due that nearly is


class OtherModel(PotluckError):
    """The run trains another model, or makes its steps in another way."""


class Driver:
    """For one optimizer, and for its training thread."""

    def __init__(
        self,
        bridge: Bridge,
        steps: Steps,
        mode: Mode,
        *,
        history: bytes,
        description: TrainingDescription,
        batch: int = 0,
    ) -> None:
        """`batch`: samples of its first batch, where that is known."""
        self._description, signature = description, description.digest
        self.standing = Standing(bridge, steps, mode, history=history, signature=signature)
        self.standing.is_to_compute(batch)
        kept = None if bridge.keeper is None else bridge.keeper.newest()
        if kept is not None:
            self.standing.begin_from(kept)
        self._bridge, self._mode = bridge, mode
        self._rounds = Rounds(bridge, steps, mode, self.standing)
        self._to_do: deque[Effect] = deque()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._serving_cost = ServingCost()
        self._waited_in_vain = -1  # in this epoch, for a round that did not begin
        self._has_place = True

    def enter(self) -> None:
        """Say who we are, look at the run, and take its state if it is elsewhere."""
        standing = self.standing
        target = self._mode.target_samples
        self._bridge.enter(
            Entry(
                standing.slot(),
                standing.look,
                standing.lock,
                target,
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

    def contribute(self, batch: Batch) -> bool:
        """A batch is done and its gradients lie in `.grad`; whether the run has stepped since."""
        self._serving_cost.computed()
        self._rounds.raise_failure()
        steps_before = self.standing.steps_taken
        self._to_do.extend(self.standing.count(batch))
        self._rounds.wait_while_full()
        self.go_on()
        self._wait_for_a_place()
        self._wait_while_no_batch_is_wanted()
        self._batch_begins()
        return self.standing.steps_taken > steps_before

    def go_on(self) -> None:
        """Tell how the run is and do what follows, until nothing does."""
        while True:
            self._do_what_is_left()
            self._to_do.extend(self.standing.tell(Estimated(self._bridge.estimate)))
            if not self._to_do:
                if self.standing.life.phase is not Phase.BEHIND:
                    return
                self._look_again()

    def wait_for_news(self, seconds: float) -> None:
        """Until the run has changed, or so long."""
        with self._bridge.waiting():
            self._bridge.wait_for_news(seconds).wait()

    def finish(self) -> None:
        """Wait for the round that is under way, and let the model have its step."""
        self._rounds.join()
        self._do_what_is_left()
        self._rounds.join()
        self.standing.take_over()

    def see_out(self, seconds: float) -> bool:
        """Bring what was accumulated to the round that ends the epoch, without computing, if that
        begins within so many seconds; whether nothing is left that could be brought."""
        until = time.monotonic() + seconds
        self.finish()
        self.standing.computes_no_more()
        self.go_on()
        while self.standing.life.samples:
            left = until - time.monotonic()
            due_in = self._bridge.estimate.due_in_seconds_with(self.standing.life.samples)
            if left <= 0.0 or due_in > left or not self._bridge.estimate.peers:
                return False
            self.wait_for_news(max(min(due_in, left), SHORTEST_WAIT_SECONDS))
            self.go_on()
        self.finish()
        return True

    @contextmanager
    def away(self) -> Iterator[None]:
        """Nobody counts on this peer while this is entered. What was accumulated stays, and counts
        if the run is still in this epoch when it is left."""
        self.finish()
        self._bridge.set_away(is_away=True)
        yield
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
        """Go on from a state of this peer's own: from a checkpoint."""
        self.finish()
        self.standing.take_state(state)
        self._to_do.extend(self.standing.tell(Restored(state.epoch, state.history)))

    def _batch_begins(self) -> None:
        self.standing.begin_batch()
        self._serving_cost.computes()

    # -- doing what the lifecycle says

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
        """The run is elsewhere: take its state, unless this peer is to rest."""
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
        )
        try:
            with bridge.waiting():
                fetched = bridge.fetch(wanted).wait()
            state = fetched.state if isinstance(fetched, StateFetched) else None
            seen, losses = standing.take_state(state, fetched.results)
        except CollaborationEnded:
            raise
        except FetchCut:
            assert rest is not None
            return self._see_out(rest)
        except PotluckError as error:
            if isinstance(error, StateRefused | MalformedMessage):
                if self._is_of_the_run(effect):
                    raise  # no other source will do
                bridge.state_refused(effect.peers, error.what)
            bridge.tell(FetchingFailed(epoch, str(error)))
            if isinstance(error, TooSlow):
                with bridge.waiting():
                    bridge.sleep(TOO_SLOW_SECONDS).wait()
            return standing.tell(FetchFailed(str(error)))
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
        """Where the run is, is looked at afterwards. Nobody is told anything of this peer until
        then, and what has come of a state is kept."""
        self._bridge.set_away(is_away=True)
        with self._bridge.waiting():
            rest.see_out()
        self._bridge.set_away(is_away=False)
        self._retry_seconds = FIRST_RETRY_SECONDS
        return self.standing.tell(FetchFailed("Its owner wanted this peer to rest."))

    def _is_of_the_run(self, effect: Fetch) -> bool:
        """Whether most of the others are there: then a state that cannot be taken is the run's, and
        this peer does not fit. Fewer may have made it up to be rid of this peer."""
        return 2 * len(effect.peers) > len(self._bridge.estimate.peers)

    def _look_again(self) -> None:
        """A fresh look at the others. After a failed fetch, and from the second failed round in a
        row on, only after a while: what was in the way is still there a moment later."""
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
        """Until so many have passed; or, after the shortest pause, until others are in the way."""
        before, until = in_the_way(self._bridge.estimate), time.monotonic() + seconds
        self._bridge.sleep(min(seconds, FIRST_RETRY_SECONDS)).wait()
        while in_the_way(self._bridge.estimate) == before:
            left = until - time.monotonic()
            if left <= 0.0:
                return
            self._bridge.wait_for_news(max(left, SHORTEST_WAIT_SECONDS)).wait()

    def _wait_while_no_batch_is_wanted(self) -> None:
        """Until the others' batches are done, and the round has ended, where the plan has no other
        batch of this peer: one that lies beyond the target, or would end too late for the round.

        Once for each epoch, and not for much longer than the others' batches take: a round that has
        not begun by then is only said to be nearly due, and this peer would wait for as long as
        that is said."""
        epoch, until = -1, math.inf
        while self.standing.life.epoch != self._waited_in_vain:
            life, found = self.standing.life, self._bridge.estimate
            if life.epoch != epoch:
                epoch, until = life.epoch, math.inf
            if life.phase is not Phase.ACCUMULATING or 0 < self._mode.last_epoch <= life.epoch:
                return
            if self._mode.delayed and life.begun_without:
                return  # the others are gone: the next epoch's batches are computed meanwhile
            seconds, now = SHORTEST_WAIT_SECONDS, time.monotonic()
            if (found.epoch, found.history) == (life.epoch, life.history):
                if found.wants_batch_after(life.samples):
                    return
                seconds = max(found.others_ready_in_seconds, SHORTEST_WAIT_SECONDS)
                until = min(until, now + found.longest_wait_seconds)
            if now >= until:
                self._waited_in_vain = life.epoch
                return
            self.wait_for_news(min(seconds, LONGEST_RETRY_SECONDS))
            self.go_on()

    def _wait_for_a_run(self) -> None:
        """Who does not begin runs waits until there is one, or somebody who keeps its checkpoints:
        a few who began anew would outvote the keeper, once it is back."""
        while not (self._bridge.begins or self.standing.at[0] or self._bridge.estimate.keepers):
            self.wait_for_news(LONGEST_RETRY_SECONDS)
            self.go_on()

    def _wait_for_a_place(self) -> None:
        """Follow the run's steps, and compute nothing, while all places in its rounds are taken."""
        while not (self.tell_of_place() or self._is_complete()):
            rest = self._bridge.rest
            if rest is not None and rest.is_wanted():
                with self.away():
                    rest.see_out()
            self.wait_for_news(LONGEST_RETRY_SECONDS)
            self.go_on()

    def tell_of_place(self) -> bool:
        """Whether this peer has a place in the run's rounds; an event says when that changes."""
        found, had_place = self._bridge.estimate, self._has_place
        self._has_place = found.has_place
        if had_place and not found.has_place:
            self._bridge.tell(PlacesTaken(self.standing.at[0], found.places))
        elif found.has_place and not had_place:
            self._bridge.tell(PlaceFree(self.standing.at[0]))
        return found.has_place

    def _is_complete(self) -> bool:
        return 0 < self._mode.last_epoch <= self.standing.at[0]

    def _check_model(self) -> None:
        """OtherModel where everybody else in the run has another one."""
        found = self._bridge.estimate
        others = [one.peer for one in found.ignored if one.kind == "model"]
        if not others or found.peers:
            return
        with self._bridge.waiting():
            theirs = self._bridge.describe(others).wait()
        differences = [] if theirs is None else how_it_differs(self._description, theirs)
        words = f": {'; '.join(differences)}" if differences else ""
        count = len(others)
        train = f"All {count} other peers train" if count > 1 else "The only other peer trains"
        raise OtherModel(
            f"{train} something else in the run {self._bridge.run}{words}.",
            why="Peers average only what is alike, and then step alike: model, optimizer and its "
            "settings, batch, codec and clipping belong to the run.",
            advice="Build all of it as the run's organiser says, or take another name for a run of "
            "your own.",
        )


def in_the_way(found: Estimate) -> tuple[object, ...]:
    """What a failed round or fetch waits for: who has to be in a step, or is further."""
    return found.company, found.holders, found.ahead, found.behind, found.fork


def _told_too_slow(epoch: int, error: TooSlow) -> TooSlowToCatchUp:
    return TooSlowToCatchUp(
        epoch, error.bytes_per_second, error.needed_bytes_per_second, str(error)
    )
