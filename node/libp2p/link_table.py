"""Which connections there are to each peer, which one is *the link*, and who is told of changes.

Usually one peer has one connection. Two exist for a while when both sides dialled at once, when a
peer came back before its old connection was known to be dead, and (in a later version) when a
direct connection joins a relayed one. Both sides then have to settle on one without a word:

- one that has shown life since the newest one came before one that has not;
- direct before relayed;
- the one that the smaller peer id dialled before the other;
- otherwise the newer.

Pure but for the channels: connections come and go by calls. Easy to get wrong: the rule must give
the same answer on both sides, or each would close the connection that the other one uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, Protocol, TypeVar

import trio

from protocols.identity import PeerId
from protocols.network import LinkEvent, Reach

# A subscriber that is this far behind misses the oldest events, as the contract says.
EVENTS_KEPT = 256


class LinkConnection(Protocol):
    """What the table has to know of a connection."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def reach(self) -> Reach: ...
    @property
    def inbound(self) -> bool: ...

    alive: bool
    """Whether it has answered since another connection to the same peer came up."""


C = TypeVar("C", bound=LinkConnection)


class LinkTable(Generic[C]):
    """Connections by peer, oldest first. Invariant: no peer with an empty list."""

    def __init__(self, own_peer: PeerId) -> None:
        self._own_peer = own_peer
        self._connections: dict[PeerId, list[C]] = {}
        self._subscribers: list[
            tuple[trio.MemorySendChannel[LinkEvent], trio.MemoryReceiveChannel[LinkEvent]]
        ] = []

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._connections)

    def connections_to(self, peer: PeerId) -> tuple[C, ...]:
        return tuple(self._connections.get(peer, ()))

    def every_connection(self) -> tuple[C, ...]:
        return tuple(each for connections in self._connections.values() for each in connections)

    def best(self, peer: PeerId) -> C | None:
        """The link to this peer: the connection that new streams go over."""
        connections = self._connections.get(peer)
        if not connections:
            return None
        if len(connections) == 1:
            return connections[0]
        newest = len(connections) - 1
        rank = max(range(newest + 1), key=lambda index: self._rank(connections[index], index))
        return connections[rank]

    def reach(self, peer: PeerId) -> Reach:
        best = self.best(peer)
        return Reach.NONE if best is None else best.reach

    def add(self, connection: C) -> None:
        was = self.reach(connection.peer)
        self._connections.setdefault(connection.peer, []).append(connection)
        self._tell(connection.peer, was)

    def remove(self, connection: C) -> None:
        """Take a connection out; one that is not in is left out."""
        connections = self._connections.get(connection.peer, [])
        if connection not in connections:
            return
        was = self.reach(connection.peer)
        connections.remove(connection)
        if not connections:
            del self._connections[connection.peer]
        self._tell(connection.peer, was)

    def mark(self, connection: C, *, alive: bool) -> None:
        """Say whether a connection has shown life; another may become the link by it."""
        was = self.reach(connection.peer)
        connection.alive = alive
        self._tell(connection.peer, was)

    def _rank(self, connection: C, age_order: int) -> tuple[bool, bool, bool, int]:
        dialled_by_us = not connection.inbound
        we_are_smaller = self._own_peer < connection.peer
        return (
            connection.alive,
            connection.reach is Reach.DIRECT,
            dialled_by_us == we_are_smaller,
            age_order,
        )

    def _tell(self, peer: PeerId, was: Reach) -> None:
        reach = self.reach(peer)
        if reach is was:
            return
        event = LinkEvent(peer, reach, was)
        for send, receive in self._subscribers:
            while True:
                try:
                    send.send_nowait(event)
                except trio.WouldBlock:
                    with suppress(trio.WouldBlock):
                        receive.receive_nowait()
                    continue
                except trio.BrokenResourceError:
                    pass  # the subscriber closed its end; leaving the `with` removes it
                break

    @contextmanager
    def events(self) -> Iterator[trio.MemoryReceiveChannel[LinkEvent]]:
        send, receive = trio.open_memory_channel[LinkEvent](EVENTS_KEPT)
        # A second receiving end, to drop the oldest event from when the channel is full.
        subscription = (send, receive.clone())
        self._subscribers.append(subscription)
        try:
            yield receive
        finally:
            if subscription in self._subscribers:
                self._subscribers.remove(subscription)
            send.close()
            subscription[1].close()
            receive.close()

    def end_subscriptions(self) -> None:
        """No event will ever come again: `async for` over a subscription ends."""
        subscribers, self._subscribers = self._subscribers, []
        for send, _ in subscribers:
            send.close()
