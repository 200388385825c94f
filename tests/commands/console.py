"""The console command as a user has it: a process of its own, with a home of its own.

`potluck(...)` runs a command to its end; `running(...)` starts one that goes on, and ends it
whatever happens. Every child gets a neutral environment, so that the settings of the person who
runs the tests cannot reach it.

`potluck_here(...)` and `laboratory_here(...)` run a command inside the process of the tests, where
its process is not the point: a command that loads torch takes two seconds of a core less.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from unittest.mock import patch

from lab.__main__ import parse
from node.app.main import main
from node.core.stopping_signals import stopping_signals
from tests.leaving import Leaving
from tests.waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from node.app.main import Parse

CHECKOUT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("potluck")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "node"]
LABORATORY = [sys.executable, "-m", "lab"]

Completed = subprocess.CompletedProcess[str]


def environment(home: Path, **variables: str) -> dict[str, str]:
    """A child's environment: its home, this checkout's code, and none of the tester's settings."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "LANG", "TMPDIR", "PYTHONPATH")
        if name in os.environ
    }
    return {**kept, "POTLUCK_HOME": str(home), **variables}


def potluck(*words: str, home: Path, **variables: str) -> Completed:
    """Run one command to its end."""
    return _run([*COMMAND, *words], home, variables)


def laboratory(
    *words: str, home: Path, patience: float = PATIENCE_SECONDS, **variables: str
) -> Completed:
    """The same with `scripts/bench …`, `scripts/simulate …` or `scripts/reproduce …`."""
    return _run([*LABORATORY, *words], home, variables, patience)


def potluck_here(*words: str, home: Path, **variables: str) -> Completed:
    """The same as `potluck`, without a process of its own."""
    return _here(words, home, variables)


def laboratory_here(*words: str, home: Path, **variables: str) -> Completed:
    """The same as `laboratory`, without a process of its own."""
    return _here(words, home, variables, parse)


def _here(
    words: tuple[str, ...], home: Path, variables: dict[str, str], parse: Parse | None = None
) -> Completed:
    """Afterwards signals, logging and warnings are as they were."""
    handlers = {number: signal.getsignal(number) for number in stopping_signals()}
    root = logging.getLogger()
    logs_to, level = list(root.handlers), root.level
    levels = {logger: logger.level for logger in _loggers()}
    standard_output, standard_error = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    )
    try:
        with (
            patch.dict(os.environ, environment(home, **variables), clear=True),
            contextlib.redirect_stdout(standard_output),
            contextlib.redirect_stderr(standard_error),
            warnings.catch_warnings(),
        ):
            code = main(words, parse)
    finally:
        root.handlers[:] = logs_to
        root.setLevel(level)
        for logger in _loggers():
            logger.setLevel(levels.get(logger, logging.NOTSET))
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Completed(list(words), code, _written(standard_output), _written(standard_error))


def _loggers() -> list[logging.Logger]:
    every = logging.root.manager.loggerDict.values()
    return [logger for logger in every if isinstance(logger, logging.Logger)]


def _written(text: io.TextIOWrapper) -> str:
    text.seek(0)
    return text.read()


def _run(
    command: list[str], home: Path, variables: dict[str, str], patience: float = PATIENCE_SECONDS
) -> Completed:
    return subprocess.run(
        command,
        env=environment(home, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects of an output, one a line; anything else in it is an error."""
    return [json.loads(line) for line in text.splitlines()]


class RunningCommand:
    """A command that goes on until it is told to stop."""

    def __init__(
        self, words: list[str], home: Path, variables: dict[str, str], stdout: int
    ) -> None:
        self.process = subprocess.Popen(
            words,
            env=environment(home, **variables),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )
        self._held = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def next_line(self) -> str:
        """The next line of its stdout; fails if none comes, or it has ended."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._held:
            ready, _, _ = select.select([descriptor], [], [], PATIENCE_SECONDS)
            some = os.read(descriptor, 65_536) if ready else b""
            assert some, f"no line came; it said on stderr: {self._said()}"
            self._held += some
        line, _, self._held = self._held.partition(b"\n")
        return line.decode()

    def next_object(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.next_line())
        return value

    def wait_until_it_says(self, words: str) -> str:
        """Its stderr up to the line that has these words; `stop` returns the rest."""
        assert self.process.stderr is not None
        said = ""
        while words not in said:
            line = self.process.stderr.readline().decode()
            assert line, f"it ended without saying {words!r}: {said}"
            said += line
        return said

    def wait_until_it_handles_signals(self) -> None:
        """Until our own handler of SIGTERM stands; what comes earlier is the interpreter's."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _catches(self.pid, signal.SIGTERM):
            assert time.monotonic() < deadline, "it never began to handle signals"
            assert self.process.poll() is None, "it ended before it handled signals"
            time.sleep(0.001)

    def stop(self, number: signal.Signals = signal.SIGINT) -> tuple[int, float, str]:
        """Send a signal and wait: the exit code, the seconds it took, and its stderr."""
        return stop(self.process, number)

    def _said(self) -> str:
        self.process.kill()
        return self.process.communicate()[1].decode()


def stop(process: subprocess.Popen[bytes], number: signal.Signals) -> tuple[int, float, str]:
    """The exit code after a signal, the seconds that were the process's own, and its stderr."""

    def rest_of(pipe: IO[bytes] | None) -> bytes:
        return pipe.read() if pipe is not None else b""

    impatience = threading.Timer(PATIENCE_SECONDS, process.kill)
    with ThreadPoolExecutor() as readers:
        leaving = Leaving(process.pid)
        process.send_signal(number)
        impatience.start()
        try:
            readers.submit(rest_of, process.stdout)  # it may have more to say than a pipe holds
            errors = readers.submit(rest_of, process.stderr)
            seconds = leaving.wait()
            return process.wait(), seconds, errors.result().decode()
        finally:
            impatience.cancel()


@contextlib.contextmanager
def running(
    *words: str, home: Path, stdout: int = subprocess.PIPE, program: str = "", **variables: str
) -> Iterator[RunningCommand]:
    """A command that runs inside the block, and not after it; one of the laboratory's if it is
    `bench` or `simulate`. `program`: a module that is run in place of `potluck`."""
    start = LABORATORY if words[0] in ("bench", "simulate") else COMMAND
    if program:
        start = [sys.executable, "-m", program]
    command = RunningCommand([*start, *words], home, variables, stdout)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()


@contextlib.contextmanager
def running_node(
    home: Path, *words: str, program: str = ""
) -> Iterator[tuple[RunningCommand, dict[str, Any]]]:
    """A `potluck listen` on loopback that has started, and what it said when it had."""
    listen = ("listen", "--json", "--listen", LOOPBACK, *words)
    with running(*listen, home=home, program=program) as command:
        yield command, command.next_object()


LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def files_of_a_running_node(home: Path) -> list[str]:
    """The files of a node beside its key, its settings and its account of the month's traffic.
    There are none if no node runs."""
    kept = {"identity.key", "potluck.toml", "run", "traffic.json"}
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.name not in kept)


def _catches(pid: int, number: signal.Signals) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & (1 << (number - 1)))
    return False
