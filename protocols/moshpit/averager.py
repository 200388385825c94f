"""Averaging a vector with whoever is there: rounds of Moshpit All-Reduce over the grid.

    async with open_averager(network, rpc, dht, AveragerSettings(run="poem")) as averager:
        outcome = await averager.average(vector, weight=samples, epoch=epoch)

One `average` is one round with everybody when all fit into a group, else one round per coordinate
of the grid (002, algorithm 1): find the group of the round's key, agree on the average with it,
take it as one's own, and derive the next index from one's place in that group (walk.py). After a
round with total weight W and s members each carries on with the weight W / s, so that the
weighted average stays exact on a full grid.

Promises: a vector is never changed. What others do, and what the network does, raises nothing: it
is in the outcome. Everything ends with the `async with`; memory is the vector, one result buffer of
its size that is kept for the next averaging (two, and a copy of the vector, for a grid of several
rounds), and a few chunks.

Easy to get wrong: one averaging at a time. A second one, in the background or not, while one
runs is a ProtocolMisuse.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Unpack

import trio

from protocols.dht.service import Dht
from protocols.errors import ProtocolMisuse
from protocols.moshpit.background import Averaging, AveragingCancelled
from protocols.moshpit.bandwidth import Bandwidth
from protocols.moshpit.buffers import ResultBuffers
from protocols.moshpit.butterfly import Butterfly
from protocols.moshpit.contribution import AveragingOptions, Contribution
from protocols.moshpit.grid import Grid, Index, grid_shape, numbered_index, random_index
from protocols.moshpit.group_round import GroupRounds
from protocols.moshpit.group_size import best_group_size, failure_rate
from protocols.moshpit.matchmaking import Matchmaker
from protocols.moshpit.outcome import Outcome
from protocols.moshpit.round import Shell
from protocols.moshpit.round_statistics import AveragerStatistics, StatisticsKeeper
from protocols.moshpit.settings import AveragerSettings
from protocols.moshpit.switchboard import Switchboard
from protocols.moshpit.vector import Vector
from protocols.moshpit.walk import Walk
from protocols.network import Network
from protocols.rpc import Rpc

CHECKED_IN_PLACE_VALUES = 1 << 18  # a quarter of a million take well under a millisecond

ONE_GROUP = Grid(width=1, dimensions=1)
"""Without coordinates to distinguish, everybody has the same key."""


@asynccontextmanager
async def open_averager(
    network: Network, rpc: Rpc, dht: Dht, settings: AveragerSettings
) -> AsyncIterator[Averager]:
    """An averager of one run on this node, until the block ends. At most one for each rpc.

    The directory's families must contain GROUP (matchmaking.py; node/directory.py has it). Errors
    of the block come out unwrapped.
    """
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        butterfly = Butterfly(rpc, network)
        averager = Averager(network, rpc, dht, settings, butterfly, nursery)
        try:
            yield averager
        except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
            failure = error
        averager.close()
        with trio.CancelScope(shield=True):  # cancelled, it ends at its next step
            await averager.idle()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Averager:
    """Made by `open_averager`."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        dht: Dht,
        settings: AveragerSettings,
        butterfly: Butterfly,
        nursery: trio.Nursery,
    ) -> None:
        self._network = network
        self._nursery = nursery
        self._group_size = settings.group_size
        self._bandwidth = Bandwidth()
        self._matchmaker = Matchmaker(network, rpc, dht)
        self._switchboard = Switchboard(rpc, lambda: self._matchmaker.fetches_a_list)
        shell = Shell(network, rpc, butterfly, self._switchboard, self._bandwidth, nursery)
        self._run = settings.run
        self._rounds = GroupRounds(shell, self._matchmaker, settings)
        self._statistics = StatisticsKeeper()
        self._buffers = ResultBuffers()
        self._place: tuple[Grid, Index] | None = None
        self._running: trio.CancelScope | None = None
        self._idle = trio.Event()
        self._idle.set()
        self._closed = False

    async def average(self, vector: Vector, **options: Unpack[AveragingOptions]) -> Outcome:
        """Average this vector with the others of the run that are in the same epoch, and have the
        same topic; `AveragingOptions` says what each option means.

        Raises NotFinite (by name, before anything is sent), ProtocolMisuse, and AveragingCancelled
        if the averager ends meanwhile. What others do, and what the network does, is in the
        outcome and raises nothing.
        """
        return await self._average(self._begin(vector, options))

    def start(self, vector: Vector, **options: Unpack[AveragingOptions]) -> Averaging:
        """The same in the background; the vector must not change until it is done."""
        contribution = self._begin(vector, options)  # now, and not only when the task begins
        averaging = Averaging(lambda: self._average(contribution))
        self._nursery.start_soon(averaging.run)
        return averaging

    def statistics(self) -> AveragerStatistics:
        """Totals since the averager was opened, and the last rounds in full."""
        return self._statistics.statistics()

    def when_asked(self, tell: Callable[[int], None]) -> None:
        """From now on tell of the epoch of each group of the run that others ask this peer into
        while it looks for none: it may not know yet that a round has begun, or that it is behind.
        Whoever likes can ask, and as often."""

        def asked(run: str, epoch: int) -> None:
            if run == self._run:
                tell(epoch)

        self._matchmaker.when_asked = asked

    def grid_for(self, peers: int) -> Grid:
        """The grid for so many peers that needs the fewest attempts, if they go on failing as
        often as those that this averager has met (DeDLOC, appendix C)."""
        seen = self._statistics
        rate = failure_rate(seen.lost, seen.took_part)
        return grid_shape(peers, max(2, best_group_size(peers, rate, self._group_size)))

    @property
    def bandwidth(self) -> Bandwidth:
        """What the exchanges so far have measured."""
        return self._bandwidth

    def close(self) -> None:
        """Take no more messages, and cancel the averaging that runs, in whatever task it does.
        Called by `open_averager`, before the nursery ends."""
        self._closed = True
        self._switchboard.close()
        if self._running is not None:
            self._running.cancel()

    async def idle(self) -> None:
        """Wait until no averaging runs."""
        await self._idle.wait()

    async def _average(self, contribution: Contribution) -> Outcome:
        try:
            with trio.CancelScope() as self._running:
                if self._closed:
                    self._running.cancel()
                return await self._walk(contribution)
            raise AveragingCancelled("The averager ended before there was an outcome.")
        finally:
            self._running = None
            self._idle.set()

    async def _walk(self, contribution: Contribution) -> Outcome:
        vector, grid = contribution.vector, contribution.grid or ONE_GROUP
        if vector.layout.values <= CHECKED_IN_PLACE_VALUES:
            vector.check_finite()
        else:
            await trio.to_thread.run_sync(vector.check_finite)
        index = self._index(grid, contribution.number)
        walk = Walk(contribution, grid, index, self._buffers)
        for _ in range(grid.rounds):
            step = await self._rounds.run(walk.next_round())
            self._statistics.add(step.statistics)
            walk.take(step)
        self._place = (grid, walk.index)
        return walk.outcome()

    def _index(self, grid: Grid, number: int | None) -> Index:
        """Where this peer begins: its number's cell, where it was, or anywhere."""
        if number is not None:
            return numbered_index(number, grid)
        if self._place is not None and self._place[0] == grid:
            return self._place[1]
        return random_index(self._network.random, grid)

    def _begin(self, vector: Vector, options: AveragingOptions) -> Contribution:
        contribution = Contribution(vector, **options)
        if self._closed:
            raise ProtocolMisuse("This averager has ended.")
        if not self._idle.is_set():
            raise ProtocolMisuse(
                "This averager is averaging already.",
                why="It has one result buffer, and a peer is in one group at a time.",
                advice="Wait for the outcome, or cancel the averaging that runs.",
            )
        self._idle = trio.Event()
        return contribution
