"""Sending and receiving exact numbers of bytes, with an eye on progress. For bulk transfers.

Easy to get wrong: a payload is gathered as it arrives. Making room for a declared length at once
would let a stranger take memory with five bytes; only a chunk's own destination, which the
receiver has made for it, is there beforehand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from protocols.errors import DeadlineExceeded, MalformedMessage
from protocols.frame_reader import PROGRESS_BYTES, READ_BYTES, stalled
from protocols.network import Stream
from protocols.wire import FRAME_HEADER_BYTES

# The step in which a stalled send is noticed. On a slow link a small one, so that slow is not
# taken for stalled (9 KB/s will do at 30 s); where the last one took no time a large one, which
# saves a twentieth of the CPU.
SLOW_SLICE_BYTES = 256 << 10
FAST_SLICE_BYTES = 1 << 20
FAST_SECONDS = 0.25


class HeaderReader:
    """The headers of frames, one after the other. A cancelled `next` loses nothing."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._header = bytearray(FRAME_HEADER_BYTES)
        self._received = 0

    def next_now(self) -> bytes | None:
        """The next five bytes, if they are there already."""
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
    """Send `start` and then `rest` in slices; how large slices should be from now on.

    `patience` is a fresh scope. Whoever hears that the other side is at work may put off its
    deadline meanwhile.
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
    """Fill `destination`, straight from the stream; `on_progress` is told now and then meanwhile
    how many bytes are there.

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


async def receive_payload(stream: Stream, length: int, stall_seconds: float) -> bytes:
    """The next `length` bytes; memory grows as they come."""
    payload = bytearray()
    progress_at = PROGRESS_BYTES
    with trio.move_on_after(stall_seconds) as patience:
        while len(payload) < length:
            data = await stream.receive_some(min(READ_BYTES, length - len(payload)))
            if not data:
                raise MalformedMessage("The stream ended in the middle of a message.")
            payload += data
            if len(payload) >= progress_at:
                progress_at = len(payload) + PROGRESS_BYTES
                patience.deadline = trio.current_time() + stall_seconds
    if patience.cancelled_caught:
        raise stalled(stall_seconds)
    return bytes(payload)
