"""Which pieces are here, which are asked for, and who is asked for the next. Pure.

    board = PieceBoard(count, done)
    board.take(peer, now)          # the number of the next piece to ask this peer for, or None
    board.arrived(peer, now)       # the one it owed longest has come: is it still wanted?
    board.lost(peer)               # what it was asked for goes back

Each source is asked for as many pieces ahead as it delivers in a second. When all are asked for,
one who is free takes over those that would come last, if it is likely to be faster: so the end of
a download does not wait for its slowest source. The first copy counts.

Easy to get wrong: a source answers in the order in which it was asked, so what it owes is a queue.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from protocols.identity import PeerId

AHEAD_SECONDS = 1.0  # more than a round trip of a bad link (600 ms), so that it never runs dry
FEWEST_AHEAD = 2
MOST_AHEAD = 16
UNKNOWN_SECONDS = 1.0  # before it has delivered anything, a source is left alone for so long
SMOOTHING = 0.3  # of the newest piece in the pace of a source


class _Source:
    def __init__(self, now: float) -> None:
        self.owes: deque[int] = deque()
        self.pace: float | None = None  # seconds for a piece
        self.since = now  # of the last arrival, or when it was first asked while it owed nothing


class PieceBoard:
    """Invariant: a piece is here, or in nobody's queue and in `_free`, or in some queues."""

    def __init__(self, count: int, here: Iterable[int] = ()) -> None:
        self.count = count
        self.here = set(here)
        self._free = deque(number for number in range(count) if number not in self.here)
        self._sources: dict[PeerId, _Source] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.here) == self.count

    def take(self, peer: PeerId, now: float) -> int | None:
        """The next piece to ask this peer for; None: it has enough to do, or nothing is left."""
        source = self._sources.setdefault(peer, _Source(now))
        if len(source.owes) >= self._ahead(source):
            return None
        number = self._next_free()
        if number is None:
            number = self._worth_taking_over(source, now)
        if number is None:
            return None
        if not source.owes:
            source.since = now
        source.owes.append(number)
        return number

    def arrived(self, peer: PeerId, now: float) -> bool:
        """The piece that this peer owed longest has come, and is right; whether it is wanted."""
        source = self._sources[peer]
        number = source.owes.popleft()
        seconds = now - source.since
        source.since = now
        known = source.pace
        source.pace = seconds if known is None else known + SMOOTHING * (seconds - known)
        return number not in self.here

    def keep(self, number: int) -> None:
        """This piece is here, verified."""
        self.here.add(number)

    def lost(self, peer: PeerId) -> None:
        """Nothing more comes from this peer."""
        source = self._sources.pop(peer, None)
        if source is not None:
            self._put_back(source.owes)

    def _put_back(self, numbers: Iterable[int]) -> None:
        owed = {number for one in self._sources.values() for number in one.owes}
        free = set(self._free)
        self._free.extendleft(
            number
            for number in numbers
            if number not in self.here and number not in owed and number not in free
        )

    def _next_free(self) -> int | None:
        while self._free:
            number = self._free.popleft()
            if number not in self.here:
                return number
        return None

    def _ahead(self, source: _Source) -> int:
        if source.pace is None:
            return FEWEST_AHEAD
        wished = math.ceil(AHEAD_SECONDS / max(source.pace, 1e-3))
        return min(max(wished, FEWEST_AHEAD), MOST_AHEAD)

    def _worth_taking_over(self, thief: _Source, now: float) -> int | None:
        """Of the pieces that others owe, the one that would come last, if it came sooner so."""
        first: dict[int, float] = {}  # when the earliest of those who owe it would bring it
        for source in self._sources.values():
            for place, number in enumerate(source.owes):
                if number not in self.here:
                    expected = _expected(source, place, now)
                    first[number] = min(first.get(number, math.inf), expected)
        for number in thief.owes:
            first.pop(number, None)
        if not first:
            return None
        number = max(first, key=lambda one: first[one])
        return number if _expected(thief, len(thief.owes), now) < first[number] else None


def _expected(source: _Source, place: int, now: float) -> float:
    """When the piece at this place of its queue will be here, for all that is known."""
    if not source.owes and source.pace is None:
        return now + UNKNOWN_SECONDS
    began = source.since if source.owes else now
    pace = UNKNOWN_SECONDS if source.pace is None else source.pace
    if began + pace >= now:
        return began + (place + 1) * pace
    overdue = now - began  # its next piece is late: it may be stuck, and takes at least this again
    return now + overdue + place * max(pace, overdue)
