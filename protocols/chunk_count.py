"""What one side of a transfer has sent: how many chunks, how many bytes, and their running hash.

Both sides count the same direction, and the closing message has to agree: so a chunk that was
lost, doubled or changed by a broken sender does not pass as complete. The guard's signature
covers the count and the hash (`closing_transcript`), and thereby the chunks.

Easy to get wrong: the hash runs over whole frames, five header bytes and then the chunk, so that
where the chunks were cut is covered as well. BLAKE3, for it is four times as fast as SHA-256 is
with help from the processor (8.1 against 1.9 GB/s on one core), and twenty times without.
"""

from __future__ import annotations

import struct

from blake3 import blake3

from protocols.errors import ProtocolMisuse
from protocols.messages import CloseHead

_TRANSCRIPT = struct.Struct(">QQB")


def closing_transcript(head: CloseHead, body: bytes) -> bytes:
    """What the guard seals at the end of a direction: everything that this side sent."""
    return _TRANSCRIPT.pack(head.chunks, head.chunk_bytes, len(head.digest)) + head.digest + body


class ChunkCount:
    """The chunks of one direction so far.

    With `alike`, which counts and hashes the same chunks for several transfers, this one only
    counts them and takes the hash from there.
    """

    def __init__(self, hashed: bool, alike: ChunkCount | None = None) -> None:
        self.chunks = 0
        self.chunk_bytes = 0
        self._hash = blake3() if hashed and alike is None else None
        self._alike = alike

    @property
    def digest(self) -> bytes:
        """The hash of the chunks so far; empty if they are not hashed."""
        if self._alike is None:
            return self._hash.digest() if self._hash is not None else b""
        if (self._alike.chunks, self._alike.chunk_bytes) != (self.chunks, self.chunk_bytes):
            raise ProtocolMisuse("The chunks that were sent are not all that were hashed for it.")
        return self._alike.digest

    def add(self, header: bytes, chunk: memoryview) -> None:
        self.chunks += 1
        self.chunk_bytes += len(chunk)
        if self._hash is not None:
            self._hash.update(header)
            self._hash.update(chunk)

    def head(self, envelope: bytes = b"") -> CloseHead:
        return CloseHead(self.chunks, self.chunk_bytes, self.digest, envelope)
