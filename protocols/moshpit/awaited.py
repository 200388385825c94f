"""Those who are awaited by name at one gathering, and what is known of each. Pure.

Of a number of peers that are expected nobody knows who they are: somebody who was not counted may
take the place of one who was, and brings samples that the others count on. Names say who is
missing. A list that misses an awaited peer is closed

    at once, as far as that peer goes,     if it is lost: gone, in another group, or refusing us
    at the deadline                        if it is there: it has answered in this search
    after the quiet while of closing_time  if neither is known, as without names

Only the leader's names count, and they do not travel. All who count on each other read the same
slots, so their names differ by what is on its way; and names that a joiner may add would let any
stranger hold a list open with peers that it invents.

Easy to get wrong: whoever answers that it looks for no group is there. It computes, and will come.
"""

from __future__ import annotations

from collections.abc import Container

from protocols.identity import PeerId


class Awaited:
    """Invariant: nobody is both there and lost, and nobody is either who is not awaited."""

    def __init__(self, peers: frozenset[PeerId]) -> None:
        self._peers = peers
        self._there: set[PeerId] = set()
        self._lost: set[PeerId] = set()
        self._asked: set[PeerId] = set()

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def __bool__(self) -> bool:
        return bool(self._peers)

    def is_there(self, peer: PeerId) -> None:
        """It has answered, whatever it was."""
        if peer in self._peers:
            self._there.add(peer)
            self._lost.discard(peer)

    def is_lost(self, peer: PeerId) -> None:
        """Its link is gone, it is in another group, or it refuses us."""
        if peer in self._peers:
            self._lost.add(peer)
            self._there.discard(peer)

    def has_left(self, peer: PeerId) -> None:
        """It had joined and does no more; whether it is there it has to say anew."""
        self._there.discard(peer)

    def to_ask(self, joined: Container[PeerId], known: Container[PeerId]) -> list[PeerId]:
        """Of whom nothing is known, and nobody has asked yet; they count as asked."""
        heard = self._there | self._lost | self._asked
        due = [one for one in sorted(self._peers - heard) if one not in joined and one not in known]
        self._asked.update(due)
        return due

    def lost(self, joined: Container[PeerId]) -> int:
        """How many do not come."""
        return sum(1 for one in self._lost if one not in joined)

    def is_complete(self, joined: Container[PeerId]) -> bool:
        """Whether all have joined who are not lost."""
        return all(one in joined for one in self._peers - self._lost)

    def will_come(self, joined: Container[PeerId]) -> bool:
        """Whether somebody is there who has not joined."""
        return any(one not in joined for one in self._there)
