"""A terminal that shows frames: any thread may write to it, one at a time.

Everything here may wait for a terminal that is paused (Ctrl-S). So it is called in threads that can
be abandoned, never in trio's. Only `typed` and `distrust` never wait, and `restore` hardly.

While a frame is there, the terminal is on its alternate screen, typed characters are not echoed,
and keys come at once and not line by line; Ctrl-C works as usual. Lines that are to stay are
printed on the normal screen, where the summary will follow; the next frame then returns to the
alternate one. In the background (`Ctrl-Z`, `bg`) nothing is drawn over the shell's output.

A terminal that has gone (its window closed, and nobody told us to end) shows nothing any more, and
does not end the training.

A background process that changes the terminal's settings is stopped by the kernel (SIGTTOU), and so
is one that reads from it (SIGTTIN).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.text import Text

from node.app.cli.line_queue import write_whole
from node.app.cli.output import folded
from node.app.screen.canvas import ENTER, LEAVE, Canvas, Look, Painted, paint

DUMB: Final = frozenset({"", "dumb", "unknown"})

COLUMNS, ROWS = 80, 24
"""If the terminal does not give its size."""

LOCAL_FLAGS, CONTROL_CHARACTERS = 3, 6  # in what tcgetattr returns
FRAME_SECONDS: Final = 0.1  # a terminal that takes longer for a frame is paused
KEYS_AT_ONCE: Final = 64  # bytes

Frame = Callable[[int, int, Look], Sequence[Painted]]


def can_show(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Whether this is a capable terminal, and this process in its foreground."""
    if sys.platform == "win32" or environment.get("TERM", "") in DUMB:
        return False
    return os.isatty(descriptor) and _is_in_foreground(descriptor)


def can_read_keys(descriptor: int, shown_on: int) -> bool:
    """Whether the keys typed at the terminal `shown_on` come from this descriptor."""
    try:
        return os.isatty(descriptor) and os.fstat(descriptor).st_rdev == os.fstat(shown_on).st_rdev
    except OSError:
        return False


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
    """Invariant: writing needs the lock, and the canvas knows what is on the alternate screen.
    `keys`: the descriptor of what is typed; None if that cannot be read."""

    def __init__(self, descriptor: int, look: Look, keys: int | None = None) -> None:
        self._descriptor, self._look, self.keys = descriptor, look, keys
        self._lock = threading.Lock()
        self._canvas = Canvas()
        self._is_up = False
        """Whether the alternate screen is shown."""
        self._settings_before: list[Any] | None = None
        self._is_distrusted = False
        self._ended = False
        self._restored = 0

    def draw(self, frame: Frame) -> None:
        """Show this frame, in the size that the terminal has now."""
        with self._lock:
            if self._ended or not _is_in_foreground(self._descriptor):
                return
            if self._is_distrusted:
                self._is_distrusted = False  # before the size is read
                self._canvas.forget()
            columns, rows = self._size()
            restored = self._restored
            lines = frame(columns, rows, self._look)  # first: it may take long, or fail
            if self._ended or restored != self._restored:
                return
            self._take_over()
            enter, self._is_up = "" if self._is_up else ENTER, True
            self._write(f"{enter}{self._canvas.draw(lines, columns)}")

    def print_line(self, line: str) -> None:
        """Print a line that stays on the normal screen; too long, it is broken between words."""
        with self._lock:
            columns, _ = self._size()
            text = self._look.shown(folded(line, columns)).replace("\n", "\r\n")
            self._write(f"{self._left()}{text}\r\n")

    def distrust(self) -> None:
        """The frame may no longer be whole: write all of it the next time. Never waits."""
        self._is_distrusted = True

    def begin_anew(self) -> None:
        """The shell had the terminal: draw everything again."""
        with self._lock:
            if _is_in_foreground(self._descriptor):
                self._write(self._left())

    def end(self, last: Callable[[int, int], Sequence[Text]]) -> None:
        """Leave these lines on the normal screen, and release the terminal."""
        with self._lock:
            self._ended = True
            columns, rows = self._size()
            lines = [paint(line, self._look) for line in last(columns, max(rows - 1, 1))]
            text = "".join(f"{line.written}\r\n" for line in lines)
            self._write(f"{self._left()}{text}")
            self._give_back()

    def restore(self) -> None:
        """Back to the normal screen; echo typed characters again, and drop those that were typed
        meanwhile. Waits at most `FRAME_SECONDS`, for a frame that is being written."""
        if self._settings_before is not None and _is_in_foreground(self._descriptor):
            with contextlib.suppress(termios.error):  # undo Ctrl-S; TCOON alone does not
                termios.tcflow(self._descriptor, termios.TCOOFF)
                termios.tcflow(self._descriptor, termios.TCOON)
        has_lock = self._lock.acquire(timeout=FRAME_SECONDS)
        try:
            self._give_back()
        finally:
            if has_lock:
                self._lock.release()

    def _give_back(self) -> None:
        self._restored += 1
        left = self._left()
        with contextlib.suppress(OSError):
            if left and select.select([], [self._descriptor], [], 0)[1]:
                os.write(self._descriptor, left.encode())
        before, self._settings_before = self._settings_before, None
        if before is not None and _is_in_foreground(self._descriptor):
            with contextlib.suppress(termios.error):
                termios.tcflush(self._descriptor, termios.TCIFLUSH)
                termios.tcsetattr(self._descriptor, termios.TCSANOW, before)

    def typed(self) -> bytes:
        """The keys that were pressed since the last call; nothing in the background. OSError if the
        terminal has gone."""
        if self.keys is None or not self._is_up or not _is_in_foreground(self.keys):
            return b""
        return os.read(self.keys, KEYS_AT_ONCE)  # the settings say that it never waits

    def _left(self) -> str:
        """What leaves the alternate screen, if it is shown."""
        was_up, self._is_up = self._is_up, False
        self._canvas.forget()
        return LEAVE if was_up else ""

    def _take_over(self) -> None:
        """Keys come at once, and are not echoed."""
        with contextlib.suppress(termios.error):
            settings = termios.tcgetattr(self._descriptor)
            if settings[LOCAL_FLAGS] & (termios.ECHO | termios.ICANON):
                if self._settings_before is None:
                    self._settings_before = termios.tcgetattr(self._descriptor)
                settings[LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
                settings[CONTROL_CHARACTERS][termios.VMIN] = 0
                settings[CONTROL_CHARACTERS][termios.VTIME] = 0
                # Ctrl-\ would end the process at once, and leave the terminal as it is
                no_key = os.fpathconf(self._descriptor, "PC_VDISABLE").to_bytes(1, "little")
                settings[CONTROL_CHARACTERS][termios.VQUIT] = no_key
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
