"""The real network: the contract of protocols/network.py on py-libp2p, TCP, Noise and Yamux.

    async with open_libp2p_network(identity) as network:
        network.serve("/potluck/echo/1.0.0", handler)
        ...

It keeps the promises of the contract. In addition, everything starts and ends with the `async
with`: no task, socket or file descriptor is left, wherever it is cancelled. Invalid data from
strangers can cost them their connection or stream, and nothing else.

The library does host, peerstore, handshake and relay protocols. Making, accepting, counting,
multiplexing and closing connections is ours, with one module for each in `node/net/libp2p/`. This
module only connects the parts. A rule with a number in it belongs in one of those modules, where it
can be tested without a socket.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractContextManager, asynccontextmanager

import trio

from node.net.clocks import machine_clocks
from node.net.libp2p import negotiation
from node.net.libp2p.address_book import AddressBook
from node.net.libp2p.connection import Libp2pStream, PeerConnection
from node.net.libp2p.dial_failure import DialFailure, unreachable
from node.net.libp2p.dialler import Dialler, SharedDials, in_order
from node.net.libp2p.host import library_id, make_host
from node.net.libp2p.introductions import Introductions
from node.net.libp2p.link_table import settle
from node.net.libp2p.listener import InboundLimit, close_listeners, open_listeners, serve_inbound
from node.net.libp2p.own_addresses import OwnAddresses
from node.net.libp2p.settings import Libp2pSettings
from node.net.libp2p.upgrading import upgrade
from node.net.transport.traffic import Traffic
from protocols.errors import (
    ProtocolMisuse,
    ProtocolNotServed,
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.identity import Identity, PeerId
from protocols.network import (
    LinkEvent,
    LinkFacts,
    Network,
    Stream,
    StreamHandler,
    TrafficFacts,
)

__all__ = ["Libp2pNetwork", "Libp2pSettings", "open_libp2p_network"]

log = logging.getLogger(__name__)

# Goodbyes go to all peers at once, each with its own timeout; this is the timeout for them all.
CLOSING_SECONDS = 1.0


@asynccontextmanager
async def open_libp2p_network(
    identity: Identity, settings: Libp2pSettings | None = None
) -> AsyncIterator[Libp2pNetwork]:
    """Start a network that listens as the settings say; it ends with the `async with`.

    NodeCannotListen if an address cannot be bound. Errors of the block are raised without an
    exception group.
    """
    body_error: BaseException | None = None
    network = None
    async with trio.open_nursery() as nursery:
        try:
            network = Libp2pNetwork(identity, settings or Libp2pSettings(), nursery)
            await network._start()
            yield network
        except BaseException as error:  # noqa: BLE001  raised again below, outside the nursery
            body_error = error
        finally:
            if network is not None:
                with trio.CancelScope(shield=True), trio.move_on_after(CLOSING_SECONDS):
                    await network._end()
            nursery.cancel_scope.cancel()
    if network is not None:
        network._links.end_subscriptions()
    if body_error is not None:
        raise body_error


class Libp2pNetwork(Network):
    """One node on the internet. `open_libp2p_network` makes it."""

    def __init__(self, identity: Identity, settings: Libp2pSettings, nursery: trio.Nursery) -> None:
        self._identity = identity
        self._settings = settings
        self._nursery = nursery
        self._random = random.SystemRandom()
        self._clocks = machine_clocks()
        self._began_at = self._clocks.wall() - self._clocks.elapsed()
        self._book = AddressBook(
            peers=settings.known_peers, addresses_per_peer=settings.addresses_per_peer
        )
        self._own = OwnAddresses(identity.peer_id, settings.announce_addresses)
        self._inbound = InboundLimit(
            total=settings.inbound_connections,
            per_address=settings.inbound_connections_per_address,
        )
        self._dials = SharedDials(self._dial, _hang_up, nursery)
        self._traffic = Traffic(
            settings.upload_bytes_per_second, settings.download_bytes_per_second
        )
        self.host, self._swarm = make_host(
            identity,
            settings,
            nursery,
            dial=self._reach_for_library,
            on_up=self._connection_up,
            on_down=self._connection_down,
        )
        self._links = self._swarm.links
        self._dialler = Dialler(self._swarm.upgrader, self._traffic, settings.dial_seconds)
        self._introductions = Introductions(self.host, self._own, self._book, settings)
        self._swarm.own_handlers.update(self._introductions.handlers())
        self._accepting = trio.CancelScope()
        self._ended = False

    async def _start(self) -> None:
        listeners = open_listeners(self._settings.listen_addresses)
        self._own.listening_on(listeners)
        self._nursery.start_soon(self._accept, listeners)
        self._nursery.start_soon(self._traffic.run)
        await trio.lowlevel.checkpoint()

    async def _end(self) -> None:
        """Stop accepting, and say goodbye to all peers at once."""
        self._ended = True
        self._accepting.cancel()
        async with trio.open_nursery() as goodbyes:
            for connection in self._links.every_connection():
                goodbyes.start_soon(connection.close)

    async def _accept(self, listeners: list[trio.SocketListener]) -> None:
        try:
            with self._accepting:
                await serve_inbound(
                    listeners,
                    self._inbound,
                    self._settings.handshake_seconds,
                    self._welcome,
                    self._nursery,
                )
        finally:
            close_listeners(listeners)

    async def _welcome(self, stream: trio.SocketStream) -> trio.Event:
        """Do the handshake with a peer that connected; the event is set at the connection's end."""
        upgraded = await upgrade(
            self._swarm.upgrader, stream, self._traffic, initiator=False, peer=None
        )
        if upgraded.muxed.peer_id == self._swarm.get_peer_id():
            await trio.aclose_forcefully(stream)
            where = ", ".join(map(str, upgraded.muxed.get_transport_addresses()))
            log.warning("Another node, at %s, uses a copy of this node's key.", where)
            raise trio.BrokenResourceError("a caller with our own identity")
        connection = await self._swarm.add_conn(upgraded.muxed, "inbound", upgraded.tcp)
        return connection.ended

    # -- who we are, and the world outside the protocols

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def random(self) -> random.Random:
        return self._random

    def wall_time(self) -> float:
        """The machine's clock at the start of the node, continued by the clock that cannot be set.

        If the clock is set meanwhile, by NTP or by hand, everything from other peers would
        otherwise seem expired, or early. (If no clock counts through a suspend, this is the
        machine's clock itself.)
        """
        clocks = self._clocks
        return self._began_at + clocks.elapsed() if clocks.counts_sleep else clocks.wall()

    def addresses(self) -> tuple[str, ...]:
        return self._own.all()

    def learn_addresses(self, peer: PeerId, addresses: Iterable[str]) -> None:
        self._book.learn(peer, addresses)

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        return self._book.addresses_of(peer)

    # -- links

    def link(self, peer: PeerId) -> LinkFacts | None:
        connection = self._links.best(peer)
        return None if connection is None else connection.facts()

    def traffic(self) -> TrafficFacts:
        return TrafficFacts(self._traffic.sent_bytes, self._traffic.received_bytes)

    def links(self) -> tuple[LinkFacts, ...]:
        facts = (self.link(peer) for peer in self._links.peers())
        return tuple(each for each in facts if each is not None)

    def link_events(self) -> AbstractContextManager[trio.MemoryReceiveChannel[LinkEvent]]:
        return self._links.events()

    async def connect(self, peer: PeerId) -> LinkFacts:
        return (await self._reach(peer)).facts()

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            for connection in self._links.connections_to(peer):
                nursery.start_soon(connection.close)

    async def check_dialable(self, peer: PeerId, addresses: Iterable[str]) -> str:
        self._check_not_ended()
        if peer == self.peer_id:
            raise ProtocolMisuse(f"{peer} is this node itself.")
        failures: list[DialFailure] = []
        for text in addresses:
            try:
                await self._dialler.prove_at(text, peer)
            except DialFailure as failure:
                failures.append(failure)
            else:
                return text
        await trio.lowlevel.checkpoint()
        raise unreachable(peer, failures)

    async def ping(self, peer: PeerId) -> float:
        self._check_not_ended()
        connection = self._links.best(peer)
        if connection is None:
            await trio.lowlevel.checkpoint()
            raise _no_link(peer)
        try:
            return await connection.ping()
        except trio.BrokenResourceError:
            raise _link_lost(peer) from None

    async def _reach(self, peer: PeerId) -> PeerConnection:
        """The link to a peer; it is made now if there is none."""
        self._check_not_ended()
        connection = self._links.best(peer)
        if connection is not None:
            await trio.lowlevel.checkpoint()
            return connection
        if peer == self.peer_id:
            raise ProtocolMisuse(
                f"{peer} is this node itself.", advice="A node does not connect to itself."
            )
        return await self._dials.reach(peer)

    async def _reach_for_library(self, peer: PeerId, addresses: Iterable[str]) -> PeerConnection:
        """Dial for the library (relay, hole punching), at the addresses that it gives."""
        self._book.learn(peer, addresses)
        return await self._reach(peer)

    async def _dial(self, peer: PeerId) -> PeerConnection:
        """Try all known addresses of a peer; Unreachable with the failure of each."""
        addresses = in_order(self._book.to_try(peer))
        outcome = await self._dialler.race(addresses, library_id(peer))
        if isinstance(outcome, list):
            raise unreachable(peer, outcome)
        address, upgraded = outcome
        try:
            connection = await self._swarm.add_conn(upgraded.muxed, "outbound", upgraded.tcp)
        except trio.BrokenResourceError:
            raise _link_lost(peer) from None
        self._book.worked(peer, address)
        return connection

    def _connection_up(self, connection: PeerConnection) -> None:
        self._book.keep(connection.peer)
        self._nursery.start_soon(self._introductions.exchange, connection)
        if len(self._links.connections_to(connection.peer)) > 1:
            self._nursery.start_soon(settle, self._links, connection, self._settings)

    def _connection_down(self, connection: PeerConnection) -> None:
        if not self._links.connections_to(connection.peer):
            self._book.release(connection.peer)
            self._introductions.forget(connection)

    # -- streams

    async def open(self, peer: PeerId, protocol: str) -> Stream:
        connection = await self._reach(peer)
        muxed = None
        try:
            muxed = await connection.open_muxed()
            with muxed.negotiating():
                served = await negotiation.propose(muxed, protocol.encode())
        except BaseException as error:
            if muxed is not None:
                muxed.reset_now()
            if isinstance(error, trio.BrokenResourceError | trio.ClosedResourceError):
                raise _no_stream(connection) from None
            if isinstance(error, RemoteMisbehaviour):
                raise _no_stream(connection) from error
            raise
        if not served:
            muxed.reset_now()
            raise ProtocolNotServed(
                f"{peer} does not serve {protocol}.",
                why="It may run another version, or another role.",
                advice="Update both sides to the same version.",
            )
        return Libp2pStream(muxed, peer, protocol)

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._check_not_ended()
        if protocol in self._swarm.protocol_names():
            raise ProtocolMisuse(f"{protocol} is served already.")
        self._swarm.handlers[protocol] = handler

    def stop_serving(self, protocol: str) -> None:
        self._swarm.handlers.pop(protocol, None)

    def _check_not_ended(self) -> None:
        if self._ended:
            raise trio.ClosedResourceError("the network has ended")


async def _hang_up(connection: PeerConnection) -> None:
    """Close a link that came up just when the last caller that wanted it gave up."""
    connection.abort()
    await connection.ended.wait()


def _no_link(peer: PeerId) -> Unreachable:
    return Unreachable(f"There is no link to {peer}.", advice="Connect to it first.")


def _link_lost(peer: PeerId) -> Unreachable:
    return Unreachable(
        f"The link to {peer} was lost.",
        why="The other node ended, or the network in between failed.",
        advice="Try again: the next call connects anew.",
    )


def _no_stream(connection: PeerConnection) -> Unreachable:
    """The error for a stream that could not be opened on a link that existed a moment ago."""
    if connection.ended.is_set() or connection.muxed_conn.is_closed:
        return _link_lost(connection.peer)
    return Unreachable(
        f"{connection.peer} did not take a stream.",
        why="It may have as many streams of ours as it allows, or it is shutting down.",
        advice="Try again in a moment.",
    )
