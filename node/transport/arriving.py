"""Receiving where the node's owner limits what comes: TCP itself holds the other side back.

What was read is charged at once, and the next read waits until the node owes nothing: so the
kernel's buffer fills, its window closes, and the sender waits. The buffer is kept small, since what
it can hold comes over the network before anybody here could say no; all connections that carry bulk
share what their buffers may hold.

Easy to get wrong: the buffer must hold two segments. A sender whose peer's window is smaller than a
segment (64 KiB on loopback) waits for a timer before each one.
"""

from __future__ import annotations

from typing import Protocol

from node.transport.throttle import SMALL_BYTES, Throttle

QUIET_BYTES = 16 * 1024
"""The buffer of a connection that carries no bulk: an agreement's messages, and a first packet."""

RESIZE_FACTOR = 1.5
"""A buffer is left alone while it is within this of what it should be."""


class Below(Protocol):
    async def receive_into(self, buffer: memoryview, least: int) -> int: ...

    def limit_unread(self, limit_bytes: int) -> None: ...


class Arriving:
    """Of one connection, which charges what it has read to the node's traffic itself."""

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
        """Wait for this connection's turn, and for bytes; how many. Cancelling loses nothing."""
        if self._has_read:
            await self._throttle.turn(is_small=not self._carries_bulk)
            self._has_read = False
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

    def _resize(self, wanted: int) -> None:
        if not wanted / RESIZE_FACTOR <= self._buffer <= wanted * RESIZE_FACTOR:
            self._buffer = wanted
            self._wire.limit_unread(wanted)
