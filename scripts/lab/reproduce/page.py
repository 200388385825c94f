"""What is told of a claim that was measured: at the terminal, as JSON, and in docs/results.md.

The page has a section for each claim, with its own date and machine, so that claims can be measured
one by one. Writing a section keeps the others as they are.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from lab.reproduce.claim import Claim, ClaimFigures

PAGE: Final = "results.md"
PICTURES: Final = Path("pictures") / "results"
SECTION: Final = re.compile(r"^## (\S+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)

_INTRODUCTION = """\
# The papers' claims, measured again

This page is written by `scripts/reproduce`; change the claims in `scripts/lab/reproduce`, not the
page. Each section says when and on what it was measured, and what is smaller here than in the
paper. A claim that is not on the page has not been measured.

The statements of the thesis's summary (section 2), and the claims whose figures show them:

"""

STATEMENTS: Final = (
    (
        "Learning@home keeps its performance under latency",
        ("learning-throughput",),
    ),
    (
        "Mixtures of experts converge as equivalent dense models do, when nodes fail",
        ("learning-convergence",),
    ),
    (
        "Moshpit All-Reduce averages efficiently among unreliable devices",
        ("moshpit-averaging", "moshpit-variance"),
    ),
    (
        "Moshpit SGD trains faster than all-reduce on unreliable devices",
        ("moshpit-sgd",),
    ),
    (
        "Collaborative training is robust to peers that join and leave",
        ("dedloc-equivalence", "potluck-survivors", "potluck-joining"),
    ),
    (
        "It takes the diversity of hardware and connections into account",
        ("dedloc-averaging-time", "dedloc-albert", "dedloc-step-time", "potluck-home-links"),
    ),
)
"""Not measured: what sahajBERT learned."""


@dataclass(frozen=True)
class Circumstances:
    """When and on what a claim was measured."""

    date: str
    cores: int
    cores_used: int
    python: str
    torch: str
    seconds: float
    short: bool

    @staticmethod
    def of_now(seconds: float, *, is_short: bool) -> Circumstances:
        cores = os.cpu_count() or 1
        # what taskset or a container left us; macOS does not say
        used = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
        return Circumstances(
            date=datetime.now(UTC).date().isoformat(),
            cores=cores,
            cores_used=used,
            python=platform.python_version(),
            torch=version("torch"),
            seconds=round(seconds, 1),
            short=is_short,
        )

    @property
    def words(self) -> str:
        form = "in the short form" if self.short else "in full"
        return (
            f"Measured {form} on {self.date} with {self.cores_used} of {self.cores} cores, Python "
            f"{self.python} and torch {self.torch}, in {self.seconds:,.0f} s."
        )


@dataclass(frozen=True)
class PageEntry:
    """A claim with its result, as it is told."""

    claim: Claim
    finding: ClaimFigures
    circumstances: Circumstances

    def as_mapping(self) -> dict[str, Any]:
        return {
            "name": self.claim.name,
            "source": self.claim.source,
            "verdict": self.finding.verdict.name.lower(),
            "checks": [asdict(check) for check in self.finding.checks],
            "head": list(self.finding.head),
            "rows": [list(row) for row in self.finding.rows],
            "scaled_down": self.claim.scaled_down,
            **asdict(self.circumstances),
        }

    def as_text(self) -> str:
        return "\n".join(
            (
                f"{self.claim.name} ({self.claim.source})",
                self.claim.says,
                "",
                *_columns([self.finding.head, *self.finding.rows]),
                "",
                self.finding.verdict.value,
                *(f"  {check.words}" for check in self.finding.checks),
                f"Scaled down: {self.claim.scaled_down}",
                self.circumstances.words,
                "",
            )
        )

    def as_markdown(self) -> str:
        return "\n".join(
            (
                f"## {self.claim.name}",
                "",
                f"{self.claim.says} ({self.claim.source}.)",
                "",
                f"**{self.finding.verdict.value}**",
                "",
                *(f"- {check.words}" for check in self.finding.checks),
                "",
                _markdown_row(self.finding.head),
                _markdown_row(["---"] * len(self.finding.head)),
                *map(_markdown_row, self.finding.rows),
                "",
                f"![{self.claim.name}]({(PICTURES / self.claim.name).as_posix()}.svg)",
                "",
                f"Scaled down: {self.claim.scaled_down}",
                "",
                self.circumstances.words,
                "",
            )
        )


def write_page(folder: Path, entry: PageEntry, *, order: Sequence[str]) -> None:
    """Put the section and the plot of one claim in place."""
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    entry.finding.picture.write(entry.claim.name, folder / PICTURES / f"{entry.claim.name}.svg")
    page = folder / PAGE
    sections = sections_of(page.read_text(encoding="utf-8")) if page.exists() else {}
    sections[entry.claim.name] = entry.as_markdown()
    known = [sections[name] for name in order if name in sections]  # a claim that is gone goes
    shown = "\n".join((_INTRODUCTION + _statements(sections), *known))
    page.write_text(shown, encoding="utf-8")


def _statements(measured: Container[str]) -> str:
    """The table of the thesis, with a link for each claim that is on the page."""
    rows = [("statement", "shown by"), ("---", "---")]
    for statement, names in STATEMENTS:
        links = [f"[{name}](#{name})" for name in names if name in measured]
        rows.append((statement, ", ".join(links) or "not measured yet"))
    return "\n".join(map(_markdown_row, rows)) + "\n"


def sections_of(page: str) -> dict[str, str]:
    """The sections of a page, by the names of their claims."""
    return {found[1]: found[0].rstrip() + "\n" for found in SECTION.finditer(page)}


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
