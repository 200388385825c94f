"""The demo's processes: commands as people type them, whose events are read as they come.

    child = Child("ann", ["join", "--json"], home=…, folder=…, variables={"POTLUCK_INVITE": …})
    child.start()
    await child.read(take)           # until it has ended
    child.exit_code

Secrets travel in variables, which other users of the machine cannot read as they can command lines.

Promises: what was started is ended by `kill`, and by the kernel if this process dies first. What a
child says on stderr is kept in a file, whose last lines `last_lines` gives.

Easy to get wrong: each child is in a session of its own, so that Ctrl-C reaches the demo alone,
which then decides. And the kernel means the parent *thread*: children are started from the main
one, which lives as long as the process does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

LARGEST_LINE = 1 << 20  # of an event; ours have some hundred bytes
LINES_SHOWN = 8  # of what a part said last, where it failed

Event = dict[str, Any]


class Child:
    """One process. `name` is who it is in the story."""

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
        """`through`: a program that becomes it, such as `nice -n 10`."""
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
        """What somebody would type."""
        return " ".join(["potluck", *self.arguments])

    def start(self) -> None:
        """In the main thread."""
        child = (sys.executable, "-m", "node.demo.child", str(os.getpid()))
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
        """Ask it to end as it does when people ask: cleanly."""
        self.may_end = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def send_signal(self, number: signal.Signals) -> None:
        """Stop or continue it. One that has ended takes no notice."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> bool:
        """End it where it stands, and whether it still ran. Never waits for more than the kernel;
        twice is harmless."""
        self.may_end = True
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.kill()
        process.wait()
        return True

    def last_lines(self) -> str:
        """What it said last: its error, or the end of what it wrote on stderr."""
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
            return "it still runs"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        return f"its exit code is {code}"

    def _environment(self) -> dict[str, str]:
        """This one's, without the settings of whoever tries the demo: it has homes of its own."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("POTLUCK_")}
        return {**kept, **self._variables, "POTLUCK_HOME": str(self._home)}


def _event_in(line: bytes) -> Event | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
