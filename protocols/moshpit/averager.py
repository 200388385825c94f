"""Averaging a vector with whoever is there: rounds of Moshpit All-Reduce over the grid.

    async with open_averager(network, rpc, dht, AveragerSettings(run="poem")) as averager:
        outcome = await averager.average(vector, weight=samples, epoch=epoch)

One `average` is one round with everybody when all fit into a group, else one round per coordinate
of the grid (002, algorithm 1): find the group of the round's key, agree on the average with it
(round.py), take it as one's own, and derive the next index from one's place in that group. After
a round with total weight W and s members each carries on with the weight W / s, so that the
weighted average stays exact on a full grid.

Promises: the vector is never changed. A round that fails leaves this peer with what it had before
that round, and the averaging goes on with the next; `Outcome` says how it ended. Everything ends
with the `async with`; memory is the vector, one result buffer of the same size that is kept for
the next averaging, and a few chunks.

Easy to get wrong: one averaging at a time. A second one, in the background or not, while one
runs is a ProtocolMisuse.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from protocols.moshpit.background import Averaging
from protocols.moshpit.outcome import Outcome
from protocols.moshpit.round_statistics import AveragerStatistics
from protocols.moshpit.settings import AveragerSettings

if TYPE_CHECKING:
    from protocols.dht.service import Dht
    from protocols.moshpit.grid import Grid
    from protocols.moshpit.vector import Vector
    from protocols.network import Network
    from protocols.rpc import Rpc


@asynccontextmanager
async def open_averager(
    network: Network, rpc: Rpc, dht: Dht, settings: AveragerSettings
) -> AsyncIterator[Averager]:
    """An averager of one run on this node, until the block ends. At most one for each rpc.

    The directory's families must contain GROUP (matchmaking.py; node/directory.py has it).
    """
    raise NotImplementedError
    yield


class Averager:
    """Made by `open_averager`."""

    async def average(
        self,
        vector: Vector,
        *,
        weight: float,
        epoch: int,
        expected: int | None = None,
        grid: Grid | None = None,
        number: int | None = None,
        overwrite: bool = False,
    ) -> Outcome:
        """Average this vector with the others of the run that are in the same epoch.

        `weight` is how much it counts (samples); 0 is an auxiliary peer, which brings no data,
        may reduce for the others, and gets the result. `expected` is how many members the caller
        believes to be there, if it knows: the group forms as soon as they have come. `grid` has
        several rounds; without one there is one group. `number`, from 0, is this peer's first place in
        the grid, if the caller numbers the peers; else chance chooses, and later averagings go on
        from where the last one ended. `overwrite` allows a grid of several rounds to write into
        the vector once the first of them was committed, which saves a second result buffer.

        Raises NotFinite (by name, before anything is sent) and ProtocolMisuse. What others do,
        and what the network does, is in the outcome and raises nothing.
        """
        raise NotImplementedError

    def start(
        self,
        vector: Vector,
        *,
        weight: float,
        epoch: int,
        expected: int | None = None,
        grid: Grid | None = None,
        number: int | None = None,
        overwrite: bool = False,
    ) -> Averaging:
        """The same in the background; the vector must not change until it is done."""
        raise NotImplementedError

    def statistics(self) -> AveragerStatistics:
        """Totals since the averager was opened, and the last rounds in full."""
        raise NotImplementedError
