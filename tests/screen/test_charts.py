"""Curves, their axis, and bars."""

from __future__ import annotations

import math

import pytest

from node.app.screen.charts import Scale, curve, labels, scale_of, shares

LINEAR = Scale(0.0, 3.0, by_factors=False)


def drawn(
    values: list[float], columns: int, rows: int = 1, at: list[int] | None = None
) -> list[str]:
    scale = scale_of(values)
    assert scale is not None
    return curve(values, at or list(range(len(values))), columns, rows, scale)


def test_a_character_has_two_by_four_dots() -> None:
    assert curve([3.0, 2.0], [1, 2], 1, 1, LINEAR) == ["⠑"]
    assert curve([0.0, 0.0], [1, 2], 1, 1, LINEAR) == ["⣀"]
    assert curve([3.0, 3.0], [1, 2], 1, 2, LINEAR) == ["⠉", " "]


def test_a_line_goes_from_each_point_to_the_next_by_their_steps() -> None:
    assert curve([3.0, 0.0], [1, 100], 4, 2, Scale(0.0, 3.0, by_factors=False)) == [
        "⠑⢄  ",
        "  ⠑⢄",
    ]


def test_it_covers_all_columns_however_many_steps_there_are() -> None:
    for many in (2, 3, 90, 700):
        (row,) = curve([1.0] * many, list(range(1, many + 1)), 61, 1, LINEAR)
        assert len(row) == 61
        assert " " not in row


def test_small_noise_does_not_change_the_curve() -> None:
    """A hundredth more or less changes nothing; scaled to the lowest and highest it was 8 rows."""
    noisy = [0.2538 * (1.0 + 0.01 * (step % 2)) for step in range(40)]
    assert len(set(drawn(noisy, 40)[0])) == 1
    noisy = [-3.0 + 0.01 * (step % 2) for step in range(40)]
    assert len(set(drawn(noisy, 40)[0])) == 1


def test_the_scale_stays_until_a_value_passes_its_end() -> None:
    assert scale_of([5.49, 2.4]) == scale_of([5.49, 2.07]) == Scale(2.0, 7.0, by_factors=True)
    assert scale_of([5.49, 1.99]) == Scale(1.5, 7.0, by_factors=True)
    assert scale_of([0.1, 0.0]) == Scale(0.0, pytest.approx(0.1), by_factors=False)
    assert scale_of([math.nan]) is None


def test_one_absurd_value_leaves_the_others_to_be_seen() -> None:
    values = [4.0, 3.0, 1e30, 2.0, 1.0]
    assert scale_of(values) == Scale(1.0, 3000.0, by_factors=True)


def test_the_axis_has_its_ends_and_round_values_between() -> None:
    assert labels(Scale(1.0, 10.0, by_factors=True), 9) == [
        *("10", "", "5", "", "3", "", "2", "", "1")
    ]
    assert labels(Scale(1.5, 7.0, by_factors=True), 2) == ["7", "1.5"]
    assert labels(Scale(1.5, 7.0, by_factors=True), 1) == [""]


def test_many_values_are_averaged_into_the_columns() -> None:
    assert curve([3.0, 1.0, 2.0, 0.0], [1, 2, 3, 4], 1, 1, LINEAR) == ["⠢"]


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_none_is_left_out(strange: float) -> None:
    assert drawn([2.0, strange, 1.0], 9) == drawn([2.0, 1.0], 9, at=[0, 2])
    assert curve([strange], [1], 2, 2, LINEAR) == ["  ", "  "]


def test_huge_values_do_not_overflow() -> None:
    assert len(drawn([1e308, -1e308, 1e308], 9)[0]) == 9
    assert len(drawn([1e308, 1e308, 5e-324], 9)[0]) == 9
    assert curve([], [], 3, 1, LINEAR) == ["   "]
    assert shares((1e308, 1e308), 1.0, 10) == [10, 0]


def test_a_bar_is_full_when_everything_is_there_and_not_before() -> None:
    assert shares((25.0, 25.0), 100.0, 40) == [10, 10]
    assert sum(shares((33.0, 66.9), 100.0, 10)) == 9
    assert sum(shares((50.0, 80.0), 100.0, 10)) == 10
    assert shares((math.nan, -3.0), 100.0, 10) == [0, 0]
    assert shares((1.0,), 0.0, 10) == [0]
