"""The connections to each peer, which of them is *the link*, and events for changes.

A peer usually has one connection. It has two for a while if both sides dialled at once, if the peer
came back before its old connection was known to be dead, or if a direct connection joins a relayed
one. Both sides then have to choose the same one without a message:

- one with a sign of life since the newest one came, before one without;
- direct before relayed;
- the one that the smaller peer id dialled before the other;
- otherwise the newer.

Pure except for the channels: connections come and go by calls. The rule must give the same answer
on both sides; otherwise each would close the connection that the other one uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, Protocol, TypeVar

import trio

from node.net.libp2p.connection import PeerConnection
from node.net.libp2p.settings import Libp2pSettings
from protocols.identity import PeerId
from protocols.network import LinkEvent, Reach

# A subscriber further behind than this misses the oldest events, as in the contract.
EVENTS_KEPT = 256


class LinkConnection(Protocol):
    """The parts of a connection that the table uses."""

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
        """The link to this peer: the connection for new streams."""
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
        """Remove a connection, if it is in the table."""
        connections = self._connections.get(connection.peer, [])
        if connection not in connections:
            return
        was = self.reach(connection.peer)
        connections.remove(connection)
        if not connections:
            del self._connections[connection.peer]
        self._tell(connection.peer, was)

    def mark(self, connection: C, *, alive: bool) -> None:
        """Mark whether a connection has shown life. Another may become the link."""
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
        # a second receiving end, to drop the oldest event when the channel is full
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
        """End all subscriptions: `async for` over one ends."""
        subscribers, self._subscribers = self._subscribers, []
        for send, _ in subscribers:
            send.close()


# When a second connection to a peer comes up: find out which are alive, and close the others.
#
# Two cases look the same at first. Either both sides dialled at once, so both connections are good
# and one is enough. Or the peer lost power, came back and dialled again, and our old connection to
# it is dead without notice. So each older connection is asked for a sign of life. Until it gives
# one, new streams use the newer connection; if it gives none in time, it is closed. The answer to a
# ping is a sign of life, and so is any other byte, because on a full link the answer waits behind
# other data.
#
# Of two that are alive, the link table's rule names the same one on both sides. The side that
# dialled the other one closes it when it has had no stream for a while.


log = logging.getLogger(__name__)


async def settle(
    links: LinkTable[PeerConnection], newcomer: PeerConnection, settings: Libp2pSettings
) -> None:
    """Run as a task when `newcomer` has come up beside others to the same peer."""
    older = [each for each in links.connections_to(newcomer.peer) if each is not newcomer]
    for connection in older:
        links.mark(connection, alive=False)
    async with trio.open_nursery() as nursery:
        for connection in older:
            nursery.start_soon(_ask_for_life, links, connection, settings.sign_of_life_seconds)
    while not newcomer.ended.is_set():  # the other side may open and close them for ever
        surplus = _dialled_surplus(links, newcomer)
        if surplus is None:
            return
        await trio.sleep(settings.surplus_idle_seconds)
        if surplus is _dialled_surplus(links, newcomer) and not surplus.open_stream_count:
            log.debug("Closing %r, which another link has made surplus", surplus)
            await surplus.close()


async def _ask_for_life(
    links: LinkTable[PeerConnection], connection: PeerConnection, patience_seconds: float
) -> None:
    received = connection.muxed_conn.bytes_received
    try:
        with trio.fail_after(patience_seconds):
            await connection.ping()
    except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
        if not connection.ended.is_set() and connection.muxed_conn.bytes_received > received:
            links.mark(connection, alive=True)
            return
        log.info("%r gives no sign of life, and the peer has a newer link", connection)
        await connection.close()
    else:
        links.mark(connection, alive=True)


def _dialled_surplus(
    links: LinkTable[PeerConnection], newcomer: PeerConnection
) -> PeerConnection | None:
    """A connection to the same peer that we dialled and that is not the link."""
    best = links.best(newcomer.peer)
    for connection in links.connections_to(newcomer.peer):
        if connection is not best and not connection.inbound:
            return connection
    return None
