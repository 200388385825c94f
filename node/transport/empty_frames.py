"""How many frames without content a peer may send: no more than it could mean. Pure.

The threat: a frame of twelve bytes costs its sender next to nothing and us a walk through parser
and tables. Measured on two cores: a peer that poured out pings, ten megabytes a second of them,
took a whole core of ours, and others waited over a second for an answer.

So frames that bring no bytes to a stream (pings, window updates, beginnings and ends of streams,
data for streams that are gone) are counted. Honest peers stay far below: a stream costs them four
such frames and us a millisecond, and credit goes back in quarters of a window of 256 KiB at least.

Easy to get wrong: the clock is asked once for many frames, for this is on the path of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protocols.errors import LimitExceeded

# Ten milliseconds of a core's second. py-libp2p's own muxer, which returns credit after every
# read, reads some 4,000 messages in that time.
MOST_EMPTY_FRAMES_PER_SECOND: Final = 20_000


class EmptyFrames:
    """Counts them in stretches of so many; a stretch must take a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._count = 0

    def another(self) -> None:
        """One more came; LimitExceeded if that was a flood."""
        self._count += 1
        if self._count < MOST_EMPTY_FRAMES_PER_SECOND:
            return
        now = self._clock()
        if now - self._began < 1.0:
            raise LimitExceeded(
                f"A peer sent {MOST_EMPTY_FRAMES_PER_SECOND:,} frames without content "
                "in less than a second."
            )
        self._began = now
        self._count = 0
