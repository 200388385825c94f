"""The virtual grid of Moshpit All-Reduce, which decides the groups (Algorithm 1 of the paper).

N peers are placed in a grid of d dimensions with M cells each. A peer's *index* is the tuple
C = (c_1, …, c_d) of its coordinates, the oldest first. In each round

1. the peers whose indices are equal in all places **but the first** are one group: the key of a
   round is C without c_1, plus the number of the round (`group_name`). So the round averages
   along c_1, the oldest coordinate, and with d = 1 all peers are one group;
2. the group averages; each member's new coordinate c follows from its place in the group's
   roster (`coordinates`), another one for each member;
3. C becomes (c_2, …, c_d, c), equation 1 of the paper (`next_index`): the next round averages
   along what is now the oldest coordinate, and no peer meets a member of this group there.

Promises: on a full grid (N = M^d, a peer in every cell) each round leaves a full grid, whatever
order the rosters have, and d rounds give every peer the exact average. With weights too, if a
peer carries `carried_weight` from one round into the next. On any other grid the (weighted) sum
over all peers is kept by every round, so that the average that they approach is the right one.

The paper does not say how places become coordinates if the grid is not full. If they were counted
up from 0, the peers would crowd in the low cells, and the few cells at the end would stay nearly
empty for ever: their small groups would keep the peers apart. So places stand for cells in an order
that is drawn for each round. 768 peers in 32 x 32 cells reach 1e-19 of the deviation in ten rounds,
and 1e-13 by counting up. Peers with random first indices spread evenly over a grid: of 1024 in 32 x
32 cells, two rounds leave 1e-4 the first time, and 7e-6 four averagings later.

Easy to get wrong: a coordinate follows from the place in the *roster*, and not from the part that
a member reduces, as in the paper. A peer that cannot be dialled reduces nothing and has no part,
but must still get another coordinate than all other members of its group. It is not the place among
the survivors of a round, either: the roster is the only list that all know before anything fails.
"""

from __future__ import annotations

import math
import random as randomness
from dataclasses import dataclass

from blake3 import blake3

LARGEST_WIDTH = 1_024  # cells in a dimension: more than any group has members
MOST_DIMENSIONS = 32  # with two cells in each that is room for four thousand million peers

Index = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """`dimensions` (d) times `width` (M) cells: room for M^d peers. ValueError out of bounds."""

    width: int
    dimensions: int

    def __post_init__(self) -> None:
        if not 1 <= self.width <= LARGEST_WIDTH:
            raise ValueError(f"a grid is 1 to {LARGEST_WIDTH} cells wide, not {self.width}")
        if not 1 <= self.dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"a grid has 1 to {MOST_DIMENSIONS} dimensions, not {self.dimensions}")

    @property
    def cells(self) -> int:
        """How many peers can have a cell of their own."""
        return int(self.width**self.dimensions)

    @property
    def rounds(self) -> int:
        """How many rounds average over the whole grid: one along each dimension."""
        return self.dimensions


def grid_shape(peers: int, group_size: int) -> Grid:
    """The grid for this many peers, if a group has at most `group_size` members.

    The fewest dimensions, since each costs a round; then the fewest cells, since a full grid
    averages exactly. When all fit into one group, there is one dimension and they are one group.
    """
    if peers < 1 or group_size < 2:
        raise ValueError(f"{peers} peers in groups of {group_size} are no grid")
    group_size = min(group_size, LARGEST_WIDTH)
    dimensions = 1
    while group_size**dimensions < peers:
        dimensions += 1
    return Grid(_root_rounded_up(peers, dimensions), dimensions)


def numbered_index(number: int, grid: Grid) -> Index:
    """The first index of the peer with this number, if all are numbered from 0.

    get_initial_index of the paper: (floor(number / M^(j-1)) mod M) for j = 1 … d. Numbers of one
    group of the first round follow each other.
    """
    if number < 0:
        raise ValueError(f"peers are numbered from 0, and {number} is less")
    return tuple(number // grid.width**place % grid.width for place in range(grid.dimensions))


def random_index(random: randomness.Random, grid: Grid) -> Index:
    """The first index of a peer that has no number: any cell, each as likely as the others."""
    return tuple(random.randrange(grid.width) for _ in range(grid.dimensions))


def group_name(index: Index) -> str:
    """The name of this index's group in the next round, as one word.

    It follows the round's number in the key under which the members find each other.
    """
    return ".".join(str(coordinate) for coordinate in index[1:]) or "all"


def coordinates(members: int, grid: Grid, round_id: bytes) -> tuple[int, ...]:
    """The new coordinate of each member, in the order of the roster: as different as can be.

    The places stand for the cells in the order of blake3(round_id, cell as 4 bytes, the highest
    first), so all members get the same result. If first indices were random, a roster may be longer
    than the grid is wide; then the cells begin again.
    """
    if members < 1:
        raise ValueError(f"a roster of {members} is none")
    cells = sorted(
        range(grid.width), key=lambda cell: blake3(round_id + cell.to_bytes(4, "big")).digest()
    )
    return tuple(cells[place % grid.width] for place in range(members))


def next_index(index: Index, coordinate: int) -> Index:
    """The index after a round: the oldest coordinate goes, the new one is last (equation 1)."""
    return (*index[1:], coordinate)


def carried_weight(total: float, members: int) -> float:
    """The weight of each member in the next round, after one that averaged `total` in all.

    All members hold the same average now, so all count the same. Their total weight must not
    change, or the next round would favour the large groups of this one.
    """
    if members < 1 or not (math.isfinite(total) and total >= 0):
        raise ValueError(f"{members} members of weight {total} cannot have averaged")
    return total / members


def _root_rounded_up(number: int, degree: int) -> int:
    """The smallest whole number whose power of this degree is at least `number`."""
    root: int = max(1, round(number ** (1 / degree)))
    while root**degree < number:
        root += 1
    while root > 1 and (root - 1) ** degree >= number:
        root -= 1
    return root
