"""`/potluck/ping/1.0.0`: is a peer there, how fast is it, what does the link carry.

`echo` answers with what it was sent. Three transfers measure a link: `sink` takes chunks,
`source` gives chunks, `exchange` gives back a chunk for each that it takes, both ways at once.
`potluck ping` and `potluck bench transport` are made of these.

Strangers may use what a node serves, so nothing here gives more than it takes: an echo is as long
as its request, `exchange` sends a chunk only after one came, and `source`, which could be used to
spend somebody's upload, is refused unless the node was started to be measured. What a transfer
moves is limited, and so is how many run at once.

Easy to get wrong: these measure the path through our own code as well, which is what a user gets,
and not the bare link.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import trio
from msgspec import Meta

from protocols.bulk import Transfer
from protocols.errors import Busy, LimitExceeded, Refused
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.messages import Count, Empty, Message
from protocols.method import BulkMethod, Method
from protocols.rpc import Rpc

PROTOCOL = "/potluck/ping/1.0.0"

LONGEST_ECHO_BYTES = 4096  # enough to see how size matters, small enough not to be a transfer
CHUNK_BYTES = 1 << 20


class EchoRequest(Message, frozen=True, gc=False):
    payload: Annotated[bytes, Meta(max_length=LONGEST_ECHO_BYTES)] = b""


class EchoResponse(Message, frozen=True, gc=False):
    payload: Annotated[bytes, Meta(max_length=LONGEST_ECHO_BYTES)] = b""


class SourceOpening(Message, frozen=True, gc=False):
    """How much to send, in chunks of which size (the last one may be shorter)."""

    total_bytes: Count
    chunk_bytes: Annotated[int, Meta(ge=1, le=CHUNK_BYTES)] = CHUNK_BYTES


class Moved(Message, frozen=True, gc=False):
    """The closing message: what this side received."""

    total_bytes: Count


_ECHO_LIMIT_BYTES = LONGEST_ECHO_BYTES + 16

ECHO = Method(PROTOCOL, "echo", EchoRequest, EchoResponse, _ECHO_LIMIT_BYTES, _ECHO_LIMIT_BYTES)
SINK = BulkMethod(PROTOCOL, "sink", Empty, Empty, Empty, Moved, CHUNK_BYTES, 256)
SOURCE = BulkMethod(PROTOCOL, "source", SourceOpening, Empty, Moved, Empty, CHUNK_BYTES, 256)
EXCHANGE = BulkMethod(PROTOCOL, "exchange", Empty, Empty, Moved, Moved, CHUNK_BYTES, 256)


@dataclass(frozen=True)
class PingLimits:
    """What this node gives to be measured.

    `source_bytes` is the most that one `source` transfer gives; 0 refuses them all.
    """

    bytes_per_transfer: int = 256 << 20
    source_bytes: int = 0
    transfers_at_once: int = 2


FOR_BENCHMARKS = PingLimits(bytes_per_transfer=1 << 40, source_bytes=1 << 40, transfers_at_once=64)
"""For a node that was started to be measured, by peers that one trusts."""


async def ping(rpc: Rpc, peer: PeerId, payload: bytes = b"", *, timeout: float) -> float:
    """One echo; the seconds that it took, connecting included when there was no stream yet."""
    start = trio.current_time()
    await rpc.call(peer, ECHO, EchoRequest(payload), timeout=timeout)
    return trio.current_time() - start


def serve_ping(rpc: Rpc, limits: PingLimits | None = None) -> None:
    """Answer the ping protocol on this node."""
    handlers = PingHandlers(limits or PingLimits())
    rpc.serve(ECHO, handlers.echo)
    rpc.serve_bulk(SINK, handlers.sink)
    rpc.serve_bulk(SOURCE, handlers.source)
    rpc.serve_bulk(EXCHANGE, handlers.exchange)


class PingHandlers:
    """The serving side. Invariant: `_open` is how many transfers are running."""

    def __init__(self, limits: PingLimits) -> None:
        self._limits = limits
        self._open = 0

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._open >= self._limits.transfers_at_once:
            raise Busy(
                f"This node is being measured by {self._open} others already.",
                advice="Try again in a minute.",
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def _check_total(self, transfer: Transfer[Empty, Moved, Any]) -> None:
        if transfer.bytes_received > self._limits.bytes_per_transfer:
            raise LimitExceeded(
                f"This node takes {self._limits.bytes_per_transfer:,} bytes in one measurement."
            )

    def echo(self, _caller: Caller, request: EchoRequest) -> EchoResponse:
        return EchoResponse(request.payload)

    async def sink(
        self, _caller: Caller, transfer: Transfer[Empty, Moved, Empty], _opening: Empty
    ) -> None:
        with self._one_more():
            await transfer.accept(Empty())
            buffer = bytearray(CHUNK_BYTES)
            while await transfer.receive_chunk_into(buffer) is not None:
                self._check_total(transfer)
            await transfer.finish(Moved(transfer.bytes_received))

    async def source(
        self, _caller: Caller, transfer: Transfer[Empty, Empty, Moved], opening: SourceOpening
    ) -> None:
        if opening.total_bytes > self._limits.source_bytes:
            raise Refused(
                f"This node does not send {opening.total_bytes:,} bytes for a measurement.",
                why=f"It was started with a limit of {self._limits.source_bytes:,}.",
                advice="Measure with an exchange, or ask its owner to start it for benchmarks.",
            )
        with self._one_more():
            await transfer.accept(Empty())
            zeros = memoryview(bytes(opening.chunk_bytes))
            left = opening.total_bytes
            while left:
                size = min(left, len(zeros))
                await transfer.send_chunk(zeros[:size])
                left -= size
            await transfer.finish(Empty())

    async def exchange(
        self, _caller: Caller, transfer: Transfer[Empty, Moved, Moved], _opening: Empty
    ) -> None:
        with self._one_more():
            await transfer.accept(Empty())
            buffer = memoryview(bytearray(CHUNK_BYTES))
            while (size := await transfer.receive_chunk_into(buffer)) is not None:
                self._check_total(transfer)
                await transfer.send_chunk(buffer[:size])
            await transfer.finish(Moved(transfer.bytes_received))
