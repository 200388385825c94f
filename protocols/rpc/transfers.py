"""Bulk transfers: chunks of raw bytes in both directions at once, on a stream of their own.

    opener                                   serving side
    OPEN    method, opening       ->
                                  <-         ACCEPT  accepted          (or ERROR)
    CHUNK   bytes                 ->  <-     CHUNK   bytes             (any number, both ways)
    CLOSE   counts, hash, closing ->  <-     CLOSE   counts, hash, closed

A chunk goes from the sender's buffer into the stream and from the stream into the receiver's
buffer, without a copy in between. Back-pressure is the stream's: a side that does not receive stops
the sender. One task may send while another receives.

Only a lack of *progress* times out; the total time is not limited. A side that waits for a byte, or
for room to send one, gives up after the method's `stall_seconds`. A trickle does not count as
progress: `PROGRESS_BYTES` must arrive in each such period. Sent bytes may be on their way for
longer than that (a megabyte in the buffers of a slow uplink), and the sender cannot see them move.
So a side that receives and has nothing to send sends ALIVE, an empty frame, now and then. The other
side then knows that its bytes arrive. It cannot keep a transfer open for ever with that: after an
hour without a chunk in either direction, ALIVE no longer counts.

A frame that is cut by cancellation breaks the framing of the stream. So cancelling a send, or a
receive inside a frame, resets the stream; cancelling the wait for a frame does not. The serving
side learns of a reset only when it sends or receives: a handler that waits for something else
should receive meanwhile.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import trio
from blake3 import blake3

from protocols.errors import (
    DeadlineExceeded,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    ProtocolMisuse,
    RemoteMisbehaviour,
    Unreachable,
    again,
)
from protocols.guard import Caller, Exchange, Part
from protocols.identity import PeerId
from protocols.network import Stream
from protocols.rpc.frames import (
    ACCEPT,
    ALIVE,
    ALIVE_FRAME,
    CHUNK,
    CLOSE,
    ERROR,
    FRAME_HEADER_BYTES,
    PROGRESS_BYTES,
    READ_BYTES,
    UnfinishedMessages,
    chunk_header,
    message_frame,
    message_limit,
    read_frame_header,
    split_payload,
    stalled,
)
from protocols.rpc.messages import (
    ERROR_BODY_LIMIT_BYTES,
    AcceptHead,
    CloseHead,
    ErrorHead,
    encode,
    message_type,
)
from protocols.rpc.method import Accepted, BulkMethod, Closed, Closing, Opening, encode_within
from protocols.rpc.peers import Endable
from protocols.rpc.remote_errors import received_error
from protocols.rpc.state import RpcState

Sent = TypeVar("Sent")
Received = TypeVar("Received")

BulkHandler = Callable[[Caller, "Transfer[Accepted, Closed, Closing]", Opening], Awaitable[None]]
"""Answers a transfer: `await transfer.accept(...)`, chunks, `await transfer.finish(...)`.

