"""Curves and bars."""

from __future__ import annotations

import math

import pytest

from node.screen.charts import curve, shares


def test_a_curve_goes_from_its_highest_to_its_lowest_value() -> None:
    assert curve([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8) == ["█▇▆▅▄▃▂▁"]
    assert curve([2.0, 1.0], 8, rows=2) == ["█ ", "█▁"]
    assert curve([3.0, 3.0], 8) == ["▄▄"]


def test_many_values_are_averaged_into_the_columns() -> None:
    assert curve([4.0, 4.0, 1.0, 1.0], 2) == ["█▁"]
    assert [len(row) for row in curve([float(n) for n in range(512)], 61, 3)] == [61] * 3


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_none_leaves_its_column_empty(strange: float) -> None:
    assert curve([2.0, strange, 1.0], 9) == ["█ ▁"]
    assert curve([strange], 9, 2) == ["", ""]


def test_huge_values_do_not_overflow() -> None:
    assert len(curve([1e308, -1e308, 1e308], 9)[0]) == 3
    assert curve([], 9) == [""]
    assert curve([1.0], 0) == [""]


def test_a_bar_is_full_when_everything_is_there_and_not_before() -> None:
    assert shares((25.0, 25.0), 100.0, 40) == [10, 10]
    assert sum(shares((33.0, 66.9), 100.0, 10)) == 9
    assert sum(shares((50.0, 80.0), 100.0, 10)) == 10
    assert shares((math.nan, -3.0), 100.0, 10) == [0, 0]
    assert shares((1.0,), 0.0, 10) == [0]
