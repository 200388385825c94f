"""The measured rates and round trips of a link. No I/O.

Round trips come from pings. Two values matter: the shortest recent one (the link itself, without
the queues that load builds; windows depend on it) and the slowest recent one (for timeouts).

Rates come only from busy spells. A link that carried a few small messages has shown nothing about
its bandwidth, so that is no measurement.

A burst that fits into the kernel's buffers "is sent" in no time, and one that waited in them
"arrives" in no time. So a sender measures only between moments at which the buffer was full (a send
that had to wait has just ended). A receiver does not measure at the beginning of a busy spell.
"""

from __future__ import annotations

import math
from collections import deque

# At one ping every five to fifteen seconds these reach back one to two minutes.
REMEMBERED_ROUND_TRIPS = 8

# A send that took this long had to wait for the link: at its end the kernel's buffer was full.
SEND_WAITED_SECONDS = 0.001

# Bytes received within this time after a pause may have waited in the kernel's buffer.
WARM_UP_SECONDS = 0.05

# A spell counts once it lasted this long and carried this much. "Full" varies by up to a batch and
# a buffer, which no longer matters much over a fifth of a second. It is closed after a second, so
# that a long transfer continues to give readings.
SHORTEST_SPELL_SECONDS = 0.2
LEAST_SPELL_BYTES = 64 * 1024
LONGEST_SPELL_SECONDS = 1.0

# Many small messages look busy and show nothing: bulk comes in larger pieces.
LEAST_BYTES_PER_PIECE = 1024

# Pauses of up to this belong to one spell (for a receiver, up to a round trip): a sender that waits
# for the peer's window while the kernel's buffer drains has not made the link idle.
LONGEST_PAUSE_SECONDS = 0.05

# The memory of the best rate: between one and two of these.
RATE_MEMORY_SECONDS = 30.0


class RoundTrips:
    """The last few measured round trips."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=REMEMBERED_ROUND_TRIPS)
        # Read at every message, so not computed each time.
        self.shortest_seconds: float | None = None
        self.slowest_seconds: float | None = None

    def add(self, seconds: float) -> None:
        self._samples.append(max(seconds, 0.0))
        self.shortest_seconds = min(self._samples)
        self.slowest_seconds = max(self._samples)


class LinkRateMeter:
    """Counts all bytes in one direction, and measures the best recent rate."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._last_carried = -math.inf
        self._counts_from = -math.inf
        self._spell_began: float | None = None
        self._spell_ended = 0.0
        self._spell_bytes = 0
        self._spell_pieces = 0
        self._bytes_since = 0  # carried after `_spell_ended`; counted once the buffer is full again
        self._pieces_since = 0
        self._recent_since = 0.0
        self._recent_best: float | None = None
        self._earlier_best: float | None = None

    @property
    def bytes_per_second(self) -> float | None:
        readings = (self._recent_best, self._earlier_best, self._spell_rate())
        return max((rate for rate in readings if rate is not None), default=None)

    def sent(self, size: int, began: float, now: float) -> None:
        """A send of `size` bytes has ended now. It had no room from `began` on."""
        if began - self._last_carried > LONGEST_PAUSE_SECONDS:
            self._end_spell()
        self._carried(size, now, is_full=now - began >= SEND_WAITED_SECONDS)

    def received(self, size: int, now: float, round_trip_seconds: float | None) -> None:
        """`size` bytes have arrived."""
        if now - self._last_carried > max(LONGEST_PAUSE_SECONDS, round_trip_seconds or 0.0):
            self._end_spell()
            self._counts_from = now + WARM_UP_SECONDS
        self._carried(size, now, is_full=True)

    def _end_spell(self) -> None:
        self._believe_spell()
        self._spell_began = None

    def _carried(self, size: int, now: float, is_full: bool) -> None:
        self.total_bytes += size
        self._last_carried = now
        if now < self._counts_from:
            return
        if self._spell_began is None:
            if is_full:
                self._begin_spell(now)
            return
        self._bytes_since += size
        self._pieces_since += 1
        if not is_full:
            return
        self._spell_bytes += self._bytes_since
        self._spell_pieces += self._pieces_since
        self._bytes_since = self._pieces_since = 0
        self._spell_ended = now
        if now - self._spell_began >= LONGEST_SPELL_SECONDS:
            self._believe_spell()
            self._begin_spell(now)

    def _begin_spell(self, now: float) -> None:
        self._spell_began = self._spell_ended = now
        self._spell_bytes = self._spell_pieces = 0
        self._bytes_since = self._pieces_since = 0

    def _spell_rate(self) -> float | None:
        """The rate of the current spell, if it counts yet."""
        if self._spell_began is None:
            return None
        seconds = self._spell_ended - self._spell_began
        if (
            seconds < SHORTEST_SPELL_SECONDS
            or self._spell_bytes < LEAST_SPELL_BYTES
            or self._spell_bytes < LEAST_BYTES_PER_PIECE * self._spell_pieces
        ):
            return None
        return self._spell_bytes / seconds

    def _believe_spell(self) -> None:
        rate = self._spell_rate()
        if rate is None:
            return
        if self._spell_ended - self._recent_since > RATE_MEMORY_SECONDS:
            if self._recent_best is not None:
                self._earlier_best = self._recent_best
            self._recent_since = self._spell_ended
            self._recent_best = rate
        else:
            self._recent_best = max(rate, self._recent_best or 0.0)
