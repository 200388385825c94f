"""However a process ends, its terminal is as it was before. Real processes on real terminals."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import sys
import termios
from pathlib import Path

import pytest

from node.app.screen.canvas import ENTER
from tests.screen.emulator import AT_REST, Emulator
from tests.waiting import PATIENCE_SECONDS, until

ROOT = Path(__file__).parents[2]
CHILD = ("-m", "tests.screen.shown_child")


class Child:
    """The process, and what its terminal has got."""

    def __init__(self, ending: str, **variables: str) -> None:
        paths = f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "TERM": "xterm"}
        self.process, self.outside = pty.fork()
        if self.process == 0:
            os.chdir(ROOT)
            words = [sys.executable, *CHILD, ending]
            os.execve(sys.executable, words, environment | variables)
        self.before = termios.tcgetattr(self.outside)
        self.got = b""
        os.set_blocking(self.outside, False)

    def has(self, part: str) -> bool:
        with contextlib.suppress(BlockingIOError, OSError):
            while got := os.read(self.outside, 65536):
                self.got += got
        return part.encode() in self.got

    def has_ended(self) -> bool:
        self.has("")
        return os.waitpid(self.process, os.WNOHANG)[0] != 0

    async def end(self) -> Emulator:
        """The terminal after the end."""
        await until(self.has_ended, PATIENCE_SECONDS)
        emulator = Emulator(80, 24)
        emulator.write(self.got.decode().replace("\r\r\n", "\r\n"))
        return emulator


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", ["bug", signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda one: str(one)
)
async def test_the_terminal_is_as_before(ending: str | signal.Signals) -> None:
    child = Child("bug" if isinstance(ending, str) else "wait")
    await until(lambda: child.has("\x1b[24;1H"), PATIENCE_SECONDS)  # the last line of a frame
    assert ENTER.encode() in child.got
    if not isinstance(ending, str):
        assert termios.tcgetattr(child.outside) != child.before
        os.kill(child.process, ending)
    emulator = await child.end()
    assert emulator.modes == AT_REST
    assert termios.tcgetattr(child.outside) == child.before
    os.close(child.outside)


@pytest.mark.slow
async def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_back() -> None:
    child = Child("wait")
    await until(lambda: child.has("\x1b[24;1H"), PATIENCE_SECONDS)
    child.got = b""
    os.kill(child.process, signal.SIGTSTP)
    await until(lambda: child.has("\x1b[?1049l"), PATIENCE_SECONDS)
    await until(lambda: termios.tcgetattr(child.outside) == child.before, PATIENCE_SECONDS)
    child.got = b""
    os.kill(child.process, signal.SIGCONT)
    await until(lambda: child.has(ENTER), PATIENCE_SECONDS)
    await until(lambda: child.has("\x1b[24;1H"), PATIENCE_SECONDS)
    os.kill(child.process, signal.SIGTERM)
    emulator = await child.end()
    assert emulator.modes == AT_REST
    os.close(child.outside)


@pytest.mark.slow
@pytest.mark.parametrize("term", ["dumb", ""])
async def test_a_dumb_terminal_gets_no_sequence(term: str) -> None:
    child = Child("bug", TERM=term)
    await child.end()
    assert b"\x1b" not in child.got
    os.close(child.outside)


@pytest.mark.slow
async def test_no_colour_on_request() -> None:
    child = Child("bug", NO_COLOR="1")
    emulator = await child.end()
    assert b"\x1b[?1049h" in child.got
    assert re.search(rb"\x1b\[[0-9;]*m", child.got) is None, "no style"
    assert emulator.modes == AT_REST
    os.close(child.outside)
