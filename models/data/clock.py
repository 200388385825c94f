"""The clock of the sources, and the one way to stop a reader that is waiting.

Everything here that waits (for a server's bytes, until the next attempt) does so through a Clock.
So a reading thread ends at once when its owner leaves, and tests need not wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from models.data.errors import DataError

CLOSED = "Reading was stopped, because its owner has closed the data."


class ReadingStopped(DataError):
    """The owner of this data has closed it. Nothing was lost: its position is still valid."""


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def wait_until(self, moment: float) -> None:
        """ReadingStopped if the owner stops it meanwhile, or has stopped it before."""
        ...

    def check(self) -> None:
        """ReadingStopped if the owner has stopped it; for loops that do not wait."""
        ...

    def watching(self, wire: socket.socket | None) -> contextlib.AbstractContextManager[None]:
        """While in this block, a stop also ends the waiting on this socket."""
        ...


class MachineClock:
    """The machine's own time. `stop` may be called from any thread, and more than once."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._wire: socket.socket | None = None

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        self._stopped.wait(max(0.0, moment - time.monotonic()))
        self.check()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
            if self._wire is not None:
                with contextlib.suppress(OSError):  # it is closed, or was never connected
                    # not the method of a TLS socket, which is not made for two threads
                    socket.socket.shutdown(self._wire, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def watching(self, wire: socket.socket | None) -> Iterator[None]:
        with self._lock:
            self.check()
            self._wire = wire
        try:
            yield
        finally:
            with self._lock:
                self._wire = None
        self.check()

    def check(self) -> None:
        if self._stopped.is_set():
            raise ReadingStopped(CLOSED)
