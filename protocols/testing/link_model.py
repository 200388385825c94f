"""When a byte sent at time t arrives: the pure part of the simulated network.

A segment passes four places: the sender's upload, the path between the two nodes, the path's
latency, and the receiver's download. The three with a rate are each a `Pipe`: first come, first
served, and a segment occupies the pipe for size / rate seconds. The latency is a base plus a
uniform jitter. It never reorders: one link is one TCP connection.

A pipe alone is not fair: a stream that queued everything at once would starve the others. So a
stream sends one segment at a time, the next when the last has left (see `stream`). A shared pipe
then serves its streams round robin.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# A segment occupies a slow pipe for about this long, so that small messages of other streams wait
# little: a tenth of a usual round trip.
SEGMENT_SECONDS = 0.01
LONGEST_SEGMENT_BYTES = 65_536  # about as much as a Yamux frame in a Noise packet carries


@dataclass(frozen=True)
class LinkSettings:
    """One direction of the path between two nodes.

    `latency_seconds`: one way, for every byte; half of the round trip if both ways are equal.
    `jitter_seconds`: at most this much more, drawn anew for each segment; the order is kept.
    `bytes_per_second`: the capacity of the path; None: no limit.
    `breaks_per_hour`: how often, on average, the connection is lost for no reason. The higher
    value of the two directions counts.
    `relayed`: links on this path go through a relay. A node can then be dialled that otherwise
    could not be. The link's facts and events say that the link is relayed.
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
    """A place that lets `bytes_per_second` through, first come, first served.

    Invariant: `free_at` never goes back. The rate may change at any time; times that were already
    returned stay.
    """

    __slots__ = ("bytes_per_second", "free_at")

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.free_at = 0.0

    def pass_through(self, now: float, size: int) -> float:
        """The time at which `size` bytes that arrive at `now` have left on the other side."""
        start = now if now > self.free_at else self.free_at
        if self.bytes_per_second is not None:
            start += size / self.bytes_per_second
        self.free_at = start
        return start


def segment_bytes(*rates: float | None) -> int | None:
    """How much to send at once to pipes of these rates; None if none has a limit."""
    limits = [rate for rate in rates if rate is not None]
    if not limits:
        return None
    return max(1, min(LONGEST_SEGMENT_BYTES, int(min(limits) * SEGMENT_SECONDS)))
