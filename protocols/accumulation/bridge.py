"""The bridge: the one place where the training thread meets the network.

    bridge.enter(OptimizerEntry(slot, look, lock))          # once, by the optimizer
    bridge.note(slot)                                       # report progress; never waits
    bridge.estimate                                         # the state of the run; never waits
    averaging = bridge.start_averaging(WantedRound(vector, weight=96.0, ...))
    outcome = averaging.wait()                              # waits

`OptimizerEntry`, `WantedRound` and `FetchWanted` are what the training thread hands over. `FarSide`
is the trio side that answers (collaboration.py implements it). `Bridge` stands between them.

Promises: nothing here makes trio wait for the training thread. The training thread waits only in
`LaterAnswer.wait`. When the collaboration ends, every wait is woken with `CollaborationEnded`, and
later calls raise it unless they say otherwise. Only flat values and small plain messages pass, so
the same class could stand in front of a separate trainer process.

Easy to get wrong: while an averaging runs, its vector is being read; do not change it before the
end. Its result is the averager's memory, and is valid until the next averaging begins.
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

from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.events import Event
from protocols.accumulation.keeping import StateKeeper
from protocols.accumulation.keeping_up import TooSlow
from protocols.accumulation.lifecycle import Ending, Mode
from protocols.accumulation.parameters import Codecs
from protocols.accumulation.progress import Estimate
from protocols.accumulation.progress_slot import ProgressSlot
from protocols.accumulation.results import ResultLayouts, ResultsKept
from protocols.accumulation.state_fetching import Fetched, Followed
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_pace import ServingCost
from protocols.accumulation.training_description import TrainingDescription
from protocols.accumulation.training_state import LiveState
from protocols.accumulation.waiting import LaterAnswer
from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.layout import Vector
from protocols.moshpit.outcome import Outcome
from protocols.moshpit.settings import GROUP_SIZE

LAST_EVENTS = 1024  # an hour of a run that steps every four seconds; memory for some 200 KB

NOTE_SECONDS = 0.1
"""How often trio looks for notes of mere samples. If the training thread woke trio instead, it
would wait at its busiest until trio lets go of the interpreter: a millisecond for each batch. When
trio wakes up by itself, the training thread is most likely inside a pass of the model and does not
need the interpreter."""

Value = TypeVar("Value")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, eq=False)
class OptimizerEntry:
    """The parts that the optimizer brings when it enters.

    - `slot`: the first progress to publish.
    - `look`: returns the live state. It is called in a worker thread, with `lock` held for reading.
    - `mode`: how this peer takes part.
    - `results`: the results that the last steps were made of.
    - `description`: what is trained, and how.
    - `serving_cost`: how much serving the state slows training down; None for a peer that computes
      nothing.
    """

    slot: ProgressSlot
    look: Callable[[], LiveState]
    lock: StateLock
    mode: Mode
    results: ResultsKept
    description: TrainingDescription
    serving_cost: ServingCost | None = None


@dataclass(frozen=True, eq=False)
class WantedRound:
    """A request for a round. `AveragingOptions` explains the fields."""

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
    """A request for a state at this epoch or later (with `history`, only of that history), or for
    the results that lead to it from `mine`, the present state. `peers` claim to have it. `too_slow`
    is called in trio's thread."""

    mine: LiveState
    peers: tuple[PeerId, ...]
    at_least_epoch: int
    history: bytes | None
    layouts: ResultLayouts
    too_slow: Callable[[TooSlow], None]
    is_unwanted: Callable[[], bool] = lambda: False
    """Whether the owner now wants this peer to rest instead. Called in any thread."""


class FetchCut(PotluckError):
    """The fetch was interrupted: the owner wants this peer to rest."""


class Rest(Protocol):
    """Rest that the owner wants: a pause, a schedule, a quota. `is_wanted` may be called in any
    thread and never waits. `see_out` waits in the training thread until the rest is over."""

    def is_wanted(self) -> bool: ...
    def see_out(self) -> None: ...


@dataclass(frozen=True)
class BridgeStatistics:
    """Times since the bridge was entered. For `waiting_seconds` of `seconds` the training thread
    only waited for the network."""

    seconds: float
    waiting_seconds: float

    @property
    def utilisation(self) -> float:
        return 1.0 - self.waiting_seconds / self.seconds if self.seconds > 0.0 else 1.0


