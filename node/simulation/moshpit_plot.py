"""Draws how the deviation falls with the rounds, as figure 7 of the thesis does.

Needs matplotlib, which a node does without: the extra `plot`. It is imported here, in the one
function that draws, so that everything else works where it is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from protocols.errors import PotluckError

EXACT = 1e-18
"""What counts as exact in the picture, of the deviation at the beginning: rounding is below."""

INCHES = (8.0, 5.0)
DOTS_PER_INCH = 120


class PlotFailed(PotluckError):
    """There is no picture."""


def require_matplotlib() -> None:
    """Raise PlotFailed now, and not after the simulation, if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotFailed(
            "A plot is drawn with matplotlib, and it is not installed.",
            why="It is an extra of potluck (`plot`), because nodes have no use for it.",
            advice="In a checkout, run ./scripts/environment development; elsewhere,"
            " pip install 'potluck[plot]'.",
        )


def draw(deviations: Mapping[str, Sequence[float]], title: str, file: Path) -> None:
    """One line per method, on a logarithmic scale, written as a PNG."""
    require_matplotlib()
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
    try:
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
    except OSError as error:
        raise PlotFailed(
            f"The plot cannot be written to {file}.",
            why=f"{error.strerror or error}.",
            advice="Name a file in a folder that exists and that you may write to.",
        ) from error
