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
from tests.processes.test_joining import ACCEPTED, ask
from tests.processes.training_runs import LOOPBACK, TestRun, Trainer, started_run, trainer
from tests.runs.expert_definitions import TEXT
from tests.waiting import PATIENCE_SECONDS, until

TEST_SECONDS: Final = 5 * PATIENCE_SECONDS
LEAVE_SECONDS: Final = 5.0
CELLS: Final = 12  # two grids of 2 x 3
DEFINITION: Final = TEXT.decode() + "[checkpoints]\nevery_seconds = 2.0\n"
KEEPER: Final = "--keep-only"
HALF: Final = ("--grid", "ffn0:*.*", "--grid", "ffn1:0.0")
HALVES: Final = 7  # cells of it


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
async def test_a_run_with_experts_trains_while_servers_come_and_go(tmp_path: Path) -> None:
    with trio.fail_after(TEST_SECONDS):
        async with started_run(tmp_path, DEFINITION, KEEPER) as run:

            async def see_whole_grids() -> bool:
                return live(await census(run.organiser.home)) == CELLS

            async with serving(run, "alice", *HALF) as alice:
                await alice.until("experts_taken")
                await until(lambda: _serves(alice, HALVES), PATIENCE_SECONDS)
                await _what_is_shown(run, alice)
                async with (
                    serving(run, "ben", "--experts", str(CELLS)),
                    run.joining("carol") as carol,
                ):
                    await carol.until(ACCEPTED)
                    await until(see_whole_grids, PATIENCE_SECONDS)
                    seen = await ask(carol.home, "status")
                    assert seen["training"]["experts"]["most"] > 0
                    await leaves_in_time(alice.child, signal.SIGINT, LEAVE_SECONDS)
                    alice.traces.insist_on_nothing()
                    await until(see_whole_grids, PATIENCE_SECONDS)
                    told = len(carol.told)
                    await carol.until("step_taken", told)
                    await leaves_in_time(carol.child, signal.SIGINT, LEAVE_SECONDS)
                    carol.traces.insist_on_nothing()


async def _serves(one: Trainer, number: int) -> bool:
    return len((await census(one.home))["own"]) == number


async def _what_is_shown(run: TestRun, alice: Trainer) -> None:
    seen = await census(alice.home)
    assert {one["came"] for one in seen["own"]} == {"new"}
    alone = await ask(run.folder / "elsewhere", "experts", "list", run.invite)
    assert [one["sizes"] for one in alone["grids"]] == [[2, 3], [2, 3]]
    assert len(alone["servers"]) == 1
    status = await ask(alice.home, "status")
    assert status["training"]["phase"] == "serving experts"
    assert status["training"]["experts"]["hosted"] == HALVES
    await ask(alice.home, "pause")
    await alice.until("paused")
    await ask(alice.home, "resume")
    await alice.until("resumed")
