"""Pictures of results. They need matplotlib, which a node does without: the extra `plot`.

It is imported in the functions that draw, so that everything else works where it is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from node.core.wrong_use import WrongUse
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")
DOTS_PER_INCH = 120


class PlotFailed(PotluckError):
    """There is no picture."""


def add_plot_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """`what` is drawn."""
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"draw {what} into this file, .png or .svg; needs the extra `plot`",
    )


def check_plot(file: Path) -> None:
    """Complain before the work and not after it."""
    if file.suffix.lower() not in KINDS:
        raise WrongUse(
            f"{file} is no picture by its name.", advice=f"Let it end in {' or '.join(KINDS)}."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotFailed(
            "A plot is drawn with matplotlib, and it is not installed.",
            why="It is an extra of potluck (`plot`), because nodes have no use for it.",
            advice="In a checkout, run ./scripts/environment development; elsewhere,"
            " pip install 'potluck[plot]'.",
        )


def write_plot(figure: Figure, file: Path) -> None:
    from matplotlib import rc_context

    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text: smaller
            figure.savefig(file, format=file.suffix[1:].lower(), dpi=DOTS_PER_INCH)
    except OSError as error:
        raise PlotFailed(
            f"The plot cannot be written to {file}.",
            why=f"{error.strerror or error}.",
            advice="Name a file in a folder that exists and that you may write to.",
        ) from error
