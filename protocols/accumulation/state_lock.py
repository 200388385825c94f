"""The lock on the parameters: one thread may change them, or any number may read them.

    with lock.changing():                  # the training thread: optimizer.step(), restore()
        optimizer.step()

    with lock.reading():                   # a worker thread of the trio side: a copy, a digest
        state = capture(...)

Between two steps the parameters, the statistics, the epoch and the history belong together, and a
reader that holds this lock sees them so. A step waits for a reader at most as long as a copy takes
(some 30 ms for 100 MB). A reader that comes while a step waits is let in after the step.

Easy to get wrong: forward and backward passes read parameters without the lock. That is safe only
because they run in the thread that changes them; no other thread may ever change a parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StateLock:
    """Many reading threads or one writing thread. Invariant: while `_changing`, `_readers` is 0.

    Not reentrant: a thread that reads must not ask to change.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._readers = 0
        self._waiting_to_change = 0
        self._changing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing changes within the block. Blocks the thread until the lock is free."""
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
        """No other thread reads or changes anything within the block."""
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
