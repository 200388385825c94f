"""Averages a vector with the other peers of a run: rounds of Moshpit All-Reduce over the grid.

    async with open_averager(network, rpc, dht, AveragerSettings(run="poem")) as averager:
        outcome = await averager.average(vector, weight=samples, epoch=epoch)

If all peers fit into one group, `average` is one round with all of them. Otherwise it is one round
for each coordinate of the grid (002, algorithm 1): find the group of the round's key, agree on the
average with its members, take the average as one's own vector, and derive the next index from one's
place in the group. After a round with total weight W and s members, each goes on with the weight
W / s, so that the weighted average stays exact on a full grid.

In this file: `open_averager` and `Averager`; `RoundContribution` and `AveragingOptions`, the
request; `ResultBuffers`, the memory for results; `GridWalk`, one averaging from round to round.

Promises: a vector is never changed. Nothing that other peers or the network do raises an error: it
is in the outcome. Everything ends with the `async with` block. Memory is the vector, one result
buffer of the same size that is kept for the next averaging, and a few chunks; for a grid of several
rounds, two buffers and a copy of the vector.

Easy to get wrong: only one averaging at a time. A second one is a ProtocolMisuse.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Required, TypedDict, Unpack

import torch
import trio
from torch import Tensor

from protocols.dht import Dht
from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.bandwidth import Bandwidth
from protocols.moshpit.butterfly import Butterfly
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
from protocols.moshpit.group import Group, check_topic
from protocols.moshpit.group_round import GroupResult, GroupRounds, WantedGroup
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
from protocols.moshpit.roster import LARGEST_EPOCH, LARGEST_WEIGHT
from protocols.moshpit.round import Shell
from protocols.moshpit.settings import AveragerSettings
from protocols.moshpit.switchboard import Switchboard
from protocols.network import Network
from protocols.rpc import Rpc
from protocols.tensors import CodecName

CHECKED_IN_PLACE_VALUES = 1 << 18  # checking so many takes well under a millisecond

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
        self._place: tuple[Grid, Index] | None = None
        self._running: trio.CancelScope | None = None
        self._idle = trio.Event()
        self._idle.set()
        self._closed = False

    async def average(self, vector: Vector, **options: Unpack[AveragingOptions]) -> Outcome:
        """Average this vector with the peers of the run that have the same epoch and topic.
        `AveragingOptions` explains the options.

        Raises NotFinite (with the tensor's name, before anything is sent), ProtocolMisuse, and
        AveragingCancelled if the averager ends meanwhile. Nothing that others or the network do
        raises an error: it is in the outcome.
        """
        return await self._average(self._begin(vector, options))

    def statistics(self) -> AveragerStatistics:
        """Totals since the averager was opened, and details of the last rounds."""
        return self._statistics.statistics()

    def when_asked(self, tell: Callable[[int], None]) -> None:
        """From now on, when another peer asks this one into a group of the run while it looks for
        none, call `tell` with the group's epoch. This peer may not know yet that a round has begun,
        or that it is behind. Any peer can ask, as often as it likes."""

        def asked(run: str, epoch: int) -> None:
            if run == self._run:
                tell(epoch)

        self._matchmaker.when_asked = asked

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

    async def _average(self, contribution: RoundContribution) -> Outcome:
        try:
            with trio.CancelScope() as self._running:
                if self._closed:
                    self._running.cancel()
                return await self._walk(contribution)
            raise AveragingCancelled("The averager ended before there was an outcome.")
        finally:
            self._running = None
            self._idle.set()

    async def _walk(self, contribution: RoundContribution) -> Outcome:
        vector, grid = contribution.vector, contribution.grid or ONE_GROUP
        if vector.layout.values <= CHECKED_IN_PLACE_VALUES:
            vector.check_finite()
        else:
            await trio.to_thread.run_sync(vector.check_finite)
        index = self._index(grid, contribution.number)
        walk = GridWalk(contribution, grid, index, self._buffers)
        for _ in range(grid.rounds):
            step = await self._rounds.run(walk.next_round())
            self._statistics.add(step.statistics)
            walk.take(step)
        self._place = (grid, walk.index)
        return walk.outcome()

    def _index(self, grid: Grid, number: int | None) -> Index:
        """Where this peer begins: the cell of its number, its last place, or a random cell."""
        if number is not None:
            return numbered_index(number, grid)
        if self._place is not None and self._place[0] == grid:
            return self._place[1]
        return random_index(self._network.random, grid)

    def _begin(self, vector: Vector, options: AveragingOptions) -> RoundContribution:
        contribution = RoundContribution(vector, **options)
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


# ---- the request


@dataclass(frozen=True, eq=False)
class RoundContribution:
    """A vector, and the fields of `AveragingOptions`. ProtocolMisuse if one makes no sense."""

    vector: Vector
    weight: float
    epoch: int
    expected: int | None = None
    grid: Grid | None = None
    number: int | None = None
    topic: str = ""
    awaited: frozenset[PeerId] | None = None
    most_weight: float = LARGEST_WEIGHT
    votes: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= LARGEST_WEIGHT:
            raise ProtocolMisuse(
                f"A weight of {self.weight} was asked for.",
                why=f"A weight is a number of samples, from 0 to {LARGEST_WEIGHT:g}.",
            )
        if not 0.0 < self.most_weight <= LARGEST_WEIGHT:
            raise ProtocolMisuse(f"Nobody can count with a weight of {self.most_weight} at most.")
        if not 0 <= self.epoch <= LARGEST_EPOCH:
            raise ProtocolMisuse(f"There is no epoch {self.epoch}: they count from 0.")
        check_topic(self.topic)


class AveragingOptions(TypedDict, total=False):
    """The same fields as keyword arguments of `Averager.average`.

    - `weight`: how much the vector counts (samples). 0 is an auxiliary peer: it brings no data, may
      reduce for the others, and gets the result.
    - `epoch`: all members of a group have the same.
    - `expected`: how many peers will take part, this one included, if the caller knows. The group
      forms as soon as so many have come, even if more are on their way, unless those are `awaited`.
    - `awaited`: which of those are known by name; used where there is one group. For up to the
      matchmaking time, the group is not closed without an awaited peer that is there, and a peer
      that is not awaited takes nobody's place. Only the names given by the leading peer count.
    - `grid`: for an averaging of several rounds; without one there is one group.
    - `number`: from 0, this peer's first place in the grid, if the caller numbers the peers.
      Otherwise the first place is random, and later averagings go on from the last place.
    - `votes`: what this peer adds to `Committed.votes`, in an averaging over a grid.
    - `topic`: peers with different topics never meet. At most 80 letters, digits, '.', '_' and '-'
      (group.py).
    - `most_weight`: the largest weight with which any member counts, this peer included; the same
      at all members. A weight is only what its owner signs: nobody can see what it has computed.
    """

    weight: Required[float]
    epoch: Required[int]
    expected: int | None
    grid: Grid | None
    number: int | None
    votes: float
    topic: str
    awaited: frozenset[PeerId] | None
    most_weight: float


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
        are lost."""
        self._buffers = [
            one
            for one in self._buffers
            if one.numel() == source.numel() and one.dtype == source.dtype
        ]
        for buffer in self._buffers:
            if not _share_memory(buffer, source):
                return buffer
        self._buffers.append(torch.empty(source.numel(), dtype=source.dtype))
        return self._buffers[-1]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# ---- one averaging over the grid


SUMS = "sums over the grid"
"""The name of the segment that is added to the vector."""


class GridWalk:
    """One averaging from round to round: this peer's index, values and weight. No I/O.

        walk = Walk(contribution, grid, index, buffers)
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
        self, contribution: RoundContribution, grid: Grid, index: Index, buffers: ResultBuffers
    ) -> None:
        if len(index) != grid.dimensions:
            raise ProtocolMisuse(f"{index} is no index of a grid of {grid.dimensions} dimensions.")
        self.index = index
        self._contribution = contribution
        self._grid = grid
        self._buffers = buffers
        self._layout, self._values = contribution.vector.layout, contribution.vector.values
        self._samples: float = 0.0
        self._votes: float | None = None
        if grid.dimensions > 1:
            self._carry_sums()
        self._result = self._values
        self._weight = contribution.weight
        self._rounds: list[RoundStatistics] = []
        self._committed: GroupResult | None = None
        self._last: GroupResult | None = None

    def next_round(self) -> WantedGroup:
        contribution, number = self._contribution, len(self._rounds)
        self._result = self._buffers.other_than(self._values)
        return WantedGroup(
            name=group_name(self.index),
            number=number,
            epoch=contribution.epoch,
            topic=contribution.topic,
            layout=self._layout,
            weight=self._weight,
            most_weight=contribution.most_weight,
            expected=self._expected(),
            awaited=contribution.awaited if self._grid.dimensions == 1 else None,
            splits=self._grid.dimensions > 1,
            source=self._values,
            result=self._result,
        )

    def take(self, step: GroupResult) -> None:
        """Take the outcome of a round."""
        self._last = step
        self._rounds.append(step.statistics)
        if step.verdict is Verdict.COMMITTED:
            self._committed = step
            self._values = self._result
            self._weight = carried_weight(step.total_weight, len(step.statistics.members))
            self._samples = step.total_weight
            if self._grid.dimensions > 1:
                self._take_sums(step)
        self.index = next_index(self.index, self._coordinate(step.group))

    def outcome(self) -> Outcome:
        rounds, step = tuple(self._rounds), self._last
        if self._committed is not None:
            last = self._committed.statistics
            return Committed(
                result=self._values[: self._contribution.vector.layout.values],
                members=last.members,
                left_out=last.excluded,
                digest=self._committed.digest,
                weight=self._samples,
                votes=self._votes,
                rounds=rounds,
                cut=self._committed.cut if len(rounds) == 1 else None,
            )
        if step is None:
            raise ProtocolMisuse("An averaging has at least one round.")
        if step.verdict is Verdict.LEFT_OUT:
            return LeftOut(step.statistics.members, step.digest, rounds)
        if step.verdict is Verdict.ALONE:
            return Alone(rounds)
        in_doubt = step.verdict is Verdict.IN_DOUBT
        return Discarded(step.statistics.reason, in_doubt, rounds, step.begun_without)

    def _carry_sums(self) -> None:
        """Add two values to the vector: samples and votes for each unit of weight."""
        contribution = self._contribution
        codec: CodecName = "none" if self._layout.dtype == "float32" else "float64"
        self._layout = Layout((*self._layout.segments, Segment(SUMS, 2, codec)))
        counts = min(contribution.weight, contribution.most_weight)
        votes = contribution.votes / counts if counts else 0.0  # without data there is no vote
        sums = self._values.new_tensor([1.0, votes])
        self._values = torch.cat((self._values, sums))

    def _take_sums(self, step: GroupResult) -> None:
        """The samples and votes in this round's result, and this peer's share to carry on."""
        sums, total = self._values[-2:], step.total_weight
        self._samples, self._votes = float(sums[0]) * total, float(sums[1]) * total
        members, group = len(step.statistics.members), step.group
        if group is not None:
            all_of_them = coordinates(len(group.members), self._grid, group.round_id)
            sums *= members / all_of_them.count(all_of_them[group.me])

    def _coordinate(self, group: Group | None) -> int:
        """The new coordinate; without a group the old one, which no other peer has taken."""
        if group is None:
            return self.index[0]
        return coordinates(len(group.members), self._grid, group.round_id)[group.me]

    def _expected(self) -> int | None:
        """How many peers will be in the next group, if known: in one group, or on a full grid."""
        expected, grid = self._contribution.expected, self._grid
        if expected is None or grid.dimensions == 1:
            return expected
        is_full = expected == grid.cells and self._contribution.number is not None
        return grid.width if is_full else None
