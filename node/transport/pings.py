"""Pings that are on their way. No I/O.

A ping carries a number, its answer carries the same. Numbers that nobody asked about are ignored:
a peer may make them up. Only pings that somebody waits for, and the last one of the keep-alive,
are remembered, so what a silent peer makes us hold is what our own callers asked for.
"""

from __future__ import annotations

import trio

# A ping carries any 32-bit number; ours count from 1.
LARGEST_PING = 2**32 - 1


class PendingPing:
    """A ping on its way; `seconds` is its round trip once it is back, None if it never was."""

    def __init__(self, value: int, sent_at: float) -> None:
        self.value = value
        self.sent_at = sent_at
        self.seconds: float | None = None
        self.is_over = trio.Event()


class Pings:
    def __init__(self) -> None:
        self._pending: dict[int, PendingPing] = {}
        self._next_value = 1
        self._last_measurement = 0

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, now: float) -> PendingPing:
        """A new ping, to be sent now and to be forgotten by its caller."""
        ping = PendingPing(self._next_value, now)
        self._pending[ping.value] = ping
        self._next_value = ping.value % LARGEST_PING + 1
        return ping

    def begin_measurement(self, now: float) -> PendingPing:
        """A ping that nobody waits for. It takes the place of the one before it."""
        self._pending.pop(self._last_measurement, None)
        ping = self.begin(now)
        self._last_measurement = ping.value
        return ping

    def forget(self, ping: PendingPing) -> None:
        self._pending.pop(ping.value, None)

    def answered(self, value: int, now: float) -> float | None:
        """The round trip of the ping with this number; None if there is none."""
        ping = self._pending.pop(value, None)
        if ping is None:
            return None
        ping.seconds = now - ping.sent_at
        ping.is_over.set()
        return ping.seconds

    def end_all(self) -> None:
        """The connection has ended: nobody waits any longer."""
        for ping in self._pending.values():
            ping.is_over.set()
        self._pending.clear()
