"""Guards: they sign outgoing messages and check incoming ones.

The channel already proves which key is at the other end. It does not prove which person is behind
the key, nor that this request was meant for this recipient, now, and only once. A `Guard` proves
that (DeDLOC, appendix I.5: token, recipient, time, nonce, signature). It sees every message that
starts, answers or ends something, in both directions, on every protocol:

    unary call       REQUEST ->            <- RESPONSE or ERROR
    bulk transfer    OPENING ->            <- ACCEPTED or ERROR
                     CLOSING ->            <- CLOSED              (each covers its side's chunks)

`seal` makes the envelope that travels beside a message. `open` checks the envelope of an incoming
message and raises `Refused`, or MalformedMessage if it is not an envelope at all. Each side has one
`Exchange` object for the whole exchange. In `memory` the guard keeps what ties the messages
together (the nonce). In `credentials` it leaves what it found out about the peer; handlers see that
as `caller.credentials`.

There are two guards: `OpenGuard` below, which checks nothing, and `token_guard.TokenGuard`, which
does all of the above.

An ERROR may answer a request that `open` refused. So `seal` must accept an exchange whose opening
was refused or, for an ERROR about a whole stream, never seen. Both methods run in the event loop:
they must not wait, and must take well under a millisecond.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from protocols.identity import PeerId


class Part(enum.Enum):
    """The message of an exchange that an envelope belongs to. Signed, so none can be swapped."""

    REQUEST = "request"
    RESPONSE = "response"
    ERROR = "error"
    OPENING = "opening"
    ACCEPTED = "accepted"
    CLOSING = "closing"  # from the side that opened
    CLOSED = "closed"  # from the side that served


class Exchange(msgspec.Struct):
    """One call or transfer, as seen from one side."""

    peer: PeerId  # the other end, as proven by the channel
    protocol: str
    method: str
    memory: Any = None  # private to the guard
    credentials: Any = None  # what the guard learned about the peer
    training: bool = False  # only peers that train may ask or answer this


class Guard(Protocol):
    """Signs outgoing messages and checks incoming ones. `content` is exactly what is signed.

    For most messages `content` is the body. For CLOSING and CLOSED it is the closing transcript of
    `transfers.py`: counts and running hash of the chunks, then the body.

    A reader with many messages must let other tasks run after each `judged_at_once` of them. Both
    sides of a transfer have to agree on `hashes_chunks`; guards of one kind do.
    """

    @property
    def judged_at_once(self) -> int: ...

    @property
    def hashes_chunks(self) -> bool:
        """Whether the closing of every transfer covers a hash of its chunks."""

    def knows(self, peer: PeerId) -> bool:
        """Whether this peer has shown that it may take part. Strangers get lower limits."""

    def may_publish(self, peer: PeerId) -> bool:
        """Whether it is known that this peer may write into the directory, from itself or from one
        that vouches for it."""

    def shown_by(self, peers: Iterable[PeerId]) -> tuple[bytes, ...]:
        """What these peers have shown, with which this one vouches for them."""

    def vouched(self, shown: Iterable[bytes]) -> None:
        """A peer vouches with this for others. Nothing is believed that does not prove itself."""

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes: ...

    def open(self, exchange: Exchange, part: Part, content: bytes, envelope: bytes) -> None: ...


class OpenGuard:
    """Lets everybody with a key take part. The only proof is the channel's proof of the key."""

    judged_at_once = 1 << 30  # it costs nothing
    hashes_chunks = False

    def knows(self, peer: PeerId) -> bool:  # noqa: ARG002
        return True

    def may_publish(self, peer: PeerId) -> bool:  # noqa: ARG002
        return True

    def shown_by(self, peers: Iterable[PeerId]) -> tuple[bytes, ...]:  # noqa: ARG002
        return ()

    def vouched(self, shown: Iterable[bytes]) -> None:
        """Nobody has to prove anything."""

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes:  # noqa: ARG002
        return b""

    def open(self, exchange: Exchange, part: Part, content: bytes, envelope: bytes) -> None:
        """Accept everything. An unexpected envelope is ignored."""


class Caller(msgspec.Struct, frozen=True):
    """The peer that asked, as a handler sees it."""

    peer: PeerId
    credentials: Any = None
