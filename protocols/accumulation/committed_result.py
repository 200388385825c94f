"""What a step was made of, so that somebody else can make the same step later.

    made = Made("step", committed.digest, committed.cut)
    result = CommittedResult.encoded_from(before, made, values, layouts)     # at who was there
    result.after                            # epoch and history of who has made this step
    steps.apply(result.values(layouts))     # at who was not: the same bits, so the same step

There are three kinds: the average that a step was made with; a lone peer's own gradients, in the
same form; and averaged parameters. They are kept and sent as the round has sent them, encoded.

Promises: `proven_digest` is that of the bytes that are here, and the history after a step is a hash
over the one before and that digest. So whoever knows the history of the run needs to believe nobody
about any of its steps.

Easy to get wrong: the digest is that of the encoded bytes, part by part as they were reduced
(moshpit/result_cut.py); a lone step has one part and no codec.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from blake3 import blake3
from torch import Tensor

from protocols.accumulation.forks import Lineage
from protocols.accumulation.history import history_after_parameters, next_history
from protocols.accumulation.state_messages import ResultKind
from protocols.errors import PotluckError
from protocols.moshpit.layout import Chunk, Layout, Segment
from protocols.moshpit.result_cut import PartCut, PartHash, ResultCut, digest_of_parts
from protocols.moshpit.settings import CHUNK_BYTES
from protocols.tensors import decode_into, encode_into, raw_bytes

_LONE = b"potluck lone step 1\0"

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Made:
    """How a result came about. `nonce`: of a lone step, so that nobody else has its digest."""

    kind: ResultKind
    digest: bytes
    cut: ResultCut | None
    nonce: bytes = b""


@dataclass(frozen=True)
class ResultLayouts:
    """How the values of a run's results lie: in rounds of steps, and of parameters."""

    exchanged: Layout
    parameters: Layout

    def of(self, kind: ResultKind) -> Layout:
        match kind:
            case "step":
                return self.exchanged
            case "lone step":
                return _not_encoded(self.exchanged)
            case "parameters":
                return self.parameters


@dataclass(frozen=True, eq=False)
class CommittedResult:
    """Invariant: `cut` covers the layout of its kind, and `memory` has its chunks' bytes."""

    before: Lineage
    kind: ResultKind
    digest: bytes
    cut: ResultCut
    nonce: bytes
    memory: memoryview

    @staticmethod
    def encoded_from(
        before: Lineage, made: Made, values: Tensor, layouts: ResultLayouts
    ) -> CommittedResult | None:
        """A copy, as it was sent; None of what cannot be encoded once more."""
        layout, cut = layouts.of(made.kind), made.cut
        if cut is None or not cut.covers(layout):
            return None
        memory, end = memoryview(bytearray(encoded_bytes(layout, cut))), 0
        try:
            for chunk in chunks(layout, cut):
                place = memory[end : end + chunk.encoded_bytes]
                encode_into(values[chunk.start : chunk.stop], chunk.codec, place, name="the result")
                end += chunk.encoded_bytes
        except PotluckError:
            return None
        return CommittedResult(before, made.kind, made.digest, cut, made.nonce, memory)

    @property
    def after(self) -> Lineage:
        return lineage_after(self.before, self.kind, self.digest)

    def values(self, layouts: ResultLayouts) -> Tensor:
        """Decoded: what all members of the round have had. MalformedMessage if it is not finite."""
        layout = layouts.of(self.kind)
        values, end = torch.empty(layout.values, dtype=_DTYPES[layout.dtype]), 0
        for chunk in chunks(layout, self.cut):
            place = self.memory[end : end + chunk.encoded_bytes]
            decode_into(values[chunk.start : chunk.stop], chunk.codec, place, layout.dtype)
            end += chunk.encoded_bytes
        return values

    def part_digests(self, layouts: ResultLayouts) -> dict[int, bytes]:
        """Of the bytes that are here. Its cost is that of hashing."""
        layout, digests, end = layouts.of(self.kind), {}, 0
        for part in self.cut.parts:
            digest = PartHash()
            for chunk in part.chunks(layout, self.cut.chunk_bytes):
                digest.add(self.memory[end : end + chunk.encoded_bytes])
                end += chunk.encoded_bytes
            digests[part.reducer] = digest.digest
        return digests


def lineage_after(before: Lineage, kind: ResultKind, digest: bytes) -> Lineage:
    """Where a peer is that was there, and has taken over a result with this digest."""
    if kind == "parameters":
        history = history_after_parameters(before.history, before.epoch, digest)
        return Lineage(before.epoch, history)
    return Lineage(before.epoch + 1, next_history(before.history, before.epoch, digest))


def proven_digest(kind: ResultKind, nonce: bytes, part_digests: dict[int, bytes]) -> bytes:
    """The digest of the result whose parts have these."""
    digest = digest_of_parts(part_digests)
    return blake3(_LONE + nonce + digest).digest() if kind == "lone step" else digest


def lone_step(values: Tensor, layouts: ResultLayouts, nonce: bytes) -> Made:
    """What a peer that is alone makes its step of. `nonce`: NONCE_BYTES by chance, so that it makes
    a history of its own."""
    layout = layouts.of("lone step")
    cut = ResultCut((PartCut(0, 0, layout.values),), CHUNK_BYTES)
    digest, bytes_of = PartHash(), raw_bytes(values)
    for chunk in chunks(layout, cut):
        size = layout.value_bytes
        digest.add(bytes_of[size * chunk.start : size * chunk.stop])
    return Made("lone step", proven_digest("lone step", nonce, {0: digest.digest}), cut, nonce)


def chunks(layout: Layout, cut: ResultCut) -> Iterable[Chunk]:
    """The chunks of a result, in the order in which they are sent and lie in memory."""
    for part in cut.parts:
        yield from part.chunks(layout, cut.chunk_bytes)


def encoded_bytes(layout: Layout, cut: ResultCut) -> int:
    """How much memory a result takes."""
    return sum(layout.encoded_bytes(part.start, part.stop, cut.chunk_bytes) for part in cut.parts)


def usual_bytes(layouts: ResultLayouts) -> int:
    """How much a step's result takes, whatever it is cut into, but for a few scales."""
    layout = layouts.exchanged
    return layout.encoded_bytes(0, layout.values, CHUNK_BYTES)


def _not_encoded(layout: Layout) -> Layout:
    codec: Literal["none", "float64"] = "float64" if layout.dtype == "float64" else "none"
    return Layout(tuple(Segment(one.name, one.values, codec) for one in layout.segments))
