"""The averaging experiment of the Moshpit paper: its results, and that it is that experiment."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from lab.simulate.moshpit import (
    METHODS,
    PAPER_GRID,
    AllReduce,
    AveragingMethod,
    AveragingPlan,
    Gossip,
    Moshpit,
    PushSum,
    RandomGroups,
    expected_contraction,
    simulate,
    usual_grid,
)
from protocols.moshpit.grid import Grid, numbered_index

FAILURE_RATE = 0.005


def deviations(**options: Any) -> dict[str, list[float]]:
    """The deviation of each method after each round."""
    found: dict[str, list[float]] = simulate(AveragingPlan(methods=METHODS, **options))["methods"]
    return found


def test_a_thousand_peers_are_exact_after_two_rounds_without_failures() -> None:
    line = simulate(AveragingPlan(peers=1024, rounds=10))["mean_squared_deviation"]
    assert len(line) == 11
    assert line[2] <= 1e-12 * line[0]
    assert line[1] > 1e-3 * line[0], "one round is not enough"
    assert max(line[2:]) <= 1e-12 * line[0], "and it stays exact"


@pytest.mark.parametrize("discards", [False, True], ids=["leave-out", "discard"])
@pytest.mark.parametrize("peers", [1024, 768])
def test_with_failures_the_methods_come_in_the_order_of_the_paper(
    peers: int, discards: bool
) -> None:
    assert usual_grid(peers) == PAPER_GRID
    lines = deviations(peers=peers, failure_rate=FAILURE_RATE, discards=discards)
    for later in range(2, 11):
        assert lines["moshpit"][later] < lines["pushsum"][later] / 10
        assert lines["moshpit"][later] < lines["gossip"][later] / 10
    assert lines["moshpit"][10] < 1e-5 * lines["pushsum"][10] < lines["gossip"][10]
    # 0.995^1024 is 0.6 %, 0.995^768 is 2 %: ten rounds pass without one that succeeds
    assert lines["allreduce"][10] == lines["allreduce"][0]


@pytest.mark.parametrize(("peers", "grid"), [(1024, Grid(32, 2)), (768, Grid(32, 2))])
def test_where_the_grid_is_well_used_moshpit_outruns_random_groups(peers: int, grid: Grid) -> None:
    lines = deviations(peers=peers, grid=grid, failure_rate=FAILURE_RATE)
    assert lines["moshpit"][2] < lines["random"][2]
    assert lines["moshpit"][10] < lines["random"][10] / 10


@pytest.mark.slow
def test_only_where_the_grid_is_sparse_random_groups_fall_as_fast() -> None:
    def rates(peers: int) -> dict[str, float]:
        """The factor by which a round reduces the deviation, once the first pass is over."""
        plan = AveragingPlan(peers=peers, grid=PAPER_GRID, methods=("moshpit", "random"), trials=5)
        return {
            name: float((line[10] / line[4]) ** (1 / 6))
            for name, line in simulate(plan)["methods"].items()
        }

    tenth, most = rates(96), rates(768)
    assert tenth["random"] == pytest.approx(tenth["moshpit"], rel=0.2)
    assert most["random"] > 3 * most["moshpit"]


@pytest.mark.slow
def test_random_groups_contract_as_the_paper_says() -> None:
    """Within 4 standard errors of the mean of many rounds, the seed being fixed."""
    peers, groups, rounds = 1024, 32, 400
    contractions = []
    for trial in range(rounds):
        numbers = np.random.default_rng((11, trial)).standard_normal(peers)
        method = RandomGroups(numbers, groups, random.Random(trial), discards=False)
        method.average(np.zeros(peers, dtype=np.bool_))
        contractions.append(method.estimates().var() / numbers.var())
    mean = float(np.mean(contractions))
    standard_error = float(np.std(contractions, ddof=1) / np.sqrt(rounds))
    paper = expected_contraction(peers, groups)
    assert paper == pytest.approx(31 / 1024 + 32 / 1024**2)
    assert standard_error < 0.02 * paper, "or it would agree with anything"
    assert abs(mean - paper) < 4 * standard_error
    # what is exact for groups of fixed sizes cannot be told apart from it here
    exact = (groups - 1) / (peers - 1)
    assert abs(paper - exact) == pytest.approx((peers - groups) / (peers**2 * (peers - 1)))
    assert abs(paper - exact) < standard_error / 10


def test_the_expectation_is_exact_over_all_splits_of_a_few_peers() -> None:
    """(r - 1) / (N - 1), which the paper's form is a little above, from all orders of five."""
    import itertools

    numbers = np.array([3.0, -1.0, 4.0, 1.0, -5.0])
    splits = [(order[0::2], order[1::2]) for order in itertools.permutations(range(5))]
    left = []
    for split in splits:
        after = numbers.copy()
        for group in split:
            after[list(group)] = numbers[list(group)].mean()
        left.append(after.var())
    assert np.mean(left) / numbers.var() == pytest.approx(1 / 4)
    assert expected_contraction(5, 2) == pytest.approx(1 / 4 + 3 / (25 * 4))


