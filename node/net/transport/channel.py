"""One stream of a muxed connection: a two-way byte channel with back-pressure.

The interface is trio's (`receive_some`, `receive_into`, `send_all`, `send_eof`, `aclose`,
`reset_now`), with the semantics of protocols.network.Stream and trio's errors. stream.py adds
py-libp2p's interface.

`ReceiveQueue` holds bytes that arrived and were not yet read. Large pieces are kept as views of the
decrypted packet, so that the reader copies a bulk transfer only once, into its destination. Small
pieces are copied and joined.

Cancellation: a cancelled receive takes nothing. A cancelled send has queued a part of its bytes;
the stream and the connection stay sound.

`aclose` and `reset_now` forget the stream at once, while its last bytes still wait in the send
queue. These have already been taken from the send window, so they leave without anything further
from the peer. Bytes that the peer still sends are answered with a reset.

A view of one byte keeps a packet of 64 KiB alive, and a million one-byte pieces cost fifty times
their bytes. A malicious peer could send exactly these. So the queue costs at most about three times
the bytes it holds (tests/transport measure it).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from node.net.transport.frames import DATA, encode_header
from node.net.transport.outgoing import StreamQueue
from node.net.transport.window import ReceiveWindow, SendWindow
from protocols.errors import MalformedMessage
from protocols.network import FEW_BYTES

if TYPE_CHECKING:
    from node.net.transport.connection import YamuxConnection


# A view may keep at most this many times its own size alive.
LARGEST_PACKET_PER_VIEW = 2

# A smaller piece is appended to the one before it, instead of queued by itself.
SMALL_PIECE_BYTES = 2048
JOINED_PIECE_BYTES = 16 * 1024

Piece = bytes | bytearray | memoryview


class ReceiveQueue:
    """First in, first out. `size_bytes` is the number of unread bytes."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return self.size_bytes > 0

    def append(self, piece: memoryview) -> None:
        """Add a non-empty view of a bytes object that will not change."""
        size = len(piece)
        self.size_bytes += size
        if size < SMALL_PIECE_BYTES and self._pieces:
            last = self._pieces[-1]
            if len(last) < JOINED_PIECE_BYTES and not isinstance(last, memoryview):
                if isinstance(last, bytes):
                    last = self._pieces[-1] = bytearray(last)
                last += piece
                return
        if (
            size < SMALL_PIECE_BYTES
            or size * LARGEST_PACKET_PER_VIEW < memoryview(piece.obj).nbytes
        ):
            self._pieces.append(bytes(piece))
        else:
            self._pieces.append(piece)

    def take(self, limit: int | None = None) -> Piece:
        """The first piece, or its first `limit` bytes; b"" if there is none."""
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if limit is not None and len(piece) > limit:
            view = memoryview(piece)
            self._pieces.appendleft(view[limit:])
            piece = view[:limit]
        self.size_bytes -= len(piece)
        return piece

    def take_joined(self, limit: int | None = None) -> bytes:
        """All bytes, up to `limit`, as one bytes object."""
        if len(self._pieces) == 1:
            return bytes(self.take(limit))
        wanted = self.size_bytes if limit is None else min(limit, self.size_bytes)
        joined = bytearray(wanted)
        self.take_into(memoryview(joined))
        return bytes(joined)

    def take_into(self, destination: memoryview) -> int:
        """Move as many bytes as possible into `destination`; return their number."""
        filled, space = 0, len(destination)
        while self._pieces and filled < space:
            piece = self._pieces.popleft()
            size = len(piece)
            if size > space - filled:
                size = space - filled
                view = memoryview(piece)
                self._pieces.appendleft(view[size:])
                piece = view[:size]
            destination[filled : filled + size] = piece
            filled += size
        self.size_bytes -= filled
        return filled

    def clear(self) -> int:
        """Drop everything; return the number of bytes."""
        dropped = self.size_bytes
        self._pieces.clear()
        self.size_bytes = 0
        return dropped


