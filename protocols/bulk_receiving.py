"""The receiving side of a bulk transfer: headers, chunks, and the other side's last word.

Easy to get wrong: what ends a receiving step early ends all receiving, and mostly the stream,
because a frame that was begun leaves it out of step. It stays when a whole frame was the reason,
for then it can still carry our ERROR; and when the wait between two frames was cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import trio

from protocols.bulk_frames import HeaderReader, receive_exactly, receive_payload
from protocols.chunk_count import ChunkCount, closing_transcript
from protocols.engagements import Ending
from protocols.errors import (
    DeadlineExceeded,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.guard import Exchange, Part
from protocols.messages import ERROR_BODY_LIMIT_BYTES, CloseHead, ErrorHead, message_type
from protocols.method import BulkMethod
from protocols.network import Stream
from protocols.remote_errors import again
from protocols.rpc_state import RpcState
from protocols.told_errors import told
from protocols.wire import (
    ALIVE,
    CHUNK,
    CLOSE,
    ERROR,
    message_limit,
    read_frame_header,
    split_payload,
)

Received = TypeVar("Received")

_CLOSE_HEAD = message_type(CloseHead)
_ERROR_HEAD = message_type(ErrorHead)


class ChunkReceiver(Generic[Received]):
    """Made by a Transfer. `Received` is the other side's closing message.

    `heard` is called whenever the other side has shown that it is at work, and `say_alive` now
    and then while a chunk comes.
    """

    def __init__(
        self,
        stream: Stream,
        bulk: BulkMethod[Any, Any, Any, Any],
        exchange: Exchange,
        state: RpcState,
        ending: Ending,
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
        self.under_way = 0  # bytes that are here of a chunk that is not whole
        self.busy = False  # a task is receiving
        self.announced: bytes | None = None  # the header of the chunk that comes next
        self._headers = HeaderReader(stream)
        self._between_frames = False
        self._patience = trio.CancelScope()  # of what is being waited for
        self._failure: PotluckError | None = None
        self._limits = {
            CHUNK: bulk.chunk_limit_bytes,
            CLOSE: message_limit(bulk.message_limit_bytes),
            ERROR: message_limit(ERROR_BODY_LIMIT_BYTES),
            ALIVE: 0,
        }

    def put_off(self, deadline: float) -> None:
        """Take nothing that is waited for to have stalled before this moment."""
        if self.busy and self._patience.deadline < deadline:
            self._patience.deadline = deadline

    async def next_header(self) -> bytes | None:
        """The header of the chunk that comes next, and stays next; None after the last one."""
        if self.closing is not None:
            return None
        if self.announced is None:
            self.announced = await self._alone(self._receive_header)
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
            await self._alone(self._fill, destination)
            self.announced = None
            self.under_way = 0
            self.count.add(header, destination)
        await self._say_alive()
        self._state.counts.chunk_bytes_received += length
        return length

    async def _alone(self, receive: Callable[..., Awaitable[Any]], *what: Any) -> Any:
        """Run one receiving step."""
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
            if not keep_stream and self._ending.error is None:  # else that is yet to be told
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
        """The header of the next chunk; None after the closing; an error that they sent."""
        kind = ALIVE
        header = self._headers.next_now()  # once: frames that are there must not hold the loop
        if header is not None:
            kind, length = read_frame_header(header, self._limits)
            self._heard()
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
            self._heard()
        assert header is not None
        if kind == CHUNK:
            if length == 0:
                raise MalformedMessage("An empty chunk came.")
            return header
        payload = await receive_payload(self._stream, length, self._bulk.stall_seconds)
        head, body = split_payload(kind, payload)
        if kind == ERROR:
            envelope = _ERROR_HEAD.decode(head).envelope
            return told(self._state.guard, self._exchange, body, envelope, self._bulk.errors)
        self._take_closing(_CLOSE_HEAD.decode(head), body)
        return None

    def _take_closing(self, head: CloseHead, body: bytes) -> None:
        counted = self.count.head()
        if (head.chunks, head.chunk_bytes) != (counted.chunks, counted.chunk_bytes):
            raise MalformedMessage(
                f"The closing message speaks of {head.chunks:,} chunks with "
                f"{head.chunk_bytes:,} bytes; {counted.chunks:,} with "
                f"{counted.chunk_bytes:,} came."
            )
        if head.digest != counted.digest:
            raise MalformedMessage("The closing message's hash is not that of the chunks.")
        content = closing_transcript(head, body)
        self._state.guard.open(self._exchange, self._part, content, head.envelope)
        self.closing = message_type(self._closing_type).decode(body)


def lost(bulk: BulkMethod[Any, Any, Any, Any], exchange: Exchange) -> Unreachable:
    """What is raised where a transfer's stream has gone."""
    return Unreachable(
        f"The transfer {bulk.name} with {exchange.peer} was cut off.",
        why="The other side went away or gave up, or the link broke.",
    )
