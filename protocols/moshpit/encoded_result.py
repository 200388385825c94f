"""The encoded bytes of a round's result, as its reducers sent them.

    memory = encode_result(values, layout, cut)
    part_digests(memory, layout, cut)            # equal to what the reducers have signed
    decode_result(memory, layout, cut, into)     # the bits that all members have

Easy to get wrong: the chunks are cut within the parts, so the same values have other bytes under
another cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from protocols.moshpit.layout import Chunk, Layout, PartHash, ResultCut
from protocols.tensors import decode_into, encode_into, raw_bytes, unset_bytes


def chunks(layout: Layout, cut: ResultCut) -> Iterator[Chunk]:
    """The chunks of a result, in the order in which they are sent and lie in memory."""
    for part in cut.parts:
        yield from cut.chunks_of(part, layout)


def part_bytes(layout: Layout, cut: ResultCut) -> list[int]:
    """The memory that each part of a result takes."""
    return [sum(chunk.encoded_bytes for chunk in cut.chunks_of(part, layout)) for part in cut.parts]


def encoded_bytes(layout: Layout, cut: ResultCut) -> int:
    """The memory that a result takes."""
    return sum(part_bytes(layout, cut))


def memory_of(size: int) -> memoryview:
    """Memory for a result of so many bytes, with anything in it. NoMemory if there is none."""
    return raw_bytes(unset_bytes(size))


def encode_result(values: Tensor, layout: Layout, cut: ResultCut) -> memoryview:
    """Encode a copy. PotluckError if a value cannot be encoded."""
    memory, end = memory_of(encoded_bytes(layout, cut)), 0
    for chunk in chunks(layout, cut):
        place = memory[end : end + chunk.encoded_bytes]
        encode_into(values[chunk.start : chunk.stop], chunk.codec, place, name="the result")
        end += chunk.encoded_bytes
    return memory


def decode_result(memory: memoryview, layout: Layout, cut: ResultCut, into: Tensor) -> None:
    """MalformedMessage if a value is not finite."""
    end = 0
    for chunk in chunks(layout, cut):
        place = memory[end : end + chunk.encoded_bytes]
        decode_into(into[chunk.start : chunk.stop], chunk.codec, place, layout.dtype)
        end += chunk.encoded_bytes


def part_digests(memory: memoryview, layout: Layout, cut: ResultCut) -> dict[int, bytes]:
    """The digest of each part, by its reducer's place. This hashes all bytes."""
    digests, end = {}, 0
    for part in cut.parts:
        digest = PartHash()
        for chunk in cut.chunks_of(part, layout):
            digest.add(memory[end : end + chunk.encoded_bytes])
            end += chunk.encoded_bytes
        digests[part.reducer] = digest.digest
    return digests
