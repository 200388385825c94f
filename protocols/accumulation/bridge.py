"""The one narrow place where the training thread meets the network.

    bridge.enter(Entry(slot, look, lock))                   # once, by the optimizer
    bridge.note(slot)                                       # how this peer is now; never waits
    bridge.estimate                                         # how the run is: a plain attribute
    averaging = bridge.start_averaging(Wanted(vector, weight=96.0, ...))
    outcome = averaging.wait()                              # waits; woken at once at the end

Promises: nothing in here makes trio wait for the training thread. The training thread waits only
in `Answer.wait`, and `CollaborationEnded` comes out of it as soon as the collaboration ends, and
out of every other call from then on. All that passes is flat values and small plain messages, so
that the same class can stand in front of a process of the trainer's own.

Easy to get wrong: while an averaging runs its vector is being read; change it only when it is
done. And its result is the averager's memory, until the next averaging begins.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

import trio

from protocols.accumulation.committed_result import ResultLayouts
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.events import Event
from protocols.accumulation.keeping import Keeper
from protocols.accumulation.keeping_up import TooSlow
from protocols.accumulation.lifecycle_events import Ending
from protocols.accumulation.parameters import Codecs
from protocols.accumulation.progress import Estimate
from protocols.accumulation.progress_slot import ProgressSlot
from protocols.accumulation.results_kept import ResultsKept
from protocols.accumulation.state_fetching import Fetched
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_pace import ServingCost
from protocols.accumulation.state_with_results import Followed
from protocols.accumulation.training_description import TrainingDescription
from protocols.accumulation.training_state import LiveState
from protocols.accumulation.waiting import Answer
from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.outcome import Outcome
from protocols.moshpit.settings import GROUP_SIZE
from protocols.moshpit.vector import Vector

LAST_EVENTS = 1024  # an hour of a run that steps every four seconds; memory for some 200 KB

NOTE_SECONDS = 0.1
"""How often trio looks whether mere samples were noted. A wake-up by the training thread would have
it wait, at its busiest, until trio lets go of the interpreter (a millisecond for each batch); when
trio wakes up by itself, the other is most likely within a pass, and needs no interpreter."""

Value = TypeVar("Value")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, eq=False)
class Entry:
    """What the optimizer brings when it enters: what its peer says first, how its state is seen
    (`look` is called in a worker thread with the lock held for reading), of how many samples a
    round is, what its last steps were made of, and what it trains and how. `serving_cost`: what
    serving the state costs its batches; None where it computes none."""

    slot: ProgressSlot
    look: Callable[[], LiveState]
    lock: StateLock
    target_samples: int
    results: ResultsKept
    description: TrainingDescription
    serving_cost: ServingCost | None = None


@dataclass(frozen=True, eq=False)
class Wanted:
    """A round that is wanted: `AveragingOptions` says what the words mean."""

    vector: Vector
    weight: float
    most_weight: float
    epoch: int
    topic: str
    expected: int
    awaited: frozenset[PeerId] | None = None
    votes: float = 0.0


@dataclass(frozen=True)
class FetchWanted:
    """The state of peers who are at this epoch or later; with a history, only of that one; or what
    leads to it from the state that is here, `mine`. `peers` claim to have it. `too_slow` is called
    in trio's thread."""

    mine: LiveState
    peers: tuple[PeerId, ...]
    at_least_epoch: int
    history: bytes | None
    layouts: ResultLayouts
    too_slow: Callable[[TooSlow], None]
    is_unwanted: Callable[[], bool] = lambda: False
    """Whether the owner wants this peer to rest instead, since a moment ago. Any thread."""


class FetchCut(PotluckError):
    """What was being fetched is left where it is: the owner wants this peer to rest."""


class Rest(Protocol):
    """What the owner of this peer wants: a pause, a schedule, a quota. `is_wanted` may be called in
    any thread and never waits; `see_out` waits, in the training thread, until it is over."""

    def is_wanted(self) -> bool: ...
    def see_out(self) -> None: ...


@dataclass(frozen=True)
class BridgeStatistics:
    """Since the bridge was entered. `waiting_seconds`: in which the training thread did nothing
    but wait for the network; the rest of `seconds` is its own."""

    seconds: float
    waiting_seconds: float

    @property
    def utilisation(self) -> float:
        return 1.0 - self.waiting_seconds / self.seconds if self.seconds > 0.0 else 1.0


