"""Which experts of a run its owner wants this peer to serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.experts import CellBlock, ExpertGrid, Uid, WrongUid


@dataclass(frozen=True)
class ServingWish:
    """- `most`: at most so many experts; 0 serves none; None is as many as suit this machine.
    - `blocks`, `uids`: exactly these cells instead, if there are any.
    """

    most: int | None = None
    blocks: tuple[CellBlock, ...] = ()
    uids: tuple[Uid, ...] = ()

    @property
    def names_cells(self) -> bool:
        return bool(self.blocks or self.uids)

    def cells_of(self, grids: Sequence[ExpertGrid]) -> tuple[Uid, ...]:
        """The named cells, in order. WrongUid if the run does not have one of them."""
        by_name = {grid.name: grid for grid in grids}
        for name in [*(block.grid for block in self.blocks), *(uid.grid for uid in self.uids)]:
            if name not in by_name:
                raise WrongUid(
                    f"The run has no grid {name}.", advice=f"Its grids are {', '.join(by_name)}."
                )
        cells = [uid for block in self.blocks for uid in by_name[block.grid].cells_in(block)]
        cells += [by_name[uid.grid].uid(str(uid)) for uid in self.uids]
        return tuple(dict.fromkeys(cells))
