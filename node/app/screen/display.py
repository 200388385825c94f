"""How the training is shown: as a screen on a terminal, else as lines, or objects with `--json`.

    with display_for(output) as display:
        nursery.start_soon(display.run)
        with display.logging(): ...
        await display.finish(seconds)

Each line begins with the time of day, except the three lines about what will be used: a person
reads them as one.

The screen has to end before an error is printed, whatever ends the training: `show_to_the_end`
runs the work with the display, and sees to that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import trio

from node.app.cli.exit_codes import BROKEN_PIPE, DONE, REFUSED
from node.app.cli.interruption import at_hard_exit, bound_the_end
from node.app.cli.line_queue import (
    LAST_LINES_SECONDS,
    STDERR,
    STDIN,
    STDOUT,
    LineQueue,
    write_line,
)
from node.app.cli.output import Output, folded
from node.app.screen.live import Screen
from node.app.screen.terminal import Terminal, can_read_keys, can_show, look_of
from node.core.display_name import with_names
from node.core.failure import CommandFailure, failure_of
from node.core.training_view import TrainerView
from node.training.happenings import Failed, Happening, Shown, WillUse
from node.training.words import object_of, words_of

if TYPE_CHECKING:
    from node.core.node import Node


class PlainView:
    """`Shown` (node/training/happenings.py) on a queue of lines."""

    def __init__(self, lines: LineQueue) -> None:
        self._lines = lines
        self._view = TrainerView()

    def happened(self, happening: Happening) -> None:
        words = with_names(words_of(happening), self._view.peers)
        if not isinstance(happening, WillUse):
            words = f"{time.strftime('%H:%M:%S')} {words}"
        self._lines.data({**object_of(happening), "time": round(time.time(), 3)}, words)

    def show(self, view: TrainerView) -> None:
        """Prints nothing: `potluck status` shows the state. Takes the peers' names from the
        view."""
        self._view = view


class Display(Protocol):
    """`draws`: it shows the state itself, and not only events."""

    lines: LineQueue
    shown: Shown
    draws: bool

    async def run(self) -> None:
        """Show until finished; frames until cancelled."""

    def meet(self, node: Node) -> None:
        """The node runs: what a screen shows of it, and the keys for it, work from now on."""

    def logging(self) -> contextlib.AbstractContextManager[None]:
        """While this is entered, the log is shown here."""

    async def finish(self, seconds: float) -> bool:
        """There are no more events: show the rest within `seconds`, also when cancelled. Returns
        whether a person has seen the end with its advice; if not, the error has to be printed.
        """


@contextlib.contextmanager
def display_for(output: Output) -> Iterator[Display]:
    """The screen needs a capable terminal, and none of the flags for lines: --plain, --json, or
    --debug, which has a long log."""
    wants_lines = output.json or output.plain or output.debug
    if wants_lines or not can_show(STDOUT, os.environ):
        yield LineDisplay(output)
        return
    keys = STDIN if can_read_keys(STDIN, STDOUT) else None
    terminal = Terminal(STDOUT, look_of(os.environ, sys.stdout.encoding), keys)
    with at_hard_exit(terminal.restore):
        try:
            yield ScreenDisplay(output, terminal)
        finally:
            terminal.restore()


class LineDisplay:
    """A terminal with --plain gets lines broken between words; a pipe or a program, whole lines."""

    draws = False

    def __init__(self, output: Output) -> None:
        self.lines = LineQueue(output, None if output.json else write_folded)
        self.shown: Shown = PlainView(self.lines)

    async def run(self) -> None:
        await self.lines.run()

    def meet(self, node: Node) -> None:
        """Lines need nothing of it."""

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
    """Printed text stays on the normal screen. A log line is an event, and also goes to stderr if
    that is a file."""

    draws = True

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

    def meet(self, node: Node) -> None:
        self._screen.meet(node.status, node.control.ask)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        logging.captureWarnings(True)  # Python's own would be printed over the frame
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
            self._terminal.print_line(line)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                trio.from_thread.run_sync(self._screen.printed, line)


async def show_to_the_end(
    display: Display,
    work: Callable[[], Awaitable[None]],
    failed: Callable[[CommandFailure], None],
    leave: Callable[[], bool],
) -> int:
    """Run it while the display runs. Returns the exit code. An error is passed to `failed`, and
    raised if the display has not shown it in full. `leave` is called when the reader has gone."""
    error: Exception | None = None

    async def show() -> None:
        nonlocal error
        try:
            await display.run()
        except BrokenPipeError as gone:
            error = gone
            bound_the_end(BROKEN_PIPE)
            if not leave():
                showing.cancel_scope.cancel()

    async with trio.open_nursery() as showing:
        showing.start_soon(show)
        try:
            with display.logging():
                await work()
        except Exception as raised:  # noqa: BLE001 - shown, and raised below
            error = raised
            failed(failure_of(error))
        finally:
            has_shown = await display.finish(LAST_LINES_SECONDS)
        showing.cancel_scope.cancel()
    if error is None:
        return DONE
    if has_shown:
        return failure_of(error).exit_code
    raise error


def happening_of(failure: CommandFailure) -> Failed:
    return Failed(failure.what, failure.why, failure.advice, failure.exit_code == REFUSED)
