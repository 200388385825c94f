"""Receiving a chunk whose size a test does not know before."""

from __future__ import annotations

from typing import Any

from protocols.rpc import Transfer


async def next_chunk(transfer: Transfer[Any, Any, Any]) -> bytearray | None:
    """The next chunk in a new buffer; None after the last one."""
    length = await transfer.next_chunk_bytes()
    if length is None:
        return None
    chunk = bytearray(length)
    await transfer.receive_chunk_into(chunk)
    return chunk
