"""A terminal as strict as the worst one that we have to look good on.

It obeys what `node/screen` writes and refuses everything else, so a sequence that not every
terminal knows, or one that a peer smuggled in, fails a test. It breaks lines at its margin like a
real one, and scrolls into `scrollback`.
"""

from __future__ import annotations

import re

from rich.cells import cell_len

_PARTS = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|([\s\S])")
WRAPPING, CURSOR, ALTERNATE, AT_ONCE = 7, 25, 1049, 2026
AT_REST = {WRAPPING: True, CURSOR: True, ALTERNATE: False, AT_ONCE: False}
SHOWN = {WRAPPING: False, CURSOR: False, ALTERNATE: True, AT_ONCE: False}
"""While a frame is there."""


class Emulator:
    """`rows` of text, the cursor, and what has gone out at the top."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.cells: list[list[str]] = [[] for _ in range(rows)]
        self.scrollback: list[str] = []
        self.pushed_out: list[str] = []
        """The end of the scrollback: rows that a resize had no room for."""
        self.row = self.column = 0
        self.modes = dict(AT_REST)
        self.normal: tuple[list[list[str]], int] | None = None
        """The normal screen with its cursor's row, while the alternate one is shown."""
        self.wrapped = 0
        """How often a character came at a margin, in whatever mode."""

    def write(self, text: str) -> None:
        for private, numbers, final, character in _PARTS.findall(text):
            if final:
                self._obey(private, numbers, final)
            else:
                self._show(character)

    def lines(self) -> list[str]:
        """The visible text, without the empty rows at the end."""
        seen = ["".join(row).rstrip() for row in self.cells]
        while seen and not seen[-1]:
            seen.pop()
        return seen

    def normal_lines(self) -> list[str]:
        """The text on the normal screen, also while it is not shown."""
        rows = self.cells if self.normal is None else self.normal[0]
        seen = ["".join(row).rstrip() for row in rows]
        while seen and not seen[-1]:
            seen.pop()
        return seen

    def resize(self, columns: int, rows: int) -> None:
        """As terminals do: the alternate screen is cut, and the normal one breaks its lines anew,
        with the cursor on the line it was on, and takes back what it had pushed out, where there
        is room for it."""
        if self.normal is not None:
            alternate = [row[:columns] for row in self.cells[:rows]]
            alternate += [[] for _ in range(rows - len(alternate))]
            self.cells, self.row = self.normal
            self._break_anew(columns, rows)
            self.normal, self.cells, self.row = (self.cells, self.row), alternate, 0
        else:
            self._break_anew(columns, rows)

    def _break_anew(self, columns: int, rows: int) -> None:
        above: list[list[str]] = []
        row_of_cursor = 0
        back = min(len(self.pushed_out), max(0, rows - self.rows))
        taken_back = [list(self.pushed_out.pop()) for _ in range(back)][::-1]
        for number, row in enumerate([*taken_back, *self.cells[: self.row + 1]], -back):
            text = list("".join(row).rstrip()) if number < self.row else []
            if number == self.row:
                row_of_cursor = len(above)
            above.extend([text[at : at + columns] for at in range(0, len(text), columns)] or [[]])
        gone = max(0, row_of_cursor + 1 - rows)
        self.pushed_out.extend("".join(row) for row in above[:gone])
        kept = above[gone : row_of_cursor + 1]
        self.cells = kept + [[] for _ in range(rows - len(kept))]
        self.row, self.column = row_of_cursor - gone, 0
        self.columns, self.rows = columns, rows

    def _obey(self, private: str, numbers: str, final: str) -> None:
        match private, final:
            case "?", "h" | "l":
                for number in map(int, numbers.split(";")):
                    assert number in self.modes
                    if number == ALTERNATE and self.modes[number] != (final == "h"):
                        self._exchange()
                    self.modes[number] = final == "h"
            case "", "H":
                row, column = (int(one) for one in (numbers or "1;1").split(";"))
                assert 0 < row <= self.rows
                assert 0 < column <= self.columns
                self.row, self.column = row - 1, column - 1
            case "", "K":
                assert not numbers
                del self.cells[self.row][self.column :]
            case "", "m":
                pass
            case _:
                raise AssertionError(f"ESC [ {private}{numbers}{final} is not for every terminal")

    def _exchange(self) -> None:
        """To the alternate screen, which is empty, or back to the normal one."""
        if self.normal is None:
            self.normal = self.cells, self.row
            self.cells, self.row = [[] for _ in range(self.rows)], 0
        else:
            (self.cells, self.row), self.normal = self.normal, None
        self.column = 0

    def _show(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        else:
            assert character.isprintable() or cell_len(character) == 0, f"{character!r} is written"
            self._place(character)

    def _place(self, character: str) -> None:
        width = cell_len(character)
        if self.column + width > self.columns:
            self.wrapped += 1
            if not self.modes[WRAPPING]:
                return
            self.column = 0
            self._down()
        row = self.cells[self.row]
        row.extend(" " * (self.column - len(row)))
        row[self.column : self.column + max(width, 1)] = [character] + [""] * (width - 1)
        self.column += width

    def _down(self) -> None:
        if self.row + 1 < self.rows:
            self.row += 1
            return
        self.scrollback.append("".join(self.cells.pop(0)).rstrip())
        self.cells.append([])
