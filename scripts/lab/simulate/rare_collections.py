"""Runs the garbage collector rarely while a simulation runs.

It finds next to nothing there, and would walk through millions of objects again and again: half of
the CPU time of a run of 64 training peers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_AFTER = (200_000, 50, 100)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within this block; then as it was before."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
