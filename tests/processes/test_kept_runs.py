"""A run outlives its peers: one of them keeps checkpoints, in processes that are really killed."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from node.run.checkpoints import Checkpoints
from tests.processes.children import Child, started

ADDRESS: Final = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")
VOLUNTEERS: Final = 2
TEST_SECONDS: Final = 240.0  # some thirty on a quiet machine
LINES_SHOWN: Final = 40  # of what each script said, where a test fails
SMALLEST_STATE_BYTES: Final = 4000  # of the model of keeping_peer.py with its statistics: 16 KB


@dataclass
class Script:
    """A keeping_peer.py, and what it has said so far."""

    child: Child
    address: str = ""
    losses: dict[int, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    told: trio.Event = field(default_factory=trio.Event)
    has_ended: bool = False

    @property
    def epoch(self) -> int:
        return max(self.losses, default=-1)

    @property
    def first_epoch(self) -> int:
        return min(self.losses)

    async def read_on(self) -> None:
        while line := (await self.child.read_line()).decode():
            self.output.append(line)
            if found := ADDRESS.search(line):
                self.address = self.address or found.group()
            if line.startswith("{"):
                told = json.loads(line)
                if "type" in told:
                    self.events.append(told)
                else:
                    self.losses[told["epoch"]] = told["loss"]
            self.told.set()
            self.told = trio.Event()
        self.has_ended = True
        self.told.set()

    async def news(self) -> None:
        assert not self.has_ended, self.output
        await self.told.wait()

    async def until(self, epoch: int) -> None:
        while self.epoch < epoch:
            await self.news()

    async def until_event(self, kind: str, after: int = -1) -> dict[str, Any]:
        while True:
            for event in self.events:
                if event["type"] == kind and event["epoch"] > after:
                    return event
            await self.news()

    async def until_address(self) -> str:
        while not self.address:
            await self.news()
        return self.address


class Crowd:
    """All scripts of a test. They are killed at its end."""

    def __init__(self, folder: Path, stack: AsyncExitStack, nursery: trio.Nursery) -> None:
        self._folder, self._stack, self._nursery = folder, stack, nursery
        self._started = 0
        self.scripts: list[Script] = []
        self.checkpoints = folder / "checkpoints"

    async def start(self, *words: str, home: str = "") -> Script:
        self._started += 1
        home = str(self._folder / (home or f"home-{self._started}"))
        command = [sys.executable, "-m", "tests.processes.keeping_peer", home, *words]
        environment = {"OMP_NUM_THREADS": "1"}
        child = await self._stack.enter_async_context(
            started(command, environment, errors_to=subprocess.STDOUT)
        )
        script = Script(child)
        self.scripts.append(script)
        self._nursery.start_soon(script.read_on)
        await script.until_address()
        return script

    async def keeper(self, *words: str) -> Script:
        return await self.start("--keeps", str(self.checkpoints), *words, home="keeper")

    async def volunteers(self, *addresses: str) -> list[Script]:
        return await self.several(VOLUNTEERS, *addresses)

    async def several(self, count: int, *words: str) -> list[Script]:
        """At the same time: importing torch takes seconds."""
        found: list[Script] = []

        async def start() -> None:
            found.append(await self.start(*words))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(start)
        return found


async def kill(*scripts: Script) -> None:
    for one in scripts:
        one.child.send_signal(signal.SIGKILL)
    for one in scripts:
        await one.child.exit_code()


@asynccontextmanager
async def crowd_in(folder: Path) -> AsyncIterator[Crowd]:
    with trio.fail_after(TEST_SECONDS):
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            crowd = Crowd(folder, stack, nursery)
            try:
                yield crowd
            except BaseException:
                for number, one in enumerate(crowd.scripts):  # pytest shows them
                    print(f"---- script {number}", *one.output[-LINES_SHOWN:], sep="\n")
                raise
            nursery.cancel_scope.cancel()


async def test_fresh_volunteers_go_on_where_the_killed_ones_left_the_keeper(
    tmp_path: Path,
) -> None:
    async with crowd_in(tmp_path) as crowd:
        keeper = await crowd.keeper("--assists")
        volunteers = await crowd.volunteers(keeper.address)
        await keeper.until(5)
        await kill(*volunteers)
        at, before = keeper.epoch, keeper.losses[keeper.epoch]

        fresh = await crowd.volunteers(keeper.address)
        for one in fresh:
            await one.until(at + 5)
            assert one.first_epoch >= at
        await keeper.until(at + 5)
        assert keeper.losses[keeper.epoch] < before < keeper.losses[0]


async def test_a_run_goes_on_from_files_when_all_are_gone_and_nobody_begins_it_anew(
    tmp_path: Path,
) -> None:
    """The volunteers are there long before the keeper, and wait for it."""
    async with crowd_in(tmp_path) as crowd:
        keeper = await crowd.keeper("--assists")
        volunteers = await crowd.volunteers(keeper.address)
        await keeper.until_event("CheckpointSaved", after=4)
        await kill(keeper, *volunteers)
        found = Checkpoints(crowd.checkpoints).newest()
        assert found is not None
        at = found.state.epoch
        assert at >= 5

        first = await crowd.start()
        fresh = [first, *await crowd.several(VOLUNTEERS - 1, first.address)]
        keeper = await crowd.keeper("--assists", first.address)
        for one in (keeper, *fresh):
            await one.until(at + 3)
            assert one.first_epoch >= at, one.output
        assert keeper.first_epoch == at
        assert keeper.losses[keeper.epoch] < keeper.losses[at]


async def test_a_disk_that_fills_is_told_and_training_goes_on(tmp_path: Path) -> None:
    """The limit on the size of a file stops the writing in its middle, as a full disk does."""
    async with crowd_in(tmp_path) as crowd:
        keeper = await crowd.keeper()
        saved = await keeper.until_event("CheckpointSaved")
        resource.prlimit(keeper.child.process_id, resource.RLIMIT_FSIZE, (SMALLEST_STATE_BYTES, -1))
        missed = await keeper.until_event("CheckpointMissed", after=saved["epoch"])
        assert "There is no room" in missed["reason"]
        assert any(
            "Free some space" in line and "Training goes on" in line for line in keeper.output
        )
        assert Checkpoints(crowd.checkpoints).newest() is not None
        await keeper.until(missed["epoch"] + 3)
        resource.prlimit(keeper.child.process_id, resource.RLIMIT_FSIZE, (-1, -1))
        await keeper.until_event("CheckpointSaved", after=missed["epoch"])


async def test_the_last_step_is_kept_when_a_script_ends(tmp_path: Path) -> None:
    async with crowd_in(tmp_path) as crowd:
        keeper = await crowd.keeper("--every", "3600")
        await keeper.until(2)
        assert Checkpoints(crowd.checkpoints).newest() is None
        keeper.child.send_signal(signal.SIGINT)
        assert await keeper.child.exit_code() == -signal.SIGINT
        found = Checkpoints(crowd.checkpoints).newest()
        assert found is not None
        assert found.state.epoch >= keeper.epoch


async def test_a_keeper_that_can_read_none_of_its_checkpoints_does_not_begin_anew(
    tmp_path: Path,
) -> None:
    async with crowd_in(tmp_path) as crowd:
        keeper = await crowd.keeper()
        await keeper.until_event("CheckpointSaved")
        await kill(keeper)
        for one in Checkpoints(crowd.checkpoints).paths():
            (one / "state.safetensors").write_bytes(b"damaged")
        command = [sys.executable, "-m", "tests.processes.keeping_peer", str(tmp_path / "keeper")]
        done = await trio.run_process(
            [*command, "--keeps", str(crowd.checkpoints)],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == 1
        assert b"is whole" in done.stdout
