"""What the heads of frames say, and how MessagePack becomes typed objects and back.

Heads are MessagePack *arrays*: compact, and they can still grow. The rule for growing is: append
fields with a default, never reorder, never remove; a reader ignores what comes after the fields
that it knows, and takes the default for what is missing. The bodies of a method are its own
business; `Message` gives them the same form and the same rule.

Promise: `decode` raises MalformedMessage and nothing else, whatever the bytes: wrong types,
missing fields, truncation, invalid UTF-8, nesting as deep as you like.

Easy to get wrong: a limit on bytes is not a limit on objects. One byte of MessagePack can become
a Python object of some 60 bytes, so a body of 1 MiB may stand for 64 MiB. Declare bodies with
types that are as narrow as can be (bytes, tuples of numbers), and limits that fit.
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
LONGEST_ERROR_TEXT = 500  # characters: a person can act on three sentences
LARGEST_ID = 0xFFFF_FFFF
LONGEST_MILLISECONDS = 0x7FFF_FFFF  # 24 days

Id = Annotated[int, Meta(ge=0, le=LARGEST_ID)]
Milliseconds = Annotated[int, Meta(ge=0, le=LONGEST_MILLISECONDS)]
Count = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF_FFFF_FFFF)]
MethodName = Annotated[str, Meta(min_length=1, max_length=LONGEST_METHOD_NAME)]
Envelope = Annotated[bytes, Meta(max_length=LONGEST_ENVELOPE_BYTES)]
ErrorText = Annotated[str, Meta(max_length=LONGEST_ERROR_TEXT)]


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A message in the compact form: an array of its fields. See above for how it may grow."""


class Empty(Message, frozen=True):
    """A message that says nothing but that it is there."""


class RequestHead(Message, frozen=True, gc=False):
    """A call. `milliseconds` is how long the caller will still wait."""

    id: Id
    method: MethodName
    milliseconds: Milliseconds
    envelope: Envelope = b""


class ResponseHead(Message, frozen=True, gc=False):
    """The answer to the call with this id. Its body is the method's response."""

    id: Id
    envelope: Envelope = b""


class ErrorHead(Message, frozen=True, gc=False):
    """The failure of the call with this id; id 0: of the stream as a whole. Body: ErrorBody."""

    id: Id
    envelope: Envelope = b""


class CancelHead(Message, frozen=True, gc=False):
    """The caller no longer wants the answer to the call with this id. No body, no answer."""

    id: Id


class OpenHead(Message, frozen=True, gc=False):
    """The start of a bulk transfer. `milliseconds` is how long the opener waits for ACCEPT."""

    method: MethodName
    milliseconds: Milliseconds
    envelope: Envelope = b""


class AcceptHead(Message, frozen=True, gc=False):
    """Yes to a bulk transfer. Its body is the method's `accepted`."""

    envelope: Envelope = b""


class CloseHead(Message, frozen=True, gc=False):
    """No chunk follows from this side. What it sent is counted and, if agreed, hashed."""

    chunks: Count
    chunk_bytes: Count
    digest: Annotated[bytes, Meta(max_length=LONGEST_DIGEST_BYTES)] = b""
    envelope: Envelope = b""


class ErrorBody(Message, frozen=True, gc=False):
    """An error as it crosses: a code for machines, and what/why/advice for people."""

    code: Annotated[str, Meta(min_length=1, max_length=LONGEST_METHOD_NAME)]
    what: ErrorText = ""
    why: ErrorText = ""
    advice: ErrorText = ""


# four bytes of UTF-8 a character at most, and some for the structure
ERROR_BODY_LIMIT_BYTES = 4 * (3 * LONGEST_ERROR_TEXT + LONGEST_METHOD_NAME) + 32

_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode

# What msgspec lets out for bytes that do not fit: its own errors, UnicodeDecodeError (a
# ValueError), RecursionError for deep nesting, TypeError for an unhashable member of a set.
_WHAT_BAD_BYTES_RAISE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)

_LONGEST_REASON = 200


class MessageType(Generic[T]):
    """A type that can be read from bytes. Making one costs; reading with it does not."""

    def __init__(self, type_: type[T], name: str | None = None) -> None:
        self.name = name or type_.__name__
        self._decoder = msgspec.msgpack.Decoder(type_)

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """The object in these bytes; MalformedMessage if they are not exactly one of them."""
        try:
            return self._decoder.decode(data)
        except _WHAT_BAD_BYTES_RAISE as error:
            reason = str(error)[:_LONGEST_REASON]
        raise MalformedMessage(f"These bytes are not a {self.name}: {reason}.")


_MESSAGE_TYPES: dict[type[Any], MessageType[Any]] = {}


def message_type(type_: type[T]) -> MessageType[T]:
    """The MessageType of a class, made once."""
    known = _MESSAGE_TYPES.get(type_)
    if known is None:
        known = _MESSAGE_TYPES[type_] = MessageType(type_)
    return known


def decode(type_: type[T], data: bytes | bytearray | memoryview) -> T:
    """Read one object of a type; for hot paths keep `message_type(type_)` instead."""
    return message_type(type_).decode(data)
