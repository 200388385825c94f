"""The bench's own protocol: real bytes poured from one node into a buffer of another.

`/potluck/bench/1.0.0`, bulk method `pour`. The sender takes its chunks from a block of random
bytes that both ends make from the same seed; the receiver reads every chunk into one buffer that
it uses again, as a reducer does. When the opening asks for it, each chunk is compared with what
it must be: the bench does that once before it measures.

Only the bench's processes serve this; an ordinary node does not.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

import trio

from protocols.errors import MalformedMessage
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.rpc import BulkMethod, Empty, Message, Rpc, Transfer

BENCH_PROTOCOL = "/potluck/bench/1.0.0"
CHUNK_BYTES = 1 << 20
BLOCK_CHUNKS = 8  # distinct chunks before they repeat: more than any cache in the path keeps apart
OPEN_SECONDS = 10.0


class PourOpening(Message, frozen=True):
    """`stop_after_chunks`: after these, stop reading and keep the stream open; 0: never."""

    check: bool = False
    stop_after_chunks: int = 0


class PourClosed(Message, frozen=True):
    """How much arrived."""

    bytes_received: int


POUR = BulkMethod(
    BENCH_PROTOCOL,
    "pour",
    opening=PourOpening,
    accepted=Empty,
    closing=Empty,
    closed=PourClosed,
    chunk_limit_bytes=CHUNK_BYTES,
)


@dataclass(frozen=True)
class Pouring:
    """One transfer, in seconds of a clock that all processes of this machine share."""

    began: float
    ended: float
    bytes_sent: int


def make_block() -> list[bytes]:
    """The chunks that are sent in turn; the same in every process."""
    source = random.Random(20_240_607)
    return [source.randbytes(CHUNK_BYTES) for _ in range(BLOCK_CHUNKS)]


class Basin:
    """The receiver: one buffer, used again for every chunk of a transfer."""

    def __init__(self, block: list[bytes]) -> None:
        self._block = block

    async def receive(
        self, _caller: Caller, transfer: Transfer[Empty, PourClosed, Empty], opening: PourOpening
    ) -> None:
        await transfer.accept(Empty())
        buffer = bytearray(CHUNK_BYTES)
        chunks = 0
        while (size := await transfer.receive_chunk_into(buffer)) is not None:
            if opening.check and buffer[:size] != self._block[chunks % BLOCK_CHUNKS]:
                raise MalformedMessage(f"Chunk {chunks} is not what was sent.")
            chunks += 1
            if chunks == opening.stop_after_chunks:
                await trio.sleep_forever()  # ends when the stream does, or the process
        await transfer.finish(PourClosed(transfer.bytes_received))


async def pour(
    rpc: Rpc,
    peer: PeerId,
    block: list[bytes],
    chunks: int,
    *,
    check: bool = False,
    bytes_per_second: float = math.inf,
) -> Pouring:
    """Send this many chunks, no faster than that.

    Timed from before the stream is opened until the last one arrived.
    """
    began = time.monotonic()
    async with rpc.open_bulk(peer, POUR, PourOpening(check=check), timeout=OPEN_SECONDS) as out:
        first = trio.current_time()
        for number in range(chunks):
            await trio.sleep_until(first + number * CHUNK_BYTES / bytes_per_second)
            await out.send_chunk(block[number % BLOCK_CHUNKS])
        closed = await out.finish(Empty())
    ended = time.monotonic()
    if closed.bytes_received != chunks * CHUNK_BYTES:
        raise MalformedMessage(f"{closed.bytes_received:,} bytes arrived of {chunks} chunks.")
    return Pouring(began, ended, closed.bytes_received)


async def pour_until_stuck(
    rpc: Rpc, peer: PeerId, block: list[bytes], chunks: int, patience_seconds: float
) -> int:
    """Send to a reader that stops; how many chunks left us before nothing moved any more."""
    sent = 0
    opening = PourOpening(stop_after_chunks=chunks // 4)  # by then windows have grown
    async with rpc.open_bulk(peer, POUR, opening, timeout=OPEN_SECONDS) as out:
        with trio.CancelScope() as patience:
            for number in range(chunks):
                patience.deadline = trio.current_time() + patience_seconds
                await out.send_chunk(block[number % BLOCK_CHUNKS])
                sent += 1
    return sent
