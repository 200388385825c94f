"""Describes the tensors of a vector, and cuts it into parts for reducers, and parts into chunks.

    layout = Layout((Segment("embedding.weight", 4_096_000, "float16"), Segment("bias", 512)))
    cuts = cut(layout, (0.5, 0.25, 0.25))                  # part i is values cuts[i] : cuts[i + 1]
    for chunk in chunks_of(layout, cuts[0], cuts[1], CHUNK_BYTES): ...

All members of a round have the same layout. Its digest is in the signed roster, so a peer with
other tensors, another order or another codec is not in the same group. From the same layout, cuts
and chunk size all members make the same chunks, so no message describes them.

Promise: it is pure, with the same result on every machine.

Easy to get wrong: a chunk may span tensors. Neighbours with the same plain codec are one run of
values. Only a codec with blocks stops at a tensor's end, because a block would give two tensors one
scale. A chunk that its codec would make larger is sent as it is. The codec float64 is for all
tensors of a vector or for none, because it sets the type of the vector itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Annotated, Literal

import torch
from blake3 import blake3
from msgspec import Meta
from torch import Tensor

from protocols.errors import ProtocolMisuse
from protocols.moshpit.ballots import digest_of_parts
from protocols.rpc import ChunkCount, Message, chunk_header, encode
from protocols.tensors import CODECS, CodecName, NotFinite, within

LONGEST_SEGMENT_NAME = 256  # characters; parameter names of deep models have some 80
MOST_SEGMENTS = 1 << 16  # a mixture of experts has some ten thousand matrices
MOST_VALUES = 1 << 40  # 4 TiB of float32
CUT_VALUES = 1024  # cuts are at its multiples: whole blocks of every codec, and aligned memory
SMALLEST_CHUNK_BYTES = 4 << 10  # holds one block of every codec
LARGEST_CHUNK_BYTES = 1 << 20  # a transfer's limit; larger ones only make the pipeline coarser

MOST_CHUNK_VALUES = 1 << 20
"""A chunk is encoded at once, by the thread that sends: with a codec of few bits, a chunk's bytes
would hold so many values that it takes a tenth of a second."""

VALUE_BYTES = {"float32": 4, "float64": 8}  # the types of a vector
_DOMAIN = b"potluck moshpit layout 1"
_CHUNKS_DOMAIN = b"potluck moshpit chunks 1"


class Segment(Message, frozen=True):
    """One tensor of a vector: its name, its number of values, and their codec."""

    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_SEGMENT_NAME)]
    values: Annotated[int, Meta(ge=0, le=MOST_VALUES)]
    codec: CodecName = "none"

    def __post_init__(self) -> None:
        """ProtocolMisuse if no codec has this name."""
        if self.codec not in CODECS:
            raise ProtocolMisuse(
                f"{self.name} is to travel as {self.codec!r}, which is no codec.",
                advice=f"Use one of {', '.join(CODECS)}.",
            )


class Layout(Message, frozen=True, dict=True):
    """The tensors of a vector, in order."""

    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=MOST_SEGMENTS)]

    def __post_init__(self) -> None:
        """ProtocolMisuse if only a part of the vector is to travel as float64."""
        other = [segment for segment in self.segments if segment.codec != "float64"]
        if other and len(other) < len(self.segments):
            raise ProtocolMisuse(
                f"{other[0].name} has the codec {other[0].codec} in a vector of float64 values.",
                why="The whole vector is float64, or the whole vector is float32.",
                advice="Give all of its tensors the codec float64, or none of them.",
            )

    @cached_property
    def dtype(self) -> Literal["float32", "float64"]:
        """The type of the vector and its sums: float64 if that is the codec."""
        return "float64" if self.segments[0].codec == "float64" else "float32"

    @cached_property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    @cached_property
    def values(self) -> int:
        return sum(segment.values for segment in self.segments)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that are equal only for equal layouts: BLAKE3 of the canonical encoding."""
        return blake3(_DOMAIN + b"\0" + encode(self)).digest()

    def digest_in_chunks(self, chunk_bytes: int) -> bytes:
        """32 bytes that also differ if the chunks do. All members of a group must have the same."""
        sized = self.digest + chunk_bytes.to_bytes(4, "big")
        return blake3(_CHUNKS_DOMAIN + b"\0" + sized).digest()

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Stretches of values whose chunks are cut without regard to the tensors in them."""
        ends = accumulate(segment.values for segment in self.segments)
        placed = [
            Run(end - segment.values, end, segment.codec)
            for segment, end in zip(self.segments, ends, strict=True)
            if segment.values
        ]
        runs: list[Run] = []
        for codec, alike in groupby(placed, key=lambda run: run.codec):
            together = list(alike)
            if CODECS[codec].block_values == 1:
                together = [Run(together[0].start, together[-1].stop, codec)]
            runs += together
        return tuple(runs)

    def encoded_bytes(self, start: int, stop: int, chunk_bytes: int) -> int:
        """The bytes of a part on the wire, without the frames' headers."""
        return sum(chunk.encoded_bytes for chunk in chunks_of(self, start, stop, chunk_bytes))


