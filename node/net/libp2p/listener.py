"""Listening: accept connections within the limits, and drop those without a handshake in time.

The library's listener runs as a trio *system task* (libp2p/transport/tcp/tcp.py:303) and so
outlives a cancelled host. It sets SO_REUSEPORT before it binds (tcp.py:59), so that two nodes with
the same port both start and take each other's connections. And it has no timeout for a caller that
connects and sends nothing. Here listening is a task of the network's nursery, a port in use is an
error, and a stranger has a few seconds to prove an identity.

`InboundLimit` (pure) counts the open inbound connections. The library also counts dead ones: its
handler takes a token for every inbound connection and then waits for the end of the *swarm* instead
of the connection (libp2p/network/swarm.py:2042-2060, the "barrier" after the upgrade). After as
many inbound connections *in all* as the limit allows it refuses everyone for ever, with none open.
Here a place is given back when its connection ends, for whatever reason. The threat is one machine,
or one botnet, that takes all our places, so there is a limit per address beside the total. An IPv6
address counts as its /64, which is what one customer gets. Loopback counts only for the total.

Hole punching dials *from* the listening port, for which Linux wants SO_REUSEPORT on both sockets.
So it is set after the exclusive bind: the port stays ours, and only we can bind it again.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from node.net.libp2p.addresses import Address, AddressKind, parse
from protocols.errors import MalformedMessage, PotluckError

IPV6_PREFIX_OF_ONE_SITE = 64


class InboundLimit:
    """Places for inbound connections. Invariant: `open` is the number of places not given back."""

    def __init__(self, *, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._by_site: Counter[str] = Counter()
        self.open = 0

    def admit(self, host: str) -> InboundPlace | None:
        """A place for a connection from this IP address, or None if there is none."""
        site = _site_of(host)
        if self.open >= self._total:
            return None
        if site is not None and self._by_site[site] >= self._per_address:
            return None
        self.open += 1
        if site is not None:
            self._by_site[site] += 1
        return InboundPlace(self, site)

    def _give_back(self, site: str | None) -> None:
        self.open -= 1
        if site is not None:
            self._by_site[site] -= 1
            if not self._by_site[site]:
                del self._by_site[site]


class InboundPlace:
    """The place of one inbound connection. Giving it back twice counts once."""

    def __init__(self, limit: InboundLimit, site: str | None) -> None:
        self._limit: InboundLimit | None = limit
        self._site = site

    def give_back(self) -> None:
        limit, self._limit = self._limit, None
        if limit is not None:
            limit._give_back(self._site)


def _site_of(host: str) -> str | None:
    """The unit of the limit: an IPv4 address or an IPv6 /64; None for this machine itself."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        network = ipaddress.ip_network((ip, IPV6_PREFIX_OF_ONE_SITE), strict=False)
        return str(network.network_address)
    return str(ip)


log = logging.getLogger(__name__)

# Connections that the kernel completes while we are busy. More have to resend their SYN.
BACKLOG = 512


class NodeCannotListen(PotluckError):
    """An address that we should listen on cannot be bound."""


def open_listeners(addresses: tuple[str, ...]) -> list[trio.SocketListener]:
    """Bind all addresses or none: NodeCannotListen names the one that failed.

    Does not block. IPv6 addresses are skipped on a machine without IPv6.
    """
    sockets = _bound(addresses)
    return [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in sockets]


def check_listening(addresses: tuple[str, ...]) -> None:
    """Raise NodeCannotListen if an address cannot be bound now.

    Called before expensive steps; needs no event loop.
    """
    for one in _bound(addresses):
        one.close()


def _bound(addresses: tuple[str, ...]) -> list[socket.socket]:
    bound: list[socket.socket] = []
    try:
        for text in addresses:
            try:
                bound.append(_listening_on(_to_listen_on(text)))
            except OSError as error:
                if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and "/ip6/" in text:
                    log.info("Not listening on %s: %s", text, error.strerror)
                    continue
                raise _cannot_listen(text, error) from error
    except BaseException:
        for one in bound:
            one.close()
        raise
    return bound


def close_listeners(listeners: list[trio.SocketListener]) -> None:
    for listener in listeners:
        listener.socket.close()


def _to_listen_on(text: str) -> Address:
    try:
        address = parse(text)
    except MalformedMessage as error:
        raise NodeCannotListen(error.what, why=error.why, advice=error.advice) from None
    if address.kind is not AddressKind.IP:
        raise NodeCannotListen(
            f"{text} is not an address to listen on.",
            why="Listening needs an IP address of this machine and a TCP port.",
            advice="For example /ip4/0.0.0.0/tcp/4001; a DNS name belongs in the announced "
            "addresses.",
        )
    return address


def _listening_on(address: Address) -> socket.socket:
    family = socket.AF_INET if address.family == 4 else socket.AF_INET6
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted node gets its port back though old connections are in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Otherwise /ip6/::/tcp/4001 would also take the port of /ip4/0.0.0.0/tcp/4001.
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address.host, address.port))
        listening.listen(BACKLOG)
        with suppress(AttributeError, OSError):  # a system without it cannot punch holes
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        listening.close()
        raise
    return listening


def _cannot_listen(text: str, error: OSError) -> NodeCannotListen:
    why, advice = "", "Choose another address; port 0 takes any free port."
    if error.errno == errno.EADDRINUSE:
        why = "Another program uses that port; a node may be running already."
    elif error.errno == errno.EACCES:
        why = "Ports below 1024 need special rights."
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "This machine does not have that address."
        advice = "Listen on /ip4/0.0.0.0/…, and announce the address that others see."
    return NodeCannotListen(f"Cannot listen on {text}: {error.strerror}.", why=why, advice=advice)


async def serve_inbound(
    listeners: list[trio.SocketListener],
    limit: InboundLimit,
    handshake_seconds: float,
    welcome: Callable[[trio.SocketStream], Awaitable[trio.Event]],
    nursery: trio.Nursery,
) -> None:
    """Accept until cancelled. `welcome` does the handshake and returns an event for the end.

    If `welcome` raises, only that connection is closed.
    """

    async def accept(stream: trio.SocketStream) -> None:
        place = None
        host = "somebody who left at once"
        try:
            host = stream.socket.getpeername()[0]
            place = limit.admit(host)
            if place is None:
                log.info("Refused a connection from %s: too many are open", host)
                return
            with trio.fail_after(handshake_seconds):
                ended = await welcome(stream)
            await ended.wait()
        except Exception as error:  # noqa: BLE001  strangers cause every kind of error
            log.info("A connection from %s came to nothing: %r", host, error)
        finally:
            if place is not None:
                place.give_back()
            await trio.aclose_forcefully(stream)

    if listeners:  # a node that only dials has none, and trio does not accept an empty list
        await trio.serve_listeners(accept, listeners, handler_nursery=nursery)
