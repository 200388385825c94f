"""The bytes that make a terminal show a picture, and then the next one. Pure.

The picture is below the text printed before, and the cursor on the empty line below it: after a
normal end, a crash or a kill the prompt appears there. No mode is left switched, and the alternate
screen is not used: an invite, a warning and the picture itself stay in the scrollback.

Nothing flickers: a line is overwritten, never cleared first; an unchanged line is not written at
all; the cursor (mode 25) is hidden meanwhile; and terminals that can (mode 2026) show the whole
change at once. Nothing wraps: wrapping is off (mode 7) while a picture is written. The start and
the end of a picture are in one write.

After a resize the place of the old picture is unknown. Some terminals break its lines, some cut
them, and one that became lower has pushed rows into the scrollback, where nothing reaches them
until it is higher again. So everything visible is cleared then, and the lines printed above the
picture are written again, as far as there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

BEGIN: Final = "\x1b[?2026h\x1b[?25l\x1b[?7l"
END: Final = "\x1b[?7h\x1b[?25h\x1b[?2026l"
CLEAR_TO_END_OF_LINE: Final = "\x1b[K"
CLEAR_BELOW: Final = "\x1b[K\x1b[C\x1b[J\r"
"""Not from the corner: tmux takes that for clearing the screen, and keeps the old contents."""

TO_THE_CORNER: Final = "\x1b[H"
NEXT_LINE: Final = "\r\n"

_ASCII: Final = str.maketrans(
    {
        **dict(zip("▁▂▃▄▅▆▇", "_.-=+*%", strict=True)),
        **{
            "█": "#",
            "▓": "=",
            "░": ".",
            "…": "~",
            "·": "-",
            "↑": "^",
            "↓": "v",
            "│": "|",
            "“": '"',
            "”": '"',
        },
    }
)
_OF_A_CONSOLE: Final = str.maketrans("▁▂▃▄▅▆▇…“”", '__▄▄▄██~""')
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
    """Invariant: the cursor is at the beginning of the line below `_lines`, which are on the
    terminal and were drawn when it had this `_size`: columns and rows."""

    def __init__(self) -> None:
        self._lines: tuple[Painted, ...] = ()
        self._size = (0, 0)

    def draw(
        self, lines: Sequence[Painted], columns: int, rows: int, above: Sequence[str] = ()
    ) -> str:
        """The bytes that put these lines on the terminal; empty if they are there already. `above`:
        the lines printed above, each short enough for the terminal, to be written again after a
        resize."""
        before, resized = self._lines, bool(self._lines) and (columns, rows) != self._size
        if tuple(lines) == before and not resized:
            return ""
        written = [BEGIN]
        if resized:
            written.append(_anew(above, rows - 1 - len(lines)))
        else:
            written.append(self._to_the_top())
        for number, line in enumerate(lines):
            if resized or number >= len(before) or before[number] != line:
                written.append(line.written)
                if line.cells < columns:  # in the last column it would take the last character
                    written.append(CLEAR_TO_END_OF_LINE)
            written.append(NEXT_LINE)
        if len(lines) < len(before):
            written.append(CLEAR_BELOW)
        self._lines, self._size = tuple(lines), (columns, rows)
        return "".join([*written, END])

    def erase(self, columns: int, rows: int, above: Sequence[str] = ()) -> str:
        """The bytes that remove the picture and put the cursor where it began."""
        if not self._lines:
            return ""
        resized = (columns, rows) != self._size
        erased = _anew(above, rows - 1) if resized else f"{self._to_the_top()}{CLEAR_BELOW}"
        written = f"{BEGIN}{erased}{END}"
        self.forget()
        return written

    def forget(self) -> None:
        """Others have written meanwhile: leave the old picture, and draw the next one below."""
        self._lines, self._size = (), (0, 0)

    def _to_the_top(self) -> str:
        return f"\x1b[{len(self._lines)}A" if self._lines else ""


def _anew(above: Sequence[str], room: int) -> str:
    """Only the last of these lines, as many as have room."""
    lines = above[max(len(above) - max(room, 0), 0) :]
    return "".join((TO_THE_CORNER, CLEAR_BELOW, *(f"{one}{NEXT_LINE}" for one in lines)))


@cache
def _styles() -> Console:
    """Knows the meaning of "bold green"; nothing is ever printed to it."""
    return Console(color_system=None, width=80, legacy_windows=False)
