"""The encrypted channel to one authenticated peer: py-libp2p's Noise handshake, our data path.

The handshake (Noise XX, 25519, ChaChaPoly, SHA256, with libp2p's identity payload) stays the
library's: it runs once. What comes after it is ours: read as much as the socket has into one
buffer and open every whole packet per wake-up; seal up to half a megabyte before each send. The
bytes on the wire are the same.

A connection through a relay has no socket of its own; it is read and written through the
library's RawConnection, and behaves the same but for speed.

What goes through the socket is counted in the node's traffic; where its owner limits that, the
writer waits for its turns (turns.py), and receiving waits here before it reads on, with a small
buffer in the kernel, so that the other side is held back by TCP itself.

Easy to get wrong: a send that is cancelled half-way leaves half a packet on the wire, after which
nothing can be understood. So such a session is broken for good, and says so. The muxer never
cancels a send (its writer task owns the session); only the negotiation before it may.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Protocol

import trio
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.base_session import BaseSession
from libp2p.security.noise.transport import Transport as LibraryNoiseTransport
from multiaddr import Multiaddr

from node.transport.arriving import Arriving
from node.transport.packets import (
    PACKET_LIMIT_BYTES,
    PACKET_OVERHEAD_BYTES,
    PLAINTEXT_LIMIT_BYTES,
    PacketOpener,
    PacketSealer,
)
from node.transport.traffic import ETHERNET_SEGMENT_BYTES, Traffic

try:
    import fcntl
    import termios

    _UNREAD: int | None = termios.FIONREAD
except ImportError:  # on Windows
    _UNREAD = None

# One system call and one wake-up carry up to this much. Larger batches measured no faster and
# would make small streams wait longer behind bulk.
SEND_BATCH_BYTES = 512 * 1024

# Frames below this are run together into one packet; above, the copy costs more than the packet.
JOINED_FRAME_BYTES = 32 * 1024

# Small sends have a small buffer; the large one is given back after this many of them in a row.
SMALL_SEND_BYTES = 4096
CALM_SENDS = 256

_UNSENT_LIMIT = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS; 0: the default
_WINDOW_LIMIT = getattr(socket, "TCP_WINDOW_CLAMP", None)  # Linux
_TCP_INFO = getattr(socket, "TCP_INFO", None) if sys.platform.startswith("linux") else None
_RESENT_AT = 208  # tcpi_bytes_retrans in linux/tcp.h's tcp_info, since Linux 4.19; else nothing
_HAS_VECTORS = hasattr(os, "readv")  # not on Windows, where a socket is no file descriptor


class Wire(Protocol):
    """Where ciphertext comes from and goes to. Raises ConnectionClosedError when that is over."""

    async def receive_into(self, buffer: memoryview, least: int) -> int:
        """Wait for bytes, and return how many; fewer than `least` are of no use yet."""

    async def send(self, data: memoryview) -> None: ...

    def unread_bytes(self) -> int:
        """How many have come and not been read, as far as can be told."""

    def limit_unsent(self, limit_bytes: int | None) -> None:
        """How much may wait to be sent below; None: whatever the system thinks good."""

    def limit_unread(self, limit_bytes: int) -> None:
        """How much may have arrived below and not been read."""

    def segment_bytes(self) -> int:
        """How much one segment carries."""

    def resent_bytes(self) -> int:
        """How much had to be sent again until now, because it was lost below."""


class SocketWire:
    """A TCP connection, straight on the socket.

    trio's own methods try first and give others a turn after each success. Here the reader waits
    first, since it has just read all there was, and a sender gives a turn once: that saves three
    turns of the event loop and a useless system call for each batch.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._socket = stream.socket
        self._least = 1

    async def receive_into(self, buffer: memoryview, least: int) -> int:
        try:
            if least != self._least:
                self._wake_at(least)
            if not _HAS_VECTORS:
                return await self._socket.recv_into(buffer)
            while True:
                await trio.lowlevel.wait_readable(self._descriptor())
                try:
                    return os.readv(self._descriptor(), [buffer])
                except BlockingIOError:
                    continue
        except (OSError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"reading failed: {error}", transport="tcp") from error

    async def send(self, data: memoryview) -> None:
        try:
            if not _HAS_VECTORS:
                await self._stream.send_all(data)
                return
            await trio.lowlevel.checkpoint()
            sent = 0
            while True:
                with contextlib.suppress(BlockingIOError):
                    sent += os.writev(self._descriptor(), [data[sent:]])
                if sent == len(data):
                    return
                await trio.lowlevel.wait_writable(self._descriptor())
        except (OSError, trio.ClosedResourceError, trio.BrokenResourceError) as error:
            raise ConnectionClosedError(f"sending failed: {error}", transport="tcp") from error

    def _wake_at(self, least: int) -> None:
        """Over a slow link a packet comes in dozens of segments: sleep until most are here."""
        self._least = least
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def unread_bytes(self) -> int:
        if _UNREAD is None:
            return 0
        count = bytearray(struct.calcsize("i"))
        try:
            fcntl.ioctl(self._socket.fileno(), _UNREAD, count)
        except (OSError, ValueError):  # it has been closed
            return 0
        unread: int = struct.unpack("i", count)[0]
        return unread

    def limit_unsent(self, limit_bytes: int | None) -> None:
        if _UNSENT_LIMIT is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, _UNSENT_LIMIT, limit_bytes or 0)

    def limit_unread(self, limit_bytes: int) -> None:
        """Both: the buffer's size ends its growing by itself, and the window is what is promised to
        the other side, which the buffer's size alone can lower and not raise."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit_bytes)
            if _WINDOW_LIMIT is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, _WINDOW_LIMIT, limit_bytes)

    def segment_bytes(self) -> int:
        try:
            found: int = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        except (OSError, AttributeError):
            return ETHERNET_SEGMENT_BYTES
        return max(found, 1)

    def resent_bytes(self) -> int:
        if _TCP_INFO is None:
            return 0
        try:
            facts = self._socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RESENT_AT + 8)
        except OSError:
            return 0
        resent: int = int.from_bytes(facts[_RESENT_AT : _RESENT_AT + 8], sys.byteorder)
        return resent

    def _descriptor(self) -> int:
        """Asked for before each use: after a close the number may belong to something else."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise trio.ClosedResourceError("the socket has been closed")
        return descriptor

    def remote_address(self) -> tuple[str, int] | None:
        try:
            address = self._stream.socket.getpeername()
        except OSError:
            return None
        return str(address[0]), int(address[1])


