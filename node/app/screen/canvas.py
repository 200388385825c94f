"""The bytes that make a terminal show a frame, and then the next one. Pure.

The frame takes the terminal's alternate screen (mode 1049), which full-screen programs use: what
was there before comes back when they leave. A frame has a line for every row, so nothing that was
in a row stays, also after a resize.

Nothing flickers: a line is overwritten, never cleared first; an unchanged line is not written at
all; the cursor (mode 25) is hidden; and terminals that can (mode 2026) show the whole change at
once. Nothing wraps: wrapping (mode 7) is off meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from node.app.screen.charts import BRAILLE

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"
LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
BEGIN: Final = "\x1b[?2026h"
END: Final = "\x1b[?2026l"
CLEAR_TO_END_OF_LINE: Final = "\x1b[K"

_UPPER, _LOWER = 0x1B, 0xE4
"""The upper and the lower half of a character of braille."""


def _dotted(mask: int) -> str:
    """A character of braille for terminals that have none."""
    return " '.:"[bool(mask & _UPPER) + 2 * bool(mask & _LOWER)]


_BRAILLE: Final = {BRAILLE + mask: _dotted(mask) for mask in range(256)}
_ASCII: Final = str.maketrans(
    {
        **dict(zip("╭╮╰╯─│━═", "++++-|#=", strict=True)),
        **dict(zip("…·↑↓°“”", '~-^v ""', strict=True)),
    }
) | {**_BRAILLE}
_OF_A_CONSOLE: Final = str.maketrans("╭╮╰╯━…“”", '┌┐└┘█~""') | {**_BRAILLE}
"""The font of Linux's own console only has the characters of the first PCs."""


@dataclass(frozen=True)
class Look:
    """A terminal's abilities. `console`: in UTF-8, but with few characters."""

    colour: bool = True
    encoding: str = "utf-8"
    console: bool = False

    def shown(self, text: str) -> str:
        """The text with only the characters that the terminal has."""
        if self.encoding.lower().startswith("utf"):
            return text.translate(_OF_A_CONSOLE) if self.console else text
        return text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)


@dataclass(frozen=True)
class Painted:
    """A line as it is written, and its width in cells."""

    written: str
    cells: int


def paint(line: Text, look: Look) -> Painted:
    """A line for a terminal of this look; without colour it has no escape sequence at all."""
    shown = line.copy()
    plain = look.shown(line.plain)
    if plain != line.plain and len(plain) == len(line.plain):  # else a style would stand wrongly
        shown.plain = plain
        shown.truncate(line.cell_len)  # an accent that the terminal lacks becomes a whole cell
    if not look.colour:
        return Painted(shown.plain, shown.cell_len)
    shown.end = ""
    written = "".join(
        segment.text
        if segment.style is None
        else segment.style.render(segment.text, color_system=ColorSystem.STANDARD)
        for segment in shown.render(_styles())
    )
    return Painted(written, shown.cell_len)


class Canvas:
    """Invariant: `_lines` are on the terminal, and were drawn when it was `_columns` wide."""

    def __init__(self) -> None:
        self._lines: tuple[Painted, ...] = ()
        self._columns = 0

    def draw(self, lines: Sequence[Painted], columns: int) -> str:
        """The bytes that put these lines on the terminal, one in each of its rows; empty if they
        are there already."""
        if columns != self._columns or len(lines) != len(self._lines):
            self.forget()
        written = [
            # in the last column, clearing would take the last character
            f"\x1b[{row};1H{line.written}{CLEAR_TO_END_OF_LINE if line.cells < columns else ''}"
            for row, line in enumerate(lines, 1)
            if row > len(self._lines) or self._lines[row - 1] != line
        ]
        self._lines, self._columns = tuple(lines), columns
        return "".join((BEGIN, *written, END)) if written else ""

    def forget(self) -> None:
        """Nothing is known of the terminal: write all lines the next time."""
        self._lines, self._columns = (), 0


@cache
def _styles() -> Console:
    """Knows the meaning of "bold green"; nothing is ever printed to it."""
    return Console(color_system=None, width=80, legacy_windows=False)
