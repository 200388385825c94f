"""The heads of frames, and the coding of typed objects in MessagePack.

Heads are MessagePack *arrays*: compact, and extensible. To extend one, append fields with a
default; never reorder or remove any. A reader ignores fields after those it knows, and takes the
default for missing ones. Each method defines its own bodies; `Message` gives them the same form and
the same rule.

`decode` raises MalformedMessage and nothing else, whatever the bytes: wrong types, missing fields,
truncation, invalid UTF-8, nesting of any depth.

A limit on bytes is not a limit on objects. One byte of MessagePack can become a Python object of
some 60 bytes, so a body of 1 MiB may take 64 MiB. Declare bodies with types as narrow as possible
(bytes, tuples of numbers), and with limits that fit.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from protocols.errors import MalformedMessage

T = TypeVar("T")

LONGEST_METHOD_NAME = 64
LONGEST_ENVELOPE_BYTES = 3072  # with the rest of the head under wire.HEAD_LIMIT_BYTES
LONGEST_DIGEST_BYTES = 32
LONGEST_ERROR_TEXT = 500  # characters: enough for three sentences
LARGEST_ID = 0xFFFF_FFFF
LONGEST_MILLISECONDS = 0x7FFF_FFFF  # 24 days

Id = Annotated[int, Meta(ge=0, le=LARGEST_ID)]
Milliseconds = Annotated[int, Meta(ge=0, le=LONGEST_MILLISECONDS)]
Count = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF_FFFF_FFFF)]
MethodName = Annotated[str, Meta(min_length=1, max_length=LONGEST_METHOD_NAME)]
Envelope = Annotated[bytes, Meta(max_length=LONGEST_ENVELOPE_BYTES)]
ErrorText = Annotated[str, Meta(max_length=LONGEST_ERROR_TEXT)]


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A message as an array of its fields. The module's docstring has the rule for extending it."""


class Empty(Message, frozen=True):
    """A message without content."""


class RequestHead(Message, frozen=True, gc=False):
    """A call. `milliseconds` is how long the caller still waits."""

    id: Id
    method: MethodName
    milliseconds: Milliseconds
    envelope: Envelope = b""


class ResponseHead(Message, frozen=True, gc=False):
    """The answer to the call with this id. Its body is the method's response."""

    id: Id
    envelope: Envelope = b""


class ErrorHead(Message, frozen=True, gc=False):
    """The failure of the call with this id; id 0: of the whole stream. Its body is ErrorBody."""

    id: Id
    envelope: Envelope = b""


class CancelHead(Message, frozen=True, gc=False):
    """Cancels the call with this id. No body, no answer."""

    id: Id


class OpenHead(Message, frozen=True, gc=False):
    """The start of a bulk transfer. `milliseconds` is how long the opener waits for ACCEPT."""

    method: MethodName
    milliseconds: Milliseconds
    envelope: Envelope = b""


class AcceptHead(Message, frozen=True, gc=False):
    """The acceptance of a bulk transfer. Its body is the method's `accepted`."""

    envelope: Envelope = b""


class CloseHead(Message, frozen=True, gc=False):
    """The end of this side's chunks. They are counted and, if agreed, hashed."""

    chunks: Count
    chunk_bytes: Count
    digest: Annotated[bytes, Meta(max_length=LONGEST_DIGEST_BYTES)] = b""
    envelope: Envelope = b""


class ErrorBody(Message, frozen=True, gc=False):
    """An error on the wire: a code for programs, and what/why/advice for people."""

    code: Annotated[str, Meta(min_length=1, max_length=LONGEST_METHOD_NAME)]
    what: ErrorText = ""
    why: ErrorText = ""
    advice: ErrorText = ""


# at most four bytes of UTF-8 for each character, and some for the structure
ERROR_BODY_LIMIT_BYTES = 4 * (3 * LONGEST_ERROR_TEXT + LONGEST_METHOD_NAME) + 32

_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode

# msgspec raises these for invalid bytes: its own errors, UnicodeDecodeError (a ValueError),
# RecursionError for deep nesting, TypeError for an unhashable member of a set.
_DECODING_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)

_LONGEST_REASON = 200


class MessageType(Generic[T]):
    """A type that can be read from bytes. Creating one is slow; reading with it is not."""

    def __init__(self, type_: type[T], name: str | None = None) -> None:
        self.name = name or type_.__name__
        self._decoder = msgspec.msgpack.Decoder(type_)

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """Decode one object; MalformedMessage unless the bytes are exactly one of this type."""
        try:
            return self._decoder.decode(data)
        except _DECODING_ERRORS as error:
            reason = str(error)[:_LONGEST_REASON]
        raise MalformedMessage(f"These bytes are not a {self.name}: {reason}.")


_MESSAGE_TYPES: dict[type[Any], MessageType[Any]] = {}


def message_type(type_: type[T]) -> MessageType[T]:
    """The MessageType of a class. It is made once and kept."""
    known = _MESSAGE_TYPES.get(type_)
    if known is None:
        known = _MESSAGE_TYPES[type_] = MessageType(type_)
    return known


def decode(type_: type[T], data: bytes | bytearray | memoryview) -> T:
    """Read one object of a type; for hot paths keep `message_type(type_)` instead."""
    return message_type(type_).decode(data)
