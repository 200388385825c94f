"""The grid of experts: uid = (u_0 … u_{d-1}) with 0 ≤ u_i < M_i (Learning@home, equation 1).

    grid = ExpertGrid("ffn", (64, 64))
    grid.uid("ffn.3.17")            # Uid("ffn", (3, 17)); WrongUid if it is not of this grid
    str(Uid("ffn", (3, 17)))        # "ffn.3.17"

A grid has more cells than there are experts, so that newcomers find free ones. A prefix is the
beginning of a uid: `ffn` has all experts below it, `ffn.3` those whose first index is 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from protocols.errors import PotluckError

MOST_DIMENSIONS = 4  # 256 ** 4 experts are more than anybody has
LARGEST_DIMENSION = 4096  # a gate has so many outputs for each dimension

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")
_RANGE = re.compile(rf"\*|(?P<first>{_INDEX.pattern})(-(?P<last>{_INDEX.pattern}))?")


class WrongUid(PotluckError):
    """A uid or a grid outside of the grammar, or a uid outside of its grid."""

    surely_not_executed = True


@dataclass(frozen=True, order=True)
class Uid:
    """One cell of a grid, or a prefix of one. Written `name.3.17`."""

    grid: str
    cells: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.grid, *map(str, self.cells)))

    @property
    def parent(self) -> Uid:
        """The prefix that is one index shorter."""
        return Uid(self.grid, self.cells[:-1])

    def child(self, index: int) -> Uid:
        return Uid(self.grid, (*self.cells, index))

    def prefixes(self) -> Iterator[Uid]:
        """All shorter prefixes, the name of the grid first."""
        for length in range(len(self.cells)):
            yield Uid(self.grid, self.cells[:length])


@dataclass(frozen=True)
class CellBlock:
    """Neighbouring cells of a grid: the first and the last index of each dimension, None for all.

    Written `ffn:0-3.*`, which are the cells whose first index is 0 to 3.
    """

    grid: str
    ranges: tuple[tuple[int, int] | None, ...]

    def __str__(self) -> str:
        return (
            f"{self.grid}:{'.'.join('*' if one is None else _dashed(*one) for one in self.ranges)}"
        )


def _dashed(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


@dataclass(frozen=True)
class ExpertGrid:
    """The name of a grid and the size of each dimension."""

    name: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise WrongUid(
                f"A grid cannot be called {self.name!r}.",
                advice="Use a small letter, then up to 31 of a-z, 0-9, _ and -.",
            )
        if not 1 <= len(self.sizes) <= MOST_DIMENSIONS:
            raise WrongUid(
                f"The grid {self.name} has {len(self.sizes)} dimensions.",
                advice=f"Give it 1 to {MOST_DIMENSIONS}.",
            )
        if not all(1 <= size <= LARGEST_DIMENSION for size in self.sizes):
            raise WrongUid(
                f"The grid {self.name} has the sizes {self.sizes}.",
                advice=f"Each dimension has 1 to {LARGEST_DIMENSION:,} cells.",
            )

    @property
    def dimensions(self) -> int:
        return len(self.sizes)

    @property
    def cells(self) -> int:
        return math.prod(self.sizes)

    @property
    def root(self) -> Uid:
        """The prefix of all experts of this grid."""
        return Uid(self.name)

    def __contains__(self, uid: Uid) -> bool:
        return (
            uid.grid == self.name
            and len(uid.cells) == len(self.sizes)
            and all(0 <= cell < size for cell, size in zip(uid.cells, self.sizes, strict=True))
        )

    def uid(self, text: str) -> Uid:
        """Read a whole uid of this grid."""
        uid = parse_uid(text)
        if uid not in self:
            raise WrongUid(
                f"{text} is not in the grid {self.name} of {' x '.join(map(str, self.sizes))}.",
                advice=f"A uid of it is {self.name} with {self.dimensions} indices, as in "
                f"{Uid(self.name, tuple(size - 1 for size in self.sizes))}, the last.",
            )
        return uid

    def cells_in(self, block: CellBlock) -> Iterator[Uid]:
        """All cells of a block, the last index fastest. WrongUid if it is not in this grid."""
        whole = [(0, size - 1) for size in self.sizes]
        if len(block.ranges) == len(whole):
            whole = [one or all_of_it for one, all_of_it in zip(block.ranges, whole, strict=True)]
        if (
            block.grid != self.name
            or len(block.ranges) != len(whole)
            or any(last >= size for (_, last), size in zip(whole, self.sizes, strict=True))
        ):
            raise WrongUid(
                f"{block} is not in the grid {self.name} of {' x '.join(map(str, self.sizes))}.",
                advice=f"{CellBlock(self.name, (None,) * self.dimensions)} are all its cells.",
            )
        for cells in product(*(range(first, last + 1) for first, last in whole)):
            yield Uid(self.name, cells)

    def at(self, number: int) -> Uid:
        """The cell with this number, counted with the last index fastest."""
        cells = []
        for size in reversed(self.sizes):
            number, cell = divmod(number, size)
            cells.append(cell)
        return Uid(self.name, tuple(reversed(cells)))


def parse_uid(text: str) -> Uid:
    """Read a uid or a prefix: only the grammar is checked."""
    name, *indices = text.split(".", MOST_DIMENSIONS)
    if not _NAME.fullmatch(name) or not all(_INDEX.fullmatch(index) for index in indices):
        raise WrongUid(
            f"{text[:80]!r} is not the uid of an expert.",
            advice="It is the name of a grid and an index for each dimension: ffn.3.17.",
        )
    return Uid(name, tuple(map(int, indices)))


def parse_block(text: str) -> CellBlock:
    """Read a block of cells: only the grammar is checked."""
    name, _, rest = text.partition(":")
    found = [_RANGE.fullmatch(one) for one in rest.split(".", MOST_DIMENSIONS)]
    ranges: list[tuple[int, int] | None] = []
    for one in found:
        if one is None or not _NAME.fullmatch(name) or len(ranges) == MOST_DIMENSIONS:
            break
        if one["first"] is None:
            ranges.append(None)
            continue
        first = int(one["first"])
        last = int(one["last"] or first)
        if last < first:
            break
        ranges.append((first, last))
    if len(ranges) < len(found):
        raise WrongUid(
            f"{text[:80]!r} is not a block of cells.",
            advice="It is the name of a grid, a colon, and for each dimension an index, a range or "
            "* for all, with dots between them: ffn:0-3.*",
        )
    return CellBlock(name, tuple(ranges))