class RawConnectionWire:
    """Any other connection that py-libp2p can make, for instance one through a relay."""

    def __init__(self, connection: IRawConnection) -> None:
        self._connection = connection

    async def receive_into(self, buffer: memoryview, least: int) -> int:
        del least  # nobody wakes up here for each segment
        try:
            data = await self._connection.read(len(buffer))
        except (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as e:
            raise ConnectionClosedError(f"reading failed: {e}") from e
        if not data:
            return 0
        if len(data) > len(buffer):
            raise ConnectionClosedError("a raw connection returned more than it was asked for")
        buffer[: len(data)] = data
        return len(data)

    async def send(self, data: memoryview) -> None:
        try:
            await self._connection.write(bytes(data))
        except (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as e:
            raise ConnectionClosedError(f"sending failed: {e}") from e

    def unread_bytes(self) -> int:
        return 0

    def limit_unsent(self, limit_bytes: int | None) -> None:
        """Only its other end knows where it waits."""

    def limit_unread(self, limit_bytes: int) -> None:
        """The connection that it goes through is limited."""

    def segment_bytes(self) -> int:
        return ETHERNET_SEGMENT_BYTES

    def resent_bytes(self) -> int:
        return 0


def socket_of(connection: IRawConnection) -> trio.SocketStream | None:
    """The trio socket under a plain TCP connection; None for everything else."""
    if type(connection) is not RawConnection:
        return None
    if not isinstance(connection.stream, TrioTCPStream):
        return None
    stream = connection.stream.stream
    return stream if isinstance(stream, trio.SocketStream) else None


class CountedTcpStream(TrioTCPStream):  # type: ignore[misc]  # the library is untyped here
    """The library's TCP stream, whose bytes are counted in a node's traffic.

    Only the handshake goes through its methods; afterwards the session has the socket.
    """

    def __init__(self, stream: trio.SocketStream, traffic: Traffic | None = None) -> None:
        super().__init__(stream)
        self.traffic = Traffic() if traffic is None else traffic

    async def write(self, data: bytes) -> None:
        await super().write(data)
        self.traffic.sent(len(data))

    async def read(self, n: int | None = None) -> bytes:
        data: bytes = await super().read(n)
        self.traffic.received(len(data))
        return data


def traffic_of(connection: IRawConnection) -> Traffic | None:
    """Where what goes through a connection's own socket is counted; None where it has none."""
    stream = getattr(connection, "stream", None)
    return stream.traffic if isinstance(stream, CountedTcpStream) else None


class NoiseSession(BaseSession):  # type: ignore[misc]  # the library is untyped here
    """A secured connection after its handshake.

    To py-libp2p it is an ISecureConn (`read`, `write`, `close`); the muxer uses `receive` and
    `send_frames`, which move many packets at a time. One task may receive, one may send.
    """

    def __init__(
        self,
        handshaken: ISecureConn,
        connection: IRawConnection,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(
            local_peer=handshaken.local_peer,
            local_private_key=handshaken.local_private_key,
            remote_peer=handshaken.remote_peer,
            remote_permanent_pubkey=handshaken.remote_permanent_pubkey,
            is_initiator=handshaken.is_initiator,
        )
        # libp2p 0.8.1 security/noise/io.py: the session's `conn` holds the Noise state, whose two
        # cipher states hold key and nonce (noiseprotocol 0.3.1, state.py).
        protocol = handshaken.conn.noise_state.noise_protocol
        seal, open_ = protocol.cipher_state_encrypt, protocol.cipher_state_decrypt
        self._sealer = PacketSealer(seal.cipher.cipher, seal.n)
        self._opener = PacketOpener(open_.cipher.cipher, open_.n)
        self._connection = connection
        self._wire: Wire
        self._remote_address: tuple[str, int] | None
        # Through a relay it is counted in the connection to that relay, and not once more
        self.traffic = Traffic() if traffic is None else traffic
        stream = socket_of(connection)
        if stream is not None:
            self._wire = wire = SocketWire(stream)
            self._remote_address = wire.remote_address()
        else:
            self._wire = RawConnectionWire(connection)
            self._remote_address = connection.get_remote_address()
        self._segment_bytes = self._wire.segment_bytes()
        self._resent_bytes = 0
        down = self.traffic.down
        self._arriving = None if down is None else Arriving(down, self._wire, self._segment_bytes)
        self._unread: list[bytes] = []
        self._packets = memoryview(bytearray(SMALL_SEND_BYTES))
        self._calm_sends = 0
        self._send_lock = trio.Lock()
        self._is_broken = False

    # ---- what the muxer uses

    async def receive(self) -> list[bytes]:
        """Wait for plaintext; returns every whole packet that had come, at least one.

        ConnectionClosedError at the end; MalformedMessage when a packet is not genuine. Cancelling
        loses nothing.
        """
        if self._unread:
            await trio.lowlevel.checkpoint()
            unread, self._unread = self._unread, []
            return unread
        opener, least = self._opener, 1
        while True:
            plaintexts = opener.open()
            if plaintexts:
                return plaintexts
            if self._arriving is None:
                count = await self._wire.receive_into(opener.free_space(), least)
            else:
                count = await self._arriving.receive_into(opener.free_space())
            if not count:
                raise ConnectionClosedError("The other side closed the connection.")
            opener.filled(count)
            self.traffic.received(count, self._segment_bytes)
            least = max(1, opener.missing_bytes)

    @property
    def partial_bytes(self) -> int:
        """How many bytes have come of packets that `receive` has not returned yet."""
        return self._opener.held_bytes + self._wire.unread_bytes()

    async def send_frames(self, frames: Sequence[bytes]) -> None:
        """Send these in order, small ones together in one packet.

        A cancelled or failed send ends the session: the peer may have half a packet.
        """
        if self._is_broken:
            raise ConnectionClosedError("This session broke while something was being sent.")
        try:
            self._send_lock.acquire_nowait()  # which `acquire` follows with a turn of the loop
        except trio.WouldBlock:
            await self._send_lock.acquire()
        try:
            self._is_broken = True
            await self._send_packets(frames)
            self._is_broken = False
        finally:
            self._send_lock.release()

    def limit_unsent(self, limit_bytes: int | None) -> None:
        """How much of what was sent here may wait in the kernel; what is under way is not meant."""
        self._wire.limit_unsent(limit_bytes)

    def count_resent(self) -> None:
        """Add to the traffic what the kernel had to send again since the last time."""
        resent = self._wire.resent_bytes()
        if resent > self._resent_bytes:
            self.traffic.sent(resent - self._resent_bytes, self._segment_bytes)
            self._resent_bytes = resent

    # ---- what py-libp2p uses, until the muxer takes over

    async def read(self, n: int | None = None) -> bytes:
        if n == 0:
            return b""
        while not self._unread:
            self._unread = await self.receive()
        first = self._unread.pop(0)
        if n is not None and len(first) > n:
            self._unread.insert(0, first[n:])
            first = first[:n]
        return first

    async def write(self, data: bytes) -> None:
        await self.send_frames([data])

    async def close(self) -> None:
        await self._connection.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        # Not the library's: io/trio.py of 0.8.1 knows no IPv6 address (it expects two fields).
        return self._remote_address

    def get_transport_addresses(self) -> list[Multiaddr]:
        addresses: list[Multiaddr] = self._connection.get_transport_addresses()
        if addresses or self._remote_address is None or not isinstance(self._wire, SocketWire):
            return addresses
        host, port = self._remote_address
        family = "ip6" if ":" in host else "ip4"
        return [Multiaddr(f"/{family}/{host.partition('%')[0]}/tcp/{port}")]

    def get_connection_type(self) -> ConnectionType:
        return self._connection.get_connection_type()

    # ---- sealing

    async def _send_packets(self, frames: Sequence[bytes]) -> None:
        self._make_packet_space(frames)
        packets, used = self._packets, 0
        seal_into = self._sealer.seal_into
        joined: list[bytes] = []
        joined_bytes = 0
        for frame in frames:
            size = len(frame)
            if joined and (
                joined_bytes + size > PLAINTEXT_LIMIT_BYTES or size > JOINED_FRAME_BYTES
            ):
                used += seal_into(b"".join(joined), packets[used:])
                joined, joined_bytes = [], 0
            if size <= JOINED_FRAME_BYTES:
                joined.append(frame)
                joined_bytes += size
            else:
                for offset in range(0, size, PLAINTEXT_LIMIT_BYTES):
                    if used >= SEND_BATCH_BYTES:
                        await self._send(packets[:used])
                        used = 0
                    part: bytes | memoryview = frame
                    if size > PLAINTEXT_LIMIT_BYTES:
                        part = memoryview(frame)[offset : offset + PLAINTEXT_LIMIT_BYTES]
                    used += seal_into(part, packets[used:])
            if used >= SEND_BATCH_BYTES:
                await self._send(packets[:used])
                used = 0
        if joined:
            used += seal_into(b"".join(joined), packets[used:])
        if used:
            await self._send(packets[:used])

    async def _send(self, data: memoryview) -> None:
        await self._wire.send(data)
        self.traffic.sent(len(data), self._segment_bytes)

    def _make_packet_space(self, frames: Sequence[bytes]) -> None:
        """Room for all these frames, or for a full batch and the two packets it may overshoot by.

        Reused from send to send: fresh memory of this size costs as much as encrypting it.
        """
        wanted = sum(map(len, frames)) + PACKET_OVERHEAD_BYTES * (len(frames) + 1)
        wanted += PACKET_OVERHEAD_BYTES * (wanted // PLAINTEXT_LIMIT_BYTES)
        if wanted <= SMALL_SEND_BYTES:
            self._calm_sends += 1
            if self._calm_sends == CALM_SENDS:
                self._packets = memoryview(bytearray(SMALL_SEND_BYTES))
            return
        self._calm_sends = 0
        largest = SEND_BATCH_BYTES + 2 * PACKET_LIMIT_BYTES
        if len(self._packets) < min(wanted, largest):
            self._packets = memoryview(bytearray(largest if wanted > largest // 8 else wanted * 2))


class NoiseTransport(LibraryNoiseTransport):  # type: ignore[misc]
    """py-libp2p's Noise, whose sessions are ours once the handshake is done."""

    async def secure_inbound(self, conn: IRawConnection) -> NoiseSession:
        return NoiseSession(await super().secure_inbound(conn), conn, traffic_of(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> NoiseSession:
        return NoiseSession(await super().secure_outbound(conn, peer_id), conn, traffic_of(conn))
