"""Methods: the name, the types of the messages, and the limits of a request to a peer.

    ECHO = Method("/potluck/ping/1.0.0", "echo", EchoRequest, EchoResponse)

Both sides make the same declaration, and both check the limits: the sender to get a clear error
early, the receiver because the sender may be hostile. The name of a protocol includes its version.
A change that the old side cannot understand needs a new version.

A unary message is held whole in memory, once for each call in flight, on both sides. Use a bulk
transfer for anything larger than `LARGEST_UNARY_BYTES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from protocols.errors import PotluckError, ProtocolMisuse
from protocols.rpc.messages import LONGEST_METHOD_NAME, MessageType, encode, message_type
from protocols.rpc.remote_errors import ErrorCodes

Request = TypeVar("Request")
Response = TypeVar("Response")
Opening = TypeVar("Opening")
Accepted = TypeVar("Accepted")
Closing = TypeVar("Closing")
Closed = TypeVar("Closed")

DEFAULT_MESSAGE_BYTES = 64 << 10  # a DHT answer of k = 20 nodes with addresses is about 8 KiB
LARGEST_UNARY_BYTES = 4 << 20  # a peer can make us hold this for each of its calls in flight
DEFAULT_CHUNK_BYTES = 1 << 20  # large: negligible cost per chunk; small: can be pooled
LARGEST_CHUNK_BYTES = 16 << 20
DEFAULT_STALL_SECONDS = 30.0  # a home link reconnects in less

_NO_ERRORS: Mapping[str, type[PotluckError]] = {}


@dataclass(frozen=True, eq=False)
class Method(Generic[Request, Response]):
    """A unary call. `errors` maps codes to the method's own error types, which may cross the wire.

    `training`: the method is part of training. A peer that may only watch (a monitor) may neither
    ask nor answer it.
    """

    protocol: str
    name: str
    request: type[Request]
    response: type[Response]
    request_limit_bytes: int = DEFAULT_MESSAGE_BYTES
    response_limit_bytes: int = DEFAULT_MESSAGE_BYTES
    errors: ErrorCodes = field(default_factory=lambda: _NO_ERRORS)
    training: bool = False
    request_type: MessageType[Request] = field(init=False, repr=False)
    response_type: MessageType[Response] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_name(self.protocol, self.name)
        for limit in (self.request_limit_bytes, self.response_limit_bytes):
            if not 0 < limit <= LARGEST_UNARY_BYTES:
                raise ProtocolMisuse(
                    f"{self.name} declares messages of up to {limit:,} bytes; "
                    f"a unary message may have {LARGEST_UNARY_BYTES:,}.",
                    advice="Make it a BulkMethod.",
                )
        object.__setattr__(self, "request_type", message_type(self.request))
        object.__setattr__(self, "response_type", message_type(self.response))


@dataclass(frozen=True, eq=False)
class BulkMethod(Generic[Opening, Accepted, Closing, Closed]):
    """A bulk transfer: opening and accepted, chunks both ways at once, closing and closed.

    `closing` is the last message of the opener, `closed` that of the serving side. `hashed` adds a
    running BLAKE3 over all chunks of each direction to the closing messages (about 0.13 s of CPU
    for each GB and side). In a run with tokens all transfers are hashed, so that the guard's
    signature covers the chunks. `stall_seconds` is how long a chunk may make no progress before the
    transfer fails. `training` is as for a Method.
    """

    protocol: str
    name: str
    opening: type[Opening]
    accepted: type[Accepted]
    closing: type[Closing]
    closed: type[Closed]
    chunk_limit_bytes: int = DEFAULT_CHUNK_BYTES
    message_limit_bytes: int = DEFAULT_MESSAGE_BYTES
    stall_seconds: float = DEFAULT_STALL_SECONDS
    hashed: bool = False
    errors: ErrorCodes = field(default_factory=lambda: _NO_ERRORS)
    training: bool = False

    def __post_init__(self) -> None:
        _check_name(self.protocol, self.name)
        if not 0 < self.chunk_limit_bytes <= LARGEST_CHUNK_BYTES:
            raise ProtocolMisuse(
                f"{self.name} declares chunks of up to {self.chunk_limit_bytes:,} bytes; "
                f"at most {LARGEST_CHUNK_BYTES:,} are allowed."
            )
        if not 0 < self.message_limit_bytes <= LARGEST_UNARY_BYTES:
            raise ProtocolMisuse(
                f"{self.name} declares messages of up to {self.message_limit_bytes:,} bytes; "
                f"at most {LARGEST_UNARY_BYTES:,} are allowed."
            )
        for type_ in (self.opening, self.accepted, self.closing, self.closed):
            message_type(type_)


def encode_within(what: str, message: object, limit: int) -> bytes:
    """Encode a message of ours; ProtocolMisuse if it is larger than its declared limit."""
    body = encode(message)
    if len(body) > limit:
        raise ProtocolMisuse(
            f"The {what} has {len(body):,} bytes; it was declared with at most {limit:,}."
        )
    return body


def _check_name(protocol: str, name: str) -> None:
    if not protocol.startswith("/") or not 0 < len(name) <= LONGEST_METHOD_NAME:
        raise ProtocolMisuse(f"{protocol!r}, {name!r} are not a valid protocol and method name.")
