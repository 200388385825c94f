"""`potluck experts serve` and `list` in a run: real processes over real connections."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.processes.commands import leaves_in_time
from tests.processes.test_joining import ask
from tests.processes.training_runs import LOOPBACK, SMALL, TestRun, Trainer, started_run, trainer
from tests.runs.expert_definitions import EXPERTS
from tests.waiting import PATIENCE_SECONDS, until

TEST_SECONDS: Final = 5 * PATIENCE_SECONDS
LEAVE_SECONDS: Final = 5.0
CELLS: Final = 12  # two grids of 2 x 3
DEFINITION: Final = (
    SMALL + EXPERTS.decode() + "[checkpoints]\nevery_seconds = 2.0\n"
)


@asynccontextmanager
async def serving(run: TestRun, name: str, *words: str) -> AsyncIterator[Trainer]:
    command = ("experts", "serve", *LOOPBACK, *words)
    environment = {"POTLUCK_INVITE": run.invite}
    async with trainer(run.folder / name, command, run.nursery, environment) as one:
        yield one


async def census(home: Path) -> dict[str, Any]:
    answer: dict[str, Any] = await ask(home, "experts", "list")
    return answer


def live(seen: dict[str, Any]) -> int:
    return sum(int(grid["live"]) for grid in seen["grids"])


@pytest.mark.slow
async def test_experts_are_served_listed_paused_and_taken_over(tmp_path: Path) -> None:
    async def all_live(home: Path, wanted: int) -> bool:
        return live(await census(home)) == wanted

    with trio.fail_after(TEST_SECONDS):
        async with (
            started_run(tmp_path, DEFINITION, "--keep-only") as run,
            serving(run, "alice", "--grid", "ffn0:0.*", "--grid", "ffn1:*.0-1") as alice,
        ):
            await alice.until("serving_began")
            async with serving(run, "ben", "--experts", "12") as ben:
                await until(lambda: all_live(run.organiser.home, CELLS), PATIENCE_SECONDS)
                seen = await census(ben.home)
                sizes = sorted(len(one["experts"]) for one in seen["servers"])
                assert sizes == [5, 7]
                assert {one["came"] for one in seen["own"]} == {"new"}
                status = await ask(ben.home, "status")
                assert status["training"]["phase"] == "serving experts"
                assert status["training"]["experts"]["hosted"] == len(seen["own"])

                await ask(alice.home, "pause")
                await alice.until("paused")
                await until(lambda: all_live(run.organiser.home, CELLS), PATIENCE_SECONDS)
                await ask(alice.home, "resume")
                await alice.until("resumed")
                await leaves_in_time(alice.child, signal.SIGINT, LEAVE_SECONDS)
                ben.child.send_signal(signal.SIGKILL)
                await ben.child.exit_code()
            async with serving(run, "carol", "--experts", "12") as carol:
                taken = await carol.until("experts_taken")
                assert taken["uids"]
                left = await ask(carol.home, "leave")
                assert left["samples"] == 0
                assert await carol.child.exit_code() == 0
                carol.traces.insist_on_nothing()
