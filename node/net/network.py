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
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    suppress,
)

import trio

from nat.addresses import ip_of, is_global, without_peer
from nat.circuits import ask_for_circuit
from node.net.clocks import machine_clocks
from node.net.libp2p import negotiation, traversal
from node.net.libp2p.address_book import AddressBook
from node.net.libp2p.addresses import Address, AddressKind, parse
from node.net.libp2p.connection import Libp2pStream, PeerConnection
from node.net.libp2p.dial_failure import DialFailure, DialReason, unreachable
from node.net.libp2p.dialler import Dialler, SharedDials, in_order
from node.net.libp2p.host import library_id, make_host
from node.net.libp2p.introductions import Introductions
from node.net.libp2p.link_table import settle
from node.net.libp2p.listener import InboundLimit, close_listeners, open_listeners, serve_inbound
from node.net.libp2p.own_addresses import OwnAddresses
from node.net.libp2p.settings import Libp2pSettings
from node.net.libp2p.traversal import Punch, Punches
from node.net.libp2p.upgrading import (
    HANDSHAKE_ERRORS,
    AnotherPeer,
    handshake_failure,
    upgrade,
    upgrade_circuit,
)
from node.net.transport import YamuxConnection
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
    Reach,
    Sighting,
    Stream,
    StreamHandler,
    TrafficFacts,
    TraversableNetwork,
)

__all__ = ["Libp2pNetwork", "Libp2pSettings", "open_libp2p_network"]

log = logging.getLogger(__name__)

# Goodbyes go to all peers at once, each with its own timeout; this is the timeout for them all.
CLOSING_SECONDS = 1.0

# Of a peer over IPv4, before one over IPv6 is taken instead.
MOST_SIGHTED, SIGHTED_SECONDS = 3, 2.0  # addresses, and for each of them


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


