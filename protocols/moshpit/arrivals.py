"""When nobody else is likely to come: the quiet period of a gathering, derived from arrivals. Pure.

Peers that end their steps together arrive together, and a group of them should not wait; peers
that arrive one by one leave gaps, and a list that is closed in a gap leaves the rest behind. So
the quiet period is the longest of

    what any network needs at the least          QUIET_SECONDS
    three round trips to the slowest member, which is what it takes to come
    twice the longest gap between two arrivals that was seen in this gathering

and never more than `LONGEST_QUIET_SECONDS`; the gathering's deadline stands above it all.

Easy to get wrong: only the first coming of a peer is an arrival. Who leaves and comes again, or
says a thing twice, could keep a list open for ever.
"""

from __future__ import annotations

from protocols.identity import PeerId

QUIET_SECONDS = 0.15  # what a slot takes to be written and seen by a reader, on a busy machine
LONGEST_QUIET_SECONDS = 1.0  # gaps beyond that are no pattern to wait for
ROUND_TRIPS = 3.0  # a slot is written (1), read (1), and its owner asks to join (1)
GAPS = 2.0


class Arrivals:
    """Who has come, and when the last one did. This peer itself is the first arrival."""

    def __init__(self, now: float) -> None:
        self.last = now
        self.slowest_round_trip = 0.0
        self._came: set[PeerId] = set()
        self._longest_gap = 0.0

    def came(self, peer: PeerId, now: float) -> bool:
        """Note an arrival; whether it is one."""
        if peer in self._came:
            return False
        self._longest_gap = max(self._longest_gap, now - self.last)
        self._came.add(peer)
        self.last = now
        return True

    def looked(self, now: float, *, first: bool) -> None:
        """The slots were read. Before the first time nobody could be seen."""
        if first and not self._came:
            self.last = now

    def measured(self, round_trip_seconds: float) -> None:
        """How long an answer of somebody took."""
        self.slowest_round_trip = max(self.slowest_round_trip, round_trip_seconds)

    def begin_anew(self, now: float) -> None:
        """Nobody could be seen to come until now."""
        self.last = now

    @property
    def quiet_seconds(self) -> float:
        wanted = max(QUIET_SECONDS, ROUND_TRIPS * self.slowest_round_trip, GAPS * self._longest_gap)
        return min(wanted, LONGEST_QUIET_SECONDS)

    @property
    def quiet_from(self) -> float:
        """The moment from which on it is quiet."""
        return self.last + self.quiet_seconds
