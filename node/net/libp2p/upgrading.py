"""From a TCP connection, or a stream through a relay, to a secured one that carries streams.

Only Noise is offered as security and only Yamux as muxer. The library's defaults also offer
plaintext and secio (libp2p/__init__.py, the `sec_opt or {…}` of `new_swarm`), which a man in the
middle would choose. So `make_upgrader` names exactly what is offered.

On any error, and on cancellation at any point, the socket is closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import trio
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr
from trio.abc import AsyncResource

from node.net.libp2p.dial_failure import DialFailure, DialReason
from node.net.transport import YamuxConnection
from node.net.transport.traffic import Traffic
from node.net.transport.wires import CountedTcpStream
from protocols.errors import MalformedMessage, RemoteMisbehaviour
from protocols.identity import public_key_of
from protocols.network import Stream

# What a handshake raises if the other side, or the way to it, fails.
HANDSHAKE_ERRORS = (BaseLibp2pError, RemoteMisbehaviour, trio.BrokenResourceError)


class AnotherPeer(trio.BrokenResourceError):
    """The other side has proven to be another peer than the one that was meant."""


class TcpStream(CountedTcpStream):
    """The library's wrapper, which also knows the other side's address if it is IPv6.

    The library wants `getpeername` to return two values (libp2p/io/trio.py:104), and for IPv6 it
    returns four: in the library an IPv6 connection has no remote address.
    """

    _remote_address: tuple[str, int] | None = None

    def get_remote_address(self) -> tuple[str, int] | None:
        if self._remote_address is None:
            try:
                host, port = self.stream.socket.getpeername()[:2]
            except OSError:
                return None
            self._remote_address = (host, port)
        return self._remote_address


class CircuitConnection(IRawConnection):  # type: ignore[misc]  # the library is untyped for mypy
    """A stream through a relay, as the library's raw connection. Its bytes count with the relay's.

    `address` is the relay's, ending in /p2p-circuit.
    """

    def __init__(self, stream: Stream, address: str, *, initiator: bool) -> None:
        self.is_initiator = initiator
        self._stream = stream
        self._address = address

    async def read(self, n: int | None = None) -> bytes:
        return await self._stream.receive_some(n)

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [Multiaddr(self._address)]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.RELAYED


@dataclass(frozen=True)
class Upgraded:
    """A connection after its handshakes, not yet running, with the socket or stream below it."""

    muxed: YamuxConnection
    below: AsyncResource


async def upgrade(
    upgrader: TransportUpgrader,
    stream: trio.SocketStream,
    traffic: Traffic,
    *,
    initiator: bool,
    peer: ID | None,
) -> Upgraded:
    """Do the handshakes on a new TCP connection. The result owns it; on an error it is closed.

    With a `peer` the other side must prove to be that peer. The bytes count in `traffic`. The
    caller sets the deadline. Raises the library's errors.
    """
    raw = RawConnection(TcpStream(stream, traffic), initiator)
    return await _upgrade(upgrader, raw, stream, initiator, peer)


async def upgrade_circuit(
    upgrader: TransportUpgrader, stream: Stream, address: str, *, initiator: bool, peer: ID | None
) -> Upgraded:
    """The same on a stream through the relay at this address."""
    raw = CircuitConnection(stream, address, initiator=initiator)
    return await _upgrade(upgrader, raw, stream, initiator, peer)


async def _upgrade(
    upgrader: TransportUpgrader,
    raw: IRawConnection,
    below: AsyncResource,
    initiator: bool,
    peer: ID | None,
) -> Upgraded:
    try:
        secured = await upgrader.upgrade_security(raw, initiator, peer)
        public_key_of(secured.get_remote_peer().to_base58())  # MalformedMessage for another kind
        muxed = await upgrader.upgrade_connection(secured, secured.get_remote_peer())
    except BaseException:
        await trio.aclose_forcefully(below)
        raise
    return Upgraded(cast(YamuxConnection, cast(Any, muxed)), below)


async def prove(
    upgrader: TransportUpgrader, stream: trio.SocketStream, traffic: Traffic, peer: ID
) -> None:
    """Let the other side of a new TCP connection prove that it is this peer, and close it.

    It stops before the muxer is negotiated, so the other side never has a second link.
    """
    try:
        raw = RawConnection(TcpStream(stream, traffic), True)
        await upgrader.upgrade_security(raw, True, peer)
    finally:
        await trio.aclose_forcefully(stream)


def handshake_failure(address: str, error: Exception) -> DialFailure:
    """Why a handshake at this address failed."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    said = " ".join(f"{type(each).__name__} {each}" for each in chain)
    # The library has several errors for this: its Noise raises one kind
    # (security/noise/patterns.py:349), its upgrader another with these words
    # (transport/upgrader.py:69).
    is_another = any(isinstance(each, AnotherPeer) for each in chain)
    if is_another or "PeerIDMismatch" in said or "Peer ID mismatch" in said:
        return DialFailure(address, DialReason.WRONG_PEER, "another node answers there")
    if any(isinstance(each, MalformedMessage) for each in chain):
        return DialFailure(
            address, DialReason.NOT_LIBP2P, "a program answers there, but no potluck node"
        )
    detail = f"the handshake failed ({type(chain[-1]).__name__})"
    return DialFailure(address, DialReason.NOT_LIBP2P, detail)
