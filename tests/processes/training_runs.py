"""A run as people have it: `potluck run start` in one process, `potluck join` in others.

    async with started_run(folder) as run:
        async with run.joining("alice") as alice:
            await alice.until("first_samples_accepted")

Every peer has a home and a temporary folder of its own, listens on loopback, computes with one
thread, and prints JSON, which is read as it comes: what happened is in `told`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from tests.processes.children import Child, started
from tests.processes.left_behind import Traces
from tests.runs.definitions import BEGINNING
from tests.waiting import PATIENCE_SECONDS

LOOPBACK: Final = ("--listen", "/ip4/127.0.0.1/tcp/0")
LINES_SHOWN: Final = 30  # of what each peer said, where a test fails

SMALL: Final = (
    BEGINNING.decode()
    + """[training]
batch = 1024
samples_at_once = 8
[averaging]
grace_seconds = 3.0
"""
)
"""A step every second or two, so that peers have time to come and go between them."""


@dataclass
class Trainer:
    """A `potluck` that trains, and what it has told so far."""

    child: Child
    home: Path
    traces: Traces
    told: list[dict[str, Any]] = field(default_factory=list)
    has_ended: bool = False
    _news: trio.Event = field(default_factory=trio.Event)

    async def read_on(self) -> None:
        with suppress(trio.ClosedResourceError):  # its block has been left
            while line := await self.child.read_line():
                self.told.append(json.loads(line))
                self._wake()
        self.has_ended = True
        self._wake()

    async def until(self, event: str, after: int = 0) -> dict[str, Any]:
        """The first of this kind, beyond so many things that were told."""
        while True:
            for one in self.told[after:]:
                if one.get("event") == event:
                    return one
            if self.has_ended:
                raise AssertionError(f"it ended without {event}: {self.told[-LINES_SHOWN:]}")
            await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()


@dataclass
class TestRun:
    """A run that was started. `invite` is what `run start` printed."""

    __test__ = False

    folder: Path
    organiser: Trainer
    invite: str
    nursery: trio.Nursery

    @asynccontextmanager
    async def joining(
        self, name: str, *words: str, invite: str | None = None, errors: Path | None = None
    ) -> AsyncIterator[Trainer]:
        """`potluck join` in the home of this name; with an empty invite, that of last time."""
        invite = self.invite if invite is None else invite
        environment = {"POTLUCK_INVITE": invite} if invite else {}
        command = ("join", *LOOPBACK, *words)
        home = self.folder / name
        async with trainer(home, command, self.nursery, environment, errors) as one:
            yield one


@asynccontextmanager
async def trainer(
    home: Path,
    words: tuple[str, ...],
    nursery: trio.Nursery,
    environment: Mapping[str, str] | None = None,
    errors: Path | None = None,
) -> AsyncIterator[Trainer]:
    """A `potluck … --json` that trains. Killed, if it still runs, when the block is left."""
    command = [sys.executable, "-m", "node", *words, "--json"]
    home.parent.mkdir(exist_ok=True)
    temporary = home.with_suffix(".temporary")
    temporary.mkdir(exist_ok=True)
    traces = Traces(home, temporary)
    variables = {
        "OMP_NUM_THREADS": "1",
        "POTLUCK_HOME": str(home),
        "TMPDIR": str(temporary),
        **(environment or {}),
    }
    with (errors or home.with_suffix(".errors")).open("ab") as to:
        async with started(command, variables, errors_to=to.fileno()) as child:
            child.errors_file = Path(to.name)
            one = Trainer(child, home, traces)
            try:
                nursery.start_soon(one.read_on)
                yield one
            except BaseException:
                said = Path(to.name).read_text()  # noqa: ASYNC240 - some lines, of a failed test
                print(f"---- {home.name}", *one.told[-LINES_SHOWN:], said, sep="\n")
                raise


def potluck(home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, in this home."""
    from tests.commands.console import potluck as run

    return run(*words, home=home, **environment)


@asynccontextmanager
async def started_run(folder: Path, definition: str = SMALL, *words: str) -> AsyncIterator[TestRun]:
    """`potluck run start`, listening."""
    home, run = folder / "organiser", folder / "poem"
    run.mkdir()
    (run / "run.toml").write_text(definition)
    signed = await trio.to_thread.run_sync(potluck, home, "run", "init", str(folder / "unused"))
    assert signed.returncode == 0, signed.stderr
    async with trio.open_nursery() as nursery:
        command = ("run", "start", str(run), *LOOPBACK, *words)
        async with trainer(home, command, nursery) as organiser:
            with trio.fail_after(PATIENCE_SECONDS):
                told = await organiser.until("started")
            yield TestRun(folder, organiser, told["invite"], nursery)
        nursery.cancel_scope.cancel()
