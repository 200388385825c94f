"""The results of `scripts/simulate moshpit`, for a person: figures, their fall, and a plot.

The plot draws the fall of the deviation as figure 7 of the thesis does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.plot import write_plot

MOST_ROWS = 21  # of the table; of more rounds some are shown, the last one always

BARS = "▁▂▃▄▅▆▇█"
DECADES_PER_BAR = 2  # eight bars reach from the beginning to nearly rounding errors
LOWEST = 10.0 ** (-DECADES_PER_BAR * (len(BARS) - 1))


def table(result: dict[str, Any]) -> str:
    """The figures of a simulation, one method a column."""
    deviations: dict[str, list[float]] = result["methods"]
    shown = _shown_rounds(result["rounds"])
    width = max(9, len(shown), *map(len, deviations))
    head = "  ".join(f"{name:>{width}}" for name in ("round", *deviations))
    lines = [title(result), "", head]
    for number in shown:
        figures = (f"{line[number]:{width}.1e}" for line in deviations.values())
        lines.append("  ".join((f"{number:{width}}", *figures)))
    bars = (_bars([line[number] for number in shown]) for line in deviations.values())
    lines.append("  ".join((f"{'':{width}}", *(f"{bar:>{width}}" for bar in bars))))
    lines += [
        "",
        "Mean squared deviation from the average. A step of a bar is a factor of "
        f"{10**DECADES_PER_BAR}, and {BARS[0]} is {LOWEST:.0e} of the beginning or less.",
    ]
    if "expected_contraction" in result:
        lines.append(
            f"Of random groups the paper expects {result['expected_contraction']:.3g} per round "
            f"without failures: (r-1)/N + r/N² for {result['random_groups']} groups."
        )
    return "\n".join(lines)


def title(result: dict[str, Any]) -> str:
    """The plan in a line."""
    width, dimensions = result["grid"]
    shape = " × ".join([str(width)] * dimensions)
    parts = [f"{result['peers']:,} peers, grid of {shape} cells ({result['grid_use']:.0%} used)"]
    if result["failure_rate"]:
        costs = "its group the round" if result["on_failure"] == "discard" else "itself the round"
        parts.append(f"failure rate {result['failure_rate']:g}, each costing {costs}")
    if result["trials"] > 1:
        parts.append(f"mean of {result['trials']} trials")
    return ", ".join(parts)


def _shown_rounds(rounds: int) -> list[int]:
    step = max(1, math.ceil(rounds / (MOST_ROWS - 1)))
    return sorted({*range(0, rounds + 1, step), rounds})


def _bars(values: Sequence[float]) -> str:
    """One bar per value, on a logarithmic scale that begins at the first."""
    lowest = values[0] * LOWEST
    heights = (
        0 if value <= lowest else math.ceil(math.log10(value / lowest) / DECADES_PER_BAR)
        for value in values
    )
    return "".join(BARS[min(height, len(BARS) - 1)] for height in heights)


EXACT = 1e-18
"""The part of the first deviation that counts as exact in the picture: rounding is below."""

INCHES = (8.0, 5.0)


def draw(deviations: Mapping[str, Sequence[float]], title: str, file: Path) -> None:
    """One line per method, on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    bottom = EXACT * max(line[0] for line in deviations.values())
    for name, line in deviations.items():
        # An exact average is nothing, and has no logarithm: it is drawn at the lower edge.
        axes.plot([max(value, bottom) for value in line], marker=".", label=name)
    axes.set_yscale("log")
    axes.set_ylim(bottom=bottom)
    axes.set_xlabel("round")
    axes.set_ylabel("mean squared deviation from the average")
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    write_plot(figure, file)
