"""The bridge: the one place where the training thread meets the network.

    bridge.enter(OptimizerEntry(slot, look, lock, ...))     # once, by the optimizer
    bridge.note(slot)                                       # report progress; never waits
    bridge.estimate                                         # the state of the run; never waits
    averaging = bridge.average(RoundRequest(vector, weight=96.0, ...))
    outcome = averaging.wait()                              # waits

The training thread holds the `Bridge`, and calls through it the functions of the `Collaboration`
(collaboration.py), which lives in trio's thread. The portal (protocols/guest.py) carries the calls.
`OptimizerEntry`, `RoundRequest` and `FetchWanted` are what the training thread hands over.

Promises: nothing here makes trio wait for the training thread. The training thread waits only in
`enter` and in `GuestCall.wait`. When the collaboration ends, every wait is woken with
`CollaborationEnded`, and later calls raise it unless they say otherwise.

Easy to get wrong: while an averaging runs, its vector is being read; do not change it before the
end. Its result is the averager's memory, and is valid until the next averaging begins.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from protocols.accumulation.claims import Brought
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.events import TrainingEvent
from protocols.accumulation.keeping import StateKeeper
from protocols.accumulation.keeping_up import TooSlow
from protocols.accumulation.lifecycle import Averaged, Mode
from protocols.accumulation.progress_slot import ProgressSlot
from protocols.accumulation.results import ResultLayouts, ResultsKept
from protocols.accumulation.state_fetching import FetchedState, Followed
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_pace import ServingCost
from protocols.accumulation.training_description import TrainingDescription
from protocols.accumulation.training_state import LiveState
from protocols.errors import PotluckError, ProtocolMisuse
from protocols.guest import GuestCall, Portal
from protocols.identity import PeerId
from protocols.moshpit.outcome import Outcome
from protocols.moshpit.request import RoundRequest

if TYPE_CHECKING:
    from protocols.accumulation.collaboration import Collaboration

LAST_EVENTS = 1024  # an hour of a run that steps every four seconds; memory for some 200 KB

NOTE_SECONDS = 0.1
"""How often trio looks for notes of mere samples. If the training thread woke trio instead, it
would wait at its busiest until trio lets go of the interpreter: a millisecond for each batch. When
trio wakes up by itself, the training thread is most likely inside a pass of the model and does not
need the interpreter."""


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


@dataclass(frozen=True)
class FetchWanted:
    """A request for a state at this epoch or later (with `history`, only of that history), or for
    the results that lead to it from `mine`, the present state. `peers` claim to have it; they have
    so many `seconds`. `too_slow` is called in trio's thread."""

    mine: LiveState
    peers: tuple[PeerId, ...]
    at_least_epoch: int
    history: bytes | None
    layouts: ResultLayouts
    too_slow: Callable[[TooSlow], None]
    is_unwanted: Callable[[], bool] = lambda: False
    """Whether the owner now wants this peer to rest instead. Called in any thread."""
    seconds: float = math.inf


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


