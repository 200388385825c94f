"""The layer below the encryption: where ciphertext comes from and goes to.

A TCP connection is read and written directly on its socket. A connection through a relay has no
socket of its own. It uses the library's RawConnection, and behaves the same but is slower.

For both, receiving returns 0 if the other side has ended; any other end of a connection raises
ConnectionClosedError. Wires do not count traffic. Only the library's handshake is counted here,
because it goes through the library's stream. The session counts everything after it (noise.py).

The number of a file descriptor may belong to another file as soon as the socket is closed. So it is
read before each use, and never kept over a wait.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import sys
from typing import NamedTuple, Protocol

import trio
from libp2p.abc import IRawConnection
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection

from node.net.transport.traffic import ETHERNET_SEGMENT_BYTES, Carried, Traffic

try:
    import fcntl
    import termios

    _UNREAD: int | None = termios.FIONREAD
    _ON_THEIR_WAY: int | None = termios.TIOCOUTQ if sys.platform.startswith("linux") else None
except ImportError:  # on Windows
    _UNREAD = _ON_THEIR_WAY = None

_SO_NWRITE = 0x1024 if sys.platform == "darwin" else None  # sys/socket.h: bytes not acknowledged
_UNSENT_LIMIT = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS; 0: the default
_PACING_RATE = 47 if sys.platform.startswith("linux") else None  # asm-generic/socket.h
_FASTEST_PACING = 2**31 - 1  # bytes per second: no limit, but not the value for "not paced"
_WINDOW_LIMIT = getattr(socket, "TCP_WINDOW_CLAMP", None)  # Linux
_TCP_INFO = getattr(socket, "TCP_INFO", None) if sys.platform.startswith("linux") else None
# In linux/tcp.h's tcp_info: tcpi_unacked, tcpi_last_ack_recv (in milliseconds), tcpi_rtt (in
# microseconds) and tcpi_bytes_retrans (since Linux 4.19; before, there is nothing at this place).
_UNACKNOWLEDGED_AT, _ACKNOWLEDGED_AT, _ROUND_TRIP_AT, _RESENT_AT = 24, 56, 68, 208
_HAS_VECTORS = hasattr(os, "readv")  # not on Windows, where a socket is no file descriptor


class Delivery(NamedTuple):
    """What is known below of the bytes that were sent."""

    resent_bytes: int = 0
    """How many were sent again because they were lost."""
    unacknowledged_seconds: float | None = None
    """If some wait for an acknowledgement: how long ago the last one of this connection came. None
    if none wait, or if that is not known."""
    round_trip_seconds: float = 0.0
    """As the kernel sees it now, with all queues on the way; 0 if that is not known."""


class Wire(Protocol):
    """A source and sink of ciphertext. Raises ConnectionClosedError when the connection is over."""

    async def receive_into(self, buffer: memoryview, least: int) -> int:
        """Wait for bytes and return their number; fewer than `least` are of no use yet."""

    async def send(self, data: memoryview) -> float:
        """Returns for how many seconds there was no room below. On a busy machine a send takes
        longer than that, which says nothing about the link."""

    def delivered_while_sending(self) -> int | None:
        """How many bytes the other side has taken so far, as far as known, if a send waits for it;
        None if none does."""

    def unread_bytes(self) -> int:
        """How many bytes have arrived and were not read, as far as known."""

    def carried(self) -> Carried:
        """What of the sent bytes has arrived, and what has not."""

    def limit_unsent(self, limit_bytes: int | None) -> None:
        """Limit the bytes that wait below to be sent; None: the system's default."""

    def pace(self) -> None:
        """Send without bursts from now on. May be called again."""

    def limit_unread(self, limit_bytes: int) -> None:
        """Limit the unread bytes that have arrived below."""

    def segment_bytes(self) -> int:
        """The payload of one segment."""

    def delivery(self) -> Delivery:
        """What became of the bytes that were sent."""


