"""How the result of a round was cut into parts and chunks: what its digest can be checked by.

    for part in cut.parts:
        digest = PartHash()
        for chunk in part.chunks(layout, cut.chunk_bytes):  digest.add(encoded bytes of the chunk)
    digest_of_parts({part.reducer: digest}) == committed.digest

A result's digest is that of its parts' digests, and a part's is that of the frames in which its
reducer has sent it (docs/protocols.md, "The exchange of a round"). So a peer that was not in the
round can be shown a result by one that was, and needs to believe nobody.

Easy to get wrong: what is hashed are the encoded chunks with their frames' headers. Members hold
decoded values; encoding them again gives the same bytes with every codec, unless a reducer has
sent what no honest one would (int8 with a scale that is not its largest value's): then nobody can
show that result to anybody, and whoever tries finds out by the digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.chunk_count import ChunkCount
from protocols.moshpit.ballots import digest_of_parts
from protocols.moshpit.layout import Chunk, Layout, chunks_of
from protocols.wire import chunk_header

__all__ = ["PartCut", "PartHash", "ResultCut", "digest_of_parts", "result_cut"]


@dataclass(frozen=True)
class PartCut:
    """Values `start` up to `stop`, as the member at this place of the roster has reduced them."""

    reducer: int
    start: int
    stop: int

    def chunks(self, layout: Layout, chunk_bytes: int) -> list[Chunk]:
        return chunks_of(layout, self.start, self.stop, chunk_bytes)


@dataclass(frozen=True)
class ResultCut:
    """The parts of a result that are not empty, in the order of the values."""

    parts: tuple[PartCut, ...]
    chunk_bytes: int

    def covers(self, layout: Layout) -> bool:
        """Whether it is of such a vector: all of its values once, and no reducer twice."""
        stops = [0, *(one.stop for one in self.parts)]
        starts = [*(one.start for one in self.parts), layout.values]
        reducers = [one.reducer for one in self.parts]
        return (
            stops == starts
            and all(one.start < one.stop for one in self.parts)
            and sorted(set(reducers)) == reducers
        )


def result_cut(members: Sequence[int], cuts: Sequence[int], chunk_bytes: int) -> ResultCut:
    """Of an exchange of these members: part i is values `cuts[i]` up to `cuts[i + 1]`."""
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
