"""How fast state leaves this peer, all downloads together.

Serving costs the processor some 3 ns a byte (encryption, copies, the kernel), and torch waits for
its slowest thread: what serving takes of one core, training loses. So the rate is limited by the
cores there are, whatever the uplink could carry; a peer that does not train needs no limit.

Easy to get wrong: a wait must be short enough for the receiver to see that it goes on. What is sent
in one turn gets smaller as the rate does.
"""

from __future__ import annotations

import os

import trio

TRAINING_BYTES_PER_CORE = 5_000_000.0
"""Bytes per second that a peer sends while it trains, for each of its cores: 1.5 % of a core."""
LARGEST_TURN_BYTES = 1 << 20
SMALLEST_TURN_BYTES = 4 << 10
TURN_SECONDS = 0.25


def training_rate() -> float:
    """What a peer that trains should send at most, in bytes per second."""
    return TRAINING_BYTES_PER_CORE * (os.cpu_count() or 1)


class UploadPace:
    """Turns, in the order in which they are asked for. `bytes_per_second` None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    @property
    def turn_bytes(self) -> int:
        """How much may be sent in one turn."""
        if self._bytes_per_second is None:
            return LARGEST_TURN_BYTES
        wished = int(self._bytes_per_second * TURN_SECONDS)
        return min(max(wished, SMALLEST_TURN_BYTES), LARGEST_TURN_BYTES)

    def turn(self, count: int) -> float:
        """The moment (`trio.current_time`) from which so many bytes may be sent. They will be."""
        now = trio.current_time()
        if self._bytes_per_second is None:
            return now
        starts = max(self._free_at, now)
        self._free_at = starts + count / self._bytes_per_second
        return starts
