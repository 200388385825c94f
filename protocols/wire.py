"""Frames: how messages and chunks are told apart on a stream. No I/O in here.

A stream carries frames and nothing else:

    length  u32 big-endian   bytes of payload that follow the kind
    kind    u8               one of the nine below
    payload

The payload of CHUNK is raw bytes, that of ALIVE is empty. Every other payload is a *head* (what
the protocol itself needs: ids, method, deadline, envelope) and a *body* (the method's own
message), both MessagePack:

    head length  u16 big-endian
    head         MessagePack array (protocols/messages.py)
    body         MessagePack, to the end of the payload; may be empty

The head comes first so that the limit of the *method* is known before its body is taken in.

Promise: whatever the bytes, `FrameParser.feed` raises nothing but MalformedMessage and
LimitExceeded, and holds no more than the frame that is arriving, as far as it has arrived: memory
grows with what was received, never with what was declared.

Easy to get wrong: `length` does not count the five bytes of the frame header itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

from protocols.errors import LimitExceeded, MalformedMessage

REQUEST: Final = 1
RESPONSE: Final = 2
ERROR: Final = 3
CANCEL: Final = 4
OPEN: Final = 5
ACCEPT: Final = 6
CHUNK: Final = 7
CLOSE: Final = 8
ALIVE: Final = 9

KIND_NAMES: Final[Mapping[int, str]] = {
    REQUEST: "REQUEST",
    RESPONSE: "RESPONSE",
    ERROR: "ERROR",
    CANCEL: "CANCEL",
    OPEN: "OPEN",
    ACCEPT: "ACCEPT",
    CHUNK: "CHUNK",
    CLOSE: "CLOSE",
    ALIVE: "ALIVE",
}

FRAME_HEADER_BYTES: Final = 5
HEAD_LENGTH_BYTES: Final = 2
LONGEST_FRAME_BYTES: Final = 0xFFFF_FFFF  # what the length field can say; limits are far below

# a head is an id, a method name, a deadline and an envelope (token and signature: under 1 KiB)
HEAD_LIMIT_BYTES: Final = 4096

_FRAME_HEADER = struct.Struct(">IB")
_MESSAGE_HEADER = struct.Struct(">IBH")  # frame header and head length in one
_HEAD_LENGTH = struct.Struct(">H")

Head = TypeVar("Head")
ReadHead = Callable[[int, bytes, int], Head]
"""(kind, bytes of the head, bytes of body declared) -> decoded head; raises when too large."""


def name_of(kind: int) -> str:
    return KIND_NAMES.get(kind, f"unknown kind {kind}")


def message_frame(kind: int, head: bytes, body: bytes) -> bytes:
    """A whole frame around an encoded head and body."""
    length = HEAD_LENGTH_BYTES + len(head) + len(body)
    return _MESSAGE_HEADER.pack(length, kind, len(head)) + head + body


def chunk_header(length: int) -> bytes:
    """The five bytes that precede a chunk's own bytes."""
    return _FRAME_HEADER.pack(length, CHUNK)


ALIVE_FRAME: Final = _FRAME_HEADER.pack(0, ALIVE)


def message_limit(body_limit: int) -> int:
    """The longest payload of a message whose body may have `body_limit` bytes."""
    return HEAD_LENGTH_BYTES + HEAD_LIMIT_BYTES + body_limit


def read_frame_header(header: bytes | bytearray, limits: Mapping[int, int]) -> tuple[int, int]:
    """(kind, payload length) of a five-byte header, checked against the limit of each kind.

    A kind that `limits` does not name may not come here at all.
    """
    length, kind = _FRAME_HEADER.unpack(header)
    check_frame(kind, length, limits)
    return kind, length


def check_frame(kind: int, length: int, limits: Mapping[int, int]) -> None:
    limit = limits.get(kind)
    if limit is None:
        raise MalformedMessage(
            f"A frame of {name_of(kind)} came where only {_names(limits)} may come.",
            why="The other side speaks another protocol or another version, or sent garbage.",
        )
    if length > limit:
        raise LimitExceeded(
            f"A {name_of(kind)} frame declares {length:,} bytes; at most {limit:,} are allowed."
        )


