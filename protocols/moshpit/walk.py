"""One averaging over the grid, from round to round: values, weight and index. No I/O.

    walk = Walk(contribution, grid, index, buffers)
    for each round:  walk.take(await rounds.run(walk.next_round()))
    walk.outcome()

A round that was committed replaces the values by its result, and the weight by W / s, so that
what all members weigh together is the same before and after it (grid.carried_weight). One that
was not changes neither, and the averaging goes on: its members are still where they were, and the
next round brings them to others. Then the average is not exact, but the weighted sum over all
peers is kept, and repeated averaging approaches the right one.

What stands behind the result is carried with the values, as two more of them: how many samples, and
how many votes, each divided by the weight that this peer brings. So a round's average of them,
times its weight, is the sum over its members. After a round several members may have the same new
coordinate and meet again; each takes its share of the sum on, so that nothing is counted twice.
What a peer fails to bring on is missing from the sum: it may be too small, and never too large.

Easy to get wrong: a result cannot be written where it is read from. The values go from one buffer
into another, and back.
"""

from __future__ import annotations

import torch

from protocols.errors import ProtocolMisuse
from protocols.moshpit.buffers import ResultBuffers
from protocols.moshpit.contribution import Contribution
from protocols.moshpit.grid import (
    Grid,
    Index,
    carried_weight,
    coordinates,
    group_name,
    next_index,
)
from protocols.moshpit.group import Group
from protocols.moshpit.group_round import Step, Wanted
from protocols.moshpit.layout import CodecName, Layout, Segment
from protocols.moshpit.outcome import Alone, Committed, Discarded, LeftOut, Outcome
from protocols.moshpit.round_statistics import RoundStatistics, Verdict

SUMS = "sums over the grid"
"""The segment that is added to the vector."""


class Walk:
    """Where this peer is in the grid, and what it carries."""

    def __init__(
        self, contribution: Contribution, grid: Grid, index: Index, buffers: ResultBuffers
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
        self._committed: Step | None = None
        self._last: Step | None = None

    def next_round(self) -> Wanted:
        contribution, number = self._contribution, len(self._rounds)
        self._result = self._buffers.other_than(self._values)
        return Wanted(
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

    def take(self, step: Step) -> None:
        """What the round has brought."""
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
        """Two more values: samples and votes for each unit of weight."""
        contribution = self._contribution
        codec: CodecName = "none" if self._layout.dtype == "float32" else "float64"
        self._layout = Layout((*self._layout.segments, Segment(SUMS, 2, codec)))
        counts = min(contribution.weight, contribution.most_weight)
        votes = contribution.votes / counts if counts else 0.0  # without data there is no vote
        sums = self._values.new_tensor([1.0, votes])
        self._values = torch.cat((self._values, sums))

    def _take_sums(self, step: Step) -> None:
        """What stands behind this round's result; and this peer's share of it, to be carried on."""
        sums, total = self._values[-2:], step.total_weight
        self._samples, self._votes = float(sums[0]) * total, float(sums[1]) * total
        members, group = len(step.statistics.members), step.group
        if group is not None:
            all_of_them = coordinates(len(group.members), self._grid, group.round_id)
            sums *= members / all_of_them.count(all_of_them[group.me])

    def _coordinate(self, group: Group | None) -> int:
        """The new one; without a group the old one, which nobody has taken."""
        if group is None:
            return self.index[0]
        return coordinates(len(group.members), self._grid, group.round_id)[group.me]

    def _expected(self) -> int | None:
        """How many will be in the next group: known with one group, and on a full grid."""
        expected, grid = self._contribution.expected, self._grid
        if expected is None or grid.dimensions == 1:
            return expected
        is_full = expected == grid.cells and self._contribution.number is not None
        return grid.width if is_full else None
