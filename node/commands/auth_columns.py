"""Lists for moderators: one aligned line for each entry, so that `grep` and `less` work.

Easy to get wrong: names, notes and reasons were chosen by others. They pass through `printable`
and into `Text`, never into rich's markup, and no cell is longer than LONGEST_CELL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from node.commands.output import printable

Answer = Mapping[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # the header, and a row for each entry
Part = str | Table

# A cell of a list: a name, a peer id (52), a fingerprint; reasons may have hundreds.
LONGEST_CELL = 80
_COLOURS = {
    "allowed": "green",
    "denied": "yellow",
    "revoked": "red",
    "withdrawn": "red",
    "NO FILE": "red",
    "signs now": "green",
    "refused": "yellow",
}


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; on a terminal with the states coloured."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    cells = [[short(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for number, row in enumerate(cells):
        line = Text()
        for cell, width in zip(row, widths, strict=True):
            style = "bold" if number == 0 else _COLOURS.get(cell, "")
            line.append(f"{cell:<{width}}", style=style)
            line.append("  ")
        line.rstrip()
        console.print(line, soft_wrap=True)


def short(text: str) -> str:
    """As it stands in a list."""
    text = one_line(text)
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…"


def one_line(text: str) -> str:
    """Harmless, and without an end of a line in it."""
    return printable(text.replace("\n", " "))


def what_is_left(shown: int, total: int, noun: str) -> str:
    """The line below a list: how many there are, or how many are not shown."""
    if total > shown:
        return f"{counted(total - shown, 'more ' + noun)}: --limit {total} shows all."
    return counted(total, noun) + "."


def roles_of(answer: Answer) -> str:
    return ", ".join(answer["roles"])


def counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def agreeing(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
