"""The joins that wait for an answer of a gathering: one of each peer at the most. Pure.

A join waits while its peer may still be in the list that is closed here. As soon as we follow
another, who is there, it is sent on to that one. A peer that could not reach it just now has said
so; it waits a little, and is then named the same leader again, which is there for us after all.

Easy to get wrong: a peer that asks again has given its earlier join up, and that one may be gone
*after* the new one has come: joins are told apart by their tickets, not by their peers.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from protocols.identity import PeerId

NAME_AGAIN_SECONDS = 0.5
"""A peer that could not reach our leader waits here, and is sent to it again after this."""


@dataclass(frozen=True)
class _Join:
    ticket: int
    passed_over: frozenset[PeerId]
    since: float


class WaitingJoins:
    """A collection of the peers that wait, in the order in which they came."""

    def __init__(self) -> None:
        self._joins: dict[PeerId, _Join] = {}

    def __contains__(self, peer: object) -> bool:
        return peer in self._joins

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._joins)

    def __len__(self) -> int:
        return len(self._joins)

    def add(self, peer: PeerId, ticket: int, passed_over: Iterable[PeerId], now: float) -> None:
        self._joins[peer] = _Join(ticket, frozenset(passed_over), now)

    def ticket_of(self, peer: PeerId) -> int | None:
        join = self._joins.get(peer)
        return None if join is None else join.ticket

    def release(self, peer: PeerId) -> int:
        """This peer waits no longer. Returns the ticket that is to be answered."""
        return self._joins.pop(peer).ticket

    def release_all_but(self, peers: Container[PeerId]) -> list[int]:
        return [self.release(peer) for peer in list(self._joins) if peer not in peers]

    def release_to(self, leader: PeerId, now: float) -> dict[PeerId, int]:
        """Those who are to be sent on to this leader now, with their tickets."""
        due = [
            peer
            for peer, join in self._joins.items()
            if leader not in join.passed_over or now >= join.since + NAME_AGAIN_SECONDS
        ]
        return {peer: self.release(peer) for peer in due}

    @property
    def named_again_at(self) -> float:
        """When the next of those who passed our leader over is sent to it again."""
        moments = (join.since + NAME_AGAIN_SECONDS for join in self._joins.values())
        return min(moments, default=math.inf)
