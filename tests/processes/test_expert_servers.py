"""`potluck experts serve` and `list` in a run: real processes over real connections."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.access.auth_servers import RUN, running_auth_server
from tests.processes.commands import leaves_in_time
from tests.processes.test_joining import ACCEPTED, ask
from tests.processes.training_runs import (
    LOOPBACK,
    TestRun,
    Trainer,
    potluck,
    started_run,
    trainer,
)
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
async def serving(
    run: TestRun, name: str, *words: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Trainer]:
    command = ("experts", "serve", *LOOPBACK, *words)
    environment = {"POTLUCK_INVITE": run.invite, **(environment or {})}
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
                    board = await ask(run.organiser.home, "leaderboard")
                    served = {one["person"]: one["served_samples"] for one in board["helpers"]}
                    assert max(served.values()) > 0, "carol has said who computed for her"
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


@pytest.mark.slow
async def test_in_a_closed_run_a_revoked_server_ends_and_others_take_its_experts_over(
    tmp_path: Path,
) -> None:
    definition = DEFINITION.replace('name = "poem"', f'name = "{RUN}"')
    with trio.fail_after(TEST_SECONDS), running_auth_server(tmp_path / "auth") as authority:

        def coded(name: str) -> dict[str, str]:
            return {"POTLUCK_LOGIN_CODE": authority.new_code(name)}

        (tmp_path / "organiser").mkdir()
        for name, invite in (("organiser", authority.invite()), ("watcher", authority.invite())):
            done = potluck(tmp_path / name, "login", invite, **coded(name))
            assert done.returncode == 0, done.stderr
        async with started_run(tmp_path, definition, KEEPER) as run:
            stranger = potluck(tmp_path / "mallory", "experts", "list", run.invite, "--json")
            assert stranger.returncode == 3, stranger.stdout

            async def served(home: Path, *invite: str) -> list[int]:
                seen = await ask(home, "experts", "list", *invite)
                return sorted(len(one["experts"]) for one in seen["servers"])

            async with serving(run, "eve", *HALF, environment=coded("eve")) as eve:
                await eve.until("experts_taken")
                count = ("--experts", str(CELLS))
                async with serving(run, "ben", *count, environment=coded("ben")) as ben:
                    await ben.until("experts_taken")
                    assert await served(tmp_path / "watcher", run.invite) == [
                        CELLS - HALVES,
                        HALVES,
                    ]
                    authority.act("revoke", target="code:eve", reason="sent garbage")
                    await until(lambda: eve.has_ended, PATIENCE_SECONDS)
                    assert await eve.child.exit_code() == 3
                    assert "access was revoked" in str(eve.told[-1])
                    await until(lambda: _taken(ben) == CELLS, PATIENCE_SECONDS)
                    assert await served(ben.home) == [CELLS]


def _taken(one: Trainer) -> int:
    return sum(len(told["uids"]) for told in one.told if told.get("event") == "experts_taken")