class Libp2pNetwork(TraversableNetwork):
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
        self._dialler = Dialler(
            self._swarm.upgrader, self._traffic, settings.dial_seconds, self._open_circuit
        )
        self._asked_as_relays: Counter[PeerId] = Counter()
        self._dialling: dict[PeerId, frozenset[Address]] = {}
        """Where each dial under way tries."""
        self._punches = Punches()
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
        punch = self._punches.at(stream)
        if punch is not None and punch.initiates:
            return (await self._punched(stream, punch)).ended
        upgraded = await upgrade(
            self._swarm.upgrader, stream, self._traffic, initiator=False, peer=None
        )
        if upgraded.muxed.peer_id == self._swarm.get_peer_id():
            await trio.aclose_forcefully(stream)
            where = ", ".join(map(str, upgraded.muxed.get_transport_addresses()))
            log.warning("Another node, at %s, uses a copy of this node's key.", where)
            raise trio.BrokenResourceError("a caller with our own identity")
        is_punched = punch is not None and punch.peer == upgraded.muxed.peer_id.to_base58()
        connection = await self._swarm.add_conn(
            upgraded.muxed, "inbound", upgraded.below, punched=is_punched
        )
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
        traffic = self._traffic
        return TrafficFacts(
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            sending_bytes=traffic.sending_bytes,
            sending_seconds=traffic.sending_seconds,
        )

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
        tried = self._dialling.get(peer)
        try:
            return await self._dials.reach(peer)
        except Unreachable:
            if tried is None or tried.issuperset(self._book.to_try(peer)):
                raise
        # that dial had begun before we knew some of these addresses
        return await self._dials.reach(peer)

    async def _reach_for_library(self, peer: PeerId, addresses: Iterable[str]) -> PeerConnection:
        """Dial for the library (relay, hole punching), at the addresses that it gives."""
        self._book.learn(peer, addresses)
        return await self._reach(peer)

    async def _dial(self, peer: PeerId) -> PeerConnection:
        """Try all known addresses of a peer; Unreachable with the failure of each.

        A relay of a circuit is only dialled directly: addresses could lead round in a circle.
        """
        addresses = in_order(self._book.to_try(peer))
        if peer in self._asked_as_relays:
            addresses = [one for one in addresses if one.kind is not AddressKind.CIRCUIT]
        tried = self._dialling[peer] = frozenset(addresses)
        later = self._book.to_try_later(peer, addresses, trio.current_time())
        addresses = [one for one in addresses if one not in later]
        try:
            outcome = await self._dialler.race(addresses, library_id(peer), later)
        finally:
            if self._dialling.get(peer) is tried:  # else this dial was called off for another one
                del self._dialling[peer]
        if isinstance(outcome, list):
            raise unreachable(peer, outcome)
        address, upgraded = outcome
        try:
            connection = await self._swarm.add_conn(upgraded.muxed, "outbound", upgraded.below)
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
        if connection.reach is Reach.RELAYED and connection.muxed_conn.was_cut_off:
            log.debug("%r was cut off", connection)
            self._book.cut_off(connection.peer, connection.remote_address, trio.current_time())
        if not self._links.connections_to(connection.peer):
            self._book.release(connection.peer)
            self._introductions.forget(connection)

    # -- traversal

    def listened_addresses(self) -> tuple[str, ...]:
        return tuple(self._own.listened())

    def announce(self, addresses: Iterable[str]) -> None:
        self._own.found(addresses)

    async def sighting(self, peer: PeerId, *, port: int = 0, ipv4: bool = False) -> Sighting:
        link = self.link(peer)
        if link is None or link.reach is not Reach.DIRECT or link.inbound:
            await trio.lowlevel.checkpoint()
            raise _no_link(peer)
        linked = parse(link.remote_address)
        if ipv4 and linked.family == 6 and 4 in self._own.ports:
            known = (parse(one) for one in self.addresses_of(peer))
            usable = [one for one in known if one.kind is AddressKind.IP and one.family == 4]
            usable.sort(key=lambda one: not is_global(one.text))
            for address in usable[:MOST_SIGHTED]:
                with trio.move_on_after(SIGHTED_SECONDS):
                    try:
                        return await self._sighting_at(peer, address, port)
                    except Unreachable as error:
                        log.debug("no sighting at %s: %s", address.text, error)
        return await self._sighting_at(peer, linked, port)

    async def _sighting_at(self, peer: PeerId, address: Address, port: int) -> Sighting:
        try:
            stream = await traversal.connect_from(address, port)
        except DialFailure as failure:
            raise unreachable(peer, [failure]) from failure
        local_port: int = stream.socket.getsockname()[1]
        try:
            async with self._as_stranger(stream, peer) as muxed:
                seen = await traversal.observed_by(muxed)
        except (*HANDSHAKE_ERRORS, trio.ClosedResourceError) as error:
            raise Unreachable(f"{peer} did not say from where we come.", why=str(error)) from error
        if ip_of(without_peer(seen)) is None:
            raise Unreachable(f"{peer} does not say from where we come.")
        return Sighting(local_port, seen)

    def _as_stranger(
        self, stream: trio.SocketStream, peer: PeerId
    ) -> AbstractAsyncContextManager[YamuxConnection]:
        return traversal.as_stranger(
            stream, library_id(peer), self._traffic, self._settings.yamux, self._nursery
        )

    @asynccontextmanager
    async def dial_back(self, peer: PeerId, address: str, protocol: str) -> AsyncIterator[Stream]:
        try:
            stream = await traversal.connect_from(parse(address), 0)
        except DialFailure as failure:
            raise unreachable(peer, [failure]) from failure
        is_open = False
        try:
            async with self._as_stranger(stream, peer) as muxed:
                opened = await muxed.open_stream()
                if not await negotiation.propose(opened, protocol.encode()):
                    raise _not_served(peer, protocol)
                is_open = True
                yield Libp2pStream(opened, peer, protocol)
        except HANDSHAKE_ERRORS as error:
            if is_open:  # an error of the block
                raise
            raise unreachable(peer, [handshake_failure(address, error)]) from error

    async def punch(self, peer: PeerId, addresses: Iterable[str], *, initiates: bool) -> LinkFacts:
        self._check_not_ended()
        punch = traversal.Punch(peer, initiates)
        targets = [parse(text) for text in addresses]
        ports = self._own.ports
        usable = [one for one in targets if one.kind is AddressKind.IP and one.family in ports]
        if not usable:
            await trio.lowlevel.checkpoint()
            raise unreachable(peer, [])
        with self._punches.under_way(punch, usable), self._links.events() as events:
            async with trio.open_nursery() as nursery:
                for address in usable:
                    nursery.start_soon(self._knock, punch, address, ports[address.family])
                while (best := self._links.best(peer)) is None or best.reach is not Reach.DIRECT:
                    await events.receive()
                nursery.cancel_scope.cancel()
        return best.facts()

    async def _knock(self, punch: Punch, address: Address, port: int) -> None:
        """Connect to one address, again and again: the first packets may come too early. No more
        if another node answers there."""
        by_another = trio.Event()
        while not by_another.is_set():
            with suppress(DialFailure):
                stream = await traversal.connect_from(address, port)
                ended = trio.Event()
                self._nursery.start_soon(self._shake_hands, stream, punch, ended, by_another)
                await ended.wait()
            await trio.sleep(traversal.KNOCK_AGAIN_SECONDS)

    async def _shake_hands(
        self, stream: trio.SocketStream, punch: Punch, ended: trio.Event, by_another: trio.Event
    ) -> None:
        """Make a link of a connection through a hole, or tell that another peer is at its end.

        It is finished even if another address of the peer leads to a link first, because the peer
        may use this connection before our side of the handshake ends.
        """
        try:
            with trio.fail_after(self._settings.handshake_seconds):
                await self._punched(stream, punch)
        except Exception as error:  # noqa: BLE001 - a handshake fails in many ways
            log.debug("the hole to %s carried nothing: %r", punch.peer, error)
            if handshake_failure("", error).reason is DialReason.WRONG_PEER:
                by_another.set()
        finally:
            ended.set()

    async def _punched(self, stream: trio.SocketStream, punch: Punch) -> PeerConnection:
        """Make a link of a connection through a hole, with the role that was agreed."""
        expected = library_id(punch.peer)
        upgraded = await upgrade(
            self._swarm.upgrader,
            stream,
            self._traffic,
            initiator=punch.initiates,
            peer=expected if punch.initiates else None,
        )
        if upgraded.muxed.peer_id != expected:
            await trio.aclose_forcefully(stream)
            raise AnotherPeer("another peer came through the hole")
        direction = "outbound" if punch.initiates else "inbound"
        return await self._swarm.add_conn(upgraded.muxed, direction, stream, punched=True)

    async def _open_circuit(self, address: Address, peer: PeerId) -> Stream:
        """A stream to a peer through the relay that its address names, for the dialler."""
        relay_address = parse(address.text.partition("/p2p-circuit")[0])
        relay = relay_address.peer
        if relay is None or relay in (peer, self.peer_id):
            raise DialFailure(address.text, DialReason.OTHER_KIND, "names no relay")
        self._book.learn(relay, [relay_address.of_peer(relay)])
        self._asked_as_relays[relay] += 1
        try:
            return await ask_for_circuit(self, relay, peer)
        finally:
            self._asked_as_relays -= Counter([relay])

    async def carry_circuit(self, stream: Stream, peer: PeerId) -> None:
        relay = self._links.best(stream.remote_peer)
        if relay is None:
            raise _link_lost(stream.remote_peer)
        address = f"{relay.remote_address}/p2p/{relay.peer}/p2p-circuit"
        try:
            with trio.fail_after(self._settings.handshake_seconds):
                upgraded = await upgrade_circuit(
                    self._swarm.upgrader, stream, address, initiator=False, peer=None
                )
                if upgraded.muxed.peer_id.to_base58() != peer:
                    raise trio.BrokenResourceError("another peer than the relay has named")
                connection = await self._swarm.add_conn(upgraded.muxed, "inbound", stream)
        except (
            *HANDSHAKE_ERRORS,
            trio.TooSlowError,
        ) as e:
            raise unreachable(peer, [handshake_failure(address, e)]) from e
        await connection.ended.wait()

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
            raise _not_served(peer, protocol)
        return connection.stream_of(muxed, protocol)

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


def _not_served(peer: PeerId, protocol: str) -> ProtocolNotServed:
    return ProtocolNotServed(
        f"{peer} does not serve {protocol}.",
        why="It may run another version, or another role.",
        advice="Update both sides to the same version.",
    )


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
