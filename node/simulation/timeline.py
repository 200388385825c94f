"""What happens when: one heap of calls, made in virtual time.

A thousand nodes with ten thousand links are one heap here and no task; whoever has nothing to do
costs nothing. Calls due at the same time are made in the order in which they were asked for,
which is the first half of why a seed repeats a run (the second is trio's own order, see
`determinism`).

Two ways to run it. `drive` takes over the jumps of a MockClock: when every task is blocked the
clock moves to the next call or the next deadline of any task, whichever is first, and due calls
are made on the spot, between tasks. That is three times as fast as `run`, a task that sleeps
until the next call, which works under any clock.

Easy to get wrong: a call must not block and must not raise; it runs between tasks, not in one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, NoReturn

import trio
from trio.testing import MockClock


class Timeline:
    """Calls in the future. Made by `drive` or by `run`, never both."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._sleep = trio.CancelScope()
        self._next_wake = -math.inf  # of `run`, while it sleeps
        self._now = 0.0  # only while driven
        self.is_driven = False
        self.calls_made = 0

    def now(self) -> float:
        """trio's current time, at a tenth of the cost while the clock is ours to move."""
        return self._now if self.is_driven else trio.current_time()

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make `call(*arguments)` at `time` (in trio's clock), or as soon as that is past."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, call, arguments))
        if time < self._next_wake:
            self._next_wake = self._sleep.deadline = time

    def drive(self, clock: MockClock, tick_seconds: float = 0.0) -> None:
        """Let this clock make our calls as it jumps, and jump to whole ticks only.

        With a tick, whatever falls due within one is done at its end, together: a thousand busy
        nodes then cost a thousand jumps a second instead of a hundred thousand.
        """
        self.is_driven = True
        self._now = clock.current_time()

        def jump() -> None:
            now = clock.current_time()
            time = now + trio.lowlevel.current_statistics().seconds_to_next_deadline
            if self._heap and self._heap[0][0] < time:
                time = self._heap[0][0]
            if time == math.inf:
                return
            if tick_seconds:
                time = _next_tick(time, tick_seconds)
            if time > now:
                clock.jump(time - now)
            self._now = clock.current_time()
            self._make_due_calls(self._now)

        # trio 0.35 calls this when all tasks are blocked; MockClock cannot be subclassed, and
        # the run loop accepts no other clock that jumps
        clock._autojump = jump  # type: ignore[attr-defined]

    async def run(self) -> NoReturn:
        heap = self._heap
        while True:
            self._next_wake = heap[0][0] if heap else math.inf
            self._sleep = trio.CancelScope(deadline=self._next_wake)
            with self._sleep:
                await trio.lowlevel.wait_task_rescheduled(_abort)
            self._next_wake = -math.inf  # calls made below need not wake us
            self._make_due_calls(trio.current_time())

    def _make_due_calls(self, now: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, _, call, arguments = heapq.heappop(heap)
            self.calls_made += 1
            call(*arguments)


def _next_tick(time: float, tick_seconds: float) -> float:
    """The first whole tick that is not before `time`. The quotient is rounded: for a time that is
    a hair past a tick it may be that tick, and a clock that went there would never get past it."""
    ticks = math.ceil(time / tick_seconds)
    while ticks * tick_seconds < time:
        ticks += 1
    return ticks * tick_seconds


def _abort(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.SUCCEEDED
