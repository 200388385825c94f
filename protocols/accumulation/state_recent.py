"""Copies of the states that this peer has named last, while somebody cannot get hold of one.

    recent.wanted()                      # a state was asked for: each that is named from now on
    if recent.is_wanted: ...             # is copied, if it is_small,
    recent.keep(state)                   # and kept here for a while
    recent.get(digest)

Who asks for a state by its digest has read that digest in a slot, and slots are some tenths of a
second old, at times a whole one. Where steps are shorter than that, the state is another one by
then, each time anew. So a donor that was asked lately keeps the states that it has just named, if
they are small; a run with large states makes no such steps.

Promises: nothing is copied unless somebody has asked within WANTED_SECONDS, and nothing is kept
when nobody has. However many ask, and for whatever, it is never more than MOST_STATES and
MOST_BYTES; a state that is being downloaded stays in memory until it is sent, as any does.

Easy to get wrong: a state is of use only together with the results of the steps since. So it is
kept for fewer steps than results are.
"""

from __future__ import annotations

from collections.abc import Callable

from protocols.accumulation.state_messages import MOST_RESULTS
from protocols.accumulation.training_state import LiveState, TrainingState

LARGEST_BYTES = 4 << 20
"""Of one state: a millisecond to copy, for a step of some 30 at the least."""

MOST_BYTES = 32 << 20
"""Of all: less than torch alone takes, at any peer that trains."""

MOST_STATES = MOST_RESULTS * 3 // 4
"""Whoever takes the oldest has some steps' time to ask for the result that follows it."""

WANTED_SECONDS = 3.0
"""After a question: a slot and another try take less, and who was let in asks for results."""


class RecentStates:
    """For one thread. Invariant: within the limits above, what was used last at the end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[bytes, TrainingState] = {}
        self._wanted_until = -1.0

    def __len__(self) -> int:
        return len(self._states)

    def states(self) -> list[TrainingState]:
        return list(self._states.values())

    @property
    def held_bytes(self) -> int:
        return sum(len(one.memory) for one in self._states.values())

    def wanted(self) -> None:
        """Somebody asks for a state."""
        self._wanted_until = self._clock() + WANTED_SECONDS

    @property
    def is_wanted(self) -> bool:
        """Whether a state that is named now is to be kept."""
        return self._clock() < self._wanted_until

    def keep(self, state: TrainingState) -> None:
        """It has just been named, or is being used."""
        self._states.pop(state.digest, None)
        self._states[state.digest] = state
        while len(self._states) > MOST_STATES or self.held_bytes > MOST_BYTES:
            del self._states[next(iter(self._states))]

    def get(self, digest: bytes) -> TrainingState | None:
        return self._states.get(digest)

    def forget_unwanted(self) -> None:
        """Let all go when nobody has asked for long enough; to be called now and then."""
        if not self.is_wanted:
            self._states.clear()


def is_small(live: LiveState) -> bool:
    """Whether a copy of it may be kept beside others."""
    return sum(one.bytes for one in live.specs) <= LARGEST_BYTES