@dataclass(frozen=True)
class Run:
    """Values `start` up to `stop` of the vector, with one codec."""

    start: int
    stop: int
    codec: CodecName


@dataclass(frozen=True, slots=True)
class Chunk:
    """The content of one frame: values `start` up to `stop` of the vector."""

    start: int
    stop: int
    codec: CodecName
    encoded_bytes: int

    @property
    def values(self) -> int:
        return self.stop - self.start

    @property
    def as_it_lies(self) -> bool:
        """Whether the encoded bytes are equal to those in the vector's memory."""
        return CODECS[self.codec].is_lossless


def cut(layout: Layout, fractions: Sequence[float]) -> tuple[int, ...]:
    """The boundaries of the parts: part i is values `cuts[i]` up to `cuts[i + 1]`.

    Proportional to the fractions, to the nearest multiple of `CUT_VALUES`; a fraction of 0 is an
    empty part. The fractions need not sum to 1.
    """
    if not fractions or not all(math.isfinite(one) and one >= 0.0 for one in fractions):
        raise ProtocolMisuse(f"A vector cannot be cut by the fractions {tuple(fractions)}.")
    total = math.fsum(fractions)
    if total <= 0.0:
        raise ProtocolMisuse("A vector cannot be cut if no member reduces any of it.")
    values = layout.values
    last = max(index for index, one in enumerate(fractions) if one > 0.0)
    cuts = [0]
    for index in range(len(fractions)):
        exact = math.fsum(fractions[: index + 1]) / total * values
        boundary = round(exact / CUT_VALUES) * CUT_VALUES if index < last else values
        cuts.append(max(cuts[-1], min(boundary, values)))
    return tuple(cuts)


def chunks_of(layout: Layout, start: int, stop: int, chunk_bytes: int) -> list[Chunk]:
    """The chunks of values `start` up to `stop`, in order; the same at every member."""
    if not 0 <= start <= stop <= layout.values:
        raise ProtocolMisuse(f"{start:,} to {stop:,} is no part of {layout.values:,} values.")
    check_chunk_bytes(chunk_bytes)
    return list(_chunks(layout, start, stop, chunk_bytes))


SMALL_PART = 8  # a part is small if the largest part is more than so many times as long
CHUNKS_OF_SMALL_PART = 32
"""A small part has about so many chunks or more, unless they would be smaller than the smallest
chunk. Only in pieces does it go as evenly beside a large one as a plan assumes (attempt.py)."""


