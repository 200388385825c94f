"""An averaging over the grid from round to round, without a network."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

from protocols.accumulation.rounds import averaged
from protocols.identity import PeerId
from protocols.moshpit.averager import GridWalk, ResultBuffers
from protocols.moshpit.grid import Grid, numbered_index
from protocols.moshpit.group import Group
from protocols.moshpit.group_round import GridRound, GroupResult
from protocols.moshpit.layout import Vector
from protocols.moshpit.outcome import Alone, Committed, Discarded, LeftOut, RoundStatistics, Verdict
from protocols.moshpit.request import RoundRequest
from tests.moshpit.unsigned_lists import unsigned_group

PEERS = tuple(PeerId(f"peer-{number}") for number in range(16))


def walk_of(number: int, grid: Grid, weight: float = 1.0, *, value: float = 0.0) -> GridWalk:
    vector = Vector.of({"w": torch.full((4,), value or float(number))})
    request = RoundRequest(
        vector, weight, epoch=3, expected=grid.cells, number=number, votes=number % 2
    )
    return GridWalk("run", request, grid, numbered_index(number, grid), ResultBuffers())


def step(
    verdict: Verdict,
    members: tuple[PeerId, ...] = PEERS[:2],
    group: Group | None = None,
    total_weight: float = 2.0,
) -> GroupResult:
    statistics = RoundStatistics(
        "group/run/3/0/all", 3, verdict, 0.0, 1.0, "a reason", members=members
    )
    return GroupResult(statistics, group, b"d" * 32, total_weight, len(statistics.members))


def average_together(walks: list[GridWalk], rounds: list[GridRound]) -> None:
    """One round of one group, as if it were committed."""
    total = sum(one.request.weight for one in rounds)
    mean = sum((one.request.weight / total) * one.request.vector.values for one in rounds)
    assert isinstance(mean, torch.Tensor)
    members = PEERS[: len(walks)]
    for one in rounds:
        assert one.result.data_ptr() != one.request.vector.values.data_ptr()
        one.result.copy_(mean)
    for place, walk in enumerate(walks):
        group = unsigned_group(members, place)
        walk.take(step(Verdict.COMMITTED, members, group, total))


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(4, 2), Grid(2, 4), Grid(3, 3)], ids=str)
def test_on_a_full_grid_the_weighted_average_is_exact(grid: Grid) -> None:
    chance = random.Random(7)
    weights = [chance.randrange(1, 100) for _ in range(grid.cells)]
    walks = [walk_of(number, grid, weight) for number, weight in enumerate(weights)]
    for _ in range(grid.rounds):
        groups: dict[str, list[tuple[GridWalk, GridRound]]] = defaultdict(list)
        for walk in walks:
            this = walk.next_round()
            groups[this.key].append((walk, this))
        for group in groups.values():
            assert len(group) == grid.width == group[0][1].request.expected
            chance.shuffle(group)  # rosters are ordered by hashes
            average_together([walk for walk, _ in group], [this for _, this in group])
    exact = sum(number * weight for number, weight in enumerate(weights)) / sum(weights)
    for walk in walks:
        outcome = walk.outcome()
        assert isinstance(outcome, Committed)
        torch.testing.assert_close(outcome.result, torch.full((4,), exact))
        assert outcome.weight == pytest.approx(sum(weights))
        assert outcome.votes == pytest.approx(grid.cells // 2)


def test_the_vector_is_not_written_to() -> None:
    walk = walk_of(1, Grid(2, 4))
    own = walk.next_round().request.vector.values.data_ptr()
    for _ in range(4):
        this = walk.next_round()
        assert this.result.data_ptr() != own
        walk.take(step(Verdict.COMMITTED))


def test_a_round_that_is_not_committed_changes_neither_values_nor_weight() -> None:
    walk = walk_of(1, Grid(2, 2), weight=5.0)
    before = walk.next_round()
    before.result.fill_(float("nan"))
    walk.take(step(Verdict.DISCARDED))
    after = walk.next_round()
    assert torch.equal(after.request.vector.values[:4], torch.ones(4))
    assert after.request.weight == 5.0


def test_an_averaging_is_committed_when_one_of_its_rounds_was() -> None:
    walk = walk_of(1, Grid(2, 2))
    walk.next_round().result.fill_(8.0)
    walk.take(step(Verdict.COMMITTED))
    walk.next_round()
    walk.take(step(Verdict.LEFT_OUT))
    outcome = walk.outcome()
    assert isinstance(outcome, Committed)
    assert torch.equal(outcome.result, torch.full((4,), 8.0))
    assert [one.verdict for one in outcome.rounds] == [Verdict.COMMITTED, Verdict.LEFT_OUT]


@pytest.mark.parametrize(("rounds", "weight"), [(1, 40.0), (2, 0.0)])
def test_one_that_is_left_out_knows_how_much_stands_behind_the_others_result(
    rounds: int, weight: float
) -> None:
    """Over a grid it is not known. If it is too little for a step, the others make none."""
    walk = walk_of(1, Grid(2, rounds))
    for verdict in (*[Verdict.NO_GROUP] * (rounds - 1), Verdict.LEFT_OUT):
        walk.next_round()
        walk.take(step(verdict, total_weight=40.0))
    outcome = walk.outcome()
    assert isinstance(outcome, LeftOut)
    assert outcome.weight == averaged(outcome).weight == weight


@pytest.mark.parametrize(
    ("verdict", "type_"),
    [
        (Verdict.DISCARDED, Discarded),
        (Verdict.IN_DOUBT, Discarded),
        (Verdict.NO_GROUP, Discarded),
        (Verdict.LEFT_OUT, LeftOut),
        (Verdict.ALONE, Alone),
    ],
)
def test_without_a_commit_the_outcome_is_that_of_the_last_round(
    verdict: Verdict, type_: type
) -> None:
    walk = walk_of(1, Grid(1, 1))
    walk.next_round()
    walk.take(step(verdict))
    outcome = walk.outcome()
    assert isinstance(outcome, type_)
    if isinstance(outcome, Discarded):
        assert outcome.in_doubt is (verdict is Verdict.IN_DOUBT)
        assert outcome.reason == "a reason"


def test_a_result_can_be_averaged_further() -> None:
    buffers = ResultBuffers()
    vector = Vector.of({"w": torch.zeros(4)})
    first = buffers.other_than(vector.values)
    second = buffers.other_than(first)
    assert second.data_ptr() != first.data_ptr()
    assert buffers.other_than(second).data_ptr() == first.data_ptr()  # and there are no more


def test_a_peer_that_was_alone_keeps_its_coordinates() -> None:
    grid = Grid(3, 2)
    walk = walk_of(5, grid)
    index = walk.index
    for _ in range(2):
        walk.next_round()
        walk.take(step(Verdict.ALONE))
    assert walk.index == index
