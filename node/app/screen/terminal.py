"""A terminal with a picture at its end: any thread may write to it, one at a time.

Everything here may wait for a terminal that is paused (Ctrl-S). So it is called in threads that can
be abandoned, never in trio's. Only `restore` never waits.

While the picture is there, typed characters are not echoed over it; Ctrl-C works as usual. In the
background (`Ctrl-Z`, `bg`) nothing is drawn over the shell's output. After Ctrl-Z the shell has its
echo back, which most shells restore themselves, but not all.

A terminal that has gone (its window closed, and nobody told us to end) shows nothing any more, and
does not end the training.

A background process that changes the terminal's settings is stopped by the kernel (SIGTTOU).
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.text import Text

from node.app.cli.line_queue import write_whole
from node.app.cli.output import folded
from node.app.screen.canvas import Canvas, Look, paint

DUMB: Final = frozenset({"", "dumb", "unknown"})
LINES_ABOVE: Final = 200
"""Lines kept from above the picture; those with room are written again after a resize."""

COLUMNS, ROWS = 80, 24
"""If the terminal does not give its size."""

LOCAL_FLAGS: Final = 3  # in what tcgetattr returns

Picture = Callable[[int, int], Sequence[Text]]


def can_show(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Whether this is a capable terminal, and this process in its foreground."""
    if sys.platform == "win32" or environment.get("TERM", "") in DUMB:
        return False
    return os.isatty(descriptor) and _is_in_foreground(descriptor)


def look_of(environment: Mapping[str, str], encoding: str | None) -> Look:
    """NO_COLOR with any value removes the colour (no-color.org). A locale without UTF-8 gets ASCII,
    although Python itself writes UTF-8 in the C locale."""
    variables = ("LC_ALL", "LC_CTYPE", "LANG")
    locale = next((environment[one] for one in variables if environment.get(one)), "utf-8")
    is_utf = "utf" in locale.lower() or bool(environment.get("PYTHONIOENCODING"))
    written = encoding or "ascii"
    if written.lower().startswith("utf") and not is_utf:
        written = "ascii"
    return Look(
        colour=not environment.get("NO_COLOR"),
        encoding=written,
        console=environment.get("TERM") == "linux",
    )


class Terminal:
    """Invariant: writing needs the lock, and the canvas knows the terminal's contents."""

    def __init__(self, descriptor: int, look: Look) -> None:
        self._descriptor, self._look = descriptor, look
        self._lock = threading.Lock()
        self._canvas = Canvas()
        self._picture: Picture = _nothing
        self._above: deque[str] = deque(maxlen=LINES_ABOVE)
        self._settings_before: list[Any] | None = None
        self._ended = False

    def draw(self, picture: Picture) -> None:
        """Show this picture, in the size that the terminal has now."""
        with self._lock:
            self._picture = picture
            self._write(self._drawn())

    def print_above(self, line: str) -> None:
        """Print a line that stays, above the picture; too long, it is broken between words."""
        with self._lock:
            columns, rows = self._size()
            erased = self._canvas.erase(columns, rows, self._lines_above(columns))
            self._above.append(line)
            text = "".join(f"{one}\r\n" for one in self._folded(line, columns))
            self._write(f"{erased}{text}{self._drawn()}")

    def begin_anew(self) -> None:
        """After the shell had the terminal: draw below its output."""
        with self._lock:
            self._canvas.forget()

    def end(self, last: Picture) -> None:
        """Replace the picture with the last one, which stays, and release the terminal."""
        with self._lock:
            self._ended, self._picture = True, _nothing
            columns, rows = self._size()
            lines = [paint(line, self._look) for line in last(columns, max(rows - 1, 1))]
            text = "".join(f"{line.written}\r\n" for line in lines)
            self.restore()
            erased = self._canvas.erase(columns, rows, self._lines_above(columns))
            self._write(f"{erased}{text}")

    def restore(self) -> None:
        """Echo typed characters again, and drop those that were typed meanwhile. Never waits."""
        before, self._settings_before = self._settings_before, None
        if before is not None and _is_in_foreground(self._descriptor):
            with contextlib.suppress(termios.error):
                termios.tcflush(self._descriptor, termios.TCIFLUSH)
                termios.tcsetattr(self._descriptor, termios.TCSANOW, before)

    def _drawn(self) -> str:
        if self._ended or not _is_in_foreground(self._descriptor):
            return ""
        self._without_echo()
        columns, rows = self._size()
        lines = self._picture(columns, max(rows - 1, 1))  # one is the cursor's
        return self._canvas.draw(
            [paint(line, self._look) for line in lines], columns, rows, self._lines_above(columns)
        )

    def _lines_above(self, columns: int) -> list[str]:
        return [short for one in self._above for short in self._folded(one, columns)]

    def _folded(self, line: str, columns: int) -> list[str]:
        return self._look.shown(folded(line, columns)).split("\n")

    def _without_echo(self) -> None:
        with contextlib.suppress(termios.error):
            settings = termios.tcgetattr(self._descriptor)
            if settings[LOCAL_FLAGS] & termios.ECHO:
                if self._settings_before is None:
                    self._settings_before = list(settings)
                settings[LOCAL_FLAGS] &= ~termios.ECHO
                termios.tcsetattr(self._descriptor, termios.TCSANOW, settings)

    def _size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self._descriptor)
        except OSError:
            columns, rows = 0, 0
        return columns or COLUMNS, rows or ROWS

    def _write(self, text: str) -> None:
        try:
            write_whole(self._descriptor, text.encode(self._look.encoding, "replace"))
        except OSError:  # gone: nobody is there to read it
            self._ended = True


def _is_in_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return True  # a terminal that controls no process, such as a container's


def _nothing(_columns: int, _rows: int) -> Sequence[Text]:
    return ()
