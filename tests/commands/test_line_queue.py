"""Lines from before the end are printed, however it ends, without waiting for any reader."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import trio

from node.app.cli.line_queue import STDERR, STDOUT, LineQueue, write_whole
from node.app.cli.output import Output
from tests.waiting import PATIENCE_SECONDS

LINES = 20

logger = logging.getLogger(__name__)


async def test_queued_lines_are_printed_when_everything_is_cancelled() -> None:
    printed: list[tuple[int, str]] = []
    lines = LineQueue(Output(), lambda *line: printed.append(line))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lines.run)
        for number in range(LINES):
            lines.data({}, str(number))
        nursery.cancel_scope.cancel()
        await lines.finish(PATIENCE_SECONDS)
    assert printed == [(STDOUT, str(number)) for number in range(LINES)]


async def test_the_last_logged_line_is_printed() -> None:
    printed: list[tuple[int, str]] = []
    lines = LineQueue(Output(), lambda *line: printed.append(line))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lines.run)
        with lines.logging():
            logger.warning("The disk is full.")
        nursery.cancel_scope.cancel()
        await lines.finish(PATIENCE_SECONDS)
    ((descriptor, line),) = printed
    assert descriptor == STDERR
    assert line.endswith("The disk is full.")


async def test_a_reader_who_never_reads_holds_no_end_up() -> None:
    reads = threading.Event()

    def write(_descriptor: int, _line: str) -> None:
        reads.wait()

    lines = LineQueue(Output(), write)
    try:
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lines.run)
                lines.say("one")
                nursery.cancel_scope.cancel()
                await lines.finish(0.01)
    finally:
        reads.set()


async def test_a_reader_who_has_gone_is_told_of_and_not_waited_for() -> None:
    def write(_descriptor: int, _line: str) -> None:
        raise BrokenPipeError

    lines = LineQueue(Output(), write)
    lines.say("one")
    with pytest.RaisesGroup(BrokenPipeError), trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lines.run)
            await lines.finish(2 * PATIENCE_SECONDS)


def test_a_slow_reader_misses_nothing_even_if_nobody_may_wait_for_it() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    said = bytes(1 << 20)  # more than a pipe holds

    def write() -> None:
        try:
            write_whole(writing, said)
        finally:
            os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    heard = b""
    while len(heard) < len(said) and (some := os.read(reading, 1 << 16)):
        heard += some
    thread.join(PATIENCE_SECONDS)
    os.close(reading)
    assert heard == said
