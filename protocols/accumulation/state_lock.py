"""Who may touch the parameters now: one who changes them, or any number who read them.

    with lock.changing():                  # the training thread: optimizer.step(), restore()
        optimizer.step()

    with lock.reading():                   # a worker thread of the trio side: a copy, a digest
        state = capture(...)

Between two steps the parameters, the statistics, the epoch and the history belong together, and
whoever reads under this lock sees them so. A step waits for a reader at most as long as a copy
takes (some 30 ms for 100 MB), and a reader that comes while a step waits, waits behind it.

Easy to get wrong: forward and backward passes read parameters without the lock. That is right, for
they run in the thread that changes them; nobody else may ever change a parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StateLock:
    """Many readers or one writer, of threads. Invariant: while `_changing`, `_readers` is 0.

    Not reentrant: a thread that reads must not ask to change.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._readers = 0
        self._waiting_to_change = 0
        self._changing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing changes within the block. Blocks the thread until then."""
        with self._free:
            self._free.wait_for(lambda: not self._changing and not self._waiting_to_change)
            self._readers += 1
        try:
            yield
        finally:
            with self._free:
                self._readers -= 1
                self._free.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody reads, and nobody else changes, within the block."""
        with self._free:
            self._waiting_to_change += 1
            try:
                self._free.wait_for(lambda: not self._changing and not self._readers)
                self._changing = True
            finally:
                self._waiting_to_change -= 1
                self._free.notify_all()
        try:
            yield
        finally:
            with self._free:
                self._changing = False
                self._free.notify_all()
