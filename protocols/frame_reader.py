"""Reading frames from a stream: the thin shell around the parser, with an eye on the clock.

An idle stream may be silent for as long as it likes. A stream that stops *inside* a frame holds
memory of ours, so it has to get on: at least `PROGRESS_BYTES` in every `stall_seconds`, or the
whole frame. One byte a second is not getting on.

Easy to get wrong: deadlines are set only while a frame is unfinished. Setting one for every
read would cost as much as everything else that a small call does.
"""

from __future__ import annotations

from typing import Generic

import trio

from protocols.errors import DeadlineExceeded, MalformedMessage
from protocols.network import Stream
from protocols.wire import FRAME_HEADER_BYTES, FrameParser, Head

READ_BYTES = 64 << 10  # one read: a Yamux frame is just under 64 KiB
PROGRESS_BYTES = 4 << 10  # per stall period: 140 bytes a second at 30 s, below any modem


class MessageReader(Generic[Head]):
    """The messages of one stream, in batches: all that one wake-up brought."""

    def __init__(self, stream: Stream, parser: FrameParser[Head], stall_seconds: float) -> None:
        self._stream = stream
        self._parser = parser
        self._stall_seconds = stall_seconds
        self._deadline = 0.0
        self._since_progress = 0

    async def next_batch(self, already_read: bytes = b"") -> list[tuple[int, Head, bytes]] | None:
        """At least one message, or None at the end of the stream.

        MalformedMessage if the stream ends inside a message, DeadlineExceeded if it stalls there.
        """
        data: bytes | bytearray = already_read
        while True:
            if data:
                batch = self._parser.feed(data)
                if self._parser.held_bytes:
                    self._note_progress(len(data), bool(batch))
                else:
                    self._deadline = 0.0
                if batch:
                    return batch
            data = await self._receive()
            if not data:
                if self._parser.held_bytes:
                    raise MalformedMessage("The stream ended in the middle of a message.")
                return None

    def _note_progress(self, received: int, finished_a_message: bool) -> None:
        self._since_progress += received
        if finished_a_message or not self._deadline or self._since_progress >= PROGRESS_BYTES:
            self._deadline = trio.current_time() + self._stall_seconds
            self._since_progress = 0

    async def _receive(self) -> bytes | bytearray:
        if not self._deadline:
            return await self._stream.receive_some(READ_BYTES)
        data: bytes | bytearray = b""
        with trio.move_on_at(self._deadline) as patience:
            data = await self._stream.receive_some(READ_BYTES)
        if patience.cancelled_caught:
            raise stalled(self._stall_seconds)
        return data


async def receive_frame_header(stream: Stream) -> bytes | None:
    """The next five bytes, or None if the stream ends before them."""
    header = bytearray(FRAME_HEADER_BYTES)
    received = await stream.receive_into(header)
    if received == 0:
        return None
    while received < FRAME_HEADER_BYTES:
        with memoryview(header) as view, view[received:] as rest:
            more = await stream.receive_into(rest)
        if more == 0:
            raise MalformedMessage("The stream ended in the middle of a frame's header.")
        received += more
    return bytes(header)


def stalled(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"Less than {PROGRESS_BYTES:,} bytes came in {seconds:g} seconds, inside a message.",
        why="The other side has stopped, or the link carries next to nothing.",
        advice="Try again; the connection is reopened by itself.",
    )
