"""The contract's stream, thin over our muxer's stream.

The library would put its NetStream between (libp2p/network/stream/net_stream.py:195-300): a lock
taken per read and write, states of its own, and a `read` that raises StreamEOF at the other
side's half-close where the contract (and trio) return b"". Nothing of that is on the data path
here, and nobody but the muxer counts the stream: it is forgotten when both directions are done.
"""

from __future__ import annotations

import trio

from node.transport import YamuxStream
from protocols.identity import PeerId
from protocols.network import Stream


class Libp2pStream(Stream):
    """One negotiated stream."""

    def __init__(self, muxed: YamuxStream, remote_peer: PeerId, protocol: str) -> None:
        self._muxed = muxed
        self._remote_peer = remote_peer
        self._protocol = protocol

    def __repr__(self) -> str:
        return f"<Libp2pStream {self._protocol} with {self._remote_peer}>"

    @property
    def remote_peer(self) -> PeerId:
        return self._remote_peer

    @property
    def protocol(self) -> str:
        return self._protocol

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("receiving at most no bytes could not be told from the end")
        # No copy when it is bytes already; bulk data is read with `receive_into`.
        return bytes(await self._muxed.receive_some(max_bytes))

    async def receive_into(self, buffer: memoryview | bytearray) -> int:
        return await self._muxed.receive_into(buffer)

    def receive_now(self, buffer: memoryview | bytearray) -> int:
        return self._muxed.receive_now(buffer)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._muxed.send_all(data)

    async def send_parts(self, start: bytes, rest: memoryview) -> None:
        await self._muxed.send_all(start, rest)

    async def wait_send_all_might_not_block(self) -> None:
        """Returns at once, which trio allows: nothing of ours builds on this method."""
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await self._muxed.send_eof()

    async def aclose(self) -> None:
        await self._muxed.aclose()

    def reset(self) -> None:
        self._muxed.reset_now()
