"""Make trio's scheduler repeatable, for the length of one run.

trio shuffles the tasks that are ready, on purpose, with a random generator of its own. It has a
hook for hypothesis that sorts them first, so that the shuffle depends on the generator alone;
we use the same hook, seed the generator, and put both back afterwards, so that other runs in
this process keep trio's ordinary behaviour.

Easy to get wrong: the hook orders tasks, nothing else. A program is only as repeatable as what
it does between: iterating over a set, ordering by `id()`, reading a real clock, drawing from
`random` or from the operating system, and threads all bring chance back in.
"""

from __future__ import annotations

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
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = allowed_before
        scheduler._r.setstate(state_before)
