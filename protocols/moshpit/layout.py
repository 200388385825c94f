"""What a vector is made of, and where it is cut: into parts for reducers, and parts into chunks.

    layout = Layout((Segment("embedding.weight", 4_096_000, "float16"), Segment("bias", 512)))
    cuts = cut(layout, (0.5, 0.25, 0.25))                  # part i is values cuts[i] : cuts[i + 1]
    for chunk in chunks_of(layout, cuts[0], cuts[1], CHUNK_BYTES): ...

All members of a round hold the same layout; its digest is in the signed roster, so whoever has
other tensors, another order or another codec is not in the same group. From the same layout, cuts
and chunk size everybody makes the same chunks: nothing about them travels.

Promise: pure; no torch (the plan of a round and the roster stand on this), and the same result on
every machine.

Easy to get wrong: a chunk may span tensors. Neighbours with the same plain codec are one run of
values; only blockwise-int8 stops at a tensor's end, where a block would give two tensors one
scale. And a chunk that int8 would make larger than it is goes as it is. The codec float64 is for
all tensors of a vector or for none: it says what the vector itself consists of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Annotated, Literal

from blake3 import blake3
from msgspec import Meta

from protocols.errors import ProtocolMisuse
from protocols.messages import Message, encode

CodecName = Literal["none", "float64", "float16", "bfloat16", "blockwise-int8"]
"""As in protocols/tensors.py, which may not be imported here: it brings torch."""

LONGEST_SEGMENT_NAME = 256  # characters; parameter names of deep models have some 80
MOST_SEGMENTS = 1 << 16  # a mixture of experts with all its matrices has some ten thousand
MOST_VALUES = 1 << 40  # 4 TiB of float32
CUT_VALUES = 1024  # cuts fall on its multiples: whole int8 blocks, and aligned memory
SMALLEST_CHUNK_BYTES = 4 << 10  # holds one block of every codec
LARGEST_CHUNK_BYTES = 1 << 20  # a transfer's limit; larger ones only make the pipeline coarser

VALUE_BYTES = {"float32": 4, "float64": 8}  # what a vector consists of
_PLAIN_BYTES = {"none": 4, "float64": 8, "float16": 2, "bfloat16": 2}
_AS_IT_LIES = frozenset({"none", "float64"})
_BLOCK_VALUES = 1024
_SCALE_BYTES = 4
_DOMAIN = b"potluck moshpit layout 1"
_CHUNKS_DOMAIN = b"potluck moshpit chunks 1"


class Segment(Message, frozen=True):
    """One tensor of a vector: what it is called, its number of values, how they are encoded."""

    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_SEGMENT_NAME)]
    values: Annotated[int, Meta(ge=0, le=MOST_VALUES)]
    codec: CodecName = "none"


class Layout(Message, frozen=True, dict=True):
    """The tensors of a vector, in order."""

    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=MOST_SEGMENTS)]

    def __post_init__(self) -> None:
        """ProtocolMisuse where only a part of the vector is to travel as float64."""
        other = [segment for segment in self.segments if segment.codec != "float64"]
        if other and len(other) < len(self.segments):
            raise ProtocolMisuse(
                f"{other[0].name} has the codec {other[0].codec} in a vector of float64 values.",
                why="A vector is float64 as a whole, or float32.",
                advice="Give all of its tensors the codec float64, or none of them.",
            )

    @cached_property
    def dtype(self) -> Literal["float32", "float64"]:
        """In what the vector and its sums are kept: float64 where that is the codec."""
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
        """32 bytes that differ also where chunks do: what the members of a group must share."""
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
            if codec in _PLAIN_BYTES:
                together = [Run(together[0].start, together[-1].stop, codec)]
            runs += together
        return tuple(runs)

    def encoded_bytes(self, start: int, stop: int, chunk_bytes: int) -> int:
        """How many bytes a part takes on the wire, without the frames' headers."""
        return sum(chunk.encoded_bytes for chunk in chunks_of(self, start, stop, chunk_bytes))


@dataclass(frozen=True)
class Run:
    """Values `start` up to `stop` of the vector, encoded alike."""

    start: int
    stop: int
    codec: CodecName


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one frame carries: values `start` up to `stop` of the vector."""

    start: int
    stop: int
    codec: CodecName
    encoded_bytes: int

    @property
    def values(self) -> int:
        return self.stop - self.start

    @property
    def as_it_lies(self) -> bool:
        """Whether the encoded bytes are those in the vector's memory."""
        return self.codec in _AS_IT_LIES


def cut(layout: Layout, fractions: Sequence[float]) -> tuple[int, ...]:
    """The boundaries of the parts: part i is values `cuts[i]` up to `cuts[i + 1]`.

    Proportional to the fractions, to the nearest multiple of `CUT_VALUES`; a fraction of 0 is an
    empty part. The fractions need not sum to 1.
    """
    if not fractions or not all(math.isfinite(one) and one >= 0.0 for one in fractions):
        raise ProtocolMisuse(f"A vector cannot be cut by the fractions {tuple(fractions)}.")
    total = math.fsum(fractions)
    if total <= 0.0:
        raise ProtocolMisuse("A vector cannot be cut when nobody reduces any of it.")
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


def check_chunk_bytes(chunk_bytes: int) -> None:
    if not SMALLEST_CHUNK_BYTES <= chunk_bytes <= LARGEST_CHUNK_BYTES:
        raise ProtocolMisuse(
            f"Chunks have {SMALLEST_CHUNK_BYTES:,} to {LARGEST_CHUNK_BYTES:,} bytes, "
            f"not {chunk_bytes:,}."
        )


def encoded_bytes(codec: CodecName, values: int) -> int:
    """How many bytes so many values take, encoded as one chunk."""
    if codec == "blockwise-int8":
        return values + _SCALE_BYTES * -(-values // _BLOCK_VALUES)
    return values * _PLAIN_BYTES[codec]


def _chunks(layout: Layout, start: int, stop: int, chunk_bytes: int) -> Iterator[Chunk]:
    for run in layout.runs:
        if run.stop <= start or run.start >= stop:
            continue
        step = _values_per_chunk(run.codec, chunk_bytes)
        end = min(run.stop, stop)
        for at in range(max(run.start, start), end, step):
            values = min(step, end - at)
            codec, size = run.codec, encoded_bytes(run.codec, values)
            if size > values * layout.value_bytes:
                codec, size = "none", values * layout.value_bytes
            yield Chunk(at, at + values, codec, size)


def _values_per_chunk(codec: CodecName, chunk_bytes: int) -> int:
    if codec == "blockwise-int8":
        return chunk_bytes // (_BLOCK_VALUES + _SCALE_BYTES) * _BLOCK_VALUES
    return chunk_bytes // _PLAIN_BYTES[codec]