# A reader that takes its bytes within this time of their arrival is not the bottleneck. A process
# that is busy with a batch of packets, or has lost the processor to another, needs some of it.
PROMPT_SECONDS = 0.02


class ChannelEnding(enum.Enum):
    """Why a stream can do nothing more, if it has ended."""

    RESET_BY_US = "this side reset the stream"
    DROPPED = "this side dropped the stream, because too much was unread"
    RESET_BY_PEER = "the other side reset the stream"
    CONNECTION_LOST = "the connection is gone"


class YamuxChannel:
    """One stream of a connection.

    Each direction is open until it is finished: sending by `send_eof`, receiving by the peer's FIN
    (`_peer_finished`) or by our own choice (`_receive_stopped`). A `ChannelEnding` ends both.
    """

    def __init__(self, stream_id: int, connection: YamuxConnection, is_initiator: bool) -> None:
        self.stream_id = stream_id
        self.muxed_conn = connection
        self.is_initiator = is_initiator
        self._connection = connection
        self.queue = StreamQueue(stream_id, self._wake_sender)
        self._send_window = SendWindow()
        self._receive_window = ReceiveWindow(
            connection.settings.stream_window_limit_bytes, connection.window_budget
        )
        self._unread = ReceiveQueue()
        self._ending: ChannelEnding | None = None
        self._send_finished = False
        self._peer_finished = False
        self._receive_stopped = False
        self._is_negotiating = False
        self._receiver_waits: trio.Event | None = None
        self._sender_waits: trio.Event | None = None
        self._is_receiving = False
        self._awaited_at = -PROMPT_SECONDS  # when bytes came for a waiting receiver
        self.last_arrival = -math.inf
        self._is_sending = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.stream_id} with {self._connection.peer_id}>"

    # ---- receiving

    @property
    def unread_bytes(self) -> int:
        return self._unread.size_bytes

    async def receive_some(self, max_bytes: int | None = None) -> Piece:
        """Wait for bytes and return some, as bytes or a view of bytes; b"" at the end."""
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("receiving nothing could not be told from the end")
        await self._wait_to_receive()
        piece = self._unread.take(max_bytes)
        self._account_for(len(piece))
        return piece

    async def receive_joined(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes and return all that are here, up to `max_bytes`; b"" at the end."""
        await self._wait_to_receive()
        data = self._unread.take_joined(max_bytes)
        self._account_for(len(data))
        return data

    async def receive_into(self, buffer: bytearray | memoryview) -> int:
        """Wait for bytes and write as many as are here into `buffer`; 0 only at the end."""
        view = memoryview(buffer).cast("B")
        if not view:
            raise ValueError("receiving into an empty buffer could not be told from the end")
        await self._wait_to_receive()
        size = self._unread.take_into(view)
        self._account_for(size)
        return size

    def receive_now(self, buffer: bytearray | memoryview) -> int:
        """Write what is here into `buffer`; 0 if there is nothing, or at the end. Never waits."""
        if self._is_receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        if not self._unread:
            return 0
        size = self._unread.take_into(memoryview(buffer).cast("B"))
        self._account_for(size)
        return size

    # ---- sending

    async def send_all(
        self, data: bytes | bytearray | memoryview, more: memoryview | None = None
    ) -> None:
        """Queue `data` and then `more`; wait while the queue or the window is full."""
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._is_sending = True
        try:
            await self._send(data, more)
        finally:
            self._is_sending = False

    async def send_eof(self) -> None:
        """End sending. Receiving goes on."""
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._check_not_ended(self._receive_stopped and self._send_finished)
        self._finish_sending()
        await trio.lowlevel.checkpoint()

    async def wait_until_sent(self) -> None:
        """Return when nothing is left in the queue, or the stream has ended.

        For bytes that must leave although a reset, which drops the queue, may follow at once.
        """
        await trio.lowlevel.checkpoint()
        while self.queue.queued_bytes and self._ending is None:
            if self._is_sending:
                raise trio.BusyResourceError("another task is sending on this stream")
            self._is_sending = True
            try:
                self._sender_waits = trio.Event()
                await self._sender_waits.wait()
            finally:
                self._is_sending = False

    @contextmanager
    def negotiating(self) -> Iterator[None]:
        """In this block, bytes that have arrived survive a reset that follows them.

        An answering side may agree to a protocol and then reset the stream at once. Both may be
        here before we read, and the agreement must not be lost with the rest.
        """
        self._is_negotiating = True
        try:
            yield
        finally:
            self._is_negotiating = False
            if self._ending is ChannelEnding.RESET_BY_PEER and not self._peer_finished:
                self._connection.count_unread(-self._unread.clear())

    async def aclose(self) -> None:
        """End sending as `send_eof` does, stop receiving, and forget the stream. Never waits."""
        self._close_now()
        await trio.lowlevel.checkpoint()

    def reset_now(self) -> None:
        """Drop the stream in both directions, and its queue. Never blocks; may be called twice."""
        if self._ending is None and not (self._is_done and not self.queue.frames):
            self._connection.outgoing.abandon(self.queue)
            self._end(ChannelEnding.RESET_BY_US)
        self._stop_receiving()

    # ---- calls from the connection; none of these ever waits

    def drop_now(self) -> None:
        """Reset the stream because of what waits unread. To its user it is broken, not closed."""
        self._connection.count_unread(-self._unread.clear())
        if self._ending is None and not (self._is_done and not self.queue.frames):
            self._connection.outgoing.abandon(self.queue)
        self._peer_finished = False  # else it would seem to end where the bytes are cut off
        self._end(ChannelEnding.DROPPED)

    def on_refused(self) -> None:
        """A stream made for a peer's SYN was not accepted: give its window back."""
        self._receive_window.close()

    def on_payload_declared(self, size: int) -> None:
        if self._peer_finished and size:
            raise MalformedMessage("A peer sent data on a stream after it had finished it.")
        self._receive_window.received(size)

    def on_payload(self, piece: memoryview) -> None:
        if self._receive_stopped:
            return
        self._unread.append(piece)
        self._connection.count_unread(len(piece))
        now = trio.current_time()
        if len(piece) > FEW_BYTES:
            self.last_arrival = now
        if self._receiver_waits is not None:
            self._awaited_at = now
            self._wake_receiver()

    def on_credit(self, size: int) -> None:
        self._send_window.grant(size)
        self._wake_sender()

    def on_peer_finished(self) -> None:
        self._peer_finished = True
        self._wake_receiver()
        self._forget_if_done()

    def on_peer_reset(self) -> None:
        self._connection.outgoing.drop(self.queue)
        self._end(ChannelEnding.RESET_BY_PEER)

    def on_connection_closing(self) -> None:
        """Queued bytes still leave if they can; no more are accepted."""
        self._end(ChannelEnding.CONNECTION_LOST)

    def on_connection_lost(self) -> None:
        self._connection.outgoing.drop(self.queue)
        self._end(ChannelEnding.CONNECTION_LOST)

    # ---- inside: receiving

    async def _wait_to_receive(self) -> None:
        """Return at bytes or the end. The caller must take them without an await in between."""
        if self._is_receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._is_receiving = True
        try:
            if self._can_receive_now():
                await trio.lowlevel.checkpoint()
            while not self._can_receive_now():
                self._receiver_waits = trio.Event()
                await self._receiver_waits.wait()
        finally:
            self._is_receiving = False

    def _can_receive_now(self) -> bool:
        if self._receive_stopped:
            raise trio.ClosedResourceError("this side stopped receiving on the stream")
        if self._unread or self._peer_finished:
            return True
        if self._ending is not None:
            self._raise_ending(self._ending)
        return False

    def _account_for(self, size: int) -> None:
        """The application took `size` bytes: return credit when it is due."""
        connection = self._connection
        connection.count_unread(-size)
        connection.read_bytes += size
        if not size or self._peer_finished or self._ending is not None:
            return
        now = trio.current_time()
        credit = self._receive_window.consumed(
            size,
            now,
            connection.round_trip_seconds,
            starving=not self._unread and now - self._awaited_at < PROMPT_SECONDS,
        )
        if credit:
            connection.outgoing.add_control(self.queue, credit=credit)

    def _stop_receiving(self) -> None:
        if self._receive_stopped:
            return
        self._receive_stopped = True
        self._connection.count_unread(-self._unread.clear())
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._receiver_waits is not None:
            self._receiver_waits.set()
            self._receiver_waits = None

    # ---- inside: sending

    async def _send(self, data: bytes | bytearray | memoryview, more: memoryview | None) -> None:
        view, rest = _bytes_of(data), _bytes_of(more or b"")
        position, border, end = 0, len(view), len(view) + len(rest)
        outgoing, window, queue = self._connection.outgoing, self._send_window, self.queue
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_can_send()
        waited = False
        while position < end:
            size = min(
                end - position,
                outgoing.frame_bytes,
                window.available_bytes,
                outgoing.allowance(queue),
            )
            if size <= 0:
                self._sender_waits = trio.Event()
                await self._sender_waits.wait()
                waited = True
                self._check_can_send()
                continue
            window.take(size)
            header = encode_header(DATA, 0, self.stream_id, size)
            then = position + size
            parts: tuple[bytes | memoryview, ...]
            if position >= border:
                parts = (header, rest[position - border : then - border])
            elif then <= border:
                parts = (header, view[position:then])
            else:
                parts = (header, view[position:], rest[: then - border])
            outgoing.add_data(queue, b"".join(parts))
            position = then
        if not waited:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def _check_can_send(self) -> None:
        self._check_not_ended(self._send_finished)

    def _check_not_ended(self, is_closed: bool) -> None:
        if is_closed:
            raise trio.ClosedResourceError("this side closed the stream for sending")
        if self._ending is not None:
            self._raise_ending(self._ending)

    def _finish_sending(self) -> None:
        if self._send_finished:
            return
        self._send_finished = True
        self._connection.outgoing.add_end(self.queue)
        self._wake_sender()
        self._forget_if_done()

    def _wake_sender(self) -> None:
        if self._sender_waits is not None:
            self._sender_waits.set()
            self._sender_waits = None

    # ---- inside: ending

    @property
    def _is_done(self) -> bool:
        return self._send_finished and (self._peer_finished or self._receive_stopped)

    def _close_now(self) -> None:
        if self._ending is None and not self._is_done:
            self._finish_sending()
            if not self._peer_finished:
                # A peer that waits for window would wait for ever: cause it to get the reset.
                dropped = self._unread.size_bytes
                credit = self._receive_window.return_all() + dropped
                if credit:
                    self._connection.outgoing.add_control(self.queue, credit=credit)
        self._send_finished = True
        self._stop_receiving()
        self._forget_if_done()

    def _forget_if_done(self) -> None:
        if self._is_done:
            self._receive_window.close()
            self._connection.forget(self)

    def _end(self, ending: ChannelEnding) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        if ending is ChannelEnding.RESET_BY_US:
            self._stop_receiving()
        elif ending is ChannelEnding.RESET_BY_PEER and not (
            self._peer_finished or self._is_negotiating
        ):
            # If the peer had finished, everything had arrived, and may still be read.
            self._connection.count_unread(-self._unread.clear())
        self._receive_window.close()
        self._connection.forget(self)
        self._wake_receiver()
        self._wake_sender()

    def _raise_ending(self, ending: ChannelEnding) -> None:
        if ending is ChannelEnding.RESET_BY_US:
            raise trio.ClosedResourceError(ending.value)
        raise trio.BrokenResourceError(f"{ending.value}{self._connection.why_ended(ending)}")


def _bytes_of(data: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
