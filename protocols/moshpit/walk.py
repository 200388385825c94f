"""One averaging over the grid, from round to round: values, weight and index. No I/O.

    walk = Walk(contribution, grid, index, buffers)
    for each round:  walk.take(await rounds.run(walk.next_round()))
    walk.outcome()

A round that was committed replaces the values by its result, and the weight by W / s, so that
what all members weigh together is the same before and after it (grid.carried_weight). One that
was not changes neither, and the averaging goes on: its members are still where they were, and the
next round brings them to others. Then the average is not exact, but the weighted sum over all
peers is kept, and repeated averaging approaches the right one.

Easy to get wrong: a result cannot be written where it is read from. The values go from the vector
into one buffer, from there into another, and back.
"""

from __future__ import annotations

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
from protocols.moshpit.outcome import Alone, Committed, Discarded, LeftOut, Outcome
from protocols.moshpit.round_statistics import RoundStatistics, Verdict


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
        self._values = contribution.vector.values
        self._result = self._values
        self._weight = contribution.weight
        self._rounds: list[RoundStatistics] = []
        self._committed: Step | None = None
        self._last: Step | None = None

    def next_round(self) -> Wanted:
        contribution, number = self._contribution, len(self._rounds)
        own = contribution.vector.values
        if contribution.overwrite and self._values is not own:
            self._result = own
        else:
            self._result = self._buffers.other_than(self._values)
        return Wanted(
            name=group_name(self.index),
            number=number,
            epoch=contribution.epoch,
            topic=contribution.topic,
            layout=contribution.vector.layout,
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
        self.index = next_index(self.index, self._coordinate(step.group))

    def outcome(self) -> Outcome:
        rounds, step = tuple(self._rounds), self._last
        if self._committed is not None:
            last = self._committed.statistics
            return Committed(
                result=self._values,
                members=last.members,
                left_out=last.excluded,
                digest=self._committed.digest,
                weight=self._committed.total_weight,
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
