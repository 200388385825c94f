"""Make trio's scheduler repeatable, for the length of one run.

trio shuffles the tasks that are ready, on purpose, with a random generator of its own. It has a
hook for hypothesis that sorts them first, so that the shuffle depends on the generator alone;
we use the same hook and seed the generator. Two more of trio's orders depend on where objects lie
in memory: in which tasks are told that they are cancelled (a set), and of timeouts that are due at
the same moment (by `id`). They matter because a call that is cancelled tells the other side at
once. Here tasks and timeouts come in the order in which they were made. All of it is put back
afterwards, so that other runs in this process keep trio's ordinary behaviour.

Easy to get wrong: this orders tasks, nothing else. A program is only as repeatable as what
it does between: iterating over a set, ordering by `id()`, reading a real clock, drawing from
`random` or from the operating system, and threads all bring chance back in.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trio._core import _run as trio_run  # trio 0.35: the hook has no public name


@contextmanager
def deterministic_scheduling(seed: int) -> Iterator[None]:
    """Within this block, `trio.run` orders ready tasks by the seed alone."""
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
    """What trio does with the sets of a CancelStatus, in the order in which members were added."""

    def add(self, member: Any) -> None:
        self[member] = None

    def remove(self, member: Any) -> None:
        del self[member]


def _told_in_order(make: Any) -> Any:
    """What makes a CancelStatus whose tasks and children are told in order."""

    def status(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        made._tasks, made._children = _InOrder(), _InOrder()
        return made

    return status


def _added_in_order() -> Any:
    """Instead of `Deadlines.add`, which lets `id` decide between equal deadlines."""
    numbers = itertools.count()

    def add(self: Any, deadline: float, scope: Any) -> None:
        heapq.heappush(self._heap, (deadline, next(numbers), scope))
        self._active += 1

    return add
