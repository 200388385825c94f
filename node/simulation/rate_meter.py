"""What a link was seen to carry: the best second of the last minute.

A link that is not asked for much says nothing about what it could carry, so seconds with little
traffic do not count, and a link without a busy second has no figure at all.
"""

from __future__ import annotations

SLICE_SECONDS = 1.0
MEMORY_SECONDS = 60.0  # an older figure says little about a home link now
BUSY_BYTES = 65_536  # fewer in one slice are small talk, not a measurement


class RateMeter:
    """Counts bytes per slice of time and remembers the best slices that still matter."""

    __slots__ = ("_best", "_bytes", "_started")

    def __init__(self) -> None:
        self._started = float("-inf")
        self._bytes = 0
        self._best: list[tuple[float, int]] = []  # (slice's start, its bytes), bytes decreasing

    def record(self, now: float, size: int) -> None:
        if now - self._started >= SLICE_SECONDS:
            self._close_slice()
            self._started = now
        self._bytes += size

    def bytes_per_second(self, now: float) -> float | None:
        if now - self._started >= SLICE_SECONDS:
            self._close_slice()
        self._best = [entry for entry in self._best if now - entry[0] <= MEMORY_SECONDS]
        best = max(self._bytes, self._best[0][1] if self._best else 0)
        return best / SLICE_SECONDS if best >= BUSY_BYTES else None

    def _close_slice(self) -> None:
        if self._bytes >= BUSY_BYTES:
            while self._best and self._best[-1][1] <= self._bytes:
                self._best.pop()
            self._best.append((self._started, self._bytes))
        self._bytes = 0
