"""Curves and bars."""

from __future__ import annotations

import math

import pytest

from node.app.screen.charts import Scale, curve, scale_of, shares


def test_a_curve_goes_from_its_highest_to_its_lowest_value() -> None:
    falling = [2.0**-power for power in range(8)]
    assert curve(falling, 8, scale=Scale(2.0**-7, 1.0, by_factors=True)) == ["█▇▆▅▄▃▂▁"]
    assert curve([2.0, 1.0], 8, rows=2) == ["█ ", "█▁"]
    assert curve([2.0, 1.0, 0.0], 8, scale=Scale(0.0, 2.0, by_factors=False)) == ["█▅▁"]


def test_small_noise_does_not_change_the_curve() -> None:
    """A hundredth more or less changes nothing; scaled to the lowest and highest it was 8 rows."""
    noisy = [0.2538 * (1.0 + 0.01 * (step % 2)) for step in range(40)]
    assert len(set(curve(noisy, 40)[0])) == 1
    noisy = [-3.0 + 0.01 * (step % 2) for step in range(40)]
    assert len(set(curve(noisy, 40)[0])) == 1


def test_the_scale_stays_until_a_value_passes_its_end() -> None:
    assert scale_of([5.49, 2.4]) == scale_of([5.49, 2.07]) == Scale(2.0, 7.0, by_factors=True)
    assert scale_of([5.49, 1.99]) == Scale(1.5, 7.0, by_factors=True)
    assert scale_of([0.1, 0.0]) == Scale(0.0, pytest.approx(0.1), by_factors=False)
    assert scale_of([math.nan]) is None


def test_one_absurd_value_leaves_the_others_to_be_seen() -> None:
    values = [4.0, 3.0, 1e30, 2.0, 1.0]
    assert scale_of(values) == Scale(1.0, 3000.0, by_factors=True)


def test_many_values_are_averaged_into_the_columns() -> None:
    assert curve([4.0, 4.0, 1.0, 1.0], 2) == ["█▁"]
    assert [len(row) for row in curve([float(n) for n in range(512)], 61, 3)] == [61] * 3


def test_steps_that_are_not_known_leave_their_columns_empty() -> None:
    assert curve([2.0, 1.0], 8, at=[1, 4]) == ["█  ▁"]
    assert curve([2.0, 1.0], 2, at=[1, 1000]) == ["█▁"]


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_none_leaves_its_column_empty(strange: float) -> None:
    assert curve([2.0, strange, 1.0], 9) == ["█ ▁"]
    assert curve([strange], 9, 2) == ["", ""]


def test_huge_values_do_not_overflow() -> None:
    assert len(curve([1e308, -1e308, 1e308], 9)[0]) == 3
    assert len(curve([1e308, 1e308, 5e-324], 9)[0]) == 3
    assert curve([], 9) == [""]
    assert curve([1.0], 0) == [""]


def test_a_bar_is_full_when_everything_is_there_and_not_before() -> None:
    assert shares((25.0, 25.0), 100.0, 40) == [10, 10]
    assert sum(shares((33.0, 66.9), 100.0, 10)) == 9
    assert sum(shares((50.0, 80.0), 100.0, 10)) == 10
    assert shares((math.nan, -3.0), 100.0, 10) == [0, 0]
    assert shares((1.0,), 0.0, 10) == [0]
