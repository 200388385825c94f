"""What a process used, seen from outside, and the worst ten seconds of it. Pure.

    worst_window(readings, "sent_bytes")        # per second, over any ten seconds

A reading is the totals of one moment. A cap is kept when no window of `WINDOW_SECONDS`, wherever
it begins, holds more than the cap allows for that time.

Easy to get wrong: windows that only begin at whole seconds, or where others end, miss the worst one
by nearly a half. Here one begins at every reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

WINDOW_SECONDS: Final = 10.0

Total = Literal["processor_seconds", "sent_bytes", "received_bytes"]


@dataclass(frozen=True)
class Reading:
    """At one moment (of any steady clock): all but the memory are totals since the beginning."""

    at: float
    processor_seconds: float
    memory_bytes: int
    sent_bytes: int
    received_bytes: int


def worst_window(readings: Sequence[Reading], total: Total) -> float:
    """The most of it per second, over any window; 0 where none is whole."""
    worst, end = 0.0, 0
    for first in readings:
        while end < len(readings) and readings[end].at - first.at < WINDOW_SECONDS:
            end += 1
        if end == len(readings):
            break
        last = readings[end]
        used = getattr(last, total) - getattr(first, total)
        worst = max(worst, used / (last.at - first.at))
    return worst


def between(readings: Sequence[Reading], began: float, ended: float) -> tuple[Reading, ...]:
    """Those of that time."""
    return tuple(one for one in readings if began <= one.at <= ended)


def used_between(readings: Sequence[Reading], began: float, ended: float, total: Total) -> float:
    """How much of it was used in that time; 0 where it was not looked at twice."""
    inside = between(readings, began, ended)
    if len(inside) < 2:
        return 0.0
    used: float = getattr(inside[-1], total) - getattr(inside[0], total)
    return used


def most_memory(readings: Sequence[Reading]) -> int:
    return max((one.memory_bytes for one in readings), default=0)


def over(worst: float, limit: float) -> float:
    """By which part of it a limit was exceeded; below zero where it was kept."""
    return worst / limit - 1.0
