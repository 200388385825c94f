"""The part that this peer reduces: weighted sums, and the encoded averages that all members get.

    reduction = Reduction(plan, source, result)
    reduction.add(sender, number, encoded)                 # sum += w_i / W · x_i
    await reduction.averaged(number); transfer.send_chunk(reduction.encoded(number))

DeDLOC's equation for a part: (Σ w_i x_i) / Σ w_i, where no weight exceeds the limit for one member
(`ExchangePlan.shares`). The weights are first scaled to sum to 1, so the last addition finishes a
chunk. A sum is kept in the vector's type (float32 or float64), in the place of `result` where the
average belongs. So senders may be far apart without a window, and a slow reader holds up no other.
A finished chunk is encoded once. Its bytes wait *in the same place* until they were sent to all
members, and are then decoded there. So all members, this one included, decode the same bytes, and
the only other memory is one scratch chunk.

Easy to get wrong: chunks are finished in order, because each sender's chunks come in order. Only
`averaged` awaits; nothing else here does while it changes something.
"""

from __future__ import annotations

import numpy as np
import trio
from torch import Tensor

from protocols.errors import MalformedMessage
from protocols.moshpit.exchange import ExchangePlan
from protocols.moshpit.layout import Chunk
from protocols.rpc import ChunkCount, chunk_header
from protocols.tensors import accumulate, add_received, decode_into, encode_into, raw_bytes


class NotFiniteReceived(MalformedMessage):
    """A member sent values that are not finite, or that an honest sender would not send."""


class Reduction:
    """The sums of our part, and its averages. `source` is only read, `result` is written."""

    def __init__(self, plan: ExchangePlan, source: Tensor, result: Tensor) -> None:
        place = plan.my_place
        self._result = result
        self._bytes = raw_bytes(result)
        self._own, self._sums = source.detach().numpy(), result.detach().numpy()
        self._dtype, self._value_bytes = plan.layout.dtype, plan.layout.value_bytes
        self._shares = plan.shares
        self._me = plan.me
        self.chunks = plan.chunks_at(place)
        senders = sum(1 for one in plan.members if one.weight > 0.0 and one.index != plan.me)
        self._missing = [senders] * len(self.chunks)
        self._begun = 0  # chunks whose sum has our own values
        self._untaken = [len(plan.members) - 1] * len(self.chunks)
        self._scratch = bytearray(max((chunk.encoded_bytes for chunk in self.chunks), default=0))
        self.finished = 0  # chunks that are averaged and encoded
        self.count = ChunkCount(hashed=True)
        self._progress = trio.Event()

    @property
    def waits_for_nobody(self) -> bool:
        """Whether all values of the next chunk are here, because no other member brings any."""
        return not self.is_finished and not self._missing[self.finished]

    @property
    def is_finished(self) -> bool:
        return self.finished == len(self.chunks)

    @property
    def digest(self) -> bytes:
        """The digest for the statement about this part, once it is finished."""
        return self.count.digest

    def add(self, member: int, number: int, encoded: memoryview) -> None:
        """Add a member's values of one chunk. If they are bad, add nothing: NotFiniteReceived."""
        chunk = self.chunks[number]
        self._begin(number)
        try:
            if chunk.as_it_lies:
                add_received(self._sums[chunk.start : chunk.stop], encoded, self._shares[member])
            else:
                accumulate(
                    self._sum(chunk),
                    chunk.codec,
                    encoded,
                    weight=self._shares[member],
                    dtype=self._dtype,
                )
        except MalformedMessage as error:
            raise NotFiniteReceived(error.what) from None
        self._missing[number] -= 1
        if not self._missing[number]:
            self.finish_due()

    def finish_due(self, most: int | None = None) -> None:
        """Encode the chunks that have all their values, or at most `most` of them."""
        stop = len(self.chunks) if most is None else min(self.finished + most, len(self.chunks))
        before = self.finished
        while self.finished < stop and not self._missing[self.finished]:
            self._finish(self.finished)
        if self.finished > before:
            self._progress.set()
            self._progress = trio.Event()

    async def averaged(self, number: int) -> None:
        """Wait until a chunk is averaged."""
        while self.finished <= number:
            await self._progress.wait()

    def encoded(self, number: int) -> memoryview:
        """The bytes of an averaged chunk, until all members have taken them."""
        return self._place(self.chunks[number])

    def taken(self, number: int) -> None:
        """An averaged chunk was sent to a member. After the last one, our own result has it."""
        self._untaken[number] -= 1
        if not self._untaken[number]:
            self._settle(self.chunks[number])

    def _begin(self, number: int) -> None:
        """Our own values are the first in every sum; with weight 0 they are zeros."""
        while self._begun <= number:
            chunk = self.chunks[self._begun]
            share = self._shares[self._me]
            sums = self._sums[chunk.start : chunk.stop]
            if share > 0.0:
                np.multiply(self._own[chunk.start : chunk.stop], share, out=sums)
            else:
                sums.fill(0.0)
            self._begun += 1

    def _finish(self, number: int) -> None:
        self._begin(number)
        chunk = self.chunks[number]
        place = self._place(chunk)
        if not chunk.as_it_lies:
            encode_into(self._sum(chunk), chunk.codec, self._scratch, name="the average")
            place[:] = memoryview(self._scratch)[: chunk.encoded_bytes]
        self.count.add(chunk_header(chunk.encoded_bytes), place)
        self.finished = number + 1
        if not self._untaken[number]:
            self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        if chunk.as_it_lies:
            return
        encoded = memoryview(self._scratch)[: chunk.encoded_bytes]
        encoded[:] = self._place(chunk)
        decode_into(self._sum(chunk), chunk.codec, encoded, self._dtype)

    def _sum(self, chunk: Chunk) -> Tensor:
        return self._result[chunk.start : chunk.stop]

    def _place(self, chunk: Chunk) -> memoryview:
        start = self._value_bytes * chunk.start
        return self._bytes[start : start + chunk.encoded_bytes]
