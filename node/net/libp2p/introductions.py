"""Introducing this node to each peer that connects, and storing the peer's description.

The exchange runs beside the connection. No caller waits for it, and a failure is only logged. It
starts after a moment, so that the first call on a new link has the processor to itself. A peer's
description goes to three places, each bounded: the address book, the library's peerstore (for relay
and hole punching; cleared when the peer leaves), and the library's collector of the addresses at
which others see us.
"""

from __future__ import annotations

import ipaddress
import logging

import trio
from multiaddr import Multiaddr

from node.net.libp2p import identify, negotiation
from node.net.libp2p.address_book import AddressBook
from node.net.libp2p.addresses import AddressKind, parse
from node.net.libp2p.connection import PeerConnection
from node.net.libp2p.host import NodeHost
from node.net.libp2p.identify import Description
from node.net.libp2p.own_addresses import OwnAddresses
from node.net.libp2p.settings import Libp2pSettings
from protocols.errors import RemoteMisbehaviour
from protocols.identity import PeerId
from protocols.network import Reach, Stream, StreamHandler

log = logging.getLogger(__name__)

# Long enough for the first call on a new link, and short for everything that uses identify.
FIRST_CALL_SECONDS = 0.2
# After this the library's peerstore forgets by itself what we failed to remove.
PEERSTORE_SECONDS = 2 * 60 * 60


class Introductions:
    """Identify, both ways. Keeps the last description of each linked peer."""

    def __init__(
        self, host: NodeHost, own: OwnAddresses, book: AddressBook, settings: Libp2pSettings
    ) -> None:
        self._host = host
        self._own = own
        self._book = book
        self._settings = settings
        self._public_key: bytes = host.get_public_key().serialize()
        self._described: dict[PeerId, Description] = {}

    def handlers(self) -> dict[str, StreamHandler]:
        return {identify.IDENTIFY: self._tell, identify.IDENTIFY_PUSH: self._be_told}

    def description_of(self, peer: PeerId) -> Description | None:
        """The description of a linked peer, once it has sent one."""
        return self._described.get(peer)

    def forget(self, connection: PeerConnection) -> None:
        """The last link to this peer is gone: remove what the library keeps of it."""
        self._described.pop(connection.peer, None)
        peerstore = self._host.peerstore
        library_id = connection.muxed_conn.peer_id
        peerstore.peer_data_map.pop(library_id, None)
        peerstore.peer_record_map.pop(library_id, None)

    async def exchange(self, connection: PeerConnection) -> None:
        """Ask a peer that has just connected for its description."""
        with trio.move_on_after(FIRST_CALL_SECONDS):
            await connection.ended.wait()
        if connection.ended.is_set():
            return
        try:
            with trio.fail_after(identify.IDENTIFY_SECONDS), connection.own_stream():
                stream = await connection.open_muxed()
                try:
                    if await negotiation.propose(stream, identify.IDENTIFY.encode()):
                        self._learn(connection, await identify.read(stream))
                finally:
                    stream.reset_now()
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            log.debug("%r did not introduce itself: %r", connection, error)
        except RemoteMisbehaviour as error:
            log.info("%r introduced itself wrongly: %s", connection, error)

    async def _tell(self, stream: Stream) -> None:
        """Answer a peer that asks for our description."""
        connection = self._host.get_network().links.best(stream.remote_peer)
        seen_at = connection.remote_address if connection is not None else ""
        if connection is not None and connection.reach is not Reach.DIRECT:
            seen_at = ""  # that is the address of the relay, not of the peer
        our_addresses = self._own.all()[: identify.MOST_ADDRESSES]
        description = Description(
            agent_version=self._settings.agent_version,
            addresses=tuple(parse(text).text for text in our_addresses),
            protocols=tuple(self._host.get_network().protocol_names()),
            observed_address=seen_at,
        )
        await stream.send_all(identify.encode(description, self._public_key))

    async def _be_told(self, stream: Stream) -> None:
        """A peer reports that its description has changed."""
        with trio.fail_after(identify.IDENTIFY_SECONDS):
            description = await identify.read(stream)
        connection = self._host.get_network().links.best(stream.remote_peer)
        if connection is not None:
            self._learn(connection, description)

    def _learn(self, connection: PeerConnection, description: Description) -> None:
        peer = connection.peer
        self._described[peer] = description
        self._book.learn(peer, _dialable_from(connection, description.addresses))
        library_id = connection.muxed_conn.peer_id
        peerstore = self._host.peerstore
        if peerstore.has_peer(library_id):
            peerstore.clear_addrs(library_id)
            peerstore.clear_protocol_data(library_id)
        addresses = [Multiaddr(text) for text in description.addresses]
        peerstore.add_addrs(library_id, addresses, PEERSTORE_SECONDS)
        peerstore.add_protocols(library_id, list(description.protocols))
        observers = self._host._observed_addr_manager
        if description.observed_address and connection.reach is Reach.DIRECT:
            observers.record_observation(
                connection,
                Multiaddr(description.observed_address),
                [Multiaddr(text) for text in self._own.listened()],
            )


def _dialable_from(connection: PeerConnection, addresses: tuple[str, ...]) -> list[str]:
    """The addresses worth storing. The loopback of another machine is not."""
    here = parse(connection.remote_address) if connection.remote_address else None
    same_machine = (
        here is not None
        and here.kind is AddressKind.IP
        and ipaddress.ip_address(here.host).is_loopback
    )
    kept = []
    for text in addresses:
        address = parse(text)
        loopback = address.kind is AddressKind.IP and ipaddress.ip_address(address.host).is_loopback
        if same_machine or not loopback:
            kept.append(text)
    return kept