def split_payload(kind: int, payload: bytes) -> tuple[bytes, bytes]:
    """(head, body) of a message's payload."""
    head_length = _head_length(kind, len(payload), payload)
    end = HEAD_LENGTH_BYTES + head_length
    return payload[HEAD_LENGTH_BYTES:end], payload[end:]


def _head_length(kind: int, payload_length: int, start_of_payload: bytes | memoryview) -> int:
    if payload_length < HEAD_LENGTH_BYTES:
        raise MalformedMessage(f"A {name_of(kind)} frame is too short to hold a head.")
    (head_length,) = _HEAD_LENGTH.unpack_from(start_of_payload)
    if head_length > HEAD_LIMIT_BYTES:
        raise LimitExceeded(
            f"A {name_of(kind)} frame declares a head of {head_length:,} bytes; "
            f"at most {HEAD_LIMIT_BYTES:,} are allowed."
        )
    if HEAD_LENGTH_BYTES + head_length > payload_length:
        raise MalformedMessage(f"A {name_of(kind)} frame is shorter than the head it declares.")
    return int(head_length)


def _names(limits: Mapping[int, int]) -> str:
    return ", ".join(KIND_NAMES[kind] for kind in sorted(limits)) or "nothing"


class FrameParser(Generic[Head]):
    """Turns the bytes of a stream of messages, cut anywhere, into messages.

    `limits` names the kinds that may come and the longest payload of each; the owner may raise a
    limit while the parser runs. `read_head` decodes the head of a message as soon as it is there
    and is told how long the body will be, so it can refuse before the body is taken in. It is
    called once for each message.

    After an error the parser is of no further use: the stream is out of step.
    """

    def __init__(self, limits: Mapping[int, int], read_head: ReadHead[Head]) -> None:
        self._limits = limits
        self._read_head = read_head
        self._partial = bytearray()
        self._wanted = 0  # bytes in _partial below which there is nothing new to see
        self._head: tuple[Head] | None = None  # of the frame that is arriving, once decoded

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished frame that are waiting for the rest."""
        return len(self._partial)

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[int, Head, bytes]]:
        """Take in what arrived; the messages (kind, head, body) that it completes, in order."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return []
            data = self._partial
        elif not data:
            return []
        with memoryview(data) as view:
            messages, used = self._parse(view)
            left = len(view) - used
            if data is not self._partial:
                if left:
                    self._partial += view[used:]
                return messages
        del self._partial[:used]
        return messages

    def _parse(self, view: memoryview) -> tuple[list[tuple[int, Head, bytes]], int]:
        messages: list[tuple[int, Head, bytes]] = []
        start, end = 0, len(view)
        limits, read_head = self._limits, self._read_head
        while True:
            here = end - start
            if here < FRAME_HEADER_BYTES:
                self._wanted = FRAME_HEADER_BYTES
                return messages, start
            length, kind = _FRAME_HEADER.unpack_from(view, start)
            if self._head is None:
                check_frame(kind, length, limits)
                if here < FRAME_HEADER_BYTES + HEAD_LENGTH_BYTES and length >= HEAD_LENGTH_BYTES:
                    self._wanted = FRAME_HEADER_BYTES + HEAD_LENGTH_BYTES
                    return messages, start
            head_start = start + FRAME_HEADER_BYTES + HEAD_LENGTH_BYTES
            head_length = _head_length(kind, length, view[start + FRAME_HEADER_BYTES : head_start])
            body_start = head_start + head_length
            if self._head is None:
                if end < body_start:
                    self._wanted = body_start - start
                    return messages, start
                head = read_head(
                    kind,
                    bytes(view[head_start:body_start]),
                    length - HEAD_LENGTH_BYTES - head_length,
                )
            else:
                (head,) = self._head
            frame_end = start + FRAME_HEADER_BYTES + length
            if end < frame_end:
                self._head = (head,)
                self._wanted = frame_end - start
                return messages, start
            self._head = None
            messages.append((kind, head, bytes(view[body_start:frame_end])))
            start = frame_end
