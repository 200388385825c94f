"""Panels with a title, beside and below one another, in exactly the room that there is. Pure.

    stacked([Panel("loss", …), Panel("peers", …)], width, height, framed=True)
    beside(left, right)

First each panel gets its least height, the most important ones first; a panel without room for
that is left out. Then they grow to the height that they can use, and those that can use any height
share the rest.

On a tall terminal a panel has a frame; on a low one it has only a line with its title.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from node.app.screen.cells import clip

Lines = list[Text]

NARROWEST_FRAME: Final = 8  # columns
LINE_STYLE: Final = "dim"


@dataclass(frozen=True)
class Panel:
    """`lines`: what is in it, for a width and a height. `least` and `most`: the lines that it can
    use, at best. `priority`: 1 is kept longest. `grows`: it can use any height."""

    name: str
    title: str
    lines: Callable[[int, int], Sequence[Text]]
    least: int
    most: int
    priority: int
    grows: bool = False


def stacked(panels: Sequence[Panel], width: int, height: int, *, framed: bool) -> Lines:
    """Exactly `height` lines of at most `width` cells."""
    framed = framed and width >= NARROWEST_FRAME
    beside_lines = 2 if framed else 1
    heights = _heights(panels, height, beside_lines)
    found: Lines = []
    for panel, one in zip(panels, heights, strict=True):
        if one:
            found += _framed(panel, width, one) if framed else _titled(panel, width, one)
    return found + [Text() for _ in range(height - len(found))]


def beside(left: Sequence[Text], right: Sequence[Text], left_width: int, gap: int) -> Lines:
    """Two columns with as many lines each."""
    return [
        Text().append_text(one).append(" " * (left_width - one.cell_len + gap)).append_text(other)
        for one, other in zip(left, right, strict=True)
    ]


def _heights(panels: Sequence[Panel], height: int, beside_lines: int) -> list[int]:
    """Of each panel with its title; 0 if it is left out."""
    found, left = [0] * len(panels), height
    by_priority = sorted(range(len(panels)), key=lambda number: panels[number].priority)
    for number in by_priority:
        needed = panels[number].least + beside_lines
        if needed <= left:
            found[number], left = needed, left - needed
    for number in by_priority:
        if found[number]:
            more = min(left, max(0, panels[number].most + beside_lines - found[number]))
            found[number], left = found[number] + more, left - more
    growing = [number for number in by_priority if found[number] and panels[number].grows]
    for place, number in enumerate(growing):
        found[number] += left // len(growing) + (place < left % len(growing))
    return found


def _framed(panel: Panel, width: int, height: int) -> Lines:
    inner = max(width - 4, 0)
    rows = _exactly(panel.lines(inner, height - 2), inner, height - 2)
    return [
        _rule(panel, width, "╭", "╮"),
        *(
            Text()
            .append("│ ", LINE_STYLE)
            .append_text(row)
            .append(" " * (inner - row.cell_len))
            .append(" │", LINE_STYLE)
            for row in rows
        ),
        Text(f"╰{'─' * (width - 2)}╯", LINE_STYLE),
    ]


def _titled(panel: Panel, width: int, height: int) -> Lines:
    return [
        _rule(panel, width, "─", "─"),
        *_exactly(panel.lines(width, height - 1), width, height - 1),
    ]


def _rule(panel: Panel, width: int, first: str, last: str) -> Text:
    line = Text().append(f"{first}─ ", LINE_STYLE).append(panel.name, "bold")
    room = width - line.cell_len - 5
    if panel.title and room > 4:
        line.append(f"  {clip(panel.title, room)}")
    line.append(f" {'─' * (width - line.cell_len - 2)}{last}", LINE_STYLE)
    line.truncate(max(width, 0))
    return line


def _exactly(lines: Sequence[Text], width: int, height: int) -> Lines:
    found = [one.copy() for one in lines[:height]]
    for one in found:
        one.truncate(max(width, 0))
    return found + [Text() for _ in range(height - len(found))]
