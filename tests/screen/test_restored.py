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

from node.app.screen.canvas import ENTER, LEAVE
from tests.screen.emulator import AT_REST, Emulator
from tests.waiting import PATIENCE_SECONDS, until

ROOT = Path(__file__).parents[2]
CHILD = ("-m", "tests.screen.shown_child")
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: None)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
print(f"job {child}", flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
while not os.WIFEXITED(status := os.waitpid(child, os.WUNTRACED)[1]):
    os.tcsetpgrp(0, os.getpgrp())
    print("stopped", flush=True)
    signal.sigwait([signal.SIGUSR1])
    os.tcsetpgrp(0, child)
    os.kill(-child, signal.SIGCONT)
os.tcsetpgrp(0, os.getpgrp())
"""
"""A shell with job control: Ctrl-Z stops nobody without one. SIGUSR1 is `fg`."""


class Child:
    """The process, and what its terminal has got."""

    def __init__(self, ending: str, *, shell: bool = False, **variables: str) -> None:
        paths = f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "TERM": "xterm"}
        self.process, self.outside = pty.fork()
        if self.process == 0:
            os.chdir(ROOT)
            words = [sys.executable, *(("-c", SHELL) if shell else ()), *CHILD, ending]
            os.execve(sys.executable, words, environment | variables)
        self.before = termios.tcgetattr(self.outside)
        self.got = b""
        self.code: int | None = None
        os.set_blocking(self.outside, False)

    def has(self, part: str) -> bool:
        with contextlib.suppress(BlockingIOError, OSError):
            while got := os.read(self.outside, 65536):
                self.got += got
        return part.encode() in self.got

    def has_ended(self) -> bool:
        self.has("")
        ended, status = os.waitpid(self.process, os.WNOHANG)
        self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code is not None

    async def end(self) -> Emulator:
        """The terminal after the end."""
        await until(self.has_ended, PATIENCE_SECONDS)
        emulator = Emulator(80, 24)
        emulator.write(self.got.decode().replace("\r\r\n", "\r\n"))
        return emulator


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code"),
    [("bug", 1), ("q", 0), (signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
    ids=str,
)
async def test_the_terminal_is_as_before(ending: str | signal.Signals, code: int) -> None:
    """A key is no interruption: leaving by it is done."""
    child = Child("bug" if ending == "bug" else "wait")
    await until(lambda: child.has("\x1b[24;1H"), PATIENCE_SECONDS)  # the last line of a frame
    assert ENTER.encode() in child.got
    if ending != "bug":
        assert termios.tcgetattr(child.outside) != child.before
    if ending == "q":
        os.write(child.outside, b"q")
    elif isinstance(ending, signal.Signals):
        os.kill(child.process, ending)
    emulator = await child.end()
    assert child.code == code
    assert emulator.modes == AT_REST
    assert termios.tcgetattr(child.outside) == child.before
    os.close(child.outside)


@pytest.mark.slow
async def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_back() -> None:
    shell = Child("wait", shell=True)
    await until(lambda: shell.has("\x1b[24;1H"), PATIENCE_SECONDS)
    job = int(shell.got.split(b"job ")[1].split()[0])
    os.write(shell.outside, b"\x1a")
    await until(lambda: shell.has("stopped"), PATIENCE_SECONDS)
    before, after = shell.got.split(b"stopped")
    assert before.endswith(LEAVE.encode())
    assert after.strip() == b"", "nothing is drawn for the shell"
    assert termios.tcgetattr(shell.outside) == shell.before
    shell.got = b""
    os.kill(shell.process, signal.SIGUSR1)
    await until(lambda: shell.has("\x1b[24;1H"), PATIENCE_SECONDS)
    assert ENTER.encode() in shell.got
    os.kill(job, signal.SIGTERM)
    emulator = await shell.end()
    assert emulator.modes == AT_REST
    os.close(shell.outside)


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