Raising an error before or after `accept` ends the transfer with that error on the other side.
"""

ALIVE_PART = 4  # send ALIVE after a silence of `stall_seconds` divided by this
MOST_ALIVE_SECONDS = 3600.0  # on the slowest line a chunk comes sooner; a round has less time
LAST_WORD_SECONDS = 1.0  # how long a broken transfer waits for the error that explains it


class Transfer(Generic[Accepted, Sent, Received]):
    """One side of a bulk transfer. `Sent` and `Received` are the closing messages."""

    def __init__(
        self,
        stream: Stream,
        bulk: BulkMethod[Any, Accepted, Any, Any],
        exchange: Exchange,
        state: RpcState,
        ending: Endable,
        opener: bool,
    ) -> None:
        self._stream = stream
        self._bulk = bulk
        self._exchange = exchange
        self._state = state
        self._opener = opener
        self._accepted: Accepted | None = None
        self._on_accept: Callable[[], None] | None = None
        self._hashed = bulk.hashed or state.guard.hashes_chunks
        self._sent = ChunkCount(self._hashed)
        self._sent_closing = False
        self._cut = False  # we have begun a frame and not finished it
        self._sending = trio.Lock()
        self._send_patience = trio.CancelScope()  # of the frame that is being sent
        self._last_sent = trio.current_time()
        self._slice_bytes = SLOW_SLICE_BYTES
        self._receiver = ChunkReceiver[Received](
            stream, bulk, exchange, state, ending, opener, self._heard, self.say_alive
        )

    @property
    def peer(self) -> PeerId:
        return self._exchange.peer

    @property
    def accepted(self) -> Accepted:
        """The serving side's message of acceptance."""
        if self._accepted is None:
            raise ProtocolMisuse("This transfer has not been accepted yet.")
        return self._accepted

    @property
    def finished(self) -> bool:
        """Whether both sides have sent their closing message."""
        return self._sent_closing and self._receiver.closing is not None

    @property
    def bytes_sent(self) -> int:
        return self._sent.chunk_bytes

    @property
    def bytes_received(self) -> int:
        return self._receiver.count.chunk_bytes

    @property
    def bytes_arrived(self) -> int:
        """Bytes received, with those of the unfinished chunk, to within a few thousand bytes."""
        return self.bytes_received + self._receiver.under_way

    @property
    def last_arrival(self) -> float:
        """When bytes of a chunk last arrived, received or not; -inf before the first."""
        return self._stream.last_arrival

    @property
    def received_digest(self) -> bytes:
        """The hash of the chunks received so far, as the closing message will have it."""
        return self._receiver.count.digest

    @property
    def may_send_error(self) -> bool:
        """Whether ERROR can still be sent: not after a cut frame or our closing message."""
        return not self._cut and not self._sent_closing

    def note_accepted(self, accepted: Accepted) -> None:
        """Opening side: the other side's ACCEPT has arrived."""
        self._accepted = accepted

    def when_accepted(self, callback: Callable[[], None]) -> None:
        """Serving side: `callback` is called once, when the handler accepts."""
        self._on_accept = callback

    async def accept(self, accepted: Accepted) -> None:
        """Serving side: accept the transfer. Nothing else may be sent before."""
        if self._opener or self._accepted is not None:
            raise ProtocolMisuse("A transfer is accepted once, by the side that serves it.")
        body = encode_within("accepting message", accepted, self._bulk.message_limit_bytes)
        envelope = self._state.guard.seal(self._exchange, Part.ACCEPTED, body)
        self._accepted = accepted
        if self._on_accept is not None:
            self._on_accept()
        await self._send(message_frame(ACCEPT, encode(AcceptHead(envelope)), body), None)

    # Sending

    def share_count(self, count: ChunkCount) -> None:
        """Use `count` to count and hash chunks that are sent on several transfers.

        Call this before the first chunk. The code that makes the chunks adds them to `count`.
        Before the closing message all chunks in `count` must have been sent on this transfer.
        """
        if self._sent.chunks:
            raise ProtocolMisuse("A shared count must be set before the first chunk is sent.")
        self._sent = ChunkCount(self._hashed, shared=count if self._hashed else None)

    async def send_chunk(self, chunk: bytes | bytearray | memoryview) -> None:
        """Send the bytes of a contiguous buffer. When this returns, the buffer may be reused."""
        view = memoryview(chunk).cast("B")
        if not 0 < len(view) <= self._bulk.chunk_limit_bytes:
            raise ProtocolMisuse(
                f"A chunk of {len(view):,} bytes cannot be sent: {self._bulk.name} allows "
                f"1 to {self._bulk.chunk_limit_bytes:,}."
            )
        self._check_may_send()
        header = chunk_header(len(view))
        self._sent.add(header, view)
        self._state.counts.chunk_bytes_sent += len(view)
        await self._send(header, view)
        self._receiver.only_alive_since = None

    async def send_closing(self, closing: Sent) -> None:
        """Send the closing message: no more chunks from this side. The other direction goes on."""
        self._check_may_send()
        body = encode_within("closing message", closing, self._bulk.message_limit_bytes)
        part = Part.CLOSING if self._opener else Part.CLOSED
        content = closing_transcript(self._sent.head(), body)
        head = self._sent.head(self._state.guard.seal(self._exchange, part, content))
        await self._send(message_frame(CLOSE, encode(head), body), None)
        self._sent_closing = True
        try:
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._read_final_error()
            raise lost(self._bulk, self._exchange) from None

    async def say_alive(self, after_seconds: float | None = None) -> None:
        """Tell the other side that we are still here, if it has not heard from us for a while.

        Receiving does this by itself. A handler that waits for something else while the other side
        waits for it must call this every few seconds. It also finds out whether the other side is
        still there; for that, `after_seconds` makes the while shorter.
        """
        due = self._last_sent + (after_seconds or self._bulk.stall_seconds / ALIVE_PART)
        may_send = self._accepted is not None and not self._sent_closing
        if may_send and trio.current_time() >= due and not self._sending.locked():
            await self._send(ALIVE_FRAME, None)

    def _check_may_send(self) -> None:
        if self._sent_closing or self._accepted is None:
            raise ProtocolMisuse(
                "Chunks can only be sent between the acceptance and the closing message."
            )

    async def _send(self, start: bytes, rest: memoryview | None) -> None:
        try:
            self._sending.acquire_nowait()  # `acquire` below is followed by a turn of the loop
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            await self._send_frame(start, rest)
        finally:
            self._sending.release()
        self._last_sent = trio.current_time()

    async def _send_frame(self, start: bytes, rest: memoryview | None) -> None:
        self._cut = True
        self._send_patience = trio.CancelScope()
        try:
            self._slice_bytes = await send_exactly(
                self._stream,
                start,
                rest,
                self._bulk.stall_seconds,
                self._slice_bytes,
                self._send_patience,
            )
            self._cut = False
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._read_final_error()
            raise lost(self._bulk, self._exchange) from None
        finally:
            if self._cut:
                self._stream.reset()

    async def _read_final_error(self) -> None:
        """Check whether the other side sent an ERROR: one that gives up does, and stops reading."""
        if self._receiver.busy or self._receiver.announced is not None:
            return
        with trio.move_on_after(LAST_WORD_SECONDS):
            with contextlib.suppress(Unreachable):
                await self._receiver.next_header()

    # Receiving

    async def next_chunk_bytes(self) -> int | None:
        """The size of the next chunk, without receiving it; None after the last one."""
        header = await self._receiver.next_header()
        return None if header is None else int.from_bytes(header[:4], "big")

    async def receive_chunk_into(self, buffer: bytearray | memoryview) -> int | None:
        """Receive the next chunk into the start of `buffer`; its size, or None after the last.

        LimitExceeded if the chunk is larger than the buffer; try again with a larger one.
        """
        return await self._receiver.receive_into(buffer)

    async def receive_closing(self) -> Received:
        """The other side's closing message. Its chunks must have been received before."""
        if await self._receiver.next_header() is not None:
            raise ProtocolMisuse("All chunks must be received before the closing message.")
        assert self._receiver.closing is not None
        return self._receiver.closing

    async def finish(self, closing: Sent) -> Received:
        """Send our closing message, unless already sent, and wait for the other side's."""
        if not self._sent_closing:
            await self.send_closing(closing)
        return await self.receive_closing()

    def extend_timeouts(self) -> None:
        """Extend the timeouts because the other side is slow but alive.

        Call this when something else that came from it shows that it lives: its bytes wait behind
        others.
        """
        self._heard()
        self._receiver.extend_deadline(trio.current_time() + self._bulk.stall_seconds)

    def _heard(self) -> None:
        """Extend the timeout of what we are sending: the other side is active."""
        deadline = trio.current_time() + self._bulk.stall_seconds
        if self._sending.locked() and self._send_patience.deadline < deadline:
            self._send_patience.deadline = deadline


