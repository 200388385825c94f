"""The figures of `potluck bench transport`: their names, and what each says.

A figure's bar is what the project asks of itself on loopback between two processes; where a bar
is a ratio to another implementation, it is not here but in scripts/bench-against-hivemind.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    name: str
    what: str
    digits: int = 2


FIGURES: tuple[Figure, ...] = (
    Figure("unary_ms_p50", "one call after another, 20 bytes each way: median round trip", 3),
    Figure("unary_per_s_16", "calls per second with 16 in flight", 0),
    Figure("stream_MiB_s", "one bulk transfer one way, 1 MiB chunks", 0),
    Figure("cpu_s_per_GB", "CPU seconds per GB of that, both ends together", 2),
    Figure("both_ways_MiB_s", "a transfer each way at once, in sum", 0),
    Figure("four_nodes_all_to_all_MiB_s", "four processes, each to each at once, in sum", 0),
    Figure("plain_socket_MiB_s", "a plain TCP socket one way: the machine's limit", 0),
    Figure("slow_reader_rss_growth_MiB", "memory grown by sending to a reader that stops", 1),
    Figure("stream_fill_at_100ms_100mbit", "share of a 100 Mbit/s, 100 ms link that one fills", 3),
    Figure("join_s", "a new node's start to its first answered call", 3),
    Figure("import_s", "a fresh interpreter that imports a node", 3),
)

NAMES = tuple(figure.name for figure in FIGURES)

AUTH_FIGURES: tuple[Figure, ...] = (
    Figure("unary_ms_p50", "one call after another, each signed and verified both ways", 3),
    Figure("unary_per_s_16", "such calls per second with 16 in flight", 0),
    Figure("auth_overhead_ms", "what tokens and signatures add to a call", 3),
    Figure("auth_overhead_ms_per_transfer", "what they add to a whole transfer of one chunk", 3),
    Figure("stream_MiB_s", "one bulk transfer one way, its opening and closing signed", 0),
    Figure("open_unary_ms_p50", "the first figure in an open run, in turn with it", 3),
    Figure("open_unary_per_s_16", "the second figure in an open run", 0),
    Figure("open_stream_MiB_s", "the transfer in an open run", 0),
)

AUTH_NAMES = tuple(figure.name for figure in AUTH_FIGURES)


class Samples:
    """The values of each figure, in the order they were measured."""

    def __init__(self, figures: Sequence[Figure] = FIGURES) -> None:
        self._figures = figures
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        """In the order of the figures, rounded to what a repeat can bear."""
        return {
            figure.name: _rounded(statistics.median(self._values[figure.name]), figure)
            for figure in self._figures
            if figure.name in self._values
        }

    def spread(self) -> dict[str, dict[str, Any]]:
        return {
            figure.name: _spread(self._values[figure.name], figure)
            for figure in self._figures
            if figure.name in self._values
        }


def _spread(values: Sequence[float], figure: Figure) -> dict[str, Any]:
    return {
        "min": _rounded(min(values), figure),
        "max": _rounded(max(values), figure),
        "runs": [_rounded(value, figure) for value in values],
    }


def _rounded(value: float, figure: Figure) -> float:
    return round(value, figure.digits) if figure.digits else float(round(value))
