"""Bulk transfers: chunks of raw bytes in both directions at once, on a stream of their own.

    opener                                   serving side
    OPEN    method, opening       ->
                                  <-         ACCEPT  accepted          (or ERROR)
    CHUNK   bytes                 ->  <-     CHUNK   bytes             (any number, both ways)
    CLOSE   counts, hash, closing ->  <-     CLOSE   counts, hash, closed

A chunk goes from the sender's buffer into the stream and from the stream into the receiver's
buffer; nothing in between copies it. Back-pressure is the stream's own: who does not receive,
stops the sender. One task may send while another receives.

Time is limited by *progress*, not in total: whoever waits for a byte, or for room to send one,
gives up after the method's `stall_seconds` without. A trickle is no progress: at least
`PROGRESS_BYTES` have to come in each such period. What has left a sender may be under way for
longer than that (a megabyte in the buffers of a slow uplink), and the sender cannot see it move.
So a side that is receiving and has nothing to send says ALIVE now and then, an empty frame, and
whoever waits for it, or for room to send more, knows that its bytes arrive.

Easy to get wrong: a frame that is cut short by cancellation leaves the stream out of step, so
cancelling a send, or a receive within a frame, resets it; cancelling the wait for a frame does
not. And the side that serves learns of a reset only when it
next sends or receives: a handler that waits for something else should receive meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import trio

from protocols.bulk_frames import (
    SLOW_SLICE_BYTES,
    send_exactly,
)
from protocols.bulk_receiving import ChunkReceiver, Received, lost
from protocols.chunk_count import ChunkCount, closing_transcript
from protocols.engagements import Ending
from protocols.errors import (
    ProtocolMisuse,
    Unreachable,
)
from protocols.guard import Caller, Exchange, Part
from protocols.identity import PeerId
from protocols.messages import (
    AcceptHead,
    encode,
)
from protocols.method import Accepted, BulkMethod, Closed, Closing, Opening, encode_within
from protocols.network import Stream
from protocols.rpc_state import RpcState
from protocols.wire import (
    ACCEPT,
    ALIVE_FRAME,
    CLOSE,
    chunk_header,
    message_frame,
)

Sent = TypeVar("Sent")

BulkHandler = Callable[[Caller, "Transfer[Accepted, Closed, Closing]", Opening], Awaitable[None]]
"""Answers a transfer: `await transfer.accept(...)`, chunks, `await transfer.finish(...)`.

