"""Prints the lines of a running node without ever making the node wait.

The reader of our output may stop reading: a paused terminal, a full pipe. A plain `print` or log
call would then block the node. So lines go through a bounded queue to a thread; while the queue is
full they are counted and dropped.

A thread that waits inside `print` holds the lock of Python's buffer, and then not even the end of
the process gets past it. So the thread writes to the descriptor itself.

Log records also come from other threads, where trio's channels must not be used. They are handed
over to the loop first, and `finish` goes the same way, so everything logged before it is printed
before the end. Cancelling does not end the printing, only `finish` does. So the caller of `run` has
to call `finish` in a `finally`.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trio

from node.app.cli.log_output import for_people
from node.app.cli.output import Output, printable

# A reader that pauses loses nothing for this many lines; one that never resumes costs 1 MB.
LINES_IN_QUEUE = 1_000

LAST_LINES_SECONDS = 0.3  # to print the last lines, for a reader that reads

STDIN, STDOUT, STDERR = 0, 1, 2

Write = Callable[[int, str], None]


class LineQueue:
    """Prints lines in order. `run` has to run for anything to appear."""

    def __init__(self, output: Output, write: Write | None = None) -> None:
        self._output = output
        self._write = write or write_line
        self._dropped = 0
        self._send, self._receive = trio.open_memory_channel[tuple[int, str]](LINES_IN_QUEUE)
        self._printing = trio.CancelScope(shield=True)
        self._ended = trio.Event()

    def data(self, value: Mapping[str, Any], text: str) -> None:
        """One event, for a program or a person, on stdout. Never waits."""
        if self._dropped and self._send.statistics().current_buffer_used < LINES_IN_QUEUE:
            value = {**value, "dropped_before": self._dropped}
            text = f"{text} ({self._dropped} lines before this were dropped: nothing read them)"
            self._dropped = 0
        self._put(STDOUT, self._output.line(value, text))

    def say(self, text: str) -> None:
        """Something for a person, on stderr. Never waits."""
        self._put(STDERR, printable(text))

    async def run(self) -> None:
        """Print until finished, also when cancelled. BrokenPipeError when the reader has gone."""
        try:
            with self._printing:
                async for descriptor, line in self._receive:
                    # Abandoned by `finish`: it may be waiting for a reader that never reads again.
                    await trio.to_thread.run_sync(
                        self._write,
                        descriptor,
                        line,
                        abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are older
                    )
        finally:
            self._ended.set()

    async def finish(self, seconds: float) -> None:
        """No more lines: wait until all are printed, or this long, also when cancelled."""
        with trio.CancelScope(shield=True):
            trio.lowlevel.current_trio_token().run_sync_soon(self._send.close)
            with trio.move_on_after(seconds):
                await self._ended.wait()
        self._printing.cancel()

    @contextmanager
    def logging(self, say: Callable[[str], None] | None = None) -> Iterator[None]:
        """In this block, the log is printed through this queue, or passed to `say`."""
        root = logging.getLogger()
        handler = for_people(_QueueHandler(say or self.say))
        before = list(root.handlers)
        root.handlers[:] = [handler]
        try:
            yield
        finally:
            root.handlers[:] = before

    def _put(self, descriptor: int, line: str) -> None:
        try:
            self._send.send_nowait((descriptor, line))
        except (trio.WouldBlock, trio.ClosedResourceError):
            self._dropped += 1


def write_line(descriptor: int, line: str) -> None:
    """In this thread, which waits for the reader."""
    encoding = (sys.stdout if descriptor == STDOUT else sys.stderr).encoding or "utf-8"
    write_whole(descriptor, f"{line}\n".encode(encoding, "replace"))


def write_whole(descriptor: int, data: bytes) -> None:
    """In this thread, which waits for the reader, even if another process that shares our terminal
    (an ssh in the background) has made it non-blocking."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


class _QueueHandler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say
        self._token = trio.lowlevel.current_trio_token()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._token.run_sync_soon(self._say, self.format(record))
        except trio.RunFinishedError:
            pass  # the node has ended; there is nobody to tell
        except Exception:  # noqa: BLE001 - logging's own rule: an error in a log line ends nothing
            self.handleError(record)
