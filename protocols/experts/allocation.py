"""Which cells of a grid a server takes when it comes.

Pure: the caller reads which experts are live (`ExpertDirectory.live`), and has the chance.

Cells are taken where there are fewest experts, so that a gate finds experts everywhere. (The caller
takes orphans before: hosting.py.) Cells of one server share prefixes where they can, because a
server has a slot in the directory for each prefix, and a trainer reads each slot.

Two servers that come at the same moment may choose the same cell. Both choose at random among equal
places, so that this is rare; the directory then decides who keeps the cell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from random import Random

from protocols.experts.grid import ExpertGrid, Uid


def free_cells(grid: ExpertGrid, live: Iterable[Uid], count: int, chance: Random) -> list[Uid]:
    """`count` cells without a live expert, or as many as there are."""
    taken = {uid for uid in live if uid in grid}
    chosen: list[Uid] = []
    experts_below = Counter(prefix for uid in taken for prefix in uid.prefixes())
    while len(chosen) < count and len(taken) < grid.cells:
        prefix = _poorest_prefix(grid, experts_below, chance)
        cells = map(prefix.child, range(grid.sizes[-1]))
        run = _run([cell for cell in cells if cell not in taken], count - len(chosen), chance)
        chosen += run
        taken.update(run)
        for above in (prefix, *prefix.prefixes()):
            experts_below[above] += len(run)
    return chosen


def _poorest_prefix(grid: ExpertGrid, experts_below: Counter[Uid], chance: Random) -> Uid:
    """The longest prefix at which one comes by always going where there are fewest experts, but
    never where all cells are taken."""
    prefix = grid.root
    for depth, size in enumerate(grid.sizes[:-1]):
        room = math.prod(grid.sizes[depth + 1 :])
        children = [
            child for child in map(prefix.child, range(size)) if experts_below[child] < room
        ]
        fewest = min(experts_below[child] for child in children)
        prefix = chance.choice([child for child in children if experts_below[child] == fewest])
    return prefix


def _run(cells: list[Uid], count: int, chance: Random) -> list[Uid]:
    """So many of these neighbouring cells, from a random one on."""
    if len(cells) <= count:
        return cells
    start = chance.randrange(len(cells))
    return [*cells[start:], *cells[:start]][:count]
