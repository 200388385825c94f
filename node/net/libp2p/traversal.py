"""Connections that traversal makes in other ways than by a plain dial.

- From a chosen local port (`connect_from`): a router shows the outside one port for it, and the
  other side's packets to that port come in. So a hole is punched from the port that we listen on.
  Linux wants SO_REUSEPORT on both sockets (see `listener`).
- As a stranger (`as_stranger`): with a key made for this one connection, so that the other side
  does not take it for a second link of ours. It is closed with a reset, because a socket that waits
  in TIME_WAIT would keep the port from the same destination for a minute.
- Punched (`Punches`): both sides connect at once, so TCP does not say who begins the handshake, and
  a packet that comes a moment early meets the other side's listening socket instead of the one that
  connects. So the roles are agreed before, and an incoming connection from the place of a punch
  plays the same role as the outgoing one would.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.transport.upgrader import TransportUpgrader

from node.net.libp2p import identify, negotiation
from node.net.libp2p.addresses import Address, AddressKind, of_socket
from node.net.libp2p.dial_failure import DialFailure, DialReason, of_os_error
from node.net.libp2p.host import speed_up
from node.net.libp2p.upgrading import HANDSHAKE_ERRORS, upgrade
from node.net.transport import YamuxConnection, YamuxSettings, security_options
from node.net.transport.keep_alive import Beats
from node.net.transport.plugin import YamuxNegotiation
from node.net.transport.traffic import Traffic
from protocols.errors import RemoteMisbehaviour
from protocols.identity import Identity, PeerId

# A connection whose first packet was answered with a reset, or whose addresses are still in use by
# the other side's attempt, is tried again after this, until the punch ends.
KNOCK_AGAIN_SECONDS = 0.1


async def connect_from(address: Address, port: int) -> trio.SocketStream:
    """Connect from this local port, 0 for a free one; DialFailure with the reason if that fails."""
    if address.kind is not AddressKind.IP:
        raise DialFailure(address.text, DialReason.OTHER_KIND, "not an IP address with a TCP port")
    family = socket.AF_INET if address.family == 4 else socket.AF_INET6
    try:
        connection = trio.socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is left
        raise of_os_error(address.text, error) from error
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(AttributeError, OSError):  # a system without it cannot punch holes
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await connection.bind(("", port))
        await connection.connect((address.host, address.port))
        return trio.SocketStream(connection)
    except OSError as error:
        connection.close()
        raise of_os_error(address.text, error) from error
    except BaseException:
        connection.close()
        raise


def close_with_reset(stream: trio.SocketStream) -> None:
    with suppress(OSError):
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@asynccontextmanager
async def as_stranger(
    stream: trio.SocketStream,
    peer: ID,
    traffic: Traffic,
    settings: YamuxSettings,
    nursery: trio.Nursery,
) -> AsyncIterator[YamuxConnection]:
    """Use a new TCP connection to this peer under a fresh identity; it ends with the block. The
    other side can open no streams on it.

    Its muxer runs in the `nursery`. Raises HANDSHAKE_ERRORS if the handshake fails.
    """
    scope = trio.CancelScope()
    try:
        key_pair = create_new_key_pair(Identity.generate().seed)
        upgrader = TransportUpgrader(security_options(key_pair), {})
        timeout = upgrader.muxer_multistream.negotiate_timeout
        settings = replace(settings, inbound_stream_limit=0)
        upgrader.muxer_multistream = YamuxNegotiation(timeout, settings, Beats(1.0))
        speed_up(upgrader)
        try:
            upgraded = await upgrade(upgrader, stream, traffic, initiator=True, peer=peer)
        except HANDSHAKE_ERRORS:
            raise
        except Exception as error:  # what the library raises about nonsense has many kinds
            raise RemoteMisbehaviour(
                f"{peer} does not keep to the handshake.", why=repr(error)
            ) from error

        async def run() -> None:
            with scope:
                await upgraded.muxed.start()

        nursery.start_soon(run)
        await upgraded.muxed.event_started.wait()
        yield upgraded.muxed
    finally:
        scope.cancel()
        close_with_reset(stream)


async def observed_by(muxed: YamuxConnection) -> str:
    """Ask by identify from where the other side sees this connection come; empty if it is silent.

    Raises the errors of streams and of `negotiation`.
    """
    stream = await muxed.open_stream()
    try:
        if not await negotiation.propose(stream, identify.IDENTIFY.encode()):
            return ""
        return (await identify.read(stream)).observed_address
    finally:
        stream.reset_now()


@dataclass(frozen=True)
class Punch:
    """One punch that is under way."""

    peer: PeerId
    initiates: bool


class Punches:
    """The punches under way, by the IP address that the other side comes from."""

    def __init__(self) -> None:
        self._at: dict[str, Punch] = {}

    @contextmanager
    def under_way(self, punch: Punch, addresses: list[Address]) -> Iterator[None]:
        hosts = [address.host for address in addresses]
        self._at.update(dict.fromkeys(hosts, punch))
        try:
            yield
        finally:
            for host in hosts:
                if self._at.get(host) is punch:
                    del self._at[host]

    def at(self, stream: trio.SocketStream) -> Punch | None:
        """The punch that an incoming connection belongs to, by where it comes from."""
        try:
            host, port = stream.socket.getpeername()[:2]
        except OSError:
            return None
        return self._at.get(of_socket(host, port).split("/")[2])