class FarSide(Protocol):
    """The trio side. `estimate` may be called in any thread and never waits. The other methods are
    called in trio's thread, and answer at once or later."""

    def estimate(self) -> Estimate: ...
    def note(self, slot: ProgressSlot, *, at_once: bool, ago: float) -> None: ...
    def enter(self, entry: OptimizerEntry, answer: LaterAnswer[None]) -> None: ...
    def average(self, wanted: WantedRound, answer: LaterAnswer[Outcome]) -> None: ...
    def look_again(self, after: int, answer: LaterAnswer[Estimate]) -> None: ...
    def wait_for_news(self, seconds: float, answer: LaterAnswer[Estimate]) -> None: ...
    def sleep(self, seconds: float, answer: LaterAnswer[None]) -> None: ...
    def fetch(self, wanted: FetchWanted, answer: LaterAnswer[Fetched | Followed]) -> None: ...
    def cut_fetch(self) -> None: ...
    def describe(
        self, peers: Sequence[PeerId], answer: LaterAnswer[TrainingDescription | None]
    ) -> None: ...
    def round_ended(
        self, ending: Ending, brought: Mapping[PeerId, float], *, applied: bool
    ) -> None: ...
    def state_refused(self, peers: Iterable[PeerId], reason: str) -> None: ...
    def state_advanced(self) -> None: ...
    def set_away(self, *, is_away: bool) -> None: ...
    def happened(self, event: Event) -> None: ...


