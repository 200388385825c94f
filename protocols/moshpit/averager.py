"""Averages a vector with the other peers of a run: rounds of Moshpit All-Reduce over the grid.

    async with open_averager(network, rpc, dht, AveragerSettings(run="poem")) as averager:
        outcome = await averager.average(RoundRequest(vector, weight=samples, epoch=epoch))

If all peers fit into one group, `average` is one round with all of them. Otherwise it is one round
for each coordinate of the grid (002, algorithm 1): find the group of the round's key, agree on the
average with its members, take the average as one's own vector, and derive the next index from one's
place in the group. After a round with total weight W and s members, each goes on with the weight
W / s, so that the weighted average stays exact on a full grid.

In this file: `open_averager` and `Averager`; `ResultBuffers`, the memory for results; `GridWalk`,
one averaging from round to round. The request is in request.py.

Promises: a vector is never changed. Nothing that other peers or the network do raises an error: it
is in the outcome. Everything ends with the `async with` block. Memory is the vector, one result
buffer of the same size that is kept for the next averaging, and a few chunks; for a grid of several
rounds, two buffers and a copy of the vector.

Easy to get wrong: only one averaging at a time. A second one is a ProtocolMisuse.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import torch
import trio
from torch import Tensor

from protocols.dht import Dht
from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.bandwidth import Bandwidth
from protocols.moshpit.butterfly import Butterfly
from protocols.moshpit.cohort_round import CohortRounds
from protocols.moshpit.grid import (
    Grid,
    Index,
    carried_weight,
    coordinates,
    grid_shape,
    group_name,
    next_index,
    numbered_index,
    random_index,
)
from protocols.moshpit.group import Group, group_key
from protocols.moshpit.group_round import GridRound, GroupResult, GroupRounds, check_finite
from protocols.moshpit.group_size import best_group_size, failure_rate
from protocols.moshpit.layout import Layout, Segment, Vector
from protocols.moshpit.matchmaking import Matchmaker
from protocols.moshpit.outcome import (
    Alone,
    AveragerStatistics,
    Committed,
    Discarded,
    LeftOut,
    Outcome,
    RoundStatistics,
    StatisticsKeeper,
    Verdict,
)
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.round import Shell
from protocols.moshpit.settings import AveragerSettings
from protocols.moshpit.switchboard import Switchboard
from protocols.network import Network
from protocols.rpc import Rpc
from protocols.tensors import CodecName

ONE_GROUP = Grid(width=1, dimensions=1)
"""A grid of a single cell: all peers have the same key."""


class AveragingCancelled(PotluckError):
    """The averager ended before there was an outcome."""


@asynccontextmanager
async def open_averager(
    network: Network, rpc: Rpc, dht: Dht, settings: AveragerSettings
) -> AsyncIterator[Averager]:
    """An averager for one run on this node, until the block ends. At most one for each rpc.

    The directory's families must contain GROUP (matchmaking.py; node/core/directory.py has it).
    Errors of the block come out unwrapped.
    """
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        butterfly = Butterfly(rpc, network)
        averager = Averager(network, rpc, dht, settings, butterfly, nursery)
        try:
            yield averager
            await averager.handed_on()
        except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
            failure = error
        averager.close()
        with trio.CancelScope(shield=True):  # it was cancelled, and ends at its next checkpoint
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
        self._group_size = settings.group_size
        self._bandwidth = Bandwidth()
        butterfly.when_ended(lambda report: self._bandwidth.add(trio.current_time(), report))
        self._matchmaker = Matchmaker(network, rpc, dht)
        self._switchboard = Switchboard(rpc, self._matchmaker.awaits_list_of)
        shell = Shell(network, rpc, butterfly, self._switchboard, self._bandwidth, nursery)
        self._run = settings.run
        self.when_exchanging = butterfly.when_begun
        """Pass it a function: it is called whenever an exchange begins, its group having been
        found."""
        self._rounds = GroupRounds(shell, self._matchmaker, settings)
        self._statistics = StatisticsKeeper()
        self._buffers = ResultBuffers()
        self._cohorts = CohortRounds(
            network,
            rpc,
            self._rounds,
            settings,
            self._buffers.other_than,
            self._statistics.add,
        )
        self._place: tuple[Grid, Index] | None = None
        self._running: trio.CancelScope | None = None
        self._idle = trio.Event()
        self._idle.set()
        self._closed = False

    async def average(self, request: RoundRequest, grid: Grid = ONE_GROUP) -> Outcome:
        """Average with the peers of the run that have the same epoch and topic: in one group, by
        cohorts if the request says so, or in several rounds over this grid.

        Raises NotFinite (with the tensor's name, before anything is sent; never if nobody else is
        expected and nobody comes), ProtocolMisuse, and AveragingCancelled if the averager ends
        meanwhile. Nothing that others or the network do raises an error: it is in the outcome.
        """
        self._begin()
        try:
            with trio.CancelScope() as self._running:
                if self._closed:
                    self._running.cancel()
                return await self._walk(request, grid)
            raise AveragingCancelled("The averager ended before there was an outcome.")
        finally:
            self._running = None
            self._rounds.settle_uplink()
            self._idle.set()

    def statistics(self) -> AveragerStatistics:
        """Totals since the averager was opened, and details of the last rounds."""
        return self._statistics.statistics()

    def when_asked(self, tell: Callable[[int, bool], None]) -> None:
        """From now on, when another peer asks this one into a group of the run while it looks for
        none, call `tell` with the group's epoch, and whether a round begins with that group. This
        peer may not know yet that a round has begun, or that it is behind. Any peer can ask, as
        often as it likes."""

        def asked(run: str, epoch: int, begins: bool) -> None:
            if run == self._run:
                tell(epoch, begins)

        self._matchmaker.when_asked = asked

    def overtaken(self, epoch: int) -> None:
        """The run has gone on from this epoch. If a group of it is still looked for, that ends now,
        with a discarded round. A group that was found is not affected: its members decide."""
        self._matchmaker.overtaken(self._run, epoch)
        self._cohorts.overtaken(epoch)

    def confirm(self, *, applied: bool) -> None:
        """Whether this peer has applied the result of the last averaging, if that `confirms`. If it
        is the head of a cohort, its members do the same. If it has not, the list of that group is
        shown to nobody any more: others may make a group without those who were in it."""
        self._cohorts.confirm(applied=applied)
        if not applied:
            self._rounds.is_void()

    async def step_shown_by(self, peer: PeerId, epoch: int) -> bytes | None:
        """By cohorts, after an averaging of this epoch: the digest of the result by which the run
        has gone on, if that peer shows the heads' decision. None: it cannot. PotluckError: it does
        not answer."""
        return await self._cohorts.shown_by(peer, epoch)

    @property
    def idle_heads(self) -> frozenset[PeerId]:
        """Peers of this peer's cohort that were its head and did nothing, lately."""
        return self._cohorts.idle_heads

    @property
    def uplink(self) -> int:
        """The class of this peer's link (cohorts.py), for others: they must know which of a cohort
        is its head, and it changes only between two averagings."""
        return self._rounds.uplink

    def grid_for(self, peers: int) -> Grid:
        """The grid for this many peers that needs the fewest attempts, if they fail as often as
        those that this averager has met (DeDLOC, appendix C)."""
        seen = self._statistics
        rate = failure_rate(seen.lost, seen.took_part)
        return grid_shape(peers, max(2, best_group_size(peers, rate, self._group_size)))

    @property
    def bandwidth(self) -> Bandwidth:
        """The bandwidth that the exchanges so far have measured."""
        return self._bandwidth

    async def handed_on(self) -> None:
        """By cohorts, before this averager ends: wait two seconds at most until those that take the
        last result from this node have it. Otherwise they would have to fetch the run's state."""
        await self._cohorts.handed_on()

    def close(self) -> None:
        """Take no more messages, and cancel the running averaging, in whichever task it runs.
        `open_averager` calls this before its nursery ends."""
        self._closed = True
        self._switchboard.close()
        if self._running is not None:
            self._running.cancel()

    async def idle(self) -> None:
        """Wait until no averaging is running."""
        await self._idle.wait()

    async def _walk(self, request: RoundRequest, grid: Grid) -> Outcome:
        if not request.expects_nobody or grid.rounds > 1:  # a walk copies the values
            await check_finite(request.vector)
        if request.cohort is not None:
            return await self._cohorts.average(request, request.cohort)
        walk = GridWalk(self._run, request, grid, self._index(grid, request.number), self._buffers)
        for _ in range(grid.rounds):
            result = await self._rounds.run(walk.next_round())
            self._statistics.add(result.statistics)
            walk.take(result)
        self._place = (grid, walk.index)
        return walk.outcome()

    def _index(self, grid: Grid, number: int | None) -> Index:
        """Where this peer begins: the cell of its number, its last place, or a random cell."""
        if number is not None:
            return numbered_index(number, grid)
        if self._place is not None and self._place[0] == grid:
            return self._place[1]
        return random_index(self._network.random, grid)

    def _begin(self) -> None:
        if self._closed:
            raise ProtocolMisuse("This averager has ended.")
        if not self._idle.is_set():
            raise ProtocolMisuse(
                "This averager is averaging already.",
                why="It has one result buffer, and a peer is in one group at a time.",
                advice="Wait for the outcome, or cancel the averaging that runs.",
            )
        self._idle = trio.Event()