Raising before or after `accept` ends the transfer with that error on the other side.
"""

ALIVE_PART = 4  # ALIVE is due after this part of the stall time in which nothing was sent
LAST_WORD_SECONDS = 1.0  # how long a broken transfer looks for the error that explains it


class Transfer(Generic[Accepted, Sent, Received]):
    """One side of a bulk transfer. `Sent` and `Received` are the closing messages."""

    def __init__(
        self,
        stream: Stream,
        bulk: BulkMethod[Any, Accepted, Any, Any],
        exchange: Exchange,
        state: RpcState,
        ending: Ending,
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
        self._cut = False  # a frame of ours was begun and not finished
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
        """What the serving side said when it accepted."""
        if self._accepted is None:
            raise ProtocolMisuse("This transfer has not been accepted yet.")
        return self._accepted

    @property
    def finished(self) -> bool:
        """Whether both sides have said their closing message."""
        return self._sent_closing and self._receiver.closing is not None

    @property
    def bytes_sent(self) -> int:
        return self._sent.chunk_bytes

    @property
    def bytes_received(self) -> int:
        return self._receiver.count.chunk_bytes

    @property
    def bytes_arrived(self) -> int:
        """Those received, and what is here of the chunk that comes, to a few thousand bytes."""
        return self.bytes_received + self._receiver.under_way

    @property
    def received_digest(self) -> bytes:
        """The hash over the chunks received so far, as the closing message has it at the end."""
        return self._receiver.count.digest

    @property
    def may_say_error(self) -> bool:
        """Whether ERROR can still follow: not behind a cut frame, nor behind our closing."""
        return not self._cut and not self._sent_closing

    def note_accepted(self, accepted: Accepted) -> None:
        """Opening side: the other side's ACCEPT has come."""
        self._accepted = accepted

    def when_accepted(self, callback: Callable[[], None]) -> None:
        """Serving side: called once, when the handler accepts."""
        self._on_accept = callback

    async def accept(self, accepted: Accepted) -> None:
        """Serving side: say yes. Before this nothing else may be sent."""
        if self._opener or self._accepted is not None:
            raise ProtocolMisuse("A transfer is accepted once, by the side that serves it.")
        body = encode_within("accepting message", accepted, self._bulk.message_limit_bytes)
        envelope = self._state.guard.seal(self._exchange, Part.ACCEPTED, body)
        self._accepted = accepted
        if self._on_accept is not None:
            self._on_accept()
        await self._send(message_frame(ACCEPT, encode(AcceptHead(envelope)), body), None)

    # Sending

    def send_alike(self, count: ChunkCount) -> None:
        """The same chunks go out on several transfers: `count` counts and hashes them for all.

        Said before the first chunk; whoever makes the chunks adds them to `count`. At the closing
        message all that was counted there must have been sent here.
        """
        if self._sent.chunks:
            raise ProtocolMisuse("What is hashed elsewhere is hashed there from the first chunk.")
        self._sent = ChunkCount(self._hashed, alike=count if self._hashed else None)

    async def send_chunk(self, chunk: bytes | bytearray | memoryview) -> None:
        """Send the bytes of a contiguous buffer; it may be reused when this returns."""
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

    async def send_closing(self, closing: Sent) -> None:
        """Say that no more chunks come from here. The other direction goes on."""
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
            await self._look_for_the_reason()
            raise lost(self._bulk, self._exchange) from None

    async def say_alive(self) -> None:
        """Tell the other side that we are still here, if it has not heard from us for a while.

        Receiving does this by itself. A handler that waits for something else, on a transfer
        whose other side waits for it, calls this every few seconds.
        """
        due = self._last_sent + self._bulk.stall_seconds / ALIVE_PART
        may_send = self._accepted is not None and not self._sent_closing
        if may_send and trio.current_time() >= due and not self._sending.locked():
            await self._send(ALIVE_FRAME, None)

    def _check_may_send(self) -> None:
        if self._sent_closing or self._accepted is None:
            raise ProtocolMisuse("Chunks go between accepting and the closing message.")

    async def _send(self, start: bytes, rest: memoryview | None) -> None:
        try:
            self._sending.acquire_nowait()  # which `acquire` follows with a turn of the loop
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
            await self._look_for_the_reason()
            raise lost(self._bulk, self._exchange) from None
        finally:
            if self._cut:
                self._stream.reset()

    async def _look_for_the_reason(self) -> None:
        """A side that gives up says ERROR and stops reading: look whether it did."""
        if self._receiver.busy or self._receiver.announced is not None:
            return
        with trio.move_on_after(LAST_WORD_SECONDS):
            with contextlib.suppress(Unreachable):
                await self._receiver.next_header()

    # Receiving

    async def next_chunk_bytes(self) -> int | None:
        """The size of the chunk that comes next, without receiving it; None: there is none."""
        header = await self._receiver.next_header()
        return None if header is None else int.from_bytes(header[:4], "big")

    async def receive_chunk(self) -> bytearray | None:
        """The next chunk in a buffer of its own; None after the last one."""
        length = await self.next_chunk_bytes()
        if length is None:
            return None
        chunk = bytearray(length)
        await self.receive_chunk_into(chunk)
        return chunk

    async def receive_chunk_into(self, buffer: bytearray | memoryview) -> int | None:
        """Receive the next chunk into the start of `buffer`; its size, or None after the last.

        LimitExceeded if it is larger than the buffer; it can then be received into a larger one.
        """
        return await self._receiver.receive_into(buffer)

    async def receive_closing(self) -> Received:
        """The other side's closing message. Its chunks must have been received before."""
        if await self._receiver.next_header() is not None:
            raise ProtocolMisuse("The other side's chunks must be received before its closing.")
        assert self._receiver.closing is not None
        return self._receiver.closing

    async def finish(self, closing: Sent) -> Received:
        """Say our closing message, if `send_closing` did not yet, and wait for the other's."""
        if not self._sent_closing:
            await self.send_closing(closing)
        return await self.receive_closing()

    def is_slow(self) -> None:
        """The other side lives, as something else shows that came from it: its bytes wait behind
        others. Give what we send, and what we wait for, as much time again."""
        self._heard()
        self._receiver.put_off(trio.current_time() + self._bulk.stall_seconds)

    def _heard(self) -> None:
        """The other side is at work: give what we are sending to it as much time again."""
        deadline = trio.current_time() + self._bulk.stall_seconds
        if self._sending.locked() and self._send_patience.deadline < deadline:
            self._send_patience.deadline = deadline
