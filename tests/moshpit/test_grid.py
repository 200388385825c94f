"""The grid: which peers average together, and that full grids give the exact average."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.moshpit.grid import (
    LARGEST_WIDTH,
    MOST_DIMENSIONS,
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

LARGEST_FULL_GRID = 1_300  # peers, of exact fractions: what a property may cost

FULL_GRIDS = [
    Grid(width, dimensions)
    for dimensions in range(1, 9)
    for width in range(1, 40)
    if width**dimensions <= LARGEST_FULL_GRID
]
full_grids = st.sampled_from(FULL_GRIDS)
small_grids = st.sampled_from([grid for grid in FULL_GRIDS if grid.cells <= 256])
chance = st.integers(0, 2**32).map(random.Random)
few = settings(max_examples=20, deadline=None)  # each is a whole grid


def groups_of(indices: list[Index]) -> list[list[int]]:
    """Which peers average together in a round, by number."""
    groups = defaultdict(list)
    for peer, index in enumerate(indices):
        groups[group_name(index)].append(peer)
    return list(groups.values())


def average(
    values: list[Fraction],
    weights: list[Fraction],
    indices: list[Index],
    grid: Grid,
    order: random.Random,
) -> None:
    """One round of all peers, with rosters in any order. Their values are replaced."""
    for group in groups_of(indices):
        order.shuffle(group)
        total = sum(weights[peer] for peer in group)
        mean = sum(weights[peer] * values[peer] for peer in group) / total
        new = coordinates(len(group), grid, order.randbytes(32))
        for peer, coordinate in zip(group, new, strict=True):
            values[peer], weights[peer] = mean, total / len(group)
            indices[peer] = next_index(indices[peer], coordinate)


@few
@given(full_grids, chance)
def test_a_full_grid_averages_exactly_whatever_order_the_rosters_have(
    grid: Grid, order: random.Random
) -> None:
    indices = [numbered_index(peer, grid) for peer in range(grid.cells)]
    values = [Fraction(order.randrange(-1000, 1000)) for _ in indices]
    weights = [Fraction(1) for _ in indices]
    mean = sum(values) / len(values)
    for _ in range(grid.rounds):
        average(values, weights, indices, grid, order)
    assert set(values) == {mean}


@few
@given(full_grids, chance)
def test_a_full_grid_averages_exactly_by_weight(grid: Grid, order: random.Random) -> None:
    indices = [numbered_index(peer, grid) for peer in range(grid.cells)]
    values = [Fraction(order.randrange(-1000, 1000)) for _ in indices]
    weights = [Fraction(order.randrange(1, 100)) for _ in indices]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    for _ in range(grid.rounds):
        average(values, weights, indices, grid, order)
    assert set(values) == {mean}


@few
@given(small_grids, chance, st.integers(0, 300))
def test_any_grid_keeps_the_weighted_sum(grid: Grid, order: random.Random, peers: int) -> None:
    indices = [random_index(order, grid) for _ in range(peers)]
    values = [Fraction(order.randrange(-1000, 1000)) for _ in indices]
    weights = [Fraction(order.randrange(1, 100)) for _ in indices]

    def of_all() -> tuple[Fraction, Fraction]:
        pairs = list(zip(weights, values, strict=True))
        return sum((w for w, _ in pairs), Fraction()), sum((w * v for w, v in pairs), Fraction())

    before = of_all()
    for _ in range(grid.rounds + 1):
        average(values, weights, indices, grid, order)
    assert of_all() == before


@pytest.mark.slow
@few
@given(full_grids, chance)
def test_a_full_grid_stays_full(grid: Grid, order: random.Random) -> None:
    cells = set(itertools.product(range(grid.width), repeat=grid.dimensions))
    indices = [numbered_index(peer, grid) for peer in range(grid.cells)]
    for _ in range(grid.rounds + 2):
        assert set(indices) == cells
        average([Fraction()] * len(indices), [Fraction(1)] * len(indices), indices, grid, order)


@few
@given(st.integers(2, 12), st.integers(2, 3), st.integers(1, 400), chance)
def test_nobody_meets_a_member_of_the_last_group_in_the_next(
    width: int, dimensions: int, peers: int, order: random.Random
) -> None:
    grid = Grid(width, dimensions)
    indices = [numbered_index(peer, grid) for peer in range(min(peers, grid.cells))]
    for _ in range(4):
        met = [set(group) for group in groups_of(indices)]
        average([Fraction()] * len(indices), [Fraction(1)] * len(indices), indices, grid, order)
        for group in groups_of(indices):
            assert all(len(before & set(group)) <= 1 for before in met)


@few
@given(small_grids, st.integers(1, 60), chance)
def test_no_group_outgrows_the_grid_where_each_peer_has_a_cell_of_its_own(
    grid: Grid, rounds: int, order: random.Random
) -> None:
    cells = list(itertools.product(range(grid.width), repeat=grid.dimensions))
    indices = order.sample(cells, order.randint(1, len(cells)))
    for _ in range(min(rounds, 6)):
        assert max(map(len, groups_of(indices))) <= grid.width
        assert len(set(indices)) == len(indices)
        average([Fraction()] * len(indices), [Fraction(1)] * len(indices), indices, grid, order)


def test_the_first_index_is_that_of_the_paper() -> None:
    grid = Grid(width=3, dimensions=3)
    assert numbered_index(0, grid) == (0, 0, 0)
    assert numbered_index(1, grid) == (1, 0, 0)
    assert numbered_index(5, grid) == (2, 1, 0)  # 5 = 2 + 1 x 3
    assert numbered_index(26, grid) == (2, 2, 2)
    assert numbered_index(27, grid) == (0, 0, 0), "floor(i / M^(j-1)) mod M begins again"


def test_a_round_averages_along_the_oldest_coordinate() -> None:
    assert group_name((7, 1, 2)) == group_name((0, 1, 2)) == "1.2"
    assert group_name((7, 1, 2)) != group_name((7, 1, 3))
    assert next_index((7, 1, 2), 5) == (1, 2, 5)


def test_different_groups_have_different_names() -> None:
    indices = list(itertools.product(range(12), repeat=3))
    assert len({group_name(index) for index in indices}) == 12**2
    assert group_name((0, 11, 1)) != group_name((0, 1, 11))


def test_everybody_is_one_group_where_there_is_one_dimension() -> None:
    grid = grid_shape(peers=5, group_size=64)
    assert grid == Grid(width=5, dimensions=1)
    assert {group_name(numbered_index(peer, grid)) for peer in range(5)} == {"all"}


@pytest.mark.parametrize(
    ("peers", "group_size", "shape"),
    [
        (1, 2, Grid(1, 1)),
        (64, 64, Grid(64, 1)),
        (65, 64, Grid(9, 2)),
        (1024, 32, Grid(32, 2)),
        (1025, 32, Grid(11, 3)),
        (768, 32, Grid(28, 2)),
        (1000, 10, Grid(10, 3)),
        (2**31, 2, Grid(2, 31)),
    ],
)
def test_a_grid_has_the_fewest_dimensions_and_then_the_fewest_cells(
    peers: int, group_size: int, shape: Grid
) -> None:
    assert grid_shape(peers, group_size) == shape


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(2, 2 * LARGEST_WIDTH))
def test_everybody_has_a_cell_and_no_group_is_too_large(peers: int, group_size: int) -> None:
    grid = grid_shape(peers, group_size)
    assert grid.cells >= peers
    assert grid.width <= group_size
    assert grid.dimensions == 1 or min(group_size, LARGEST_WIDTH) ** (grid.dimensions - 1) < peers
    assert (grid.width - 1) ** grid.dimensions < peers


def test_peers_without_a_number_come_to_stand_everywhere_alike() -> None:
    grid, drawn = Grid(4, 2), random.Random(7)
    counts = defaultdict(int)
    for _ in range(16_000):
        counts[random_index(drawn, grid)] += 1
    assert len(counts) == grid.cells
    # 1000 in each, give or take a standard deviation of 31: five of them
    assert all(850 < count < 1150 for count in counts.values())


@settings(deadline=None)
@given(full_grids, st.integers(1, 3 * 40), st.binary(min_size=32, max_size=32))
def test_members_get_coordinates_as_different_as_can_be_and_all_come_to_the_same(
    grid: Grid, members: int, round_id: bytes
) -> None:
    new = coordinates(members, grid, round_id)
    assert new == coordinates(members, grid, bytes(round_id))
    counts = Counter(new)
    assert sum(counts.values()) == members
    assert len(counts) == min(members, grid.width)
    assert max(counts.values()) == -(-members // grid.width)
    assert set(counts) <= set(range(grid.width))


def test_places_stand_for_the_cells_in_an_order_that_the_round_draws() -> None:
    grid = Grid(8, 2)
    assert coordinates(8, grid, bytes(32)) == (5, 0, 2, 3, 6, 7, 4, 1)
    assert coordinates(3, grid, bytes(32)) == (5, 0, 2)
    assert coordinates(10, grid, bytes(32))[8:] == (5, 0), "and begins again"
    assert coordinates(8, grid, b"\1" * 32) != coordinates(8, grid, bytes(32))


def test_peers_who_begin_anywhere_come_to_fill_the_grid_evenly() -> None:
    grid, order = Grid(16, 2), random.Random(7)
    indices = [random_index(order, grid) for _ in range(grid.cells)]
    largest = [max(map(len, groups_of(indices)))]
    for _ in range(8):
        average([Fraction()] * len(indices), [Fraction(1)] * len(indices), indices, grid, order)
        largest.append(max(map(len, groups_of(indices))))
    assert largest[0] > 20
    assert largest[-1] <= 17


def test_all_members_carry_the_weight_of_their_group_in_equal_shares() -> None:
    assert carried_weight(12.0, 4) == 3.0
    assert carried_weight(0.0, 3) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Grid(0, 1),
        lambda: Grid(LARGEST_WIDTH + 1, 1),
        lambda: Grid(2, 0),
        lambda: Grid(2, MOST_DIMENSIONS + 1),
        lambda: grid_shape(0, 4),
        lambda: grid_shape(4, 1),
        lambda: grid_shape(2**MOST_DIMENSIONS + 1, 2),
        lambda: numbered_index(-1, Grid(2, 2)),
        lambda: coordinates(0, Grid(2, 2), bytes(32)),
        lambda: carried_weight(1.0, 0),
        lambda: carried_weight(float("nan"), 1),
        lambda: carried_weight(-1.0, 1),
    ],
)
def test_an_impossible_grid_is_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=r"\w"):
        wrong()


def test_the_grid_is_light() -> None:
    """Programs that simulate or plan with it start at once: torch alone would cost a second."""
    check = "import sys, protocols.moshpit.grid; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
