"""Scheduled calls: one heap of calls, made in virtual time.

A thousand nodes with ten thousand links are one heap and no tasks; an idle node costs nothing.
Calls due at the same time are made in the order in which they were scheduled. That is the first
half of making a seed repeatable; the second is trio's own order (see `deterministic_scheduling`).

There are two ways to run it. `drive` takes over the jumps of a MockClock. When every task is
blocked, the clock moves to the next call or to the next deadline of any task, whichever is first,
and due calls are made at once, between tasks. `run` is a task that sleeps until the next call. It
works under any clock, but `drive` is three times as fast.

A call must not block and must not raise: it runs between tasks, not in one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import trio
from trio._core import _run as trio_run  # trio 0.35: the hook has no public name
from trio.testing import MockClock

MOST_JUMPS = 1_000  # before trio looks for signals and other threads


class Timeline:
    """Future calls. Run it by `drive` or by `run`, never both."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._sleep = trio.CancelScope()
        self._next_wake = -math.inf  # of `run`, while it sleeps
        self._now = 0.0  # only while driven
        self.is_driven = False
        self.calls_made = 0

    def now(self) -> float:
        """trio's current time, at a tenth of the cost while we drive the clock."""
        return self._now if self.is_driven else trio.current_time()

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make `call(*arguments)` at `time` in trio's clock, or at once if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, call, arguments))
        if time < self._next_wake:
            self._next_wake = self._sleep.deadline = time

    def drive(self, clock: MockClock, tick_seconds: float = 0.0) -> None:
        """Let this clock make our calls as it jumps.

        With a tick it jumps only to whole ticks, and everything due within one is done at its end,
        together. A thousand busy nodes then cost a thousand jumps a second instead of a hundred
        thousand.
        """
        self.is_driven = True
        self._now = clock.current_time()
        heap = self._heap

        def jump() -> None:
            runner = trio_run.GLOBAL_RUN_CONTEXT.runner
            for _ in range(MOST_JUMPS):  # most calls wake no task, and trio's own round costs more
                if runner.runq:
                    return
                deadline = runner.deadlines.next_deadline()
                time = min(deadline, heap[0][0]) if heap else deadline
                if time == math.inf:
                    return
                if tick_seconds:
                    time = _next_tick(time, tick_seconds)
                self._now = max(self._now, time)
                self._make_due_calls(self._now)
                if runner.deadlines.next_deadline() <= self._now:
                    return

        # trio 0.35 calls `_autojump` when all tasks are blocked. MockClock cannot be subclassed,
        # and the run loop accepts no other clock that jumps.
        clock._autojump = jump  # type: ignore[attr-defined]
        clock.current_time = lambda: self._now  # type: ignore[method-assign]
        clock.jump = self._jumped  # type: ignore[method-assign]

    def _jumped(self, seconds: float) -> None:
        """A test has called `jump` of our clock."""
        self._now += seconds

    async def run(self) -> NoReturn:
        heap = self._heap
        while True:
            self._next_wake = heap[0][0] if heap else math.inf
            self._sleep = trio.CancelScope(deadline=self._next_wake)
            with self._sleep:
                await trio.lowlevel.wait_task_rescheduled(_abort)
            self._next_wake = -math.inf  # a call made below need not wake us
            self._make_due_calls(trio.current_time())

    def _make_due_calls(self, now: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, _, call, arguments = heapq.heappop(heap)
            self.calls_made += 1
            call(*arguments)


def _next_tick(time: float, tick_seconds: float) -> float:
    """The first whole tick that is not before `time`.

    The quotient is rounded. If `time` is slightly after a tick, it may give that tick, and a clock
    that went there would never get past it.
    """
    ticks = math.ceil(time / tick_seconds)
    while ticks * tick_seconds < time:
        ticks += 1
    return ticks * tick_seconds


def _abort(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.SUCCEEDED


# Make trio's scheduler repeatable for the length of one run.
#
# trio shuffles the ready tasks on purpose, with its own random generator. It has a hook for
# hypothesis that sorts them first, so that the shuffle depends only on the generator. We use that
# hook and seed the generator. Two more orders in trio depend on memory addresses: the order in
# which tasks are told of a cancellation (a set), and that of timeouts due at the same moment (by
# `id`). Both matter, because a cancelled call tells the other side at once. Here tasks and timeouts
# come in the order in which they were made. Everything is restored afterwards, so other runs in
# this process keep trio's usual behaviour.
#
# This only orders tasks. A program is as repeatable as its own code: iterating over a set, ordering
# by `id()`, reading a real clock, drawing from `random` or from the operating system, and threads
# all make it random again.


@contextmanager
def deterministic_scheduling(seed: int) -> Iterator[None]:
    """In this block the order in which `trio.run` runs ready tasks depends only on the seed."""
    scheduler: Any = trio_run
    allowed_before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state_before = scheduler._r.getstate()
    status_before, add_before = scheduler.CancelStatus, scheduler.Deadlines.add
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    scheduler.CancelStatus = _told_in_order(status_before)
    scheduler.Deadlines.add = _added_in_order()
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = allowed_before
        scheduler._r.setstate(state_before)
        scheduler.CancelStatus, scheduler.Deadlines.add = status_before, add_before


class _InOrder(dict[Any, None]):
    """Stands in for the sets of a CancelStatus; keeps the order in which members were added."""

    def add(self, member: Any) -> None:
        self[member] = None

    def remove(self, member: Any) -> None:
        del self[member]


def _told_in_order(make: Any) -> Any:
    """Wrap the maker of a CancelStatus, so that its tasks and children are told in order."""

    def status(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        made._tasks, made._children = _InOrder(), _InOrder()
        return made

    return status


def _added_in_order() -> Any:
    """Replaces `Deadlines.add`, which orders equal deadlines by `id`."""
    numbers = itertools.count()

    def add(self: Any, deadline: float, scope: Any) -> None:
        heapq.heappush(self._heap, (deadline, next(numbers), scope))
        self._active += 1

    return add
