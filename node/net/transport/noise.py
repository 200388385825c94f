"""The encrypted channel to one authenticated peer: py-libp2p's Noise handshake, our data path.

The handshake (Noise XX, 25519, ChaChaPoly, SHA256, with libp2p's identity payload) is the
library's, because it runs only once. The rest is ours. Per wake-up it reads as much as the socket
has into one buffer and opens every whole packet; before each send it seals up to half a megabyte.
The bytes on the wire are the same.

The ciphertext goes over a wire (wires.py), which is a socket or a connection through a relay. Bytes
through a socket are counted in the node's traffic. If the node has a limit for it, the writer waits
for its turns (writer.py), and receiving waits for its own (below) before it reads on.

A send that is cancelled half-way leaves half a packet on the wire, and the peer can decrypt nothing
after it. So such a session is marked as broken. The muxer never cancels a send (its writer task
owns the session); only the negotiation before it may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import trio
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.security.base_session import BaseSession
from libp2p.security.noise.transport import Transport as LibraryNoiseTransport
from multiaddr import Multiaddr

from node.net.transport.packets import (
    PACKET_LIMIT_BYTES,
    PACKET_OVERHEAD_BYTES,
    PLAINTEXT_LIMIT_BYTES,
    SMALL_BUFFER_BYTES,
    Lender,
    PacketOpener,
    PacketSealer,
)
from node.net.transport.traffic import SMALL_BYTES, Throttle, Traffic
from node.net.transport.wires import (
    Delivery,
    RawConnectionWire,
    SocketWire,
    Wire,
    socket_of,
    traffic_of,
)

# One system call and one wake-up carry up to this much. Larger batches were no faster in
# measurements, and would make small streams wait longer behind bulk.
SEND_BATCH_BYTES = 512 * 1024

# Smaller frames are joined into one packet; for larger ones the copy costs more than the packet.
JOINED_FRAME_BYTES = 32 * 1024

# Small sends have a small buffer. The large one is freed after this many of them in a row.
SMALL_SEND_BYTES = 4096
CALM_SENDS = 256

# A connection that brings nothing for so long needs no large buffer. Growing again costs two reads.
IDLE_SECONDS = 0.2


class NoiseSession(BaseSession):  # type: ignore[misc]  # the library is untyped here
    """A secured connection after its handshake.

    To py-libp2p it is an ISecureConn (`read`, `write`, `close`). The muxer uses `receive` and
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
        # Bytes through a relay are already counted in the connection to that relay.
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
        """Wait for plaintext; return whole packets that have arrived, at least one.

        It waits only if none has arrived. ConnectionClosedError at the end; MalformedMessage if a
        packet is not genuine. Cancellation loses nothing.
        """
        if self._unread:
            await trio.lowlevel.checkpoint()
            unread, self._unread = self._unread, []
            return unread
        opener, least, count = self._opener, 1, 0
        while True:
            plaintexts = opener.open()
            if plaintexts:
                return plaintexts
            if self._arriving is not None:
                await self._arriving.turn()
            is_small = opener.buffer_bytes == SMALL_BUFFER_BYTES
            with trio.move_on_after(math.inf if is_small else IDLE_SECONDS) as patience:
                count = await self._read(least)
            if patience.cancelled_caught:
                opener.shrink()
                continue
            if not count:
                raise ConnectionClosedError("The other side closed the connection.")
            opener.filled(count)
            self.traffic.received(count, self._segment_bytes)
            least = max(1, opener.missing_bytes)

    async def _read(self, least: int) -> int:
        if self._arriving is None:
            return await self._wire.receive_into(self._opener.free_space(), least)
        return await self._arriving.receive_into(self._opener.free_space())

    def borrow_buffers_from(self, lender: Lender) -> None:
        """Read more at once from now on, as far as this allows it."""
        self._opener.lender = lender

    @property
    def partial_bytes(self) -> int:
        """Bytes that have arrived of packets that `receive` has not returned yet."""
        return self._opener.held_bytes + self._wire.unread_bytes()

    @property
    def delivered_while_sending(self) -> int | None:
        """How many bytes the other side has taken so far, if a send waits for it; else None."""
        return self._wire.delivered_while_sending()

    async def send_frames(self, frames: Sequence[bytes]) -> float:
        """Send these in order, small ones together in one packet. Returns for how many seconds the
        wire had no room.

        A cancelled or failed send ends the session: the peer may have half a packet.
        """
        if self._is_broken:
            raise ConnectionClosedError("This session broke while something was being sent.")
        try:
            self._send_lock.acquire_nowait()  # `acquire` below is followed by a turn of the loop
        except trio.WouldBlock:
            await self._send_lock.acquire()
        try:
            self._is_broken = True
            waited = await self._send_packets(frames)
            self._is_broken = False
            return waited
        finally:
            self._send_lock.release()

    def limit_unsent(self, limit_bytes: int | None) -> None:
        """How many sent bytes may wait in the kernel; bytes in flight do not count."""
        self._wire.limit_unsent(limit_bytes)

    def pace(self) -> None:
        """Send without bursts from now on, as far as the kernel can do that."""
        self._wire.pace()

    def look_at_delivery(self) -> Delivery:
        """What is known now of the bytes that were sent. Adds those that the kernel has resent
        since the last call to the traffic."""
        delivery = self._wire.delivery()
        if delivery.resent_bytes > self._resent_bytes:
            self.traffic.sent(delivery.resent_bytes - self._resent_bytes, self._segment_bytes)
            self._resent_bytes = delivery.resent_bytes
        return delivery

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
        self._opener.end()
        await self._connection.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        # Replaces the library's: io/trio.py of 0.8.1 knows no IPv6 address (it expects two fields).
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

    async def _send_packets(self, frames: Sequence[bytes]) -> float:
        self._make_packet_space(frames)
        packets, used, waited = self._packets, 0, 0.0
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
                        waited += await self._send(packets[:used])
                        used = 0
                    part: bytes | memoryview = frame
                    if size > PLAINTEXT_LIMIT_BYTES:
                        part = memoryview(frame)[offset : offset + PLAINTEXT_LIMIT_BYTES]
                    used += seal_into(part, packets[used:])
            if used >= SEND_BATCH_BYTES:
                waited += await self._send(packets[:used])
                used = 0
        if joined:
            used += seal_into(b"".join(joined), packets[used:])
        if used:
            waited += await self._send(packets[:used])
        return waited

    async def _send(self, data: memoryview) -> float:
        self.traffic.sends_on(self._wire)
        waited = await self._wire.send(data)
        self.traffic.sent(len(data), self._segment_bytes)
        # once more, because a look may have come before anything was written
        self.traffic.sends_on(self._wire, waited)
        return waited

    def _make_packet_space(self, frames: Sequence[bytes]) -> None:
        """Make room for all these frames, or for a full batch and the two packets beyond it.

        The buffer is reused: new memory of this size costs as much as encrypting it.
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
    """py-libp2p's Noise, with our sessions after the handshake."""

    async def secure_inbound(self, conn: IRawConnection) -> NoiseSession:
        return NoiseSession(await super().secure_inbound(conn), conn, traffic_of(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> NoiseSession:
        return NoiseSession(await super().secure_outbound(conn, peer_id), conn, traffic_of(conn))


# Receiving on a node with a download limit: TCP itself slows the other side down.
#
# Bytes are charged when read, and the next read waits until the node owes nothing. So the kernel's
# buffer fills, its window closes, and the sender waits. The buffer is kept small, because the bytes
# that it can hold arrive before we can delay them. All connections with bulk share the total for
# these buffers.
#
# The buffer must hold two segments. A sender whose peer's window is smaller than a segment (64 KiB
# on loopback) waits for a timer before each one.


QUIET_BYTES = 16 * 1024
"""The buffer of a connection without bulk: small messages, and a first packet."""

RESIZE_FACTOR = 1.5
"""A buffer stays as it is while its size is within this factor of the wanted one."""


class Below(Protocol):
    async def receive_into(self, buffer: memoryview, least: int) -> int: ...

    def limit_unread(self, limit_bytes: int) -> None: ...


class Arriving:
    """The receiving side of one connection. It charges what it has read to the node's traffic
    itself.
    """

    def __init__(self, throttle: Throttle, wire: Below, segment_bytes: int) -> None:
        self._throttle = throttle
        self._wire = wire
        self._least_buffer = 2 * segment_bytes
        self._buffer = max(self._least_buffer, QUIET_BYTES)
        self._read_bytes = SMALL_BYTES
        self._carries_bulk = False
        self._has_read = False
        wire.limit_unread(self._buffer)

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes, after `turn`; return their number. Cancellation loses nothing."""
        count = await self._wire.receive_into(buffer[: self._read_bytes], 1)
        self._has_read = True
        self._carries_bulk = count >= SMALL_BYTES
        if self._carries_bulk:
            busy = self._throttle.busy_with(self)
            self._read_bytes = self._throttle.read_bytes(busy)
            self._resize(max(self._least_buffer, self._throttle.buffer_bytes(busy)))
        else:
            self._read_bytes = SMALL_BYTES
        return count

    async def turn(self) -> None:
        """Wait until this connection may read, after what it has read last."""
        if self._has_read:
            await self._throttle.turn(is_small=not self._carries_bulk)
            self._has_read = False

    def _resize(self, wanted: int) -> None:
        if not wanted / RESIZE_FACTOR <= self._buffer <= wanted * RESIZE_FACTOR:
            self._buffer = wanted
            self._wire.limit_unread(wanted)
