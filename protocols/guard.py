"""The place of the signed envelope: who may ask, and whether it was really they.

The channel already proves which key is at the other end. What it does not prove is the person
behind the key, and that this request was meant for this recipient, now, and only once. That is
the business of a `Guard` (DeDLOC, appendix I.5: token, recipient, time, nonce, signature). It
sees every message that starts, answers or ends something, in both directions, on every protocol:

    unary call       REQUEST ->            <- RESPONSE or ERROR
    bulk transfer    OPENING ->            <- ACCEPTED or ERROR
                     CLOSING ->            <- CLOSED              (each covers its side's chunks)

`seal` makes the envelope that travels beside a message; `open` judges the envelope that came with
one and raises `Refused` (or MalformedMessage, for what is not an envelope at all). One `Exchange`
object goes with the whole exchange on each side: the guard keeps in `memory` what ties the parts
together (the nonce), and leaves in `credentials` what it found out about the peer, which handlers
see as `caller.credentials`.

Two guards there are: `OpenGuard` below, and `token_guard.TokenGuard`, which keeps all of that.

Easy to get wrong: an ERROR may answer a request that `open` refused, so `seal` must cope with an
exchange whose opening it never accepted, or, for an ERROR about a whole stream, never saw. And
both methods run in the event loop: well under a millisecond, no waiting.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import msgspec

from protocols.identity import PeerId


class Part(enum.Enum):
    """Which message of an exchange an envelope belongs to. Binding it stops swapping."""

    REQUEST = "request"
    RESPONSE = "response"
    ERROR = "error"
    OPENING = "opening"
    ACCEPTED = "accepted"
    CLOSING = "closing"  # from the side that opened
    CLOSED = "closed"  # from the side that served


class Exchange(msgspec.Struct):
    """One call or transfer, as one side sees it."""

    peer: PeerId  # the other end, as proven by the channel
    protocol: str
    method: str
    memory: Any = None  # the guard's own
    credentials: Any = None  # what the guard established about the peer
    training: bool = False  # whether only those who train may ask or answer this


class Guard(Protocol):
    """Seals what goes out, judges what comes in. `content` is exactly what must be covered.

    For most parts `content` is the body of the message; for CLOSING and CLOSED it is the closing
    transcript of `bulk.py`: counts and running hash of the chunks, then the body.

    Whoever reads many messages at once lets other tasks run after each `judged_at_once` of them.
    Both sides of a transfer have to agree on `hashes_chunks`, as guards of one kind do.
    """

    @property
    def judged_at_once(self) -> int: ...

    @property
    def hashes_chunks(self) -> bool:
        """Whether the closing of every transfer covers a hash of its chunks."""

    def knows(self, peer: PeerId) -> bool:
        """Whether this peer has shown that it may take part. Strangers get less of everything."""

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes: ...

    def open(self, exchange: Exchange, part: Part, content: bytes, envelope: bytes) -> None: ...


class OpenGuard:
    """Everybody with a key may take part; the channel's proof of the key is all there is."""

    judged_at_once = 1 << 30  # it costs nothing
    hashes_chunks = False

    def knows(self, peer: PeerId) -> bool:  # noqa: ARG002
        return True

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes:  # noqa: ARG002
        return b""

    def open(self, exchange: Exchange, part: Part, content: bytes, envelope: bytes) -> None:
        """Let everybody in. An envelope that nobody asked for is not looked at."""


class Caller(msgspec.Struct, frozen=True):
    """Who is asking, as a handler sees it."""

    peer: PeerId
    credentials: Any = None
