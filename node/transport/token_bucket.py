"""How much may leave (or come) now, if it is to be so many bytes a second: a token bucket.

Tokens, one for each byte, come at the rate and are kept up to a short burst. Bulk takes what is
there, and waits otherwise. What is small (a sign of life, a step of an agreement) may also borrow a
little: it must not stand behind bulk, and is so little that bulk can wait for it. What cannot be
asked beforehand (headers, acknowledgements, handshakes) is charged, and paid by those who come
later.

Promise: in any time of W seconds, what was granted is at most

    rate · (W + BURST_SECONDS + BORROWED_SECONDS) + one small message

which is 2.5 % above the limit in ten seconds; what waits in the kernel comes on top.
No clock: moments are arguments.

Easy to get wrong: the level may be far below zero after a charge, and then nothing is granted until
it has come back; a debt is not forgiven, or the limit would not hold.
"""

from __future__ import annotations

BURST_SECONDS = 0.2
"""What an idle moment saves up: a loop that is busy for a fifth of a second loses nothing."""

BORROWED_SECONDS = 0.05

# By so many bytes a level may be wrong from adding fractions, many times over.
ROUNDING_BYTES = 1e-6


class TokenBucket:
    """Invariant: the level is at most the burst."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.burst_bytes = BURST_SECONDS * bytes_per_second
        self.borrowed_bytes = BORROWED_SECONDS * bytes_per_second
        self._level = self.burst_bytes
        self._at = now

    def level(self, now: float) -> float:
        """How many bytes may leave now; below zero after a charge."""
        if now > self._at:
            self._level += (now - self._at) * self.bytes_per_second
            self._level = min(self._level, self.burst_bytes)
            self._at = now
        return self._level

    def take(self, size: float, now: float) -> None:
        """These bytes leave now, whether they may or not. A negative size gives back."""
        self._level = min(self.level(now) - size, self.burst_bytes)

    def bulk_waits(self, size: float, now: float) -> float:
        """Seconds until so much bulk may leave; more than a burst is let go with a full one."""
        return self._seconds_to(min(size, self.burst_bytes), now)

    def small_waits(self, now: float) -> float:
        """Seconds until a small message may leave."""
        return self._seconds_to(-self.borrowed_bytes, now)

    def _seconds_to(self, level: float, now: float) -> float:
        missing = level - self.level(now) - ROUNDING_BYTES
        return max(0.0, missing / self.bytes_per_second)
