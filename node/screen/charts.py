"""A curve in rows of characters, and a bar of several parts. Pure.

Easy to get wrong: losses are what a machine computed, and now and then one is no number. Such a
column stays empty, and the scale goes by the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
STEPS: Final = len(EIGHTHS) - 1


def curve(values: Sequence[float], columns: int, rows: int = 1) -> list[str]:
    """The rows, the highest first; each at most so many columns.

    More values than columns are averaged in even groups; fewer take one column each. The lowest
    value has an eighth of a row, so that it is seen.
    """
    shown = _gathered(values, columns)
    known = [one for one in shown if one is not None]
    if not known or rows < 1:
        return [""] * max(rows, 0)
    low, high = min(known), max(known)
    most = rows * STEPS
    heights = [0 if one is None else _height(one, low, high, most) for one in shown]
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


def _height(value: float, low: float, high: float, most: int) -> int:
    if high <= low:
        return max(1, most // 2)
    share = value / (high - low) - low / (high - low)  # the difference itself may overflow
    return 1 + round(min(max(share, 0.0), 1.0) * (most - 1)) if math.isfinite(share) else 1


def _gathered(values: Sequence[float], columns: int) -> list[float | None]:
    if columns < 1:
        return []
    if len(values) <= columns:
        return [_mean([one]) for one in values]
    edges = [len(values) * column // columns for column in range(columns + 1)]
    return [_mean(values[low:high]) for low, high in itertools.pairwise(edges)]


def _mean(values: Sequence[float]) -> float | None:
    known = [one for one in values if math.isfinite(one)]
    return sum(one / len(known) for one in known) if known else None
