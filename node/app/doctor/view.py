"""The findings of `potluck doctor` for a person: a line for each, with what to do below it.

Some of the text comes from others (a server's answer, an address). It goes through `printable` and
into `Text`, never into rich's markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from node.app.cli.output import counted, hung, printable
from node.app.doctor.finding import Finding, FindingLevel

STYLES = {
    FindingLevel.OK: "green",
    FindingLevel.NOTE: "dim",
    FindingLevel.WARNING: "yellow",
    FindingLevel.ERROR: "bold red",
}
TOPIC_CELLS, LEVEL_CELLS = 13, 9  # "auth server" and "warning", with two blanks


def show_findings(findings: Sequence[Finding]) -> None:
    """Print them on stdout."""
    console = Console(highlight=False, markup=False, emoji=False)
    columns = console.width if console.is_terminal else None
    console.print(drawing(findings, columns), soft_wrap=True)


def drawing(findings: Sequence[Finding], columns: int | None) -> Text:
    """`columns`: the width of the terminal; None if there is none."""
    text = Text()
    topic = ""
    for finding in findings:
        name = finding.topic if finding.topic != topic else ""
        topic = finding.topic
        first, level = f"{name:<{TOPIC_CELLS}}", f"{finding.level.value:<{LEVEL_CELLS}}"
        text.append(first, style="bold")
        text.append(level, style=STYLES[finding.level])
        text.append(_below(first + level, finding.says, columns) + "\n")
        if finding.advice:
            margin = " " * TOPIC_CELLS + f"{'  next:':<{LEVEL_CELLS}}"
            text.append(margin, style="bold")
            text.append(_below(margin, finding.advice, columns) + "\n")
    text.append(summary(findings))
    return text


def _below(first: str, words: str, columns: int | None) -> str:
    return hung(first, printable(" ".join(words.split())), columns)[len(first) :]


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    count = Counter(finding.level for finding in findings)
    errors, warnings = count[FindingLevel.ERROR], count[FindingLevel.WARNING]
    words = [
        counted(number, noun)
        for number, noun in ((errors, "error"), (warnings, "warning"))
        if number
    ]
    return f"\nFound: {' and '.join(words)}." if words else "\nNothing is wrong."