# The count of one side's chunks and bytes, and their running hash.
#
# Both sides count the same direction, and the closing message has to agree. So a chunk that a
# broken sender lost, doubled or changed is noticed. The guard's signature covers the count and the
# hash (`closing_transcript`), and thereby the chunks.
#
# The hash runs over whole frames, five header bytes and then the chunk, so it also covers the
# boundaries of the chunks. It is BLAKE3, which is four times as fast as SHA-256 with hardware
# support (8.1 against 1.9 GB/s on one core), and twenty times as fast as SHA-256 without.


_TRANSCRIPT = struct.Struct(">QQB")


def closing_transcript(head: CloseHead, body: bytes) -> bytes:
    """The bytes that the guard signs at the end of a direction. They cover all sent chunks."""
    return _TRANSCRIPT.pack(head.chunks, head.chunk_bytes, len(head.digest)) + head.digest + body


class ChunkCount:
    """The chunks of one direction so far.

    With `shared`, a count and hash for several transfers, this one only counts the chunks and takes
    the hash from there.
    """

    def __init__(self, hashed: bool, shared: ChunkCount | None = None) -> None:
        self.chunks = 0
        self.chunk_bytes = 0
        self._hash = blake3() if hashed and shared is None else None
        self._shared = shared

    @property
    def digest(self) -> bytes:
        """The hash of the chunks so far; empty if they are not hashed."""
        if self._shared is None:
            return self._hash.digest() if self._hash is not None else b""
        if (self._shared.chunks, self._shared.chunk_bytes) != (self.chunks, self.chunk_bytes):
            raise ProtocolMisuse("The chunks that were sent differ from those in the shared count.")
        return self._shared.digest

    def add(self, header: bytes, chunk: memoryview) -> None:
        self.chunks += 1
        self.chunk_bytes += len(chunk)
        if self._hash is not None:
            self._hash.update(header)
            self._hash.update(chunk)

    def head(self, envelope: bytes = b"") -> CloseHead:
        return CloseHead(self.chunks, self.chunk_bytes, self.digest, envelope)


