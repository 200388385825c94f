"""What a link has been measured to carry, and how long a round trip on it takes. No I/O.

Round trips come from pings. Two readings matter: the shortest of late (the link itself, without
the queues that load builds: windows are sized by it) and the slowest of late (what a patient
deadline must allow for).

Rates come from busy spells alone. A link that carried a few small messages has shown nothing
about its bandwidth, so what it carried then is not a measurement.

Easy to get wrong: a burst that fits into the kernel's buffers "is sent" in no time, and one that
waited in them "arrives" in no time. So the beginning of a busy time does not count.
"""

from __future__ import annotations

from collections import deque

# At one ping every five to fifteen seconds these reach back one to two minutes.
REMEMBERED_ROUND_TRIPS = 8

# After this long without a pause the kernel's buffers no longer flatter: what goes in at one end
# has come out at the other.
WARM_UP_SECONDS = 0.05

# A spell is believed once it lasted this long and carried this much, and is then closed so that
# a long transfer yields a reading several times a second.
SHORTEST_SPELL_SECONDS = 0.02
LEAST_SPELL_BYTES = 64 * 1024
LONGEST_SPELL_SECONDS = 0.25

# Chatter of small messages looks busy and shows nothing: bulk comes in larger pieces.
LEAST_BYTES_PER_PIECE = 1024

# Receiving pauses of up to this (or a round trip) belong to one spell.
LONGEST_PAUSE_SECONDS = 0.05

# "Of late", for the best rate: between one and two of these.
RATE_MEMORY_SECONDS = 30.0


class RoundTrips:
    """The last few measured round trips."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=REMEMBERED_ROUND_TRIPS)
        # Asked for with every message, so not computed each time.
        self.shortest_seconds: float | None = None
        self.slowest_seconds: float | None = None

    def add(self, seconds: float) -> None:
        self._samples.append(max(seconds, 0.0))
        self.shortest_seconds = min(self._samples)
        self.slowest_seconds = max(self._samples)


class RateMeter:
    """Bytes in all, and the best rate of late, in one direction."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._counts_from: float | None = None  # None while the link is idle
        self._spell_began: float | None = None
        self._spell_last = 0.0
        self._spell_bytes = 0
        self._spell_pieces = 0
        self._last_received = 0.0
        self._recent_since = 0.0
        self._recent_best: float | None = None
        self._earlier_best: float | None = None

    @property
    def bytes_per_second(self) -> float | None:
        readings = [rate for rate in (self._recent_best, self._earlier_best) if rate is not None]
        return max(readings, default=None)

    def became_busy(self, now: float) -> None:
        """From here on there is always something to carry."""
        self._counts_from = now + WARM_UP_SECONDS

    def became_idle(self) -> None:
        """There is nothing more to carry for now."""
        self._believe_spell()
        self._spell_began = None
        self._counts_from = None

    def carried(self, size: int, now: float) -> None:
        """`size` bytes were carried, ending now. Counts for the rate only while busy."""
        self.total_bytes += size
        if self._counts_from is None or now < self._counts_from:
            return
        if self._spell_began is None:
            self._begin_spell(now)
            return
        self._spell_bytes += size
        self._spell_pieces += 1
        self._spell_last = now
        if now - self._spell_began >= LONGEST_SPELL_SECONDS:
            self._believe_spell()
            self._begin_spell(now)

    def received(self, size: int, now: float, round_trip_seconds: float | None) -> None:
        """As `carried`, for a receiver, who must guess from the pauses when the link was busy."""
        pause = max(LONGEST_PAUSE_SECONDS, round_trip_seconds or 0.0)
        if self._counts_from is None or now - self._last_received > pause:
            self.became_idle()
            self.became_busy(now)
        self._last_received = now
        self.carried(size, now)

    def _begin_spell(self, now: float) -> None:
        self._spell_began = self._spell_last = now
        self._spell_bytes = 0
        self._spell_pieces = 0

    def _believe_spell(self) -> None:
        if self._spell_began is None:
            return
        seconds = self._spell_last - self._spell_began
        if (
            seconds < SHORTEST_SPELL_SECONDS
            or self._spell_bytes < LEAST_SPELL_BYTES
            or self._spell_bytes < LEAST_BYTES_PER_PIECE * self._spell_pieces
        ):
            return
        rate = self._spell_bytes / seconds
        if self._spell_last - self._recent_since > RATE_MEMORY_SECONDS:
            if self._recent_best is not None:
                self._earlier_best = self._recent_best
            self._recent_since = self._spell_last
            self._recent_best = rate
        else:
            self._recent_best = max(rate, self._recent_best or 0.0)
