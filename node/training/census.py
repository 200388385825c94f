"""The census of a run's experts: which grids there are, and who serves what.

    census = await take_census(directory, "poem", grids)

It is what the servers announce: everything about a server is its own claim. For `potluck experts
list`, which gets it from the node in this home or takes it itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from node.core.training_view import GridView
from protocols.experts import ExpertDirectory, ExpertGrid
from protocols.identity import PeerId

EXPERTS_LIST: Final = "experts list"
"""The request to a node (node/core/control.py)."""


class CensusServer(msgspec.Struct, frozen=True, kw_only=True):
    """`since`: when it added the last of these experts, in seconds since 1970 by its own clock."""

    peer: str = ""
    experts: tuple[str, ...] = ()
    load_seconds: float = 0.0
    since: float = 0.0


class CountedGrid(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""
    sizes: tuple[int, ...] = ()
    cells: int = 0
    live: int = 0


class OwnExpert(msgspec.Struct, frozen=True, kw_only=True):
    """An expert of the node that was asked, with what only its server knows."""

    uid: str = ""
    came: str = ""  # new, own copy, or taken over
    steps: int = 0
    rows: int = 0
    saved_seconds_ago: float | None = None


class ExpertCensus(msgspec.Struct, frozen=True, kw_only=True):
    """Servers with the most experts come first."""

    run: str = ""
    grids: tuple[CountedGrid, ...] = ()
    servers: tuple[CensusServer, ...] = ()
    own: tuple[OwnExpert, ...] = ()

    def in_short(self) -> tuple[GridView, ...]:
        return tuple(
            GridView(name=grid.name, cells=grid.cells, live=grid.live) for grid in self.grids
        )


async def take_census(
    directory: ExpertDirectory, run: str, grids: Sequence[ExpertGrid]
) -> ExpertCensus:
    """Read the whole directory of the run's experts."""
    counted = []
    uids: dict[PeerId, list[str]] = {}
    load: dict[PeerId, float] = {}
    since: dict[PeerId, int] = {}
    for grid in grids:
        live = await directory.live(grid)
        counted.append(
            CountedGrid(name=grid.name, sizes=grid.sizes, cells=grid.cells, live=len(live))
        )
        for uid in sorted(live):
            for host in live[uid]:
                uids.setdefault(host.peer, []).append(str(uid))
                load[host.peer] = max(load.get(host.peer, 0.0), host.load)
                since[host.peer] = max(since.get(host.peer, 0), host.since)
    servers = (
        CensusServer(
            peer=peer,
            experts=tuple(hosted),
            load_seconds=round(load[peer], 3),
            since=since[peer] / 1000.0,
        )
        for peer, hosted in uids.items()
    )
    ordered = sorted(servers, key=lambda server: (-len(server.experts), server.peer))
    return ExpertCensus(run=run, grids=tuple(counted), servers=tuple(ordered))
