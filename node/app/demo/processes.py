"""The demo's processes, commands as people type them, and the folder that they live in.

    with demo_folder(keep=False) as folder: ...
    child = Child("ann", ["join", "--json"], home=…, folder=…, variables={"POTLUCK_INVITE": …})
    child.start()
    await child.read(take)           # until it has ended
    child.exit_code

Secrets are passed in environment variables, because other users can read command lines.

Promises: `kill` ends the children, and so does the kernel if this process dies first. The stderr of
a child goes to a file; `last_lines` gives its end. The folder is in the temporary directory and is
removed when the block ends, unless it is kept. If a demo was killed (SIGKILL, the power), the next
demo removes its folder, because nobody holds its lock any more. A kept folder has no lock, and is
never removed.

Each child is in a session of its own, so that Ctrl-C reaches the demo alone, which then decides.
The kernel watches the parent *thread*, so children are started from the main thread, which lives as
long as the process. A demo that is just beginning has a folder and does not hold its lock yet, so
only folders of some age are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from node.core.running_lock import AlreadyRunning, hold_lock
from protocols.errors import PotluckError

LOWEST_PORT, HIGHEST_PORT = 20_000, 32_000  # below those that the system assigns
PORT_TRIES = 50
KILLED_SECONDS = 1.0  # a killed process is gone in a moment


class NoFreePort(PotluckError):
    """All ports that were tried are in use."""


def free_port() -> int:
    """A port that nobody listens on now, and that the system does not assign by itself."""
    for _ in range(PORT_TRIES):
        port = LOWEST_PORT + secrets.randbelow(HIGHEST_PORT - LOWEST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise NoFreePort("There is no free port on this machine.")


PREFIX: Final = "potluck-demo-"
BEGINNING_SECONDS: Final = 60.0
"""A demo makes its folder and takes its lock within a millisecond; a stopped machine is slower."""


@contextlib.contextmanager
def demo_folder(*, keep: bool) -> Iterator[Path]:
    """A new folder, for this user alone."""
    remove_abandoned(Path(tempfile.gettempdir()), time.time())
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if keep:
        yield folder
        return
    try:
        with hold_lock(_lock_of(folder), _somebody_else):
            yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Remove all of it. Also for a signal's handler."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(temporary: Path, now: float) -> None:
    """Remove the folders of this user's demos that were killed."""
    for folder in temporary.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, AlreadyRunning):
            status = folder.lstat()
            is_ours = status.st_uid == os.geteuid()
            is_old = now - status.st_mtime > BEGINNING_SECONDS
            if is_ours and is_old and not folder.is_symlink() and _lock_of(folder).is_file():
                with hold_lock(_lock_of(folder), _somebody_else):
                    remove(folder)


def _lock_of(folder: Path) -> Path:
    return folder / "demo.lock"


def _somebody_else(_pid: str) -> AlreadyRunning:
    return AlreadyRunning("Another demo uses this folder.")


LARGEST_LINE = 1 << 20  # of an event; ours have some hundred bytes
LINES_SHOWN = 8  # of a failed part's last output

Event = dict[str, Any]


class Child:
    """One process. `name` is its name in the story."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        home: Path,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
    ) -> None:
        """`through`: a program that starts it, such as `nice -n 10`."""
        self.name, self.arguments = name, tuple(arguments)
        self.events: list[Event] = []
        self.exit_code: int | None = None
        self.may_end = False  # whether its end is part of the story
        self._home, self._folder, self._variables = home, folder, dict(variables or {})
        self._through = tuple(through)
        self._errors_file = folder / f"{name}.errors"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> str:
        """The command as a person would type it."""
        return " ".join(["potluck", *self.arguments])

    def start(self) -> None:
        """Call this in the main thread."""
        child = (sys.executable, "-m", "node.app.demo.child", str(os.getpid()))
        command = [*self._through, *child, *self.arguments]
        with self._errors_file.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                env=self._environment(),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    async def read(self, take: Callable[[Child, Event], None]) -> None:
        """Give every event to `take`, until the process has ended."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        held = bytearray()
        with process.stdout:
            async with trio.lowlevel.FdStream(os.dup(process.stdout.fileno())) as output:
                async for more in output:
                    held += more
                    *lines, rest = held.split(b"\n")
                    held = bytearray(rest[:LARGEST_LINE])
                    for line in lines:
                        event = _event_in(bytes(line))
                        if event is not None:
                            self.events.append(event)
                            take(self, event)
        self.exit_code = await trio.to_thread.run_sync(
            process.wait,
            abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
        )

    def terminate(self) -> None:
        """Ask it to end cleanly, as a person would."""
        self.may_end = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def send_signal(self, number: signal.Signals) -> None:
        """Stop or continue it. Does nothing if it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> bool:
        """Kill it; returns whether it still ran. Waits for the kernel at most; may be called
        twice, also by a signal's handler in the middle of another call."""
        self.may_end = True
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.kill()
        # without an end, a handler would wait for a lock that the interrupted call holds
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_SECONDS)
        return True

    def last_lines(self) -> str:
        """The last output: its error, or the end of its stderr."""
        for event in reversed(self.events):
            error = event.get("error")
            if isinstance(error, dict):
                return " ".join(str(error.get(key) or "") for key in ("what", "why", "advice"))
        try:
            said = self._errors_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            said = []
        return "\n".join(said[-LINES_SHOWN:])

    def ended_by(self) -> str:
        """How it ended, in words."""
        code = self.exit_code
        if code is None:
            return "it is still running"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        return f"its exit code is {code}"

    def _environment(self) -> dict[str, str]:
        """This process's environment without potluck's settings: the demo has homes of its own."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("POTLUCK_")}
        return {**kept, **self._variables, "POTLUCK_HOME": str(self._home)}


def _event_in(line: bytes) -> Event | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
