"""The library's swarm, kept for the parts that need it, without its dangerous parts.

The library's host, identify, relay and hole punching use it. Removed are:

- The auto-connector, which dials every peer that was merely added to the peerstore
  (libp2p/network/swarm.py:2732, started by `run`): it is never started, its trigger does nothing.
- The default resource manager (libp2p/__init__.py, end of `new_swarm`), with rate limits and 256
  streams (its semaphore, swarm.py:369): none is attached. Our own limits are counts.
- Its way to dial (see `dialler`) and to accept (see `listener`).
- The service manager, which ends everything when one task raises (tools/anyio_service): our
  connections are tasks of the network's own nursery.

The library calls these methods from its own tasks, so each must be safe to call at any time, also
while the network closes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import trio
from libp2p.abc import INetStream
from libp2p.network.config import ConnectionConfig
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.transport.upgrader import TransportUpgrader
from trio.abc import AsyncResource

from node.net.libp2p.connection import PeerConnection
from node.net.libp2p.link_table import LinkTable
from node.net.libp2p.settings import Libp2pSettings
from node.net.transport import YamuxConnection
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.network import StreamHandler

LibraryHandler = Callable[[INetStream], Awaitable[None]]

# The library checks its own limits beside ours. Ours are reached first.
_NO_LIMIT = sys.maxsize

MOST_CONNECTIONS_OF_A_PEER = 8
"""An honest peer has two or three: by a relay, a hole, and one that both have dialled. Without a
limit one key could take the places of all others."""

log = logging.getLogger(__name__)


class ServedProtocols:
    """The names of our protocols and of the library's, looked up at each proposal."""

    def __init__(self, swarm: NodeSwarm) -> None:
        self._swarm = swarm

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, bytes):
            return False
        try:
            protocol = name.decode()
        except UnicodeDecodeError:
            return False
        swarm = self._swarm
        return (
            protocol in swarm.handlers
            or protocol in swarm.own_handlers
            or protocol in swarm.library_handlers
        )


class NodeSwarm(Swarm):  # type: ignore[misc]  # the library is untyped for mypy
    """A swarm whose connections run in our nursery, and which dials by our dialler."""

    def __init__(
        self,
        peer_id: ID,
        peerstore: PeerStore,
        upgrader: TransportUpgrader,
        settings: Libp2pSettings,
        nursery: trio.Nursery,
        dial: Callable[[PeerId, Iterable[str]], Awaitable[PeerConnection]],
        on_connection_up: Callable[[PeerConnection], None],
        on_connection_down: Callable[[PeerConnection], None],
    ) -> None:
        config = ConnectionConfig(
            max_connections=_NO_LIMIT,
            min_connections=0,
            low_watermark=0,
            high_watermark=_NO_LIMIT,
            max_connections_per_peer=_NO_LIMIT,
        )
        super().__init__(peer_id, peerstore, upgrader, connection_config=config)
        # The library's tag store remembers every peer that ever connected, for its pruner.
        self.notifees.clear()
        self.settings = settings
        self.nursery = nursery
        self.background_nursery = nursery
        self.event_background_nursery_created.set()
        self.links: LinkTable[PeerConnection] = LinkTable(PeerId(peer_id.to_base58()))
        self.handlers: dict[str, StreamHandler] = {}
        self.own_handlers: dict[str, StreamHandler] = {}
        self.library_handlers: dict[Any, Any] = {}
        self.served = ServedProtocols(self)
        self.on_connection_up = on_connection_up
        self.on_connection_down = on_connection_down
        self._dial = dial

    def handler_of(self, protocol: str) -> StreamHandler | None:
        return self.handlers.get(protocol) or self.own_handlers.get(protocol)

    def protocol_names(self) -> tuple[str, ...]:
        """All protocols that we answer."""
        return (*self.handlers, *self.own_handlers, *map(str, self.library_handlers))

    def library_handler_of(self, protocol: str) -> LibraryHandler:
        handler: LibraryHandler = self.library_handlers[protocol]
        return handler

    async def add_conn(
        self,
        muxed_conn: YamuxConnection,
        direction: str = "unknown",
        below: AsyncResource | None = None,
        *,
        punched: bool = False,
    ) -> PeerConnection:
        """Start a connection after its handshakes; return when it carries streams.

        BrokenResourceError if it ended before. The connection owns `below`, its socket or its
        stream through a relay, from here on, also if this raises or is cancelled.
        """
        inbound = direction == "inbound"
        connection = PeerConnection(muxed_conn, self, inbound=inbound, below=below, punched=punched)
        try:
            self.nursery.start_soon(connection.run)
        except RuntimeError:  # the network has ended
            await connection.close_everything()
            raise trio.ClosedResourceError("the network has ended") from None
        try:
            await connection.up_or_ended.wait()
        except BaseException:
            connection.abort()
            with trio.CancelScope(shield=True):
                await connection.ended.wait()
            raise
        if not connection.is_up:
            raise trio.BrokenResourceError("the connection ended as it began")
        return connection

    def connection_up(self, connection: PeerConnection) -> None:
        of_peer = self.connections.setdefault(connection.muxed_conn.peer_id, [])
        of_peer.append(connection)
        self.links.add(connection)
        self.on_connection_up(connection)
        if len(of_peer) > MOST_CONNECTIONS_OF_A_PEER:
            log.info("%s has %d connections: the newest is closed", connection.peer, len(of_peer))
            connection.abort()
        if self.notifees:
            self.nursery.start_soon(self.notify_connected, connection)

    def connection_down(self, connection: PeerConnection) -> None:
        self.remove_conn(connection)
        self.links.remove(connection)
        self.on_connection_down(connection)
        if self.notifees:
            self.nursery.start_soon(self.notify_disconnected, connection)

    # The library calls these.

    async def dial_peer(self, peer_id: ID) -> list[PeerConnection]:
        """Dial by our dialler, with the library's addresses of the peer and the library's error."""
        try:
            known = [str(address) for address in self.peerstore.addrs(peer_id)]
        except PeerStoreError:
            known = []
        try:
            return [await self._dial(PeerId(peer_id.to_base58()), known)]
        except PotluckError as error:
            raise SwarmException(str(error)) from error

    async def close_peer(self, peer_id: ID) -> None:
        async with trio.open_nursery() as nursery:
            for connection in self.get_connections(peer_id):
                nursery.start_soon(connection.close)

    def _schedule_auto_connect(self) -> None:
        """Do nothing: only dial peers on request."""

    def _schedule_prune(self) -> None:
        """Do nothing: the library's quota closes no connection."""
