"""What this peer's connection bears, as its own rounds have measured it.

Each exchange says how much went each way and how long its links were busy with it. A rate that
was reached is a proof that at least that much is possible; that one was not reached proves
nothing, for the other end may have been the slow one. So the estimate is the best of the recent
rounds, and what a round has shown counts for less the longer it is ago: a connection that has
become slow is believed to be slow after some half-lives. At once, if the group has left this peer
out because it was late: then only what that attempt itself has measured is believed.

Pure: moments are arguments. Memory is bounded in rounds and in peers.

Easy to get wrong: a fast machine does not measure its link. And small transfers measure latency:
what moved fewer than `SMALLEST_BYTES` is no measurement at all, in total or of one link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from auth.bounded_map import BoundedMap
from protocols.identity import PeerId
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.exchange import ExchangeReport

HALF_LIFE_SECONDS = 600.0  # a home connection has good and bad quarters of an hour
RECENT_MEASUREMENTS = 16  # of each direction, in total and of each link
PEERS_KEPT = 4 * LARGEST_GROUP  # links whose measurements are kept, with those who come and go
LARGEST_ESTIMATE = 50e6
"""Bytes per second. Beyond 400 Mb/s it is mostly the processor that is measured, and its noise: a
plan for four makes 40 % less work of a rate that is 15 % lower. So whoever is faster is equal."""
SMALLEST_BYTES = 256 << 10  # a TCP connection's slow start is over by then


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
            self._measurements.append(Measurement(at, size / seconds))

    def keep_since(self, at: float) -> None:
        """Forget what was measured before."""
        kept = [one for one in self._measurements if one.at >= at]
        self._measurements = deque(kept, maxlen=RECENT_MEASUREMENTS)

    def estimate(self, now: float) -> float:
        best = max((_aged(one, now) for one in self._measurements), default=0.0)
        return min(best, LARGEST_ESTIMATE)


def _aged(one: Measurement, now: float) -> float:
    return float(one.bytes_per_second * 2.0 ** (-max(0.0, now - one.at) / HALF_LIFE_SECONDS))


class Bandwidth:
    """Estimates for this peer in total and for each of its links, in bytes per second."""

    def __init__(self) -> None:
        self._up, self._down = Rate(), Rate()
        self._links = BoundedMap[PeerId, tuple[Rate, Rate]](PEERS_KEPT)
        self._last_at = 0.0

    def add(self, at: float, report: ExchangeReport) -> None:
        """What one exchange measured, also one that failed. Its links were busy at the same time,
        and shared the rest."""
        self._last_at = at
        self._up.add(at, report.bytes_sent, report.sending_seconds)
        self._down.add(at, report.bytes_received, report.receiving_seconds)
        for link in report.links:
            up, down = self._rates_of(link.peer)
            up.add(at, link.bytes_sent, link.sending_seconds)
            down.add(at, link.bytes_received, link.receiving_seconds)

    def was_late(self) -> None:
        """This peer could not keep up with the rates that it had declared: forget all that was
        measured before its last exchange."""
        self._up.keep_since(self._last_at)
        self._down.keep_since(self._last_at)

    def up(self, now: float) -> float:
        """What can be sent in total; 0.0 while nothing is known."""
        return self._up.estimate(now)

    def down(self, now: float) -> float:
        return self._down.estimate(now)

    def link(self, peer: PeerId, now: float) -> tuple[float, float]:
        """To a peer and from it; 0.0 for what is not known."""
        rates = self._links.get(peer)
        return (0.0, 0.0) if rates is None else (rates[0].estimate(now), rates[1].estimate(now))

    def _rates_of(self, peer: PeerId) -> tuple[Rate, Rate]:
        rates = self._links[peer] = self._links.get(peer) or (Rate(), Rate())
        return rates