class FarSide(Protocol):
    """The trio side. `estimate` may be called in any thread and never waits; the others are called
    in trio's thread, and answer at once or later."""

    def estimate(self) -> Estimate: ...
    def note(self, slot: ProgressSlot, *, at_once: bool, ago: float) -> None: ...
    def enter(self, entry: Entry, answer: Answer[None]) -> None: ...
    def average(self, wanted: Wanted, answer: Answer[Outcome]) -> None: ...
    def look_again(self, after: int, answer: Answer[Estimate]) -> None: ...
    def wait_for_news(self, seconds: float, answer: Answer[Estimate]) -> None: ...
    def sleep(self, seconds: float, answer: Answer[None]) -> None: ...
    def fetch(self, wanted: FetchWanted, answer: Answer[Fetched | Followed]) -> None: ...
    def cut_fetch(self) -> None: ...
    def describe(
        self, peers: Sequence[PeerId], answer: Answer[TrainingDescription | None]
    ) -> None: ...
    def round_ended(
        self, ending: Ending, brought: Mapping[PeerId, float], *, applied: bool
    ) -> None: ...
    def state_refused(self, peers: Iterable[PeerId], reason: str) -> None: ...
    def state_advanced(self) -> None: ...
    def set_away(self, *, is_away: bool) -> None: ...
    def happened(self, event: Event) -> None: ...


