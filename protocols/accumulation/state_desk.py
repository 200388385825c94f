"""Who may download from this peer now, and how long the others should wait. Pure.

    seconds = desk.ask(peer, now)          # 0.0: a place is kept for it for some seconds
    desk.begin(peer, now, state_bytes); desk.sent(peer, count); desk.end(peer)

So many at a time that each gets on; more would make all of them slow, and each newcomer has other
donors to ask. One who is told to wait is told for how long, from what the others have left.

Easy to get wrong: a place is kept for a peer between the manifest and its transfer, but not for
long, and not after the transfer: who comes back after an interruption asks like everybody.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.identity import PeerId

KEPT_SECONDS = 10.0  # for the next step of one who was let in: eight round trips of a bad link
USUAL_WAIT_SECONDS = 10.0  # when nothing is known yet of those who download
SHORTEST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0


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


class DownloadDesk:
    """Invariant: at most `most` places, each of one peer with a transfer or a reservation."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[PeerId, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def downloading(self) -> int:
        """How many peers have a transfer open."""
        return sum(place.transfers > 0 for place in self._places.values())

    def ask(self, peer: PeerId, now: float) -> float:
        """0.0 if the peer has a place now; otherwise in how many seconds it should ask again."""
        self._forget(now)
        place = self._places.get(peer)
        if place is None:
            if len(self._places) >= self._most:
                left = min(place.seconds_left(now) for place in self._places.values())
                return min(max(left, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
            place = self._places[peer] = _Place(now)
        place.kept_until = now + KEPT_SECONDS
        return 0.0

    def begin(self, peer: PeerId, now: float, state_bytes: int) -> None:
        """A transfer to a peer that has a place is open."""
        place = self._places[peer]
        if not place.transfers:
            place.began, place.wanted_bytes, place.sent_bytes = now, state_bytes, 0
        place.transfers += 1

    def sent(self, peer: PeerId, count: int) -> None:
        self._places[peer].sent_bytes += count

    def end(self, peer: PeerId) -> None:
        """A transfer has ended. Without another one the place is free."""
        place = self._places[peer]
        place.transfers -= 1
        if not place.transfers:
            del self._places[peer]

    def _forget(self, now: float) -> None:
        for peer, place in list(self._places.items()):
            if not place.transfers and place.kept_until <= now:
                del self._places[peer]
