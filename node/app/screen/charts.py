"""A curve in rows of braille, its scale, its labels, and a bar of several parts. Pure.

A computed loss is sometimes not a number. Such a point is left out, and the scale ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

ROUND: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
"""Times a power of ten: the possible ends of a scale, and its labels."""

LEAST_FACTOR: Final = 2.0
"""Between the ends of a scale, so that losses that differ by a hundredth look alike."""

MOST_FACTOR: Final = 1e6  # otherwise a loss of zero would take all rows but one
MOST_ABOVE_MEDIAN: Final = 1e3  # one absurd value must not hide the others
SMALLEST: Final = 1e-300

BRAILLE: Final = 0x2800
"""The first of the 256 characters of 2 × 4 dots."""
ACROSS, DOWN = 2, 4  # dots of one character
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot, by column and then by row from above."""

ROWS_BETWEEN: Final = 2  # two labels of an axis


@dataclass(frozen=True)
class Scale:
    """From the lowest row of a chart to its highest; by factors where all values are positive."""

    low: float
    high: float
    by_factors: bool

    def share(self, value: float) -> float:
        """From 0 at the lowest row to 1; a value outside the scale is drawn at the edge."""
        if self.by_factors:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:  # the difference itself may overflow
            share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0


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
    values: Sequence[float], at: Sequence[int], columns: int, rows: int, scale: Scale
) -> list[str]:
    """The rows, the highest first, each of exactly `columns` characters of braille or spaces.

    `at`: the step of each value, in order. The first step is at the left edge and the last one at
    the right edge, and a line goes from each point to the next. Several points in one column of
    dots are averaged.
    """
    width, height = columns * ACROSS, rows * DOWN
    masks = [[0] * columns for _ in range(rows)]
    for x, first, last in _strokes(_in_columns(values, at, width), scale, height):
        for y in range(first, last + 1):
            masks[y // DOWN][x // ACROSS] |= _DOTS[x % ACROSS][y % DOWN]
    return ["".join(chr(BRAILLE + mask) if mask else " " for mask in row) for row in masks]


def labels(scale: Scale, rows: int) -> list[str]:
    """The label of each row of an axis, the highest first; empty for most. The ends have one, and
    round values between them where there is room."""
    if rows < ROWS_BETWEEN:
        return [""] * rows
    found = {0: f"{scale.high:.4g}", rows - 1: f"{scale.low:.4g}"}
    for value in _round_values(scale):
        row = round((1.0 - scale.share(value)) * (rows - 1))
        if all(abs(row - taken) >= ROWS_BETWEEN for taken in found):
            found[row] = f"{value:.4g}"
    return [found.get(row, "") for row in range(rows)]


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
    if not whole > 0:  # zero, or no number
        return 0
    return columns if amount >= whole else int(columns * amount / whole)


def _in_columns(values: Sequence[float], at: Sequence[int], width: int) -> list[tuple[int, float]]:
    """One mean value for each column of dots that has any, in order."""
    steps = at[-1] - at[0] if at else 0
    placed: dict[int, list[float]] = {}
    for value, step in zip(values, at, strict=True):
        if math.isfinite(value):
            column = round((step - at[0]) * (width - 1) / steps) if steps else 0
            placed.setdefault(column, []).append(value)
    return [(x, sum(one / len(many) for one in many)) for x, many in sorted(placed.items())]


def _strokes(
    points: Sequence[tuple[int, float]], scale: Scale, height: int
) -> Iterator[tuple[int, int, int]]:
    """Of each column of dots from the first point to the last one: the highest dot and the lowest
    one. A column begins where the one before it ended."""
    before: tuple[int, int] | None = None
    for x, value in points:
        y = round((1.0 - scale.share(value)) * (height - 1))
        x0, y0 = before or (x - 1, y)
        last = y0
        for column in range(x0 + 1, x + 1):
            now = round(y0 + (y - y0) * (column - x0) / (x - x0))
            begin = now if now == last else last + (1 if now > last else -1)
            yield column, min(begin, now), max(begin, now)
            last = now
        before = x, y


def _round_values(scale: Scale) -> list[float]:
    """Those that are worth a label, the roundest first."""
    if not scale.by_factors:
        return [scale.low + (scale.high - scale.low) * part for part in (0.5, 0.25, 0.75)]
    powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    return [
        first * 10.0**power
        for first in (1.0, 2.0, 5.0, 3.0, 7.0, 1.5, 4.0)
        for power in powers
        if scale.low < first * 10.0**power < scale.high
    ]


def _bound_above(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(value, SMALLEST)))
    return next((one * power for one in ROUND if one * power >= value), 10.0 * power)


def _bound_below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(value, SMALLEST)))
    return next((one * power for one in reversed(ROUND) if one * power <= value), power)