class Bridge:
    """Made by `open_collaboration`. The methods are for the training thread (and the thread of a
    delayed step), except where a section says otherwise."""

    def __init__(
        self, portal: Portal, collaboration: Collaboration, keeper: StateKeeper | None
    ) -> None:
        self.settings = collaboration.settings
        self.events: deque[TrainingEvent] = deque(maxlen=LAST_EVENTS)
        """The latest events. Any thread may read them; iterate over `tuple(bridge.events)`."""
        self.keeper = keeper
        """Keeps the run's checkpoints on this peer, if set."""
        self.rest: Rest | None = None
        """The rest that the owner wants, if any. Set it before the bridge is entered."""
        self._portal, self._collaboration = portal, collaboration
        self._entered_at: float | None = None
        self._waited_seconds = 0.0
        self._noted: deque[tuple[ProgressSlot, float]] = deque(maxlen=2)
        """The newest notes that trio has not taken, with their times. Two, because a batch is
        measured from the note of its beginning to the note of its end."""

    # -- for the training thread

    @property
    def ended(self) -> bool:
        """Whether the collaboration has ended. Most other calls then raise CollaborationEnded."""
        return self._portal.ended

    @property
    def portal(self) -> Portal:
        """For other calls to the node, from any thread of the training. It ends with the
        collaboration."""
        return self._portal

    @property
    def estimate(self) -> Estimate:
        """The state of the run as of the last look. The object is replaced, never changed. Never
        waits."""
        self._portal.check()
        return self._collaboration.tracker.estimate

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
        with self.waiting():
            self._portal.begin(self._collaboration.enter, entry).wait()

    def note(self, slot: ProgressSlot, *, at_once: bool = False) -> None:
        """Report this peer's progress. Never waits; one thread at a time. Without `at_once`, the
        note reaches trio within NOTE_SECONDS, and before any later note with `at_once`. Only the
        last two such notes are kept."""
        self._portal.check()
        now = time.monotonic()
        if not at_once:
            self._noted.append((slot, now))
            return
        for noted in self._take_noted():
            self._portal.post(self._hand_on, *noted, False)
        self._portal.post(self._hand_on, slot, now, True)

    def average(self, request: RoundRequest) -> GuestCall[Outcome]:
        """Begin a round. One at a time."""
        return self._portal.begin(self._collaboration.average, request)

    def look_again(self, after: int) -> GuestCall[Estimate]:
        """Read the others' progress now. The call returns an estimate with a higher number than
        `after`."""
        return self._portal.begin(self._collaboration.tracker.look_again, after)

    def wait_for_news(self, seconds: float) -> GuestCall[Estimate]:
        """The next estimate with news, or the latest one after this time."""
        return self._portal.begin(self._collaboration.wait_for_news, seconds)

    def sleep(self, seconds: float) -> GuestCall[None]:
        """Returns after this time. The end of the collaboration wakes the waiting thread, too."""
        return self._portal.begin(trio.sleep, seconds)

    def fetch(self, wanted: FetchWanted) -> GuestCall[FetchedState | Followed]:
        """A verified state, or the results that lead on from the present one. The call fails with
        an error for each source, or with FetchCut if the owner wants a rest."""
        return self._portal.begin(self._collaboration.fetch, wanted)

    def describe(self, peers: Sequence[PeerId]) -> GuestCall[TrainingDescription | None]:
        """The description of the first of these peers that answers; None if none does."""
        return self._portal.begin(self._collaboration.describe, peers)

    def round_ended(self, ended: Averaged, brought: Brought, *, applied: bool) -> None:
        """Tell the tracker who was in the round, with what weight. Call it before the next epoch is
        noted. Never waits."""
        self._portal.post(self._collaboration.round_ended, ended, brought, applied)

    def state_refused(self, peers: Iterable[PeerId], reason: str) -> None:
        """This peer cannot take the state of these peers: ignore them for a while. Never waits."""
        self._portal.post(self._collaboration.state_refused, tuple(peers), reason)

    def state_advanced(self) -> None:
        """The state has changed: compute its digest anew. Never waits."""
        self._portal.post(self._collaboration.state_advanced)
        if self.keeper is not None:
            self.keeper.advanced()

    def set_away(self, *, is_away: bool) -> None:
        """Tell the others whether this peer is away: paused, or off. Never waits."""
        self._portal.post(self._collaboration.set_away, is_away)

    def tell(self, event: TrainingEvent) -> None:
        """Record an event. Never waits, and raises nothing, not even after the end."""
        self.events.append(event)
        with suppress(CollaborationEnded):
            self._portal.post(self._collaboration.happened, event)

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
                self._portal.post(self._collaboration.cut_fetch)

    # -- for trio's thread

    async def hand_on_notes(self) -> None:
        """Until cancelled, hand on the notes that may wait."""
        while True:
            await trio.sleep(NOTE_SECONDS)
            for noted in self._take_noted():
                self._hand_on(*noted, False)

    def _hand_on(self, slot: ProgressSlot, at: float, at_once: bool) -> None:
        self._collaboration.note(slot, at_once=at_once, ago=time.monotonic() - at)

    # -- for both

    def _take_noted(self) -> list[tuple[ProgressSlot, float]]:
        """The waiting notes, in order. The training thread may add one at the same time."""
        taken = []
        with suppress(IndexError):  # there are no more
            while True:
                taken.append(self._noted.popleft())
        return taken