def methods(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> list[AveragingMethod]:
    """One of each, with 16 peers, in a grid of 4 x 4."""
    grid, drawn = Grid(4, 2), random.Random(3)
    indices = [numbered_index(peer, grid) for peer in range(16)]
    return [
        Moshpit(numbers, indices, grid, drawn, discards=False),
        Moshpit(numbers, list(indices), grid, drawn, discards=True),
        RandomGroups(numbers, 4, drawn, discards=False),
        AllReduce(numbers),
        Gossip(numbers),
    ]


def test_no_method_loses_or_adds_anything_whoever_fails() -> None:
    world = np.random.default_rng(5)
    numbers = world.standard_normal(16)
    for method in methods(numbers):
        for _ in range(20):
            method.average(world.random(16) < 0.3)
            assert method.estimates().sum() == pytest.approx(numbers.sum())


def test_pushsum_comes_to_the_average_though_pushes_are_missing() -> None:
    world = np.random.default_rng(5)
    numbers = world.standard_normal(16)
    method = PushSum(numbers)
    for _ in range(200):
        method.average(world.random(16) < 0.3)
    assert method.estimates() == pytest.approx(np.full(16, numbers.mean()))


def test_pushsum_is_exact_after_as_many_rounds_as_a_number_has_bits() -> None:
    numbers = np.random.default_rng(5).standard_normal(64)
    method = PushSum(numbers)
    for _ in range(6):
        method.average(np.zeros(64, dtype=np.bool_))
    assert method.estimates() == pytest.approx(np.full(64, numbers.mean()), abs=1e-15)


def test_a_peer_that_fails_keeps_its_value() -> None:
    numbers = np.random.default_rng(5).standard_normal(16)
    failed = np.zeros(16, dtype=np.bool_)
    failed[5] = True
    for method in (*methods(numbers), PushSum(numbers)):
        method.average(failed)
        assert method.estimates()[5] == numbers[5]


def test_a_discarded_round_leaves_the_whole_group_as_it_was_and_no_other() -> None:
    numbers = np.random.default_rng(5).standard_normal(16)
    failed = np.zeros(16, dtype=np.bool_)
    failed[5] = True  # in the first round of a 4 x 4 grid with 4, 6 and 7
    discarding, leaving_out = (methods(numbers)[choice] for choice in (1, 0))
    for method in (discarding, leaving_out):
        method.average(failed)
    assert (discarding.estimates() == numbers).nonzero()[0].tolist() == [4, 5, 6, 7]
    assert (leaving_out.estimates() == numbers).nonzero()[0].tolist() == [5]
    assert leaving_out.estimates()[4] == numbers[[4, 6, 7]].mean()


def test_all_methods_meet_the_same_numbers_and_failures_and_a_seed_decides_them() -> None:
    plan = AveragingPlan(peers=100, grid=Grid(10, 2), methods=METHODS, failure_rate=0.1, rounds=3)
    once, again = simulate(plan), simulate(plan)
    for result in (once, again):
        result.pop("wall_seconds")
    assert once == again
    assert len({line[0] for line in once["methods"].values()}) == 1
    alone = simulate(AveragingPlan(peers=100, grid=Grid(10, 2), failure_rate=0.1, rounds=3))
    assert alone["mean_squared_deviation"] == once["methods"]["moshpit"]
    assert alone["failed"] == once["failed"] > 0


def test_several_trials_are_averaged_and_told_one_by_one() -> None:
    result = simulate(AveragingPlan(peers=64, grid=Grid(8, 2), trials=3, rounds=2))
    each = result["mean_squared_deviation_of_trials"]["moshpit"]
    assert len(each) == 3
    assert len({line[0] for line in each}) == 3
    assert result["mean_squared_deviation"] == pytest.approx(np.mean(each, axis=0).tolist())


@pytest.mark.parametrize(
    ("peers", "grid"),
    [(1024, Grid(32, 2)), (768, Grid(32, 2)), (512, Grid(23, 2)), (2048, Grid(13, 3))],
)
def test_the_grid_of_the_paper_is_taken_where_it_is_more_than_half_full(
    peers: int, grid: Grid
) -> None:
    assert usual_grid(peers) == grid
