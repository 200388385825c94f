"""When a byte sent at t arrives: the pure part of the simulated network.

A segment passes four places: the sender's upload, the path between the two nodes, the path's
latency, and the receiver's download. The three with a rate are a `Pipe` each: whatever comes
first goes first, and a segment holds the pipe for size / rate seconds. The latency is a base
plus a uniform jitter, and never reorders: one link is one TCP connection.

Easy to get wrong: fairness. A pipe serves in order of arrival, so a stream that queued all it
has would starve the others. Streams therefore hand over one segment at a time, the next one
when the last has left (see `stream`), which makes a shared pipe round robin between them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# A segment holds a slow pipe for about this long, so that small messages of other streams wait
# little; a tenth of a usual round trip.
SEGMENT_SECONDS = 0.01
LONGEST_SEGMENT_BYTES = 65_536  # about what one Yamux frame in one Noise packet carries


@dataclass(frozen=True)
class LinkSettings:
    """One direction of the path between two nodes.

    `latency_seconds`: one way, for every byte; half of the round trip when both ways are equal.
    `jitter_seconds`: up to this much more, drawn anew for each segment; order is kept.
    `bytes_per_second`: what the path carries; None is without limit.
    `breaks_per_hour`: how often, on average, the connection is lost for no reason at all. The
    higher of the two directions counts.
    `relayed`: links on this path go through somebody else. That lets a node be dialled that
    otherwise could not be, and is what the link's facts and events then say.
    """

    latency_seconds: float = 0.02
    jitter_seconds: float = 0.0
    bytes_per_second: float | None = None
    breaks_per_hour: float = 0.0
    relayed: bool = False

    def delay(self, chance: random.Random) -> float:
        """The latency of one segment."""
        if not self.jitter_seconds:
            return self.latency_seconds
        return self.latency_seconds + self.jitter_seconds * chance.random()


class Pipe:
    """A place that lets `bytes_per_second` through, first come first served.

    Invariant: `free_at` never goes back. The rate may be changed at any time; what has been
    promised already keeps its time.
    """

    __slots__ = ("bytes_per_second", "free_at")

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.free_at = 0.0

    def pass_through(self, now: float, size: int) -> float:
        """When `size` bytes that arrive at `now` have left on the other side."""
        start = now if now > self.free_at else self.free_at
        if self.bytes_per_second is not None:
            start += size / self.bytes_per_second
        self.free_at = start
        return start


def segment_bytes(*rates: float | None) -> int | None:
    """How much to hand over at once to pipes of these rates; None where nothing is limited."""
    limits = [rate for rate in rates if rate is not None]
    if not limits:
        return None
    return max(1, min(LONGEST_SEGMENT_BYTES, int(min(limits) * SEGMENT_SECONDS)))
