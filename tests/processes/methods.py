"""The methods of the peers of these tests, made to be interrupted at every point.

Easy to get wrong: a fault test that only looks at the caller proves half. `CENSUS` therefore asks
a peer what it holds (tasks, files, links, handlers at work), so that a test can see that a fault
left nothing behind at the other side either.
"""

from __future__ import annotations

from typing import Final

from protocols.rpc import BulkMethod, Empty, Message, Method

PROTOCOL: Final = "/potluck-tests/faults/1.0.0"
CHUNK_BYTES: Final = 1 << 20
_ECHO_BYTES: Final = 1 << 20


class Content(Message, frozen=True):
    content: bytes


class Duration(Message, frozen=True):
    seconds: float


class Amount(Message, frozen=True):
    chunks: int


class Seen(Message, frozen=True):
    """The bytes that arrived at the other side: how many, and their hash."""

    total_bytes: int
    digest: bytes


class Census(Message, frozen=True):
    """The resources that a peer holds at one moment."""

    tasks: int
    file_descriptors: int
    links: int
    streams: int
    handlers: int

    def exceeds(self, before: Census) -> bool:
        """Whether more of anything is held now than before."""
        return any(getattr(self, what) > getattr(before, what) for what in self.__struct_fields__)


ECHO: Final = Method(
    PROTOCOL,
    "echo",
    Content,
    Content,
    request_limit_bytes=_ECHO_BYTES + 64,
    response_limit_bytes=_ECHO_BYTES + 64,
)
# Answers after so many seconds
LINGER: Final = Method(PROTOCOL, "linger", Duration, Empty)
# Its handler raises an error that is none of ours
BREAK: Final = Method(PROTOCOL, "break", Empty, Empty)
CENSUS: Final = Method(PROTOCOL, "census", Empty, Census)

# The opener sends chunks; the other side says at the end what it saw
SINK: Final = BulkMethod(PROTOCOL, "sink", Empty, Empty, Empty, Seen, chunk_limit_bytes=CHUNK_BYTES)
# The opener is sent so many chunks
SOURCE: Final = BulkMethod(
    PROTOCOL, "source", Amount, Empty, Empty, Empty, chunk_limit_bytes=CHUNK_BYTES
)