class Bridge:
    """Made by `open_collaboration`. The methods are for the training thread (and the thread of a
    delayed step), except where a section says otherwise."""

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
        """The latest events. Any thread may read them; iterate over `tuple(bridge.events)`."""
        self.keeper: StateKeeper | None = None
        """Keeps the run's checkpoints on this peer, if set."""
        self.begins = True
        """As in CollaborationSettings."""
        self.group_size, self.approximate = GROUP_SIZE, False
        """As in CollaborationSettings."""
        self.rest: Rest | None = None
        """The rest that the owner wants, if any. Set it before the bridge is entered."""
        self._token = token
        self._far: FarSide | None = None
        self._lock = threading.Lock()
        self._open: set[LaterAnswer[Any]] = set()
        self._ended = False
        self._entered_at: float | None = None
        self._waited_seconds = 0.0
        self._noted: deque[tuple[ProgressSlot, float]] = deque(maxlen=2)
        """The newest notes that trio has not taken, with their times. Two, because a batch is
        measured from the note of its beginning to the note of its end."""

    # -- for the training thread

    @property
    def ended(self) -> bool:
        """Whether the collaboration has ended. Most other calls then raise CollaborationEnded."""
        return self._ended

    @property
    def estimate(self) -> Estimate:
        """The state of the run as of the last look. The object is replaced, never changed. Never
        waits."""
        return self._far_side().estimate()

    def enter(self, entry: OptimizerEntry) -> None:
        """Take part from now on. Waits until this peer's progress is published and the others' is
        read. May be called once."""
        if self._entered_at is not None:
            raise ProtocolMisuse(
                "This bridge has an optimizer already.",
                why="A node has one state of a run, which others fetch from it.",
                advice="Make one CollaborativeOptimizer for each collaboration.",
            )
        self._entered_at = time.monotonic()
        answer = self._answer(LaterAnswer[None]("being let in"))
        self._post(self._far_side().enter, entry, answer)
        with self.waiting():
            answer.wait()

    def note(self, slot: ProgressSlot, *, at_once: bool = False) -> None:
        """Report this peer's progress. Never waits; one thread at a time. Without `at_once`, the
        note reaches trio within NOTE_SECONDS, and before any later note with `at_once`. Only the
        last two such notes are kept."""
        self._far_side()
        now = time.monotonic()
        if not at_once:
            self._noted.append((slot, now))
            return
        for noted in self._take_noted():
            self._post(self._hand_on, *noted, False)
        self._post(self._hand_on, slot, now, True)

    def start_averaging(self, wanted: WantedRound) -> LaterAnswer[Outcome]:
        """Begin a round. One at a time."""
        answer = self._answer(LaterAnswer[Outcome]("the outcome of a round"))
        self._post(self._far_side().average, wanted, answer)
        return answer

    def look_again(self, after: int) -> LaterAnswer[Estimate]:
        """Read the others' progress now. The answer is an estimate with a higher number than
        `after`."""
        answer = self._answer(LaterAnswer[Estimate]("a look at the run"))
        self._post(self._far_side().look_again, after, answer)
        return answer

    def wait_for_news(self, seconds: float) -> LaterAnswer[Estimate]:
        """The next estimate with news, or the latest one after this time."""
        answer = self._answer(LaterAnswer[Estimate]("news of the run"))
        self._post(self._far_side().wait_for_news, seconds, answer)
        return answer

    def sleep(self, seconds: float) -> LaterAnswer[None]:
        """Answered after this time. The end of the collaboration wakes the waiting thread, too."""
        answer = self._answer(LaterAnswer[None]("the end of a pause"))
        self._post(self._far_side().sleep, seconds, answer)
        return answer

    def fetch(self, wanted: FetchWanted) -> LaterAnswer[Fetched | Followed]:
        """A verified state, or the results that lead on from the present one. The answer fails with
        an error for each source, or with FetchCut if the owner wants a rest."""
        answer = self._answer(LaterAnswer[Fetched | Followed]("a state"))
        self._post(self._far_side().fetch, wanted, answer)
        return answer

    def describe(self, peers: Sequence[PeerId]) -> LaterAnswer[TrainingDescription | None]:
        """The description of the first of these peers that answers; None if none does."""
        answer = self._answer(LaterAnswer[TrainingDescription | None]("what others train"))
        self._post(self._far_side().describe, peers, answer)
        return answer

    def round_ended(
        self, ending: Ending, brought: Mapping[PeerId, float], *, applied: bool
    ) -> None:
        """Tell the tracker who was in the round, with what weight. Call it before the next epoch is
        noted. Never waits."""
        far = self._far_side()
        self._post(lambda: far.round_ended(ending, brought, applied=applied))

    def state_refused(self, peers: Iterable[PeerId], reason: str) -> None:
        """This peer cannot take the state of these peers: ignore them for a while. Never waits."""
        self._post(self._far_side().state_refused, tuple(peers), reason)

    def state_advanced(self) -> None:
        """The state has changed: compute its digest anew. Never waits."""
        self._post(self._far_side().state_advanced)
        if self.keeper is not None:
            self.keeper.advanced()

    def set_away(self, *, is_away: bool) -> None:
        """Tell the others whether this peer is away: paused, or off. Never waits."""
        far = self._far_side()
        self._post(lambda: far.set_away(is_away=is_away))

    def tell(self, event: Event) -> None:
        """Record an event. Never waits, and raises nothing, not even after the end."""
        self.events.append(event)
        with suppress(CollaborationEnded):
            self._post(self._far_side().happened, event)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the block as waiting. Wraps every wait of the training thread."""
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
        """The owner's wish for rest has changed. Never waits, and raises nothing, not even after
        the end."""
        if self.rest is not None and self.rest.is_wanted():
            with suppress(CollaborationEnded):
                self._post(self._far_side().cut_fetch)

    # -- for trio's thread

    def set_far_side(self, far: FarSide) -> None:
        """Set the trio side, before the bridge is handed out."""
        self._far = far

    async def hand_on_notes(self) -> None:
        """Until the end, hand on the notes that may wait."""
        while not self._ended:
            await trio.sleep(NOTE_SECONDS)
            with suppress(CollaborationEnded):
                for noted in self._take_noted():
                    self._hand_on(*noted, False)

    def _take_noted(self) -> list[tuple[ProgressSlot, float]]:
        """The waiting notes, in order. The training thread may add one at the same time."""
        taken = []
        with suppress(IndexError):  # there are no more
            while True:
                taken.append(self._noted.popleft())
        return taken

    def _hand_on(self, slot: ProgressSlot, at: float, at_once: bool) -> None:
        self._far_side().note(slot, at_once=at_once, ago=time.monotonic() - at)

    def end(self) -> None:
        """Wake every waiting thread, and refuse all further calls. Calling it twice is harmless."""
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

    def _answer(self, answer: LaterAnswer[Value]) -> LaterAnswer[Value]:
        """Register the answer, so that the end wakes the thread that waits for it. Answers that are
        done are forgotten."""
        with self._lock:
            if self._ended:
                raise _ended()
            self._open = {one for one in self._open if not one.done}
            self._open.add(answer)
        return answer

    def _post(self, call: Callable[[Unpack[Arguments]], object], *arguments: *Arguments) -> None:
        """Call it in trio's thread, unless the collaboration ends first. Then nothing could handle
        the call, and an error in it would end the whole trio run."""

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