def part_chunk_bytes(layout: Layout, values: int, longest: int, chunk_bytes: int) -> int:
    """The size of the chunks of a part of so many values, where the longest part has `longest`."""
    if values * SMALL_PART >= longest:
        return chunk_bytes
    share = values * layout.value_bytes // CHUNKS_OF_SMALL_PART
    whole = -(-share // SMALLEST_CHUNK_BYTES) * SMALLEST_CHUNK_BYTES
    return min(chunk_bytes, max(SMALLEST_CHUNK_BYTES, whole))


def check_chunk_bytes(chunk_bytes: int) -> None:
    if not SMALLEST_CHUNK_BYTES <= chunk_bytes <= LARGEST_CHUNK_BYTES:
        raise ProtocolMisuse(
            f"Chunks have {SMALLEST_CHUNK_BYTES:,} to {LARGEST_CHUNK_BYTES:,} bytes, "
            f"not {chunk_bytes:,}."
        )


def _chunks(layout: Layout, start: int, stop: int, chunk_bytes: int) -> Iterator[Chunk]:
    for run in layout.runs:
        if run.stop <= start or run.start >= stop:
            continue
        chosen = CODECS[run.codec]
        step = chunk_bytes // chosen.encoded_bytes(chosen.block_values) * chosen.block_values
        step = min(step, MOST_CHUNK_VALUES)
        end = min(run.stop, stop)
        for at in range(max(run.start, start), end, step):
            values = min(step, end - at)
            codec, size = run.codec, chosen.encoded_bytes(values)
            if size > values * layout.value_bytes:
                codec, size = "none", values * layout.value_bytes
            yield Chunk(at, at + values, codec, size)


# The values that are averaged: one flat tensor, and its layout.
#
#     vector = Vector.of(model.named_parameters(), codec="float16")
#     vector = Vector.of(gradients, codec={"embedding.weight": "blockwise-int8"})   # others: none
#     vector = Vector.of(gradients, codec="float64")         # all of it, and all sums, in float64
#     vector.check_finite()                                  # NotFinite names the tensor
#     vector.unpack(outcome.result, into=parameters)
#
# Promise: `of` copies every tensor once, from any device and floating dtype, into float32; or into
# float64 if one tensor has the codec float64, which all of them have then. `check_finite` also
# finds values that their codec could not carry, so nothing of a bad vector is ever sent.
#
# Easy to get wrong: `Vector(layout, values)` does not copy. The caller must not write to the values
# while they are averaged. If they are still on their way from a GPU, `arrive` waits for them, and
# nobody reads them before `check_finite`, which calls it.


LARGEST_AVERAGED = 1.75 * 2.0**127
"""The largest value of a vector, 2.98e38. At the very edge of float32 (3.4e38) the
rounding of a weighted sum could make an average infinite that should not be."""
_LARGEST_AVERAGED_FLOAT64 = 1.75 * 2.0**1023

LARGEST_CARRIED: Mapping[CodecName, float] = {
    name: min(codec.largest, _LARGEST_AVERAGED_FLOAT64 if name == "float64" else LARGEST_AVERAGED)
    for name, codec in CODECS.items()
}
"""The largest value that each codec carries."""

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Vector:
    """A flat tensor on the CPU, of the layout's dtype, with its layout."""

    def __init__(
        self, layout: Layout, values: Tensor, arrive: Callable[[], None] = lambda: None
    ) -> None:
        """Use these values without a copy. ProtocolMisuse if they do not fit the layout."""
        check_values(layout, values, "A vector's values")
        self.layout, self._arrive = layout, arrive
        self.values = values.detach()

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        codec: CodecName | Mapping[str, CodecName] = "none",
    ) -> Vector:
        """Copy these tensors, in this order; `codec` for all, or by name.

        Tensors that are not named have the codec none, or float64 if one tensor has that.
        """
        named = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        for name, tensor in named:
            if not tensor.dtype.is_floating_point:
                raise ProtocolMisuse(
                    f"{name} is {tensor.dtype}, which has no average.",
                    advice="Leave it out, or make it a floating-point tensor.",
                )
        layout = layout_of(((name, tensor.numel()) for name, tensor in named), codec)
        values = torch.empty(layout.values, dtype=_DTYPES[layout.dtype])
        at = 0
        for _, tensor in named:
            values[at : at + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
            at += tensor.numel()
        return Vector(layout, values)

    def check_finite(self) -> None:
        """NotFinite, with the tensor's name, if a value is not finite or beyond its codec."""
        self._arrive()
        for run in self.layout.runs:
            if not within(self.values[run.start : run.stop], LARGEST_CARRIED[run.codec]):
                raise self._not_finite(run.start, run.stop, run.codec)

    def unpack(self, values: Tensor, into: Mapping[str, Tensor]) -> None:
        """Copy averaged values into tensors of the layout's names and sizes."""
        check_values(self.layout, values, "The vector to unpack")
        if set(into) != {segment.name for segment in self.layout.segments}:
            raise ProtocolMisuse("A vector is unpacked into tensors of exactly its own names.")
        for segment, start, stop in self._places():
            target = into[segment.name]
            if target.numel() != segment.values:
                raise ProtocolMisuse(
                    f"{segment.name} has {target.numel():,} values; "
                    f"{segment.values:,} were averaged."
                )
            with torch.no_grad():
                target.copy_(values[start:stop].view(target.shape))

    def _places(self) -> Iterator[tuple[Segment, int, int]]:
        at = 0
        for segment in self.layout.segments:
            yield segment, at, at + segment.values
            at += segment.values

    def _not_finite(self, start: int, stop: int, codec: CodecName) -> NotFinite:
        """The error for this stretch, with the first bad tensor and the place in it."""
        largest = LARGEST_CARRIED[codec]
        for segment, first, last in self._places():
            values = self.values[first:last]
            if not start <= first < stop or within(values, largest):
                continue
            bad = ~(values.abs() <= largest)
            at = int(torch.nonzero(bad)[0].item())
            return NotFinite(
                f"{segment.name} has {int(bad.sum().item()):,} values that {codec} cannot carry; "
                f"the first is {values[at].item()!r} at {at:,} of {segment.values:,}.",
                why="The loss has diverged, or the values are too large for this codec.",
                advice="Hold these values back, or choose a codec with a wider range.",
            )
        raise AssertionError("a value that is not finite is in one of the tensors")


def layout_of(
    named: Iterable[tuple[str, int]], codec: CodecName | Mapping[str, CodecName] = "none"
) -> Layout:
    """The layout of tensors with these names and sizes; ProtocolMisuse as `Vector.of`."""
    sizes = list(named)
    if isinstance(codec, str):
        return Layout(tuple(Segment(name, values, codec) for name, values in sizes))
    unknown = set(codec) - {name for name, _ in sizes}
    if unknown:
        raise ProtocolMisuse(f"Codecs are given for {sorted(unknown)}, which are not here.")
    others: CodecName = "float64" if "float64" in codec.values() else "none"
    return Layout(tuple(Segment(name, values, codec.get(name, others)) for name, values in sizes))


def check_values(layout: Layout, values: Tensor, what: str) -> None:
    """ProtocolMisuse unless the values have the layout's number and dtype, in one piece."""
    if values.dtype is not _DTYPES[layout.dtype]:
        raise ProtocolMisuse(
            f"{what} must be {layout.dtype}, not {values.dtype}.",
            advice="float64 values have the codec float64; all others are averaged in float32.",
        )
    if values.device.type != "cpu" or not values.is_contiguous():
        raise ProtocolMisuse(f"{what} must lie in one piece in the CPU's memory.")
    if values.dim() != 1 or values.numel() != layout.values:
        raise ProtocolMisuse(
            f"{what} must be {layout.values:,} in one dimension, as the layout says, "
            f"not {tuple(values.shape)}."
        )


# How the result of a round was cut into parts and chunks. With it, a peer can check the digest.
#
#     for part in cut.parts:
#         digest = PartHash()
#         for chunk in cut.chunks_of(part, layout):  digest.add(encoded bytes of the chunk)
#     digest_of_parts({part.reducer: digest}) == committed.digest
#
# A result's digest is made of its parts' digests, and a part's digest of the frames in which its
# reducer sent it (docs/protocols.md, "The exchange of a round"). So a peer that was in the round
# can show the result to one that was not, which need not trust it.
#
# Easy to get wrong: the hash is over the encoded chunks with their frames' headers. Members hold
# decoded values. Encoding them again gives the same bytes with every codec, unless a reducer sent
# bytes that no honest one would (a block whose scale is not its largest value's). Such a result
# cannot be shown to other peers; the digest reveals that.


__all__ = ["PartCut", "PartHash", "ResultCut", "SentParts", "digest_of_parts", "result_cut"]


@dataclass(frozen=True)
class PartCut:
    """Values `start` up to `stop`, which the member at this place of the roster has reduced."""

    reducer: int
    start: int
    stop: int


@dataclass(frozen=True)
class ResultCut:
    """The parts of a result that are not empty, in the order of the values."""

    parts: tuple[PartCut, ...]
    chunk_bytes: int

    def chunks_of(self, part: PartCut, layout: Layout) -> list[Chunk]:
        """The chunks in which this part was sent."""
        longest = max(one.stop - one.start for one in self.parts)
        size = part_chunk_bytes(layout, part.stop - part.start, longest, self.chunk_bytes)
        return chunks_of(layout, part.start, part.stop, size)

    def covers(self, layout: Layout) -> bool:
        """Whether it has each value of such a vector once, and no reducer twice."""
        stops = [0, *(one.stop for one in self.parts)]
        starts = [*(one.start for one in self.parts), layout.values]
        reducers = [one.reducer for one in self.parts]
        return (
            stops == starts
            and all(one.start < one.stop for one in self.parts)
            and sorted(set(reducers)) == reducers
        )


@dataclass(frozen=True)
class SentParts:
    """How a member's own values went to the others: all parts of a cut but the one that it has
    reduced itself. `own`: its place in the roster."""

    cut: ResultCut
    own: int

    def chunks(self, layout: Layout) -> Iterator[Chunk]:
        """The chunks in which they were encoded, in order."""
        for part in self.cut.parts:
            if part.reducer != self.own:
                yield from self.cut.chunks_of(part, layout)


def result_cut(members: Sequence[int], cuts: Sequence[int], chunk_bytes: int) -> ResultCut:
    """The cut of an exchange of these members: part i is values `cuts[i]` up to `cuts[i + 1]`."""
    parts = (PartCut(member, cuts[place], cuts[place + 1]) for place, member in enumerate(members))
    return ResultCut(tuple(one for one in parts if one.start < one.stop), chunk_bytes)


class PartHash:
    """The digest of one part, chunk by chunk."""

    def __init__(self) -> None:
        self._count = ChunkCount(hashed=True)

    def add(self, encoded: memoryview) -> None:
        self._count.add(chunk_header(len(encoded)), encoded)

    @property
    def digest(self) -> bytes:
        return self._count.digest
