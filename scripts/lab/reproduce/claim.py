"""A claim of a paper, what was found of it, and the words for the result.

A claim *holds* if all its checks hold. A check that does not hold may still be *explained*: the
measuring function gives the reason, and only if its own figures show that reason. Anything else is
a claim that *fails*, and `scripts/reproduce` ends with the exit code 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lab import Talk
from lab.plot import write_plot

INCHES = (8.0, 5.0)

Points = Sequence[tuple[float | str, float]]


class Bearing(Enum):
    """The result in words."""

    HOLDS = "It holds."
    EXPLAINED = "It deviates from the paper, and the figures say why."
    FAILS = "It does not hold here."


@dataclass(frozen=True)
class Condition:
    """One sentence about the figures, and whether it is so. `because`: why it is not."""

    sentence: str
    holds: bool
    because: str = ""

    @property
    def words(self) -> str:
        if self.holds:
            return f"Yes: {self.sentence}"
        return f"No: {self.sentence} {self.because}".rstrip()


@dataclass(frozen=True)
class Picture:
    """Lines over one axis."""

    lines: Mapping[str, Points]
    across: str
    up: str
    is_log: bool = False

    def write(self, title: str, file: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.subplots()
        for name, points in self.lines.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
        if any(isinstance(x, str) for points in self.lines.values() for x, _ in points):
            axes.tick_params(axis="x", labelrotation=15)  # words need more room than numbers
        if self.is_log:
            axes.set_yscale("log")
        axes.set_xlabel(self.across)
        axes.set_ylabel(self.up)
        axes.set_title(title, fontsize="medium")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        write_plot(figure, file)


@dataclass(frozen=True)
class ClaimFigures:
    """The table beside the paper's figures, the checks of it, and the picture."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    checks: Sequence[Condition]
    picture: Picture

    @property
    def verdict(self) -> Bearing:
        wrong = [check for check in self.checks if not check.holds]
        if not wrong:
            return Bearing.HOLDS
        return Bearing.EXPLAINED if all(check.because for check in wrong) else Bearing.FAILS


@dataclass(frozen=True)
class Claim:
    """A claim and how it is measured.

    - `name`: on the command line, and the heading on the page.
    - `source`: where the paper says it.
    - `scaled_down`: what is smaller or simpler here than in the paper.
    - `measure`: called with whether the short form will do.
    """

    name: str
    source: str
    says: str
    scaled_down: str
    measure: Callable[[bool, Talk], ClaimFigures]
