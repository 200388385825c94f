"""How the training is shown: as a screen on a terminal, else as lines, or objects with `--json`.

    with display_for(output) as display:
        nursery.start_soon(display.run)
        with display.logging(): ...
        await display.finish(seconds)

Easy to get wrong: whatever ends the training, the screen has to end before an error is printed:
`finish` belongs into a `finally`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Protocol

import trio

from node.commands.interruption import at_hard_exit
from node.commands.line_queue import STDERR, STDOUT, LineQueue, write_line
from node.commands.output import Output, folded
from node.commands.plain_view import PlainView
from node.screen.live import Screen
from node.screen.terminal import Terminal, can_show, look_of
from node.trainer.shown import Shown


class Display(Protocol):
    lines: LineQueue
    shown: Shown

    async def run(self) -> None:
        """Show until finished; a picture until cancelled."""

    def logging(self) -> contextlib.AbstractContextManager[None]:
        """While this is entered, the log is shown here."""

    async def finish(self, seconds: float) -> bool:
        """Nothing comes any more: show what is left, in at most so long; also when cancelled.
        Whether a person has now seen how it ended, with what to do: else an error has to be said.
        """


@contextlib.contextmanager
def display_for(output: Output) -> Iterator[Display]:
    """The screen needs a terminal that obeys, and nobody who asked for lines: --plain, --json, or
    --debug, whose log is long."""
    wants_lines = output.json or output.plain or output.debug
    if wants_lines or not can_show(STDOUT, os.environ):
        yield LineDisplay(output)
        return
    terminal = Terminal(STDOUT, look_of(os.environ, sys.stdout.encoding))
    with at_hard_exit(terminal.restore):
        try:
            yield ScreenDisplay(output, terminal)
        finally:
            terminal.restore()


class LineDisplay:
    """A terminal that asked for lines gets whole words; a pipe, and a program, whole lines."""

    def __init__(self, output: Output) -> None:
        self.lines = LineQueue(output, None if output.json else write_folded)
        self.shown: Shown = PlainView(self.lines)

    async def run(self) -> None:
        await self.lines.run()

    def logging(self) -> contextlib.AbstractContextManager[None]:
        return self.lines.logging()

    async def finish(self, seconds: float) -> bool:
        await self.lines.finish(seconds)
        return False


def write_folded(descriptor: int, line: str) -> None:
    try:
        columns = os.get_terminal_size(descriptor).columns or None
    except OSError:
        columns = None
    write_line(descriptor, folded(line, columns))


class ScreenDisplay:
    """What is said stays above the picture; what is logged is an event in it, and goes to stderr
    as well where that is a file."""

    def __init__(self, output: Output, terminal: Terminal, stderr: int = STDERR) -> None:
        self._terminal = terminal
        self._stderr_is_elsewhere = not os.isatty(stderr)
        self.lines = LineQueue(output, self._print)
        self._screen = Screen(terminal, lambda text: self.lines.data({}, text))
        self.shown: Shown = self._screen

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.lines.run)
            nursery.start_soon(self._screen.run)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        logging.captureWarnings(True)  # Python's own would be printed over the picture
        try:
            with self.lines.logging(self._warn):
                yield
        finally:
            logging.captureWarnings(False)

    async def finish(self, seconds: float) -> bool:
        await self.lines.finish(seconds)
        has_ended = await self._screen.end(seconds)
        return has_ended and not self._stderr_is_elsewhere

    def _warn(self, line: str) -> None:
        self._screen.warn(line)
        if self._stderr_is_elsewhere:
            self.lines.say(line)

    def _print(self, descriptor: int, line: str) -> None:
        if descriptor == STDERR and self._stderr_is_elsewhere:
            write_line(descriptor, line)
        else:
            self._terminal.print_above(line)
