"""Listen on several addresses, and let in only who is within the limits and shakes hands in time.

The library's listener runs as a trio *system task* (libp2p/transport/tcp/tcp.py:303) and so
outlives a cancelled host, sets SO_REUSEPORT before it binds (tcp.py:59), so that two nodes given
the same port both start and take each other's callers, and has no deadline of its own for those
who connect and say nothing. Here listening is a task of the network's nursery, a port that is
taken is an error, and a stranger has a few seconds to prove an identity.

Easy to get wrong: hole punching (a later issue) dials *from* the listening port, for which Linux
wants SO_REUSEPORT on both sockets. It is therefore set after the exclusive bind: that keeps the
port ours and still lets us, and nobody else, bind it again.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from node.libp2p.addresses import Address, Kind, of_socket, parse
from node.libp2p.inbound_limit import InboundLimit
from protocols.errors import MalformedMessage, PotluckError

log = logging.getLogger(__name__)

# Connections that the kernel completes while we are busy; more wait for a SYN to be sent again.
BACKLOG = 512


class CannotListen(PotluckError):
    """An address that we were told to listen on cannot be had."""


def open_listeners(addresses: tuple[str, ...]) -> list[trio.SocketListener]:
    """Bind them all, or none: CannotListen names the one that failed.

    Does not block. An IPv6 address is passed over where the machine has no IPv6.
    """
    sockets = _bound(addresses)
    return [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in sockets]


def check_listening(addresses: tuple[str, ...]) -> None:
    """CannotListen if one of them cannot be had now: asked before something is spent on it. Needs
    no loop."""
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
        raise CannotListen(error.what, why=error.why, advice=error.advice) from None
    if address.kind is not Kind.IP:
        raise CannotListen(
            f"{text} is not an address to listen on.",
            why="Listening needs an IP address of this machine and a TCP port.",
            advice="For example /ip4/0.0.0.0/tcp/4001; a DNS name goes into what is announced.",
        )
    return address


def _listening_on(address: Address) -> socket.socket:
    family = socket.AF_INET if address.family == 4 else socket.AF_INET6
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted node gets its port back though old connections linger in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Else /ip6/::/tcp/4001 would also take the port of /ip4/0.0.0.0/tcp/4001.
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address.host, address.port))
        listening.listen(BACKLOG)
        with suppress(AttributeError, OSError):  # a system without it cannot punch holes
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        listening.close()
        raise
    return listening


def _cannot_listen(text: str, error: OSError) -> CannotListen:
    why, advice = "", "Choose another address; port 0 takes any free port."
    if error.errno == errno.EADDRINUSE:
        why = "Another program uses that port; perhaps a node is running already."
    elif error.errno == errno.EACCES:
        why = "Ports below 1024 need special rights."
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "This machine does not have that address."
        advice = "Listen on /ip4/0.0.0.0/…, and announce the address that others see."
    return CannotListen(f"Cannot listen on {text}: {error.strerror}.", why=why, advice=advice)


def listen_address_of(listener: trio.SocketListener) -> str:
    """The multiaddr that a listener really has (its port, where we asked for 0)."""
    host, port = listener.socket.getsockname()[:2]
    return of_socket(host, port)


async def serve_inbound(
    listeners: list[trio.SocketListener],
    limit: InboundLimit,
    handshake_seconds: float,
    welcome: Callable[[trio.SocketStream], Awaitable[trio.Event]],
    nursery: trio.Nursery,
) -> None:
    """Accept until cancelled. `welcome` shakes hands and returns an event that marks the end.

    Whatever `welcome` raises concerns that one connection: it is closed.
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

    if listeners:  # none on a node that only dials, and trio does not take an empty list
        await trio.serve_listeners(accept, listeners, handler_nursery=nursery)
