"""The conversations of two ends in these tests, the same for our streams and a stranger's.

Every byte sent is a known function of its position, with a prime period, so that a byte lost,
doubled, swapped or cut at any boundary of frames, packets or buffers is seen at once.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import trio
from trio.abc import HalfCloseableStream

ECHO: Final = "/strangers/echo/1.0.0"
DIGEST: Final = "/strangers/digest/1.0.0"
SOURCE: Final = "/strangers/source/1.0.0"
SINK: Final = "/strangers/sink/1.0.0"

_PERIOD: Final = 251  # prime, so it falls in step with no frame, packet or buffer
_WRITE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 18
_PATTERN: Final = bytes(range(_PERIOD)) * (_WRITE_BYTES // _PERIOD + 2)
_COUNT: Final = struct.Struct(">Q")
DIGEST_BYTES: Final = 32


def pattern(count: int, at: int = 0) -> bytes:
    """The `count` bytes that belong at position `at`; at most a megabyte of them."""
    start = at % _PERIOD
    return _PATTERN[start : start + count]


async def send_pattern(stream: HalfCloseableStream, count: int) -> None:
    at = 0
    while at < count:
        chunk = pattern(min(_WRITE_BYTES, count - at), at)
        await stream.send_all(chunk)
        at += len(chunk)


async def receive_pattern(stream: HalfCloseableStream, count: int, at: int = 0) -> None:
    """Read exactly `count` bytes and insist that each is the one that belongs there."""
    end = at + count
    while at < end:
        chunk = await stream.receive_some(min(_READ_BYTES, end - at))
        assert chunk, f"the stream ended after {at} of {end} bytes"
        assert chunk == pattern(len(chunk), at), f"wrong bytes between {at} and {at + len(chunk)}"
        at += len(chunk)


async def expect_end(stream: HalfCloseableStream) -> None:
    assert await stream.receive_some(1) == b""


async def receive_exactly(stream: HalfCloseableStream, count: int) -> bytes:
    held = bytearray()
    while len(held) < count:
        chunk = await stream.receive_some(count - len(held))
        assert chunk, f"the stream ended after {len(held)} of {count} bytes"
        held += chunk
    return bytes(held)


async def exchange(stream: HalfCloseableStream, count: int) -> None:
    """Send the pattern to an `echo` and check what comes back, both at once."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_pattern, stream, count)
        await receive_pattern(stream, count)


async def upload(stream: HalfCloseableStream, count: int) -> None:
    """Send the pattern to a `sink`, which checks it and answers how many bytes it saw."""
    await stream.send_all(_COUNT.pack(count))
    await send_pattern(stream, count)
    assert await receive_exactly(stream, _COUNT.size) == _COUNT.pack(count)


async def download(stream: HalfCloseableStream, count: int) -> None:
    """Have a `source` send the pattern, check it, and see that nothing follows it."""
    await stream.send_all(_COUNT.pack(count))
    await receive_pattern(stream, count)
    await expect_end(stream)


async def echo(stream: HalfCloseableStream) -> None:
    async for chunk in stream:
        await stream.send_all(chunk)
    await stream.send_eof()


async def digest(stream: HalfCloseableStream) -> None:
    """Read to the end, then answer the hash of it all: needs a half-close that still answers."""
    seen = hashlib.sha256()
    async for chunk in stream:
        seen.update(chunk)
    await stream.send_all(seen.digest())
    await stream.send_eof()


async def source(stream: HalfCloseableStream) -> None:
    (count,) = _COUNT.unpack(await receive_exactly(stream, _COUNT.size))
    await send_pattern(stream, count)
    await stream.send_eof()


async def sink(stream: HalfCloseableStream) -> None:
    (count,) = _COUNT.unpack(await receive_exactly(stream, _COUNT.size))
    await receive_pattern(stream, count)
    await stream.send_all(_COUNT.pack(count))
    await stream.send_eof()
