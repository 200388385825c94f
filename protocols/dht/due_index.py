"""Things that fall due, in the order in which they do.

Each thing has one moment; it can be moved and taken out. Everything costs O(log n), and asking
whether anything is due costs next to nothing when nothing is.

Easy to get wrong: moving leaves the old place in the heap until its time comes. Whoever moves one
thing a million times would fill the memory with places, so the heap is built anew as soon as less
than half of it is true; that is O(1) a move on average.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Thing = TypeVar("Thing", bound=Hashable)

_SMALL_HEAP = 64  # not worth cleaning below


class DueIndex(Generic[Thing]):
    """Invariant: `_due` holds the truth; for each thing in it the heap has that place.

    The second number of a place is a counter: equal moments come in the order in which they were
    set, and things need no order of their own.
    """

    def __init__(self) -> None:
        self._due: dict[Thing, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, Thing]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, thing: Thing) -> bool:
        return thing in self._due

    @property
    def places(self) -> int:
        """How many places are held, true and old ones: for tests of the memory it takes."""
        return len(self._heap)

    def set(self, thing: Thing, due: int) -> None:
        """Let this thing fall due then, and not when it would have before."""
        self._count += 1
        self._due[thing] = (due, self._count)
        heapq.heappush(self._heap, (due, self._count, thing))
        self._clean()

    def discard(self, thing: Thing) -> None:
        if self._due.pop(thing, None) is not None:
            self._clean()

    def due_of(self, thing: Thing) -> int | None:
        place = self._due.get(thing)
        return None if place is None else place[0]

    def next_due(self) -> int | None:
        """When the next thing falls due, or None if there is none."""
        while self._heap:
            due, count, thing = self._heap[0]
            if self._due.get(thing) == (due, count):
                return due
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: int, at_most: int | None = None) -> list[Thing]:
        """Take out what is due at `now` or was before, in order; no more than `at_most`."""
        taken: list[Thing] = []
        while self._heap and self._heap[0][0] <= now and len(taken) != at_most:
            due, count, thing = heapq.heappop(self._heap)
            if self._due.get(thing) == (due, count):
                del self._due[thing]
                taken.append(thing)
        if taken:
            self._clean()
        return taken

    def _clean(self) -> None:
        if len(self._heap) > _SMALL_HEAP and len(self._heap) > 2 * len(self._due):
            self._heap = [(due, count, thing) for thing, (due, count) in self._due.items()]
            heapq.heapify(self._heap)
