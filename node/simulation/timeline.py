"""What happens when: one heap of calls and one task that makes them.

A thousand nodes with ten thousand links cost one task here; whoever has nothing to do costs
nothing. Calls due at the same time are made in the order in which they were asked for, which
is the first half of why a seed repeats a run (the second is trio's own order, see
`determinism`).

Easy to get wrong: a call must not block and must not raise; it runs between tasks, not in one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, NoReturn

import trio


class Timeline:
    """Calls in the future. `run` makes them; it is started once, by the world."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._sleep = trio.CancelScope()
        self.calls_made = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make `call(*arguments)` at `time` (in trio's clock), or as soon as that is past."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, call, arguments))
        if time < self._sleep.deadline:
            self._sleep.deadline = time

    def __len__(self) -> int:
        return len(self._heap)

    async def run(self) -> NoReturn:
        heap = self._heap
        while True:
            self._sleep = trio.CancelScope(deadline=heap[0][0] if heap else math.inf)
            with self._sleep:
                await trio.lowlevel.wait_task_rescheduled(_abort)
            self._sleep.deadline = -math.inf  # calls made below need not wake us
            now = trio.current_time()
            while heap and heap[0][0] <= now:
                _, _, call, arguments = heapq.heappop(heap)
                self.calls_made += 1
                call(*arguments)


def _abort(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.SUCCEEDED
