"""Reads some batches ahead in a thread of its own, so that training does not wait for a server.

    with open_data(...) as data, reading_ahead(WindowBatches(data, ...), 8) as batches:
        for batch in batches:
            ...
        kept = batches.position()

Promises: the thread begins with the block and has ended when the block is left, however it is
left, also while it waits for a server or for the next attempt. `position` is that of the batches
that were given, not of those that were read. An error of the reading is raised where its batch
would have been given.

Leaving the block stops the data underneath. To continue, open it at the position.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from models.data.batches import BatchSnapshot
from models.data.opening import Data
from models.data.position import Position

Batch = TypeVar("Batch")
Given = TypeVar("Given", covariant=True)


class Batches(Protocol[Given]):
    """WindowBatches or ImageBatches."""

    @property
    def data(self) -> Data: ...
    def __next__(self) -> Given: ...
    def snapshot(self) -> BatchSnapshot: ...


class ReadAhead(Generic[Batch]):
    """An iterator over batches, for one thread, and the reader that fills it, in another."""

    def __init__(self, batches: Batches[Batch], count: int) -> None:
        self._batches = batches
        self._count = count
        self._changed = threading.Condition()
        self._ready: deque[tuple[Batch, BatchSnapshot]] = deque()
        self._given = batches.snapshot()
        self._ending: BaseException | None = None
        self._stopped = False

    def __iter__(self) -> ReadAhead[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._changed:
            while not self._ready:
                if self._ending is not None:
                    raise self._ending
                self._changed.wait()
            batch, self._given = self._ready.popleft()
            self._changed.notify_all()
            return batch

    @property
    def ready(self) -> int:
        """How many batches can be had without waiting."""
        return len(self._ready)

    def position(self) -> Position:
        return self._given.position()

    def read(self) -> None:
        """The body of the reading thread."""
        try:
            while self._has_room():
                batch = next(self._batches)
                snapshot = self._batches.snapshot()
                with self._changed:
                    self._ready.append((batch, snapshot))
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised when a batch is asked for
            self._end(error)
        else:
            self._end(StopIteration())

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._batches.data.stop()

    def _has_room(self) -> bool:
        """Waits for it. False when it is over."""
        with self._changed:
            while len(self._ready) >= self._count and not self._stopped:
                self._changed.wait()
            return not self._stopped

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._ending = error
            self._changed.notify_all()


@contextmanager
def reading_ahead(batches: Batches[Batch], count: int) -> Iterator[ReadAhead[Batch]]:
    """An iterator over the same batches, `count` of which are read before they are asked for."""
    ahead = ReadAhead(batches, max(1, count))
    thread = threading.Thread(target=ahead.read, name="potluck data", daemon=False)
    try:
        thread.start()
        yield ahead
    finally:
        ahead.stop()
        if thread.ident is not None:  # else a Ctrl-C came before it began
            thread.join()
