"""An index of things by the time at which they are due.

Each thing has one time, which can be changed, and can be taken out. All operations cost O(log n).
Asking whether anything is due costs almost nothing when nothing is.

A thing that moves leaves its old entry in the heap until that time comes. Moving one thing a
million times would fill the memory, so the heap is rebuilt when less than half of it is valid. That
is O(1) a move on average.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Thing = TypeVar("Thing", bound=Hashable)

_SMALL_HEAP = 64  # smaller heaps are not worth cleaning


class DueIndex(Generic[Thing]):
    """Invariant: `_due` is the truth; the heap has that entry for each thing in it.

    The second number of an entry is a counter. So equal times keep the order in which they were
    set, and things need not be comparable.
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
        """The number of heap entries, valid and old: for tests of the memory use."""
        return len(self._heap)

    def set(self, thing: Thing, due: int) -> None:
        """Set the time at which this thing is due, in place of an earlier one."""
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
        """When the next thing is due; None if there is none."""
        while self._heap:
            due, count, thing = self._heap[0]
            if self._due.get(thing) == (due, count):
                return due
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: int, at_most: int | None = None) -> list[Thing]:
        """Take out, in order, what is due at `now` or earlier; at most `at_most` things."""
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
