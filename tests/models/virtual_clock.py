"""A clock whose time passes only when somebody waits."""

from __future__ import annotations

import contextlib
import socket

from models.data.clock import MachineClock


class VirtualClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.waits: list[float] = []

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.waits.append(moment - self.time)
        self.time = max(self.time, moment)

    def check(self) -> None:
        pass

    def watching(self, wire: socket.socket | None) -> contextlib.AbstractContextManager[None]:
        del wire
        return contextlib.nullcontext()


class ImpatientClock(MachineClock):
    """The machine's time, which waiting moves on at once."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped = 0.0

    def now(self) -> float:
        return super().now() + self._skipped

    def wait_until(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self.now())
