"""Yamux frames: twelve bytes of header, and for DATA a payload. No I/O, no state of streams.

    version u8 = 0 | type u8 | flags u16 | stream id u32 | length u32        (big-endian)

`length` is the payload's size for DATA, a credit in bytes for WINDOW_UPDATE, an opaque number for
PING and an error code for GO_AWAY. `YamuxFrameParser` turns plaintext, cut anywhere, into headers
and pieces of payload. It does not collect a payload, so it holds at most a part of a header.

A payload piece is a view into the chunk that it came in. Keeping a small piece keeps the whole
chunk alive (channel.py copies those).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from protocols.errors import LimitExceeded, MalformedMessage

VERSION: Final = 0

DATA: Final = 0
WINDOW_UPDATE: Final = 1
PING: Final = 2
GO_AWAY: Final = 3

SYN: Final = 1
ACK: Final = 2
FIN: Final = 4
RST: Final = 8

NORMAL_END: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2

SESSION_STREAM_ID: Final = 0  # PING and GO_AWAY concern the connection, not a stream
LARGEST_STREAM_ID: Final = 2**32 - 1
LARGEST_WINDOW_BYTES: Final = 2**32 - 1

_HEADER: Final = struct.Struct("!BBHII")
HEADER_BYTES: Final = _HEADER.size


class FrameHeader(NamedTuple):
    type: int
    flags: int
    stream_id: int
    length: int


def encode_header(type: int, flags: int, stream_id: int, length: int) -> bytes:
    return _HEADER.pack(VERSION, type, flags, stream_id, length)


def decode_header(chunk: bytes | bytearray | memoryview, offset: int = 0) -> FrameHeader:
    """The header at `offset`; MalformedMessage if it is not valid in Yamux version 0."""
    version, type, flags, stream_id, length = _HEADER.unpack_from(chunk, offset)
    if version != VERSION:
        raise MalformedMessage(
            f"A Yamux frame of version {version} came; only version {VERSION} exists."
        )
    if type > GO_AWAY:
        raise MalformedMessage(f"A Yamux frame of the unknown type {type} came.")
    if type <= WINDOW_UPDATE and stream_id == SESSION_STREAM_ID:
        raise MalformedMessage("A Yamux frame for a stream named stream 0, which is none.")
    return FrameHeader(type, flags, stream_id, length)


class YamuxFrameParser:
    """Cuts a sequence of chunks into frame headers and payload pieces.

    `feed` yields, in order, each header as a FrameHeader and, after a DATA header, its payload as
    one or more non-empty memoryviews. It is lazy: the caller handles one event before the next is
    parsed. So a caller that refuses a header has taken none of its payload.
    """

    def __init__(self, payload_limit_bytes: int) -> None:
        self._payload_limit = payload_limit_bytes
        self._payload_left = 0
        self._partial_header = b""

    def feed(self, chunk: bytes | memoryview) -> Iterator[FrameHeader | memoryview]:
        view = memoryview(chunk)
        position, end = 0, len(view)
        while position < end:
            if self._payload_left:
                size = min(self._payload_left, end - position)
                self._payload_left -= size
                position += size
                yield view[position - size : position]
                continue
            if self._partial_header or end - position < HEADER_BYTES:
                missing = HEADER_BYTES - len(self._partial_header)
                self._partial_header += bytes(view[position : position + missing])
                position += missing
                if len(self._partial_header) < HEADER_BYTES:
                    return
                header = decode_header(self._partial_header)
                self._partial_header = b""
            else:
                header = decode_header(view, position)
                position += HEADER_BYTES
            if header.type == DATA:
                if header.length > self._payload_limit:
                    raise LimitExceeded(
                        f"A Yamux frame declares {header.length} bytes of data; "
                        f"no window here is larger than {self._payload_limit}."
                    )
                self._payload_left = header.length
            yield header