# Sending and receiving exact numbers of bytes, with a check for progress. For bulk transfers.
#
# A payload is collected as it arrives. Allocating the declared length at once would let a stranger
# take memory with five bytes. Only a chunk's destination, which the receiver made, exists before.


# The unit of progress for a send. On a slow link it is small, so that slow is not taken for stalled
# (9 KB/s is enough at 30 s). If the last one took no time it is large, which saves a twentieth of
# the CPU.
SLOW_SLICE_BYTES = 256 << 10
FAST_SLICE_BYTES = 1 << 20
FAST_SECONDS = 0.25


class HeaderReader:
    """Reads the headers of frames one by one. A cancelled `next` loses nothing."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._header = bytearray(FRAME_HEADER_BYTES)
        self._received = 0

    def next_now(self) -> bytes | None:
        """The next five bytes, if they have already arrived."""
        with memoryview(self._header) as view, view[self._received :] as rest:
            self._received += self._stream.receive_now(rest)
        if self._received < FRAME_HEADER_BYTES:
            return None
        self._received = 0
        return bytes(self._header)

    async def next(self) -> bytes | None:
        """The next five bytes, or None if the stream ends before them."""
        while self._received < FRAME_HEADER_BYTES:
            with memoryview(self._header) as view, view[self._received :] as rest:
                more = await self._stream.receive_into(rest)
            if more == 0 and self._received == 0:
                return None
            if more == 0:
                raise MalformedMessage("The stream ended in the middle of a frame's header.")
            self._received += more
        self._received = 0
        return bytes(self._header)


async def send_exactly(
    stream: Stream,
    start: bytes,
    rest: memoryview | None,
    stall_seconds: float,
    slice_bytes: int,
    patience: trio.CancelScope,
) -> int:
    """Send `start` and then `rest` in slices; return the slice size to use next.

    `patience` is a fresh scope. The caller may extend its deadline if the other side shows that it
    is active.
    """
    before = trio.current_time()
    patience.deadline = before + stall_seconds
    with patience:
        if rest is None:
            await stream.send_all(start)
            return slice_bytes
        at = 0
        while True:
            part = rest[at : at + slice_bytes]
            await (stream.send_parts(start, part) if at == 0 else stream.send_all(part))
            at += slice_bytes
            now = trio.current_time()
            slice_bytes = FAST_SLICE_BYTES if now - before < FAST_SECONDS else SLOW_SLICE_BYTES
            if at >= len(rest):
                return slice_bytes
            before = now
            patience.deadline = now + stall_seconds
    raise DeadlineExceeded(
        f"The other side took nothing for {stall_seconds:g} seconds.",
        why="It has stopped reading, or the link carries nothing.",
    )


async def receive_exactly(
    stream: Stream,
    destination: memoryview,
    stall_seconds: float,
    patience: trio.CancelScope,
    on_progress: Callable[[int], Awaitable[None]],
) -> None:
    """Fill `destination` directly from the stream; report the bytes so far to `on_progress`.

    `patience` is a fresh scope, as for `send_exactly`.
    """
    received, length = stream.receive_now(destination), len(destination)
    if received == length:
        await trio.lowlevel.checkpoint()
        return
    progress_at = received + PROGRESS_BYTES
    patience.deadline = trio.current_time() + stall_seconds
    with patience:
        while received < length:
            count = await stream.receive_into(destination[received:])
            if count == 0:
                raise MalformedMessage("The stream ended in the middle of a chunk.")
            received += count
            if received >= progress_at:
                progress_at = received + PROGRESS_BYTES
                patience.deadline = trio.current_time() + stall_seconds
                await on_progress(received)
    if patience.cancelled_caught:
        raise stalled(stall_seconds)


async def receive_payload(
    stream: Stream, length: int, stall_seconds: float, unfinished: UnfinishedMessages
) -> bytes:
    """The next `length` bytes; memory grows as they arrive."""
    payload = bytearray()
    progress_at = PROGRESS_BYTES
    try:
        with trio.move_on_after(stall_seconds) as patience:
            while len(payload) < length:
                data = await stream.receive_some(min(READ_BYTES, length - len(payload)))
                if not data:
                    raise MalformedMessage("The stream ended in the middle of a message.")
                payload += data
                unfinished.holds(stream, len(payload))
                if len(payload) >= progress_at:
                    progress_at = len(payload) + PROGRESS_BYTES
                    patience.deadline = trio.current_time() + stall_seconds
    finally:
        unfinished.holds(stream, 0)
    if patience.cancelled_caught:
        raise stalled(stall_seconds)
    return bytes(payload)


# The receiving side of a bulk transfer: headers, chunks, and the closing message.
#
# A receiving step that ends early ends all receiving. Usually it also resets the stream, because an
# unfinished frame breaks the framing. There are two exceptions. If a complete frame was the reason,
# the stream stays open to carry our ERROR. If the wait between two frames was cancelled, nothing is
# lost.


_CLOSE_HEAD = message_type(CloseHead)
_ERROR_HEAD = message_type(ErrorHead)


class ChunkReceiver(Generic[Received]):
    """A Transfer makes this. `Received` is the other side's closing message.

    `heard` is called when the other side has shown that it is active, and `say_alive` now and then
    while a chunk arrives.
    """

    def __init__(
        self,
        stream: Stream,
        bulk: BulkMethod[Any, Any, Any, Any],
        exchange: Exchange,
        state: RpcState,
        ending: Endable,
        opener: bool,
        heard: Callable[[], None],
        say_alive: Callable[[], Awaitable[None]],
    ) -> None:
        self._stream = stream
        self._bulk = bulk
        self._exchange = exchange
        self._state = state
        self._ending = ending
        self._part = Part.CLOSED if opener else Part.CLOSING
        self._closing_type = bulk.closed if opener else bulk.closing
        self._heard = heard
        self._say_alive = say_alive
        self.count = ChunkCount(bulk.hashed or state.guard.hashes_chunks)
        self.closing: Received | None = None
        self.under_way = 0  # bytes of the unfinished chunk that are here
        self.only_alive_since: float | None = None  # nothing else came or went
        self.busy = False  # a task is receiving
        self.announced: bytes | None = None  # the header of the next chunk
        self._headers = HeaderReader(stream)
        self._between_frames = False
        self._patience = trio.CancelScope()  # of the current wait
        self._failure: PotluckError | None = None
        self._limits = {
            CHUNK: bulk.chunk_limit_bytes,
            CLOSE: message_limit(bulk.message_limit_bytes),
            ERROR: message_limit(ERROR_BODY_LIMIT_BYTES),
            ALIVE: 0,
        }

    def extend_deadline(self, deadline: float) -> None:
        """Set the stall deadline of the current wait to this time at least."""
        if self.busy and self._patience.deadline < deadline:
            self._patience.deadline = deadline

    async def next_header(self) -> bytes | None:
        """The header of the next chunk, which stays the next; None after the last one."""
        if self.closing is not None:
            return None
        if self.announced is None:
            self.announced = await self._exclusively(self._receive_header)
        return self.announced

    async def receive_into(self, buffer: bytearray | memoryview) -> int | None:
        """See Transfer.receive_chunk_into."""
        header = await self.next_header()
        if header is None:
            return None
        length = int.from_bytes(header[:4], "big")
        view = memoryview(buffer).cast("B")
        if length > len(view):
            raise LimitExceeded(
                f"{self._exchange.peer} sends a chunk of {length:,} bytes where {len(view):,} "
                "were expected."
            )
        with view[:length] as destination:
            await self._exclusively(self._fill, destination)
            self.announced = None
            self.under_way = 0
            self.count.add(header, destination)
        await self._say_alive()
        self._state.counts.chunk_bytes_received += length
        return length

    async def _exclusively(self, receive: Callable[..., Awaitable[Any]], *what: Any) -> Any:
        """Run one receiving step; only one may run at a time."""
        if self.busy:
            raise trio.BusyResourceError("another task is receiving from this transfer")
        if self._failure is not None:
            raise again(self._failure)
        self.busy = True
        keep_stream = False
        try:
            result = await receive(*what)
            keep_stream = True
        except trio.Cancelled:
            keep_stream = self._between_frames
            raise
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise lost(self._bulk, self._exchange) from None
        except PotluckError as error:
            self._failure = error
            keep_stream = not isinstance(error, DeadlineExceeded)
            if isinstance(error, RemoteMisbehaviour):
                self._state.misbehaved(self._exchange.peer, self._bulk.protocol, error)
            raise
        finally:
            self.busy = False
            if not keep_stream and self._ending.error is None:  # else it is sent the reason
                self._stream.reset()
        if isinstance(result, PotluckError):
            self._failure = result
            raise result
        return result

    async def _fill(self, destination: memoryview) -> None:
        self._patience = trio.CancelScope()
        await receive_exactly(
            self._stream, destination, self._bulk.stall_seconds, self._patience, self._on_progress
        )

    async def _on_progress(self, received: int) -> None:
        self.under_way = received
        self._heard()
        await self._say_alive()

    async def _receive_header(self) -> bytes | PotluckError | None:
        """The header of the next chunk; None after the closing; an error that the peer sent."""
        kind = ALIVE
        header = self._headers.next_now()  # only once: many frames could block the loop
        if header is not None:
            kind, length = read_frame_header(header, self._limits)
            self._heard_of(kind)
        while kind == ALIVE:
            stall_seconds = self._bulk.stall_seconds
            with trio.move_on_after(stall_seconds) as self._patience:
                self._between_frames = True
                header = await self._headers.next()
                self._between_frames = False
            if self._patience.cancelled_caught:
                self._between_frames = False
                raise DeadlineExceeded(
                    f"Nothing came from {self._exchange.peer} for {stall_seconds:g} seconds.",
                    why="It has stopped, or the link carries nothing.",
                )
            if header is None:
                raise MalformedMessage("The transfer ended without a closing message.")
            kind, length = read_frame_header(header, self._limits)
            self._heard_of(kind)
        assert header is not None
        if kind == CHUNK:
            if length == 0:
                raise MalformedMessage("An empty chunk came.")
            return header
        payload = await receive_payload(
            self._stream, length, self._bulk.stall_seconds, self._state.unfinished
        )
        head, body = split_payload(kind, payload)
        if kind == ERROR:
            envelope = _ERROR_HEAD.decode(head).envelope
            return received_error(
                self._state.guard, self._exchange, body, envelope, self._bulk.errors
            )
        self._take_closing(_CLOSE_HEAD.decode(head), body)
        return None

    def _heard_of(self, kind: int) -> None:
        """A frame has come. DeadlineExceeded if for too long only ALIVE does."""
        self._heard()
        now = trio.current_time()
        if kind != ALIVE:
            self.only_alive_since = None
        elif self.only_alive_since is None:
            self.only_alive_since = now
        elif now - self.only_alive_since > MOST_ALIVE_SECONDS:
            raise DeadlineExceeded(
                f"{self._exchange.peer} has said for {MOST_ALIVE_SECONDS:,.0f} seconds that it is "
                "alive, and nothing else.",
                why="It waits for something that does not come, or wants to hold us up.",
            )

    def _take_closing(self, head: CloseHead, body: bytes) -> None:
        counted = self.count.head()
        if (head.chunks, head.chunk_bytes) != (counted.chunks, counted.chunk_bytes):
            raise MalformedMessage(
                f"The closing message counts {head.chunks:,} chunks with "
                f"{head.chunk_bytes:,} bytes; {counted.chunks:,} with "
                f"{counted.chunk_bytes:,} arrived."
            )
        if head.digest != counted.digest:
            raise MalformedMessage("The closing message's hash is not that of the chunks.")
        content = closing_transcript(head, body)
        self._state.guard.open(self._exchange, self._part, content, head.envelope)
        self.closing = message_type(self._closing_type).decode(body)


def lost(bulk: BulkMethod[Any, Any, Any, Any], exchange: Exchange) -> Unreachable:
    """The error to raise when the stream of a transfer is lost."""
    return Unreachable(
        f"The transfer {bulk.name} with {exchange.peer} was cut off.",
        why="The other side went away or gave up, or the link broke.",
    )
