"""Where newcomers go: to where there are fewest experts, with few prefixes."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from protocols.experts import ExpertGrid, Uid, free_cells

GRID = ExpertGrid("ffn", (4, 8))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    st.data(),
    st.integers(0, 40),
    st.integers(0, 9),
)
def test_only_free_cells_are_given_each_once_and_as_many_as_there_are(
    sizes: tuple[int, ...], data: st.DataObject, count: int, seed: int
) -> None:
    grid = ExpertGrid("ffn", sizes)
    numbers = st.sets(st.integers(0, grid.cells - 1))
    live = {grid.at(number) for number in data.draw(numbers)}
    cells = free_cells(grid, live, count, Random(seed))
    assert len(cells) == len(set(cells)) == min(count, grid.cells - len(live))
    assert all(cell in grid and cell not in live for cell in cells)


def test_a_server_whose_experts_fit_below_one_prefix_has_only_one() -> None:
    cells = free_cells(GRID, [], 8, Random(1))
    assert len({cell.parent for cell in cells}) == 1


def test_servers_that_come_in_turn_spread_over_all_prefixes() -> None:
    live: list[Uid] = []
    for seed in range(8):
        live += free_cells(GRID, live, 4, Random(seed))
    assert Counter(cell.parent for cell in live) == {GRID.root.child(row): 8 for row in range(4)}


def test_the_prefix_with_fewest_experts_is_filled_first() -> None:
    live = [Uid("ffn", (row, column)) for row in range(4) for column in range(2 + (row != 2))]
    assert {cell.parent for cell in free_cells(GRID, live, 3, Random(1))} == {Uid("ffn", (2,))}


def test_the_cells_below_one_prefix_are_neighbours() -> None:
    cells = sorted(cell.cells[1] for cell in free_cells(GRID, [], 3, Random(4)))
    assert {(one - cells[0]) % 8 for one in cells} in ({0, 1, 2}, {0, 1, 7}, {0, 6, 7})


def test_two_that_come_at_once_mostly_choose_different_cells() -> None:
    grid = ExpertGrid("ffn", (64, 64))
    apart = sum(
        not set(free_cells(grid, [], 4, Random(seed)))
        & set(free_cells(grid, [], 4, Random(1000 + seed)))
        for seed in range(100)
    )
    assert apart > 90


def test_experts_of_other_grids_and_outside_of_this_one_do_not_count() -> None:
    live = [Uid("other", (0, 0)), Uid("ffn", (9, 9))]
    cells = free_cells(GRID, live, 32, Random(1))
    assert sorted(cells) == [GRID.at(number) for number in range(32)]


def test_a_grid_too_large_to_be_walked_is_no_trouble() -> None:
    grid = ExpertGrid("ffn", (4096,) * 4)
    assert len(free_cells(grid, [], 100, Random(1))) == 100