class Bridge:
    """Made by `open_collaboration`. Its methods are for the training thread (and the one that a
    delayed step runs in); `set_far_side` and `end` are for trio's."""

    def __init__(
        self,
        run: str,
        target_batch: int,
        codec: Codecs,
        grace_seconds: float,
        token: trio.lowlevel.TrioToken,
    ) -> None:
        self.run, self.target_batch = run, target_batch
        self.codec, self.grace_seconds = codec, grace_seconds
        self.events: deque[Event] = deque(maxlen=LAST_EVENTS)
        """The last that happened. Any thread may look; `tuple(bridge.events)` to go through it."""
        self.keeper: Keeper | None = None
        """Who keeps the run's checkpoints at this peer, if anybody does."""
        self.begins = True
        """CollaborationSettings.begins."""
        self.group_size, self.approximate = GROUP_SIZE, False
        """Those of the CollaborationSettings."""
        self.rest: Rest | None = None
        """What the owner of this peer has to say in it, if anything; set before it is entered."""
        self._token = token
        self._far: FarSide | None = None
        self._lock = threading.Lock()
        self._open: set[Answer[Any]] = set()
        self._ended = False
        self._entered_at: float | None = None
        self._waited_seconds = 0.0
        self._noted: deque[tuple[ProgressSlot, float]] = deque(maxlen=1)
        """The newest that trio has not taken, and when it was said."""

    # -- for the training thread

    @property
    def ended(self) -> bool:
        """Whether the collaboration has ended: every call but this raises."""
        return self._ended

    @property
    def estimate(self) -> Estimate:
        """How the run is, as of the last look. Replaced, never changed; never waits."""
        return self._far_side().estimate()

    def enter(self, entry: Entry) -> None:
        """Take part from now on. Waits until the progress is said and read. Once for a bridge."""
        if self._entered_at is not None:
            raise ProtocolMisuse(
                "This bridge has an optimizer already.",
                why="A node has one state of a run, which others fetch from it.",
                advice="Make one CollaborativeOptimizer for each collaboration.",
            )
        self._entered_at = time.monotonic()
        answer = self._answer(Answer[None]("being let in"))
        self._post(self._far_side().enter, entry, answer)
        with self.waiting():
            answer.wait()

    def note(self, slot: ProgressSlot, *, at_once: bool = False) -> None:
        """How this peer is now. Never waits; what is not to be said at once is handed on within
        NOTE_SECONDS, or left out for a newer one. One thread at a time."""
        far = self._far_side()
        if at_once:
            self._noted.clear()
            self._post(lambda: far.note(slot, at_once=True, ago=0.0))
        else:
            self._noted.append((slot, time.monotonic()))

    def start_averaging(self, wanted: Wanted) -> Answer[Outcome]:
        """Begin a round; one at a time."""
        answer = self._answer(Answer[Outcome]("the outcome of a round"))
        self._post(self._far_side().average, wanted, answer)
        return answer

    def look_again(self, after: int) -> Answer[Estimate]:
        """Read the others' progress now: an estimate with a higher number than this."""
        answer = self._answer(Answer[Estimate]("a look at the run"))
        self._post(self._far_side().look_again, after, answer)
        return answer

    def wait_for_news(self, seconds: float) -> Answer[Estimate]:
        """The next estimate that says anything new, or the last one after so many seconds."""
        answer = self._answer(Answer[Estimate]("news of the run"))
        self._post(self._far_side().wait_for_news, seconds, answer)
        return answer

    def sleep(self, seconds: float) -> Answer[None]:
        """Given after so many seconds; the end wakes whoever waits for it."""
        answer = self._answer(Answer[None]("the end of a pause"))
        self._post(self._far_side().sleep, seconds, answer)
        return answer

    def fetch(self, wanted: FetchWanted) -> Answer[Fetched | Followed]:
        """A verified state, or what leads on from the present one. The answer fails with what
        befell each source; with FetchCut where the owner wants a rest."""
        answer = self._answer(Answer[Fetched | Followed]("a state"))
        self._post(self._far_side().fetch, wanted, answer)
        return answer

    def describe(self, peers: Sequence[PeerId]) -> Answer[TrainingDescription | None]:
        """What the first of these trains, and how, that says so; None if none does."""
        answer = self._answer(Answer[TrainingDescription | None]("what others train"))
        self._post(self._far_side().describe, peers, answer)
        return answer

    def round_ended(
        self, ending: Ending, brought: Mapping[PeerId, float], *, applied: bool
    ) -> None:
        """Who was in the round with what weight, for the progress to remember. Before the epoch
        that follows from it is noted; never waits."""
        far = self._far_side()
        self._post(lambda: far.round_ended(ending, brought, applied=applied))

    def state_refused(self, peers: Iterable[PeerId], reason: str) -> None:
        """What these peers have is no state that this one can take: they are ignored for a while.
        Never waits."""
        self._post(self._far_side().state_refused, tuple(peers), reason)

    def state_advanced(self) -> None:
        """The state has changed: it is to be named anew. Never waits."""
        self._post(self._far_side().state_advanced)
        if self.keeper is not None:
            self.keeper.advanced()

    def set_away(self, *, is_away: bool) -> None:
        """Whether the others are told that this peer is not there: paused, or off. Never waits."""
        far = self._far_side()
        self._post(lambda: far.set_away(is_away=is_away))

    def tell(self, event: Event) -> None:
        """Something happened. Never waits; raises nothing, also after the end."""
        self.events.append(event)
        with suppress(CollaborationEnded):
            self._post(self._far_side().happened, event)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever the training thread waits for: it counts as waiting."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited_seconds += time.monotonic() - began

    def statistics(self) -> BridgeStatistics:
        entered = self._entered_at
        seconds = 0.0 if entered is None else time.monotonic() - entered
        return BridgeStatistics(seconds, self._waited_seconds)

    # -- for any thread

    def rest_changed(self) -> None:
        """Its owner wants another thing now. Never waits; raises nothing, also after the end."""
        if self.rest is not None and self.rest.is_wanted():
            with suppress(CollaborationEnded):
                self._post(self._far_side().cut_fetch)

    # -- for trio's thread

    def set_far_side(self, far: FarSide) -> None:
        """Where everything goes; before the bridge is handed out."""
        self._far = far

    async def hand_on_notes(self) -> None:
        """Those that need not be said at once, until the end."""
        while not self._ended:
            await trio.sleep(NOTE_SECONDS)
            with suppress(IndexError, CollaborationEnded):  # nothing noted; or the end
                slot, at = self._noted.popleft()
                self._far_side().note(slot, at_once=False, ago=time.monotonic() - at)

    def end(self) -> None:
        """Wake whoever waits, and refuse everything from now on. Twice is harmless."""
        with self._lock:
            self._ended = True
            waiting, self._open = self._open, set()
        for answer in waiting:
            answer.fail(_ended())

    # -- within

    def _far_side(self) -> FarSide:
        if self._ended or self._far is None:
            raise _ended()
        return self._far

    def _answer(self, answer: Answer[Value]) -> Answer[Value]:
        """Let the end wake whoever waits for it. Only those that are open are kept."""
        with self._lock:
            if self._ended:
                raise _ended()
            self._open = {one for one in self._open if not one.done}
            self._open.add(answer)
        return answer

    def _post(self, call: Callable[[Unpack[Arguments]], object], *arguments: *Arguments) -> None:
        """Call it in trio's thread, unless the end comes first: then nothing is there any more that
        could take it, and what it raised would end the whole of trio's run."""

        def unless_ended() -> None:
            if not self._ended:
                call(*arguments)

        try:
            self._token.run_sync_soon(unless_ended)
        except trio.RunFinishedError:
            raise _ended() from None


def _ended() -> CollaborationEnded:
    return CollaborationEnded(
        "The collaboration has ended.",
        why="Its block, or its node, has ended; nothing is averaged any more.",
        advice="End the training loop; what it has learnt is in the model.",
    )
