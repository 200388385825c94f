"""Who may download from this peer now, and how long the others should wait. Pure.

    seconds = desk.ask(peer, now, most)    # 0.0: a place is kept for it for some seconds
    desk.begin(peer, now, state_bytes); desk.sent(peer, count); desk.end(peer)
    desk.place_in_line(peer, now)          # the lowest has been served longest, and is first

So many newcomers at a time as all get in; more would keep each other out. Each has other donors to
ask. One who is told to wait is told for how long, from what the others have left.

Easy to get wrong: a peer that follows the run asks for one result after the other, and has no
transfer in between. So since when it has been served is remembered for a while; but nobody stays
the first for ever: after SENIOR_STATES times what it has asked for, it is the newest again.

Easy to get wrong: a place is kept for a peer between the manifest and its transfer, but not for
long, and not after the transfer: who comes back after an interruption asks like everybody.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from protocols.identity import PeerId

KEPT_SECONDS = 10.0  # for the next step of one who was let in: eight round trips of a bad link
USUAL_WAIT_SECONDS = 10.0  # when nothing is known yet of those who download
SHORTEST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
SENIOR_SECONDS = 10.0  # since its last transfer; a step that takes longer leaves time for all
SENIOR_STATES = 4.0
"""A state, and as much again three times in results while it comes; who needs more goes last."""
MOST_REMEMBERED = 64  # peers that were served lately


@dataclass
class _Place:
    kept_until: float
    transfers: int = 0
    began: float = 0.0
    wanted_bytes: int = 0
    sent_bytes: int = 0

    def seconds_left(self, now: float) -> float:
        if not self.transfers:
            return self.kept_until - now
        elapsed = now - self.began
        if elapsed <= 0.0 or not self.sent_bytes:
            return USUAL_WAIT_SECONDS
        return (self.wanted_bytes - self.sent_bytes) * elapsed / self.sent_bytes


@dataclass
class _Served:
    place: int
    last: float
    largest_bytes: int = 0
    sent_bytes: int = 0


class DownloadDesk:
    """Invariant: at most `most` places, each of one peer with a transfer or a reservation."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[PeerId, _Place] = {}
        self._served: OrderedDict[PeerId, _Served] = OrderedDict()
        self._places_given = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def downloading(self) -> int:
        """How many peers have a transfer open."""
        return sum(place.transfers > 0 for place in self._places.values())

    def ask(
        self, peer: PeerId, now: float, most: int | None = None, held_seconds: float = 0.0
    ) -> float:
        """0.0 if the peer has a place now; otherwise in how many seconds it should ask again.

        `most`: of newcomers, at present. Who was served within `held_seconds` still counts as one:
        it asks for one result after the other.
        """
        self._forget(now)
        place = self._places.get(peer)
        if place is None:
            others = set(self._places)
            if most is not None:
                lately = (
                    one
                    for one, served in self._served.items()
                    if _is_held(served, now, held_seconds)
                )
                others |= {*lately}
                others.discard(peer)
            if len(others) >= min(self._most, most or self._most):
                left = (one.seconds_left(now) for one in self._places.values())
                return min(max(min(left, default=0.0), SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
            place = self._places[peer] = _Place(now)
        place.kept_until = now + KEPT_SECONDS
        return 0.0

    def begin(self, peer: PeerId, now: float, state_bytes: int) -> None:
        """A transfer to a peer that has a place is open."""
        place = self._places[peer]
        if not place.transfers:
            place.began, place.wanted_bytes, place.sent_bytes = now, state_bytes, 0
        place.transfers += 1
        served = self._served_of(peer, now)
        served.largest_bytes = max(served.largest_bytes, state_bytes)

    def place_in_line(self, peer: PeerId, now: float) -> int:
        """Of a peer that downloads. No two have the same."""
        return self._served_of(peer, now).place

    def sent(self, peer: PeerId, count: int, now: float) -> None:
        self._places[peer].sent_bytes += count
        served = self._served_of(peer, now)
        served.sent_bytes += count
        if served.sent_bytes > SENIOR_STATES * served.largest_bytes:
            served.place, served.sent_bytes = self._last_place(), 0

    def end(self, peer: PeerId) -> None:
        """A transfer has ended. Without another one the place is free."""
        place = self._places[peer]
        place.transfers -= 1
        if not place.transfers:
            del self._places[peer]

    def _served_of(self, peer: PeerId, now: float) -> _Served:
        served = self._served.get(peer)
        if served is None or now - served.last > SENIOR_SECONDS:
            served = self._served[peer] = _Served(self._last_place(), now)
        served.last = now
        self._served.move_to_end(peer)
        if len(self._served) > MOST_REMEMBERED:
            self._served.popitem(last=False)
        return served

    def _last_place(self) -> int:
        self._places_given += 1
        return self._places_given

    def _forget(self, now: float) -> None:
        for peer, place in list(self._places.items()):
            if not place.transfers and place.kept_until <= now:
                del self._places[peer]


def _is_held(served: _Served, now: float, seconds: float) -> bool:
    return now - served.last < seconds
