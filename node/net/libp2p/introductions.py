"""Introducing this node to each peer that connects, and storing the peer's description.

The exchange runs beside the connection. No caller waits for it, and a failure is only logged. It
starts after a moment, so that the first call on a new link has the processor to itself. Of a peer's
description only its addresses are kept, in the address book.

Anybody may ask and tell, without a token, on many streams at once, and each costs milliseconds. So
a peer may do so a few times in some seconds; its other streams are reset.
"""

from __future__ import annotations

import ipaddress
import logging

import trio

from auth.bounded_map import BoundedMap
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
COUNTED_SECONDS = 5.0
MOST_TOLD = 8  # in that time: a peer asks once on each of its connections
MOST_HEARD = 4  # the same: a peer that starts may find its addresses one after another
MOST_COUNTED = 1024  # peers; more than have links


class FewTimes:
    """How often each peer did something lately: at most `most` times in `COUNTED_SECONDS`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counted = BoundedMap[PeerId, tuple[float, int]](MOST_COUNTED)

    def take(self, peer: PeerId, now: float) -> bool:
        """Whether it may do it now; then it has."""
        since, count = self._counted.get(peer, (now, 0))
        if now - since >= COUNTED_SECONDS:
            since, count = now, 0
        if count >= self._most:
            return False
        self._counted[peer] = since, count + 1
        return True


class Introductions:
    """Identify, both ways."""

    def __init__(
        self, host: NodeHost, own: OwnAddresses, book: AddressBook, settings: Libp2pSettings
    ) -> None:
        self._host = host
        self._own = own
        self._book = book
        self._settings = settings
        self._public_key: bytes = host.get_public_key().serialize()
        self._told, self._heard = FewTimes(MOST_TOLD), FewTimes(MOST_HEARD)

    def handlers(self) -> dict[str, StreamHandler]:
        return {identify.IDENTIFY: self._tell, identify.IDENTIFY_PUSH: self._be_told}

    def forget(self, connection: PeerConnection) -> None:
        """The last link to this peer is gone: remove what the library keeps of it."""
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
        if not self._told.take(stream.remote_peer, trio.current_time()):
            stream.reset()
            return
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
        if not self._heard.take(stream.remote_peer, trio.current_time()):
            stream.reset()
            return
        with trio.fail_after(identify.IDENTIFY_SECONDS):
            description = await identify.read(stream)
        connection = self._host.get_network().links.best(stream.remote_peer)
        if connection is not None:
            self._learn(connection, description)

    def _learn(self, connection: PeerConnection, description: Description) -> None:
        self._book.learn(connection.peer, _dialable_from(connection, description.addresses))


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
