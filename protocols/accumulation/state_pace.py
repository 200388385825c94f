"""How fast state leaves this peer, all downloads together.

Serving costs the processor some 3 ns a byte (encryption, copies, the kernel), in one thread, and
torch waits for its slowest thread: what serving takes of one core, training loses. So a peer that
trains sends no faster than that may cost, whatever its uplink could carry; one that does not train
needs no limit.

Easy to get wrong: a wait must be short enough for the receiver to see that it goes on. What is sent
in one turn gets smaller as the rate does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from protocols.accumulation.state_messages import STALL_SECONDS

TRAINING_BYTES_PER_SECOND = 8_000_000.0
"""64 Mb/s: more than most uplinks at home, and 2.5 % of one core."""
LARGEST_TURN_BYTES = 1 << 20
SMALLEST_TURN_BYTES = 4 << 10
TURN_SECONDS = 0.05
ALIVE_SECONDS = STALL_SECONDS / 4  # how often one is told, in a long wait, that we are there


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


async def until(moment: float, say_alive: Callable[[], Awaitable[None]]) -> None:
    """Wait for a turn, and let who is to get it know meanwhile that we are there."""
    while trio.current_time() < moment:
        await trio.sleep_until(min(moment, trio.current_time() + ALIVE_SECONDS))
        await say_alive()
