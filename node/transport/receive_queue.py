"""Bytes of one stream that arrived and were not yet read, in the pieces they arrived in.

Large pieces are kept as views of the decrypted packet, so that a bulk transfer is copied once,
by the reader, into its destination. Small pieces are copied and run together.

Easy to get wrong: memory. A view of one byte keeps a packet of 64 KiB alive, and a million
one-byte pieces cost fifty times their bytes; a peer that wants to hurt sends exactly these. The
queue therefore costs at most about three times the bytes it holds (tests/transport measure it).
"""

from __future__ import annotations

from collections import deque

# A view may keep alive at most this many times its own size.
LARGEST_PACKET_PER_VIEW = 2

# Below this, a piece is appended to the one before it instead of queued by itself.
SMALL_PIECE_BYTES = 2048
JOINED_PIECE_BYTES = 16 * 1024

Piece = bytes | bytearray | memoryview


class ReceiveQueue:
    """First in, first out. `size_bytes` is what is unread."""

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
        """The first piece, or its first `limit` bytes; b"" when nothing is there."""
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
        """All that is there, up to `limit` bytes, as one bytes object."""
        if len(self._pieces) == 1:
            return bytes(self.take(limit))
        wanted = self.size_bytes if limit is None else min(limit, self.size_bytes)
        joined = bytearray(wanted)
        self.take_into(memoryview(joined))
        return bytes(joined)

    def take_into(self, destination: memoryview) -> int:
        """Fill `destination` with as much as is there; returns how much that was."""
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
        """Drop everything; returns how many bytes that was."""
        dropped = self.size_bytes
        self._pieces.clear()
        self.size_bytes = 0
        return dropped
