"""The library's host, built from its parts and never "run".

`new_host` (libp2p/__init__.py:794) would add unwanted parts: plaintext and secio beside Noise,
Mplex, a resource manager with other limits than ours, and QUIC. `host.run` would start the
auto-connector, system tasks, and a service manager that ends everything when one task raises. So
the parts are put together here: Noise and Yamux only, our swarm, and of the library's protocols
only ping. Identify is ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.host.ping import ID as PING
from libp2p.host.ping import PingService
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.transport.upgrader import TransportUpgrader

from node.net.libp2p import negotiation
from node.net.libp2p.connection import PeerConnection
from node.net.libp2p.settings import Libp2pSettings
from node.net.libp2p.swarm import NodeSwarm
from node.net.transport import install_muxer, security_options
from protocols.errors import MalformedMessage, RemoteMisbehaviour
from protocols.identity import Identity, PeerId


class NodeHost(BasicHost):  # type: ignore[misc]  # the library is untyped for mypy
    """A BasicHost that starts nothing by itself."""

    def __init__(self, swarm: NodeSwarm) -> None:
        super().__init__(swarm, default_protocols=OrderedDict({PING: self._answer_ping}))
        # Its notifee would identify every new connection in a system task.
        swarm.notifees.clear()
        swarm.library_handlers = self.multiselect.handlers
        self._ping_service = PingService(self)

    async def _answer_ping(self, stream: Any) -> None:
        try:
            await self._ping_service.handle_ping(stream)
        finally:  # the library keeps an empty entry of each peer that has ever pinged
            streams = self._ping_service._inbound_streams
            for peer in [peer for peer, some in streams.items() if not some]:
                del streams[peer]

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        """Do nothing: our own identify runs when a connection comes up."""


def make_host(
    identity: Identity,
    settings: Libp2pSettings,
    nursery: trio.Nursery,
    *,
    dial: Callable[[PeerId, Iterable[str]], Awaitable[PeerConnection]],
    on_up: Callable[[PeerConnection], None],
    on_down: Callable[[PeerConnection], None],
) -> tuple[NodeHost, NodeSwarm]:
    """Make a host over our swarm, with Noise as only security and our Yamux as only muxer."""
    key_pair = create_new_key_pair(identity.seed)
    peer_id = ID.from_pubkey(key_pair.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, key_pair)
    upgrader = TransportUpgrader(security_options(key_pair), {})
    swarm = NodeSwarm(peer_id, peerstore, upgrader, settings, nursery, dial, on_up, on_down)
    host = NodeHost(swarm)
    beats = install_muxer(host, settings.yamux)
    nursery.start_soon(beats.run)
    speed_up(upgrader)
    return host, swarm


def library_id(peer: PeerId) -> ID:
    """The library's form of a peer id; MalformedMessage if it is invalid."""
    try:
        return ID.from_base58(peer)
    except ValueError as error:
        raise MalformedMessage(f"{peer[:64]!r} is not a peer id.", why=str(error)) from None


# Agree on security and on the muxer in one round trip each.
#
# Before a connection carries streams, multistream-select runs twice: in the clear for the security
# protocol, and inside Noise for the muxer. The library takes two round trips for each
# (libp2p/protocol_muxer/generic_selector.py:78-111), though we offer exactly one protocol each time
# and know what the answer must be. With header and proposal sent together a connection costs four
# round trips (TCP, Noise chosen, Noise, Yamux chosen) instead of six.
#
# It also keeps strangers away from the library's reader, which accepts up to four gigabytes and
# raises UnicodeDecodeError: anybody who finds the port can send to it.


class LibraryConnection(Protocol):
    """A raw or a secured connection of the library."""

    async def read(self, n: int | None = None) -> bytes: ...

    async def write(self, data: bytes) -> None: ...


class _Readable:
    """The library's read and write under the names that `negotiation` uses."""

    def __init__(self, connection: LibraryConnection) -> None:
        self.receive_some = connection.read
        self.send_all = connection.write


class OneRoundTripSelector:
    """Replaces the library's GenericMultistreamSelector. Offers one protocol."""

    def __init__(self, handlers: dict[Any, Any]) -> None:
        ((self._protocol, self._handler),) = handlers.items()
        self.handlers = handlers

    async def select(
        self,
        connection: LibraryConnection,
        is_initiator: bool,
        negotiate_timeout: float = 0,  # noqa: ARG002
    ) -> tuple[Any, Any]:
        """(protocol, handler), or the library's MultiselectError.

        The caller sets the deadline, which covers all handshakes of a connection.
        """
        stream = _Readable(connection)
        name = str(self._protocol).encode()
        try:
            if is_initiator:
                agreed = await negotiation.propose(stream, name)
            else:
                agreed = await negotiation.answer(stream, (name,)) is not None
        except RemoteMisbehaviour as error:
            raise MultiselectError(str(error)) from error
        if not agreed:
            raise MultiselectError(f"the other side does not offer {self._protocol}")
        return self._protocol, self._handler


def speed_up(upgrader: TransportUpgrader) -> None:
    """Replace both selectors of an upgrader that offers one security and one muxer."""
    for part in (upgrader.security_multistream, upgrader.muxer_multistream):
        part._selector = OneRoundTripSelector(dict(part._selector.handlers))