class SocketWire:
    """A TCP connection, directly on the socket.

    trio's own methods try first and yield after each success. Here the reader waits first, since it
    has just read everything, and a sender yields once. That saves three turns of the event loop and
    a useless system call for each batch.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._socket = stream.socket
        self._least = 1
        self._is_paced = False
        self._is_sending = False
        self._sent_bytes = 0

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

    async def send(self, data: memoryview) -> float:
        self._is_sending = True
        try:
            if not _HAS_VECTORS:
                began = trio.current_time()
                await self._stream.send_all(data)
                self._sent_bytes += len(data)
                return trio.current_time() - began
            await trio.lowlevel.checkpoint()
            sent, full_since = 0, math.inf
            while True:
                with contextlib.suppress(BlockingIOError):
                    written = os.writev(self._descriptor(), [data[sent:]])
                    sent += written
                    self._sent_bytes += written
                if sent == len(data):
                    return max(0.0, trio.current_time() - full_since)
                full_since = min(full_since, trio.current_time())
                await trio.lowlevel.wait_writable(self._descriptor())
        except (OSError, trio.ClosedResourceError, trio.BrokenResourceError) as error:
            raise ConnectionClosedError(f"sending failed: {error}", transport="tcp") from error
        finally:
            self._is_sending = False

    def delivered_while_sending(self) -> int | None:
        return self.carried().arrived_bytes if self._is_sending else None

    def _wake_at(self, least: int) -> None:
        """On a slow link a packet comes in dozens of segments: sleep until most have arrived."""
        self._least = least
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def unread_bytes(self) -> int:
        try:
            return 0 if _UNREAD is None else self._ask(_UNREAD)
        except (OSError, ValueError):  # it was closed
            return 0

    def carried(self) -> Carried:
        """`tcp_info` would not do: Linux counts a segment as sent that its own queue has refused,
        and once more when it tries again."""
        try:
            if _ON_THEIR_WAY is not None:
                waiting = self._ask(_ON_THEIR_WAY)
            elif _SO_NWRITE is not None:
                waiting = self._socket.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
            else:
                return Carried(self._sent_bytes, None)
        except (OSError, ValueError):  # it was closed
            return Carried(0, 0)
        return Carried(self._sent_bytes - waiting, waiting)

    def _ask(self, what: int) -> int:
        """A count of bytes that the kernel keeps."""
        count = bytearray(struct.calcsize("i"))
        fcntl.ioctl(self._socket.fileno(), what, count)
        size: int = struct.unpack("i", count)[0]
        return size

    def limit_unsent(self, limit_bytes: int | None) -> None:
        if _UNSENT_LIMIT is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, _UNSENT_LIMIT, limit_bytes or 0)

    def pace(self) -> None:
        """Have TCP spread its segments over the round trip.

        Else a piece of bulk leaves as one burst after each pause, and a home's router drops what
        its queue does not hold. (Linux then paces at up to twice the rate of the connection.)
        """
        if _PACING_RATE is not None and not self._is_paced:
            self._is_paced = True
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, _PACING_RATE, _FASTEST_PACING)

    def limit_unread(self, limit_bytes: int) -> None:
        """Limit both the buffer and the window.

        A fixed buffer size stops its automatic growth. The window is what the other side is
        promised; the buffer size alone can lower it but not raise it.
        """
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

    def delivery(self) -> Delivery:
        if _TCP_INFO is None:
            return Delivery()
        try:
            facts = self._socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RESENT_AT + 8)
        except OSError:
            return Delivery()

        def number(at: int, size: int) -> int:
            return int.from_bytes(facts[at : at + size], sys.byteorder)

        waits = number(_UNACKNOWLEDGED_AT, 4) > 0
        seconds = number(_ACKNOWLEDGED_AT, 4) / 1000 if waits else None
        return Delivery(number(_RESENT_AT, 8), seconds, number(_ROUND_TRIP_AT, 4) / 1e6)

    def _descriptor(self) -> int:
        """Read before each use: after a close the number may belong to another file."""
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
    """Any other connection of py-libp2p, for instance one through a relay."""

    def __init__(self, connection: IRawConnection) -> None:
        self._connection = connection
        self._is_sending = False
        self._sent_bytes = 0

    async def receive_into(self, buffer: memoryview, least: int) -> int:
        del least  # there is no wake-up for each segment here
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

    async def send(self, data: memoryview) -> float:
        began = trio.current_time()
        self._is_sending = True
        try:
            await self._connection.write(bytes(data))
            self._sent_bytes += len(data)
            return trio.current_time() - began
        except (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as e:
            raise ConnectionClosedError(f"sending failed: {e}") from e
        finally:
            self._is_sending = False

    def delivered_while_sending(self) -> int | None:
        return self._sent_bytes if self._is_sending else None

    def unread_bytes(self) -> int:
        return 0

    def carried(self) -> Carried:
        return Carried(0, 0)  # counted in the connection to the relay

    def limit_unsent(self, limit_bytes: int | None) -> None:
        """Does nothing: only the relay's connection knows what waits."""

    def pace(self) -> None:
        """Does nothing: the relay's connection has its own pace."""

    def limit_unread(self, limit_bytes: int) -> None:
        """Does nothing: the connection below has the limit."""

    def segment_bytes(self) -> int:
        return ETHERNET_SEGMENT_BYTES

    def delivery(self) -> Delivery:
        return Delivery()


def socket_of(connection: IRawConnection) -> trio.SocketStream | None:
    """The trio socket under a plain TCP connection; None for any other."""
    if type(connection) is not RawConnection:
        return None
    if not isinstance(connection.stream, TrioTCPStream):
        return None
    stream = connection.stream.stream
    return stream if isinstance(stream, trio.SocketStream) else None


class CountedTcpStream(TrioTCPStream):  # type: ignore[misc]  # the library is untyped here
    """The library's TCP stream; it counts its bytes in a node's traffic.

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
    """The traffic that counts a connection's own socket; None without one."""
    stream = getattr(connection, "stream", None)
    return stream.traffic if isinstance(stream, CountedTcpStream) else None