# ---- memory for results


class ResultBuffers:
    """At most two buffers, of the size and dtype that were asked for last.

    Easy to get wrong: a buffer is free only if it is not what is being averaged. The caller may
    average the last result again, and that is one of these buffers.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def other_than(self, source: Tensor) -> Tensor:
        """A buffer with the size and dtype of `source` that shares no memory with it. Its contents
        are lost. It is pinned if `source` is: the result goes where that came from, to a GPU."""
        self._buffers = [
            one
            for one in self._buffers
            if one.numel() == source.numel() and one.dtype == source.dtype
        ]
        for buffer in self._buffers:
            if not _share_memory(buffer, source):
                return buffer
        pinned = source.is_pinned()
        self._buffers.append(torch.empty(source.numel(), dtype=source.dtype, pin_memory=pinned))
        return self._buffers[-1]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# ---- one averaging over the grid


SUMS = "sums over the grid"
"""The name of the segment that is added to the vector."""


class GridWalk:
    """One averaging from round to round: this peer's index, values and weight. No I/O.

        walk = GridWalk(run, request, grid, index, buffers)
        for each round:  walk.take(await rounds.run(walk.next_round()))
        walk.outcome()

    A committed round replaces the values by its result, and the weight by W / s, so that the total
    weight of the members is the same before and after it (grid.carried_weight). Another round
    changes neither, and the averaging goes on: the next round brings the members to other peers.
    The average is then not exact, but the weighted sum over all peers is preserved, and repeated
    averaging approaches the right one.

    Two more values are carried with the vector: how many samples and how many votes are in the
    result, each divided by the weight that this peer brings. So their average in a round, times its
    weight, is the sum over its members. After a round several members may have the same new
    coordinate and meet again; each carries on only its share of the sum, so that nothing is counted
    twice. If a peer fails to carry its share on, the sum is too small, but it is never too large.

    Easy to get wrong: a result cannot be written into the memory that is read from. The values go
    from one buffer into the other, and back.
    """

    def __init__(
        self, run: str, request: RoundRequest, grid: Grid, index: Index, buffers: ResultBuffers
    ) -> None:
        if len(index) != grid.dimensions:
            raise ProtocolMisuse(f"{index} is no index of a grid of {grid.dimensions} dimensions.")
        self.index = index
        self._run, self._request, self._grid, self._buffers = run, request, grid, buffers
        self._now = request if grid.dimensions == 1 else self._with_sums()
        """The request for the next round. In one group it is the caller's."""
        self._samples: float = 0.0
        self._votes: float | None = None
        self._result = request.vector.values
        self._rounds: list[RoundStatistics] = []
        self._committed: GroupResult | None = None
        self._last: GroupResult | None = None

    def next_round(self) -> GridRound:
        now, number = self._now, len(self._rounds)
        self._result = self._buffers.other_than(now.vector.values)
        return GridRound(
            group_key(self._run, now.epoch, number, group_name(self.index), now.topic),
            now,
            self._result,
            splits=self._grid.dimensions > 1,
        )

    def take(self, result: GroupResult) -> None:
        """Take the outcome of a round."""
        self._last = result
        self._rounds.append(result.statistics)
        if result.verdict is Verdict.COMMITTED:
            self._committed = result
            self._now = replace(
                self._now,
                vector=Vector(self._now.vector.layout, self._result),
                weight=carried_weight(result.total_weight, len(result.statistics.members)),
            )
            self._samples = result.total_weight
            if self._grid.dimensions > 1:
                self._take_sums(result)
        self.index = next_index(self.index, self._coordinate(result.group))

    def outcome(self) -> Outcome:
        rounds, last = tuple(self._rounds), self._last
        if self._committed is not None:
            committed = self._committed.statistics
            return Committed(
                result=self._now.vector.values[: self._request.vector.layout.values],
                members=committed.members,
                left_out=committed.excluded,
                digest=self._committed.digest,
                weight=self._samples,
                votes=self._votes,
                rounds=rounds,
                cut=self._committed.cut if len(rounds) == 1 else None,
                sent=self._committed.sent if len(rounds) == 1 else None,
                peers=self._committed.total_peers if len(rounds) == 1 else 0,
            )
        if last is None:
            raise ProtocolMisuse("An averaging has at least one round.")
        if last.verdict is Verdict.LEFT_OUT:
            known = (last.total_weight, last.total_peers) if len(rounds) == 1 else (0.0, 0)
            return LeftOut(last.statistics.members, last.digest, rounds, *known)
        if last.verdict is Verdict.ALONE:
            return Alone(rounds)
        in_doubt = last.verdict is Verdict.IN_DOUBT
        return Discarded(last.statistics.reason, in_doubt, rounds, last.begun_without)

    def _with_sums(self) -> RoundRequest:
        """The request with two more values: samples and votes for each unit of weight. Nobody knows
        who will be in the groups of a grid; how many is known if the grid is full."""
        request, grid, vector = self._request, self._grid, self._request.vector
        codec: CodecName = "none" if vector.layout.dtype == "float32" else "float64"
        layout = Layout((*vector.layout.segments, Segment(SUMS, 2, codec)))
        counts = min(request.weight, request.most_weight)
        votes = request.votes / counts if counts else 0.0  # without data there is no vote
        sums = vector.values.new_tensor([1.0, votes])
        is_full = request.expected == grid.cells and request.number is not None
        return replace(
            request,
            vector=Vector(layout, torch.cat((vector.values, sums))),
            expected=grid.width if is_full else None,
            awaited=None,
            coming=frozenset(),
        )

    def _take_sums(self, result: GroupResult) -> None:
        """The samples and votes in this round's result, and this peer's share to carry on."""
        sums, total = self._now.vector.values[-2:], result.total_weight
        self._samples, self._votes = float(sums[0]) * total, float(sums[1]) * total
        members, group = len(result.statistics.members), result.group
        if group is not None:
            all_of_them = coordinates(len(group.members), self._grid, group.round_id)
            sums *= members / all_of_them.count(all_of_them[group.me])

    def _coordinate(self, group: Group | None) -> int:
        """The new coordinate; without a group the old one, which no other peer has taken."""
        if group is None:
            return self.index[0]
        return coordinates(len(group.members), self._grid, group.round_id)[group.me]
