"""Receiving an exact number of bytes, with an eye on progress. For streams of bulk transfers.

Easy to get wrong: a payload is gathered as it arrives. Making room for a declared length at once
would let a stranger take memory with five bytes; only a chunk's own destination, which the
receiver has made for it, is there beforehand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from protocols.errors import MalformedMessage
from protocols.frame_reader import PROGRESS_BYTES, READ_BYTES, stalled
from protocols.network import Stream


async def receive_exactly(
    stream: Stream,
    destination: memoryview,
    stall_seconds: float,
    on_progress: Callable[[], Awaitable[None]],
) -> None:
    """Fill `destination`, straight from the stream; `on_progress` runs now and then meanwhile."""
    received, length = 0, len(destination)
    progress_at = PROGRESS_BYTES
    with trio.move_on_after(stall_seconds) as patience:
        while received < length:
            count = await stream.receive_into(destination[received:])
            if count == 0:
                raise MalformedMessage("The stream ended in the middle of a chunk.")
            received += count
            if received >= progress_at:
                progress_at = received + PROGRESS_BYTES
                patience.deadline = trio.current_time() + stall_seconds
                await on_progress()
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
