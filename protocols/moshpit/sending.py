"""Towards one reducer: our values of its part out, its averages back, on the same stream.

Where nothing is encoded (codecs none and float64) both directions are copies of memory: chunks are
sent from where they lie in `source`, and averages are received into where they belong in `result`.

Easy to get wrong: the two directions must go on at the same time, or the two sides could each
wait for the other to read. Behind a closing message nothing can say that we are alive, so ours
follows when our whole result is here, also from the other reducers. And when a transfer breaks,
what explains it is read, not sent; so the sending task leaves the verdict to the receiving one for
a moment.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import trio
from torch import Tensor

from protocols.bulk import LAST_WORD_SECONDS, Transfer
from protocols.errors import Busy, MalformedMessage, Unreachable
from protocols.messages import Empty
from protocols.moshpit.attempt import Attempt
from protocols.moshpit.ballots import Statement
from protocols.moshpit.exchange import Participant
from protocols.moshpit.layout import Chunk
from protocols.moshpit.opening_time import LONGEST_OPENING_SECONDS, OPEN_SECONDS
from protocols.moshpit.part_messages import (
    ALIVE_SECONDS,
    PART,
    PartClosed,
    PartTaken,
    opening_for,
)
from protocols.moshpit.reducing import NotFiniteReceived
from protocols.moshpit.statements import counts
from protocols.rpc import Rpc
from protocols.tensor_codecs import is_finite
from protocols.tensors import decode_into, encode_into, raw_bytes

BUSY_SECONDS = 0.5  # until a reducer that had no room is asked again

SenderTransfer = Transfer[Empty, PartTaken, PartClosed]


class PartExchange:
    """What we have to do with one reducer."""

    def __init__(self, attempt: Attempt, reducer: Participant) -> None:
        plan = attempt.plan
        place = plan.place_of(reducer.index)
        self._attempt, self._reducer = attempt, reducer
        self._steps = attempt.steps_to(reducer.index)
        self._opening = opening_for(plan, place)
        self._chunks = plan.chunks_at(place)
        self._brings_data = plan.member_of(plan.me).weight > 0.0
        self._received = trio.Event()  # all, to the closing message, or a reason why not

    async def run(self, rpc: Rpc) -> None:
        """All of it. What goes wrong ends the attempt; nothing is raised."""
        attempt, reducer = self._attempt, self._reducer
        with attempt.blaming(reducer.index, opening=True):
            async with AsyncExitStack() as opened:
                transfer = await self._open(rpc, opened)
                attempt.opened(reducer.index)
                with attempt.transferring(reducer.index, transfer):
                    await self._exchange(transfer)

    async def _exchange(self, transfer: SenderTransfer) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, transfer)
            with self._attempt.blaming(self._reducer.index):
                await self._receive_averages(transfer)
            self._received.set()

    async def _open(self, rpc: Rpc, opened: AsyncExitStack) -> SenderTransfer:
        """An accepted transfer. A reducer that is busy is asked again for a while."""
        began = self._attempt.began
        while True:
            left = began + LONGEST_OPENING_SECONDS - trio.current_time()
            opening = rpc.open_bulk(self._reducer.peer, PART, self._opening, timeout=left)
            try:
                return await opened.enter_async_context(opening)
            except Busy:
                if began + OPEN_SECONDS - trio.current_time() <= BUSY_SECONDS:
                    raise
            await trio.sleep(BUSY_SECONDS)

    async def _send(self, transfer: SenderTransfer) -> None:
        with self._attempt.blaming(self._reducer.index):
            try:
                if self._brings_data:
                    await self._send_values(transfer)
                await until_whole(self._attempt, transfer)
                await transfer.send_closing(PartTaken(self._attempt.result_digest))
            except Unreachable:
                with trio.move_on_after(LAST_WORD_SECONDS):
                    await self._received.wait()
                raise

    async def _send_values(self, transfer: SenderTransfer) -> None:
        source = self._attempt.source
        sending = self._attempt.meter.sending_to(self._reducer.peer)
        memory = raw_bytes(source)
        buffer = bytearray(_largest_encoded(self._chunks))
        with self._attempt.pace.values(self._steps, len(self._chunks)) as stream:
            for number, chunk in enumerate(self._chunks):
                await stream.turn(number, transfer)
                if chunk.as_it_lies:
                    encoded = self._place(memory, chunk)
                else:
                    values = source[chunk.start : chunk.stop]
                    encode_into(values, chunk.codec, buffer, name="a tensor of this peer")
                    encoded = memoryview(buffer)[: chunk.encoded_bytes]
                with sending:
                    await transfer.send_chunk(encoded)
                sending.bytes += chunk.encoded_bytes
                self._attempt.values_to[self._reducer.index].advanced()

    async def _receive_averages(self, transfer: SenderTransfer) -> None:
        attempt, reducer = self._attempt, self._reducer
        receiving = attempt.meter.receiving_from(reducer.peer)
        memory = raw_bytes(attempt.result)
        buffer = bytearray(_largest_encoded(self._chunks))
        for number, chunk in enumerate(self._chunks):
            check_size(await transfer.next_chunk_bytes(), chunk, number)
            place = self._place(memory, chunk) if chunk.as_it_lies else memoryview(buffer)
            encoded = place[: chunk.encoded_bytes]
            with receiving:
                await transfer.receive_chunk_into(encoded)
            receiving.bytes += chunk.encoded_bytes
            _take(attempt.result[chunk.start : chunk.stop], chunk, encoded)
            attempt.averages_of[reducer.index].advanced()
        attempt.has_part(reducer.index, transfer.received_digest)
        check_no_more(await transfer.next_chunk_bytes(), len(self._chunks))
        closed = await transfer.receive_closing()
        self._take_statement(transfer.received_digest, closed)

    def _place(self, memory: memoryview, chunk: Chunk) -> memoryview:
        size = self._attempt.plan.layout.value_bytes
        return memory[size * chunk.start : size * chunk.stop]

    def _take_statement(self, digest: bytes, closed: PartClosed) -> None:
        attempt, plan, reducer = self._attempt, self._attempt.plan, self._reducer
        statement = Statement(reducer.index, digest, closed.signature)
        if not counts(reducer.peer, plan.round_id, plan.ballot, statement):
            attempt.suspect(
                reducer.index, "bad_statement", "It did not sign the averages that it sent."
            )
            return
        attempt.statements[reducer.index] = statement
        attempt.told(reducer.index, closed.result)
        told = min(closed.busy_ms / 1000.0, trio.current_time() - attempt.began)
        attempt.meter.sending_to(reducer.peer).told_seconds = told


async def until_whole(attempt: Attempt, transfer: Transfer[Any, Any, Any]) -> None:
    """Keep our direction open until our whole result is here, so that ALIVE can be said."""
    while not attempt.whole.is_set():
        await transfer.say_alive()
        with trio.move_on_after(ALIVE_SECONDS):
            await attempt.whole.wait()


def check_size(size: int | None, chunk: Chunk, number: int) -> None:
    """MalformedMessage unless the chunk that comes next has the only size that it may have."""
    if size is None:
        raise MalformedMessage(f"The chunks end after {number:,}, before the part does.")
    if size != chunk.encoded_bytes:
        raise MalformedMessage(
            f"Chunk {number:,} came with {size:,} bytes; {chunk.values:,} values in {chunk.codec} "
            f"have {chunk.encoded_bytes:,}."
        )


def check_no_more(size: int | None, chunks: int) -> None:
    if size is not None:
        raise MalformedMessage(f"More chunks came than the {chunks:,} that the part has.")


def _take(destination: Tensor, chunk: Chunk, encoded: memoryview) -> None:
    """Averages into our result; where nothing is encoded they are there already."""
    if chunk.as_it_lies:
        if not is_finite(destination):
            raise NotFiniteReceived("An average came with values that are not finite.")
        return
    try:
        decode_into(destination, chunk.codec, encoded, "float32")
    except MalformedMessage as error:
        raise NotFiniteReceived(error.what) from None


def _largest_encoded(chunks: list[Chunk]) -> int:
    """Room for any chunk that does not go as it lies."""
    return max((one.encoded_bytes for one in chunks if not one.as_it_lies), default=0)
