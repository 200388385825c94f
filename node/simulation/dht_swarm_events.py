"""A virtual clock and what is to happen when: the loop of a swarm that has no tasks.

Ten thousand nodes as trio tasks would take an hour and all the memory; as calls that are due at a
moment they take minutes. Nothing here waits: time jumps to the next event.

Easy to get wrong: events of one moment happen in the order in which they were asked for, so that
the same seed gives the same run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Invariant: no event is before `now`. Time is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call this in so many seconds."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call, arguments))

    def run_until(self, moment: float) -> None:
        """Let everything happen that is due by then; it is that moment afterwards."""
        events = self._events
        while events and events[0][0] <= moment:
            self.now, _, call, arguments = heapq.heappop(events)
            call(*arguments)
        self.now = max(self.now, moment)

    def run_while(self, unfinished: Callable[[], object]) -> None:
        """Let things happen until this is no longer true, or nothing is left to happen."""
        events = self._events
        while events and unfinished():
            self.now, _, call, arguments = heapq.heappop(events)
            call(*arguments)
