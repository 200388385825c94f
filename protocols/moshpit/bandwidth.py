"""Estimates the speed of this peer's connection from its own rounds.

Each exchange says how much this node sent meanwhile and the exchange received, and for how long the
links were busy with it. A rate that was reached is a proof that at least that much is possible;
that one was not reached proves nothing, for the other end may have been the slow one. So the
estimate is the best of the recent rounds, and what a round has shown counts for less the longer it
is ago: a connection that has become slow is believed to be slow after some half-lives. At once, if
the group has left this peer out because it was late: then only what that attempt itself has
measured is believed.

Pure: moments are arguments. Memory is bounded.

Easy to get wrong: a fast machine does not measure its link. Small transfers measure latency: an
exchange of fewer than `SMALLEST_BYTES` is no measurement.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from protocols.moshpit.exchange import ExchangeReport

HALF_LIFE_SECONDS = 600.0  # a home connection has good and bad quarters of an hour
RECENT_MEASUREMENTS = 16  # of each direction
LARGEST_ESTIMATE = 50e6
"""Bytes per second. Above 400 Mb/s, the processor and its noise are measured more than the link,
and a plan for four gives a peer with a 15 % lower rate 40 % less work. So all faster peers count as
equal."""
SMALLEST_BYTES = 256 << 10  # a TCP connection's slow start is over by then
ROOM_BELOW = 1.5
"""Up to so many times its measured rate, a plan takes a downlink for as fast as the uplink. Mostly
the others' uplinks decide how fast values come, and few lines receive more slowly than they send.
Without this, a peer that happened to get fewer would get a smaller part, and so fewer still."""


@dataclass(frozen=True)
class Measurement:
    at: float
    bytes_per_second: float


class Rate:
    """The best of recent measurements, each halved every half-life. 0.0: nothing is known."""

    def __init__(self) -> None:
        self._measurements: deque[Measurement] = deque(maxlen=RECENT_MEASUREMENTS)

    def add(self, at: float, size: int, seconds: float) -> None:
        if size >= SMALLEST_BYTES and seconds > 0.0:
            rate = min(size / seconds, LARGEST_ESTIMATE)
            self._measurements.append(Measurement(at, rate))

    def keep_since(self, at: float) -> None:
        """Forget what was measured before."""
        kept = [one for one in self._measurements if one.at >= at]
        self._measurements = deque(kept, maxlen=RECENT_MEASUREMENTS)

    def estimate(self, now: float) -> float:
        return max((_aged(one, now) for one in self._measurements), default=0.0)


def _aged(one: Measurement, now: float) -> float:
    return float(one.bytes_per_second * 2.0 ** (-max(0.0, now - one.at) / HALF_LIFE_SECONDS))


class Bandwidth:
    """Estimates for all of this peer's links together, in bytes per second."""

    def __init__(self) -> None:
        self._up, self._down = Rate(), Rate()
        self._last_at = 0.0

    def add(self, at: float, report: ExchangeReport) -> None:
        """Add the measurements of one exchange, even of a failed one."""
        self._last_at = at
        self._up.add(at, report.sending_bytes, report.sending_seconds)
        self._down.add(at, report.bytes_received, report.receiving_seconds)

    def was_late(self) -> None:
        """This peer could not keep up with the rates that it had declared: forget all that was
        measured before its last exchange."""
        self._up.keep_since(self._last_at)
        self._down.keep_since(self._last_at)

    def up(self, now: float) -> float:
        """The total upload speed; 0.0 while it is unknown."""
        return self._up.estimate(now)

    def down(self, now: float) -> float:
        return self._down.estimate(now)

    def possible_down(self, now: float) -> float:
        """What a plan may count on."""
        down = self.down(now)
        return max(down, min(ROOM_BELOW * down, self.up(now)))
