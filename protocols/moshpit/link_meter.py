"""How long links were busy with one exchange, and how much they carried.

A direction is busy while a chunk of it is being sent, or while the rest of a chunk whose header
is there is awaited. Waiting for a chunk to be begun is not busy: then the other end had nothing
to send. What is shared by several transfers counts once, however many of them are busy.

Easy to get wrong: what was sent may still lie in a buffer. Only the receiving end sees bytes
arrive, so it says at the end how long our part took to come (`PartClosed.busy_ms`), and the
longer of the two times counts. It could lie, but not beyond the time that the exchange took.
"""

from __future__ import annotations

import statistics

import trio

from protocols.identity import PeerId
from protocols.moshpit.exchange import LinkUse


class BusyClock:
    """The time in which at least one thing was going on: `with clock:` around each."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._going_on = 0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """So far, what goes on now included."""
        if not self._going_on:
            return self._seconds
        return self._seconds + trio.current_time() - self._since

    def __enter__(self) -> None:
        if self._going_on == 0:
            self._since = trio.current_time()
        self._going_on += 1

    def __exit__(self, *_error: object) -> None:
        self._going_on -= 1
        if self._going_on == 0:
            self._seconds += trio.current_time() - self._since


class Direction:
    """Bytes and busy time of one direction of one link, which is part of a total."""

    def __init__(self, total: BusyClock) -> None:
        self._total = total
        self._clock = BusyClock()
        self.bytes = 0
        self.told_seconds = 0.0

    @property
    def seconds(self) -> float:
        return max(self._clock.seconds, self.told_seconds)

    def __enter__(self) -> None:
        self._total.__enter__()
        self._clock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._clock.__exit__(*error)
        self._total.__exit__(*error)


class LinkMeter:
    """All links of one exchange."""

    def __init__(self) -> None:
        self._sending, self._receiving = BusyClock(), BusyClock()
        self._links: dict[PeerId, tuple[Direction, Direction]] = {}

    def sending_to(self, peer: PeerId) -> Direction:
        return self._link(peer)[0]

    def receiving_from(self, peer: PeerId) -> Direction:
        return self._link(peer)[1]

    @property
    def bytes_sent(self) -> int:
        return sum(sending.bytes for sending, _ in self._links.values())

    @property
    def bytes_received(self) -> int:
        return sum(receiving.bytes for _, receiving in self._links.values())

    @property
    def sending_seconds(self) -> float:
        """Of all links together; of what they told the median, which one liar does not move."""
        told = [sending.told_seconds for sending, _ in self._links.values()]
        return max(self._sending.seconds, statistics.median(told) if told else 0.0)

    @property
    def receiving_seconds(self) -> float:
        return self._receiving.seconds

    def uses(self) -> tuple[LinkUse, ...]:
        return tuple(
            LinkUse(peer, sending.bytes, receiving.bytes, sending.seconds, receiving.seconds)
            for peer, (sending, receiving) in self._links.items()
        )

    def _link(self, peer: PeerId) -> tuple[Direction, Direction]:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = (Direction(self._sending), Direction(self._receiving))
        return link
