"""A curve in rows of characters, its scale, and a bar of several parts. Pure.

A computed loss is sometimes not a number. Such a column stays empty, and the scale ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
STEPS: Final = len(EIGHTHS) - 1

ROUND: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
"""Times a power of ten: the possible ends of a scale."""

LEAST_FACTOR: Final = 2.0
"""Between the ends of a scale, so that losses that differ by a hundredth look alike."""

MOST_FACTOR: Final = 1e6  # otherwise a loss of zero would take all rows but one
MOST_ABOVE_MEDIAN: Final = 1e3  # one absurd value must not hide the others
SMALLEST: Final = 1e-300


@dataclass(frozen=True)
class Scale:
    """From the lowest row of a chart to its highest; by factors where all values are positive."""

    low: float
    high: float
    by_factors: bool

    def height(self, value: float, most: int) -> int:
        """The height in eighths of a row; a value outside the scale is drawn at the edge."""
        if self.by_factors:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:  # the difference itself may overflow
            share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return 1 + round(min(max(share, 0.0), 1.0) * (most - 1)) if math.isfinite(share) else 1


def scale_of(values: Sequence[float]) -> Scale | None:
    """Round bounds around all values that are numbers; None if none is.

    It never covers less than a factor of LEAST_FACTOR, so that noise looks as small as it is, and
    changes only when a value passes a bound.
    """
    known = sorted(one for one in values if math.isfinite(one))
    if not known:
        return None
    if known[0] > 0.0:
        high = _bound_above(min(known[-1], known[len(known) // 2] * MOST_ABOVE_MEDIAN))
        low = _bound_below(max(known[0], high / MOST_FACTOR))
        while high / low < LEAST_FACTOR:
            low = _bound_below(low * 0.99)
        return Scale(low, high, by_factors=True)
    largest = max(abs(known[0]), abs(known[-1]), SMALLEST)
    high = _bound_above(max(known[-1], known[0] + largest / LEAST_FACTOR, SMALLEST))
    return Scale(known[0], high, by_factors=False)


def curve(
    values: Sequence[float],
    columns: int,
    rows: int = 1,
    *,
    at: Sequence[int] = (),
    scale: Scale | None = None,
) -> list[str]:
    """The rows, the highest first; each at most `columns` wide.

    `at`: the step of each value, in order; without it they follow one another. A step takes one
    column if there is room; otherwise several are averaged. A column without a value stays empty.
    """
    scale = scale or scale_of(values)
    if scale is None or rows < 1 or columns < 1:
        return [""] * max(rows, 0)
    most = rows * STEPS
    heights = [
        0 if one is None else scale.height(one, most)
        for one in _gathered(values, at or range(len(values)), columns)
    ]
    return [
        "".join(EIGHTHS[min(max(height - row * STEPS, 0), STEPS)] for height in heights)
        for row in reversed(range(rows))
    ]


def shares(parts: Sequence[float], whole: float, columns: int) -> list[int]:
    """Columns of each part of a bar: together at most all, and all only when it is full."""
    taken: list[int] = []
    sum_before = 0.0
    for part in parts:
        sum_now = sum_before + (part if math.isfinite(part) and part > 0 else 0.0)
        taken.append(_columns(sum_now, whole, columns) - _columns(sum_before, whole, columns))
        sum_before = sum_now
    return taken


def _columns(amount: float, whole: float, columns: int) -> int:
    return min(int(columns * amount / whole), columns) if whole > 0 else 0


def _gathered(values: Sequence[float], at: Sequence[int], columns: int) -> list[float | None]:
    first, steps = at[0], at[-1] - at[0] + 1
    columns = min(columns, steps)
    placed: list[list[float]] = [[] for _ in range(columns)]
    for value, step in zip(values, at, strict=True):
        placed[(step - first) * columns // steps].append(value)
    return [_mean(one) for one in placed]


def _mean(values: Sequence[float]) -> float | None:
    known = [one for one in values if math.isfinite(one)]
    return sum(one / len(known) for one in known) if known else None


def _bound_above(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(value, SMALLEST)))
    return next((one * power for one in ROUND if one * power >= value), 10.0 * power)


def _bound_below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(value, SMALLEST)))
    return next((one * power for one in reversed(ROUND) if one * power <= value), power)
