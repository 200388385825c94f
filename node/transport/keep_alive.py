"""Noticing that the other side is gone although nobody said so. No I/O, no clock.

A process that is killed is noticed at once, because its kernel closes the socket. A process that
is stopped, a laptop that sleeps, a link that swallows packets: nothing is noticed by itself. So a
connection that was silent for a while is pinged, and one that stays silent is given up. Any byte
is a sign of life, not only the answer to a ping.

The time is counted in *beats*, moments at which our own loop really ran, not in seconds. If this
process was the one that was stopped (or busy, or asleep), the peer's bytes lie unread in our
socket, and by the clock everybody would seem dead at once. Every beat gives the reader its turn
first.
"""

from __future__ import annotations

import enum
import math

# Fine enough that "silent for five seconds" is not noticed after seven (after nine on the side that
# does not lead); coarse enough to cost nothing on a thousand idle connections.
BEAT_SECONDS = 1.0

# On a link with a long queue an answer may take a few of the slowest round trips seen.
PATIENCE_IN_ROUND_TRIPS = 4

# Round trips are measured this often even while data flows; windows are sized by them.
MEASURE_EVERY_SECONDS = 15.0

# And on each of the first beats: the very first measurement is spoilt by two processes that are
# still busy greeting each other.
EARLY_MEASUREMENTS = 3


# By so much the side that does not lead waits longer: the beats of the two are up to one apart,
# and the ping is under way for a while.
BEATS_BEHIND = 2


class Verdict(enum.Enum):
    FINE = "fine"
    PING = "ping"
    GONE = "gone"


def beat_seconds(silence_seconds: float, deadline_seconds: float) -> float:
    """How long a beat is for these times."""
    return min(BEAT_SECONDS, silence_seconds / 4, deadline_seconds / 4)


class KeepAlive:
    """Fed with the count of received bytes once a beat; says what is to be done.

    One side of a connection `leads`: it pings first, and its ping is the other side's sign of
    life. Both would ping at the same time otherwise, since both have heard the last byte then.
    """

    def __init__(
        self, silence_seconds: float, deadline_seconds: float, *, leads: bool = True
    ) -> None:
        self.beat_seconds = beat_seconds(silence_seconds, deadline_seconds)
        self._silence_beats = self._beats(silence_seconds) + (0 if leads else BEATS_BEHIND)
        self._deadline_seconds = deadline_seconds
        self._silent_beats = 0
        self._beats_since_ping = 0
        self._bytes_seen = 0
        self._early_left = EARLY_MEASUREMENTS

    def beat(self, bytes_received: int, slowest_round_trip: float | None) -> Verdict:
        self._beats_since_ping += 1
        if bytes_received != self._bytes_seen:
            self._bytes_seen = bytes_received
            self._silent_beats = 0
            if self._beats_since_ping >= self._beats(MEASURE_EVERY_SECONDS) or self._early_left:
                self._early_left = max(0, self._early_left - 1)
                return self._ping()
            return Verdict.FINE
        self._silent_beats += 1
        if self._silent_beats < self._silence_beats:
            return Verdict.FINE
        patience = max(
            self._deadline_seconds, PATIENCE_IN_ROUND_TRIPS * (slowest_round_trip or 0.0)
        )
        if self._silent_beats >= self._silence_beats + self._beats(patience):
            return Verdict.GONE
        if self._silent_beats == self._silence_beats:
            return self._ping()
        return Verdict.FINE

    def _ping(self) -> Verdict:
        self._beats_since_ping = 0
        return Verdict.PING

    def _beats(self, seconds: float) -> int:
        return math.ceil(seconds / self.beat_seconds)
