"""Connections between two ends in memory, for the tests of the transport.

The wire below is a py-libp2p raw connection without a socket, with a delay, a bandwidth and a
bounded buffer, under whatever clock trio runs. Everything above it is the real thing, handshake
and encryption included.

`joined_pair` gives two muxed connections; `hostile_pair` gives one, and at its other end a
session on which a test may say whatever it likes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache

import trio
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from node.net.transport import YamuxConnection, YamuxSettings, YamuxStream, security_options
from node.net.transport.frames import FrameHeader, YamuxFrameParser, encode_header
from node.net.transport.noise import NoiseSession
from node.net.transport.window import NodeBudget
from tests.waiting import PATIENCE_SECONDS

MEBIBYTE = 1024 * 1024
NOISE = "/noise"


@lru_cache
def key_pair(name: str) -> KeyPair:
    return create_new_key_pair(name.encode().ljust(32, b"."))


def peer_id(name: str) -> ID:
    return ID.from_pubkey(key_pair(name).public_key)


class Pipe:
    """One direction: bytes leave at a rate, arrive after a delay, wait in a bounded buffer."""

    def __init__(self, delay_seconds: float, bytes_per_second: float, buffer_bytes: int) -> None:
        self.delay_seconds = delay_seconds
        self.bytes_per_second = bytes_per_second
        self.buffer_bytes = buffer_bytes
        self.is_swallowing = False
        self.is_closed = False
        self._free_at = -math.inf
        self._arriving: deque[tuple[float, bytes]] = deque()
        self._unread = 0
        self._changed = trio.Event()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def close(self) -> None:
        self.is_closed = True
        self._change()

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_swallowing:
            return
        # As a kernel does: wait until the buffer has drained, by the rate or by the reader. Bytes
        # on their way (with one send's worth to spare) do not count.
        on_its_way = self.bytes_per_second * self.delay_seconds + len(data)
        capacity = self.buffer_bytes + (on_its_way if math.isfinite(on_its_way) else 0)
        while self._unread > capacity and not self.is_closed:
            await self._changed.wait()
        drained_at = self._free_at - self.buffer_bytes / self.bytes_per_second
        await trio.sleep_until(max(drained_at, trio.current_time()))
        if self.is_closed:
            raise ConnectionClosedError("the wire is closed")
        now = trio.current_time()
        self._free_at = max(now, self._free_at) + len(data) / self.bytes_per_second
        self._arriving.append((self._free_at + self.delay_seconds, data))
        self._unread += len(data)
        self._change()

    async def receive(self, limit: int) -> bytes:
        while not self._arriving:
            if self.is_closed:
                await trio.lowlevel.checkpoint()
                return b""
            await self._changed.wait()
        arrives_at = self._arriving[0][0]
        if arrives_at > trio.current_time():
            await trio.sleep_until(arrives_at)
        else:
            await trio.lowlevel.checkpoint()
        time, data = self._arriving.popleft()
        if len(data) > limit:
            self._arriving.appendleft((time, data[limit:]))
            data = data[:limit]
        self._unread -= len(data)
        self._change()
        return data


class PipeConnection(IRawConnection):
    """A py-libp2p raw connection over two pipes."""

    def __init__(self, incoming: Pipe, outgoing: Pipe, is_initiator: bool) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        self.is_initiator = is_initiator

    async def read(self, n: int | None = None) -> bytes:
        return await self.incoming.receive(n or MEBIBYTE)

    async def write(self, data: bytes) -> None:
        await self.outgoing.send(data)

    async def close(self) -> None:
        self.incoming.close()
        self.outgoing.close()
        await trio.lowlevel.checkpoint()

    def swallow_everything(self) -> None:
        """From here on the link takes bytes both ways and delivers none."""
        self.incoming.is_swallowing = self.outgoing.is_swallowing = True

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return []

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.RELAYED


def wire_pair(
    delay_seconds: float = 0.0,
    bytes_per_second: float = math.inf,
    buffer_bytes: int = 256 * 1024,
) -> tuple[PipeConnection, PipeConnection]:
    there = Pipe(delay_seconds, bytes_per_second, buffer_bytes)
    back = Pipe(delay_seconds, bytes_per_second, buffer_bytes)
    return PipeConnection(back, there, True), PipeConnection(there, back, False)


async def session_pair(
    near_wire: IRawConnection, far_wire: IRawConnection
) -> tuple[NoiseSession, NoiseSession]:
    """Shake hands over two raw connections; the near end is the initiator."""
    sessions: dict[str, NoiseSession] = {}

    async def secure(name: str) -> None:
        transport = security_options(key_pair(name))[NOISE]
        if name == "near":
            sessions[name] = await transport.secure_outbound(near_wire, peer_id("far"))
        else:
            sessions[name] = await transport.secure_inbound(far_wire)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(secure, "near")
        nursery.start_soon(secure, "far")
    return sessions["near"], sessions["far"]


@asynccontextmanager
async def joined_pair(
    wires: tuple[PipeConnection, PipeConnection] | None = None,
    near: YamuxSettings | None = None,
    far: YamuxSettings | None = None,
) -> AsyncIterator[tuple[YamuxConnection, YamuxConnection]]:
    """Two running connections; both have ended, tasks included, when the block is left."""
    near_session, far_session = await session_pair(*(wires or wire_pair()))
    async with joined_pair_of(near_session, far_session, near, far) as pair:
        yield pair


@asynccontextmanager
async def joined_pair_of(
    near_session: NoiseSession,
    far_session: NoiseSession,
    near: YamuxSettings | None = None,
    far: YamuxSettings | None = None,
) -> AsyncIterator[tuple[YamuxConnection, YamuxConnection]]:
    """The same over sessions that a test has made ready."""
    near_connection = YamuxConnection(near_session, peer_id("far"), near)
    far_connection = YamuxConnection(far_session, peer_id("near"), far)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near_connection.start)
        nursery.start_soon(far_connection.start)
        await near_connection.event_started.wait()
        await far_connection.event_started.wait()
        try:
            yield near_connection, far_connection
        finally:
            nursery.cancel_scope.cancel()
    assert near_connection.event_closed.is_set()
    assert far_connection.event_closed.is_set()


async def stream_pair(
    near: YamuxConnection, far: YamuxConnection
) -> tuple[YamuxStream, YamuxStream]:
    """A stream, opened by the near end and accepted by the far one."""
    opened = await near.open_stream()
    with trio.fail_after(PATIENCE_SECONDS):
        return opened, await far.accept_stream()


class HostilePeer:
    """The other end of a connection, in the hands of a test: it speaks raw frames."""

    def __init__(self, session: NoiseSession, wire: PipeConnection) -> None:
        self.session = session
        self.wire = wire
        self._parser = YamuxFrameParser(2**32 - 1)
        self._events: deque[FrameHeader | memoryview] = deque()

    async def send(self, *frames: bytes) -> None:
        await self.session.send_frames(list(frames))

    async def send_frame(
        self, type: int, flags: int, stream_id: int, length: int, payload: bytes = b""
    ) -> None:
        await self.send(encode_header(type, flags, stream_id, length) + payload)

    async def next_header(self) -> FrameHeader:
        """The next frame's header; payload on the way there is skipped."""
        with trio.fail_after(60):
            while True:
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, FrameHeader):
                        return event
                for plaintext in await self.session.receive():
                    self._events.extend(self._parser.feed(plaintext))

    async def next_of(self, *types: int) -> FrameHeader:
        """The next frame of one of these types."""
        while True:
            header = await self.next_header()
            if header.type in types:
                return header


@asynccontextmanager
async def hostile_pair(
    settings: YamuxSettings | None = None,
    wires: tuple[PipeConnection, PipeConnection] | None = None,
    of_node: NodeBudget | None = None,
) -> AsyncIterator[tuple[YamuxConnection, HostilePeer]]:
    """A running connection, and a peer of no manners, who initiated it (its streams are odd)."""
    peer_wire, our_wire = wires or wire_pair()
    peer_session, our_session = await session_pair(peer_wire, our_wire)
    connection = YamuxConnection(our_session, peer_id("near"), settings, of_node=of_node)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.start)
        await connection.event_started.wait()
        try:
            yield connection, HostilePeer(peer_session, peer_wire)
        finally:
            nursery.cancel_scope.cancel()
    assert connection.event_closed.is_set()


async def read_to_end(stream: YamuxStream) -> bytes:
    data = bytearray()
    while piece := await stream.receive_some():
        data += piece
    return bytes(data)


async def read_exactly(stream: YamuxStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await stream.receive_some(size - len(data))
        if not piece:
            raise EOFError(f"the stream ended {size - len(data)} bytes early")
        data += piece
    return bytes(data)
