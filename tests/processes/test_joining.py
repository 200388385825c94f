"""`potluck join` from an invite to accepted samples, and out again at any moment.

Real processes over real connections: one organiser, and volunteers in homes of their own.

Easy to get wrong: only files for the next start may be left, and nothing else (left_behind.py).
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from node.app.cli.exit_codes import BROKEN_PIPE
from tests.processes.commands import leaves_in_time
from tests.processes.training_runs import TestRun, Trainer, potluck, started_run
from tests.waiting import PATIENCE_SECONDS, until

LEAVE_SECONDS: Final = 5.0
TEST_SECONDS: Final = 5 * PATIENCE_SECONDS  # some thirty on a quiet machine
MOMENTS: Final = (
    ("preparing", signal.SIGTERM),
    ("will_use", signal.SIGINT),
    ("began", signal.SIGHUP),  # its terminal is closed
)
"""By what was told last, so that they are the same on every machine. A hundred of them are in
tests/soak/test_leaving_a_run.py."""

ACCEPTED: Final = "first_samples_accepted"


async def ask(home: Path, *words: str) -> Any:
    done = await trio.to_thread.run_sync(lambda: potluck(home, *words, "--json"))
    assert done.returncode == 0, (done.stdout, done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return lines[0] if len(lines) == 1 else lines


async def leaves(one: Trainer, number: signal.Signals) -> None:
    one.traces.look()
    await leaves_in_time(one.child, number, LEAVE_SECONDS)
    one.traces.insist_on_nothing()


@pytest.mark.slow
async def test_a_volunteer_joins_is_accepted_rests_leaves_and_comes_back(tmp_path: Path) -> None:
    with trio.fail_after(TEST_SECONDS):
        async with started_run(tmp_path) as run:
            async with run.joining("alice") as alice:
                await alice.until(ACCEPTED)
                await _what_others_and_commands_see(run, alice)
                left = await ask(alice.home, "leave")
                assert left["samples"] > 0
                assert (left["kept_in"], left["fetched_in_part_bytes"]) == (str(alice.home), 0)
                assert list(alice.home.glob("run/node.lock")) == [], "another may start"
                assert await alice.child.exit_code() == 0
                alice.traces.insist_on_nothing()
            async with run.joining("alice", invite="") as alice:  # that of last time
                await alice.until(ACCEPTED)
                second = await trio.to_thread.run_sync(potluck, alice.home, "join")
                assert second.returncode == 3
                assert "A node already runs in this home" in second.stderr
                alice.child.send_signal(signal.SIGKILL)
                await alice.child.exit_code()
            async with run.joining("alice", invite="") as alice:
                await alice.until(ACCEPTED)
                await alice.child.standard_output.aclose()  # `potluck join --plain | head`
                assert await alice.child.exit_code() == BROKEN_PIPE
                alice.traces.insist_on_nothing()


async def _what_others_and_commands_see(run: TestRun, alice: Trainer) -> None:
    status = await ask(alice.home, "status")
    training = status["training"]
    assert training["run"] == "poem"
    assert training["phase"] in ("training", "averaging")
    assert training["contribution"]["samples"] > 0
    (other,) = (await ask(alice.home, "peers"))["peers"]
    assert (other["role"], other["keeps"], other["reach"]) == ("trains", True, "direct")
    assert (await ask(alice.home, "logs", "--last", "1"))["words"]
    board = await ask(alice.home, "leaderboard", "--check")
    assert [one["samples"] > 0 for one in board["people"]] == [True, True]
    assert (board["records"], board["unheard"]) == (2, {})
    assert [one["differences"] for one in board["checks"]] == [[]]

    paused = await ask(alice.home, "pause", "--for", "1h")
    assert paused["until"] is not None
    await alice.until("paused")
    await until(lambda: _is_alone(run.organiser.home), PATIENCE_SECONDS)
    told = len(alice.told)
    resumed = await ask(alice.home, "resume")
    assert resumed == {"was_paused": True, "still_closed": [], "not_kept": ""}
    await alice.until("step_taken", told)


async def _is_alone(home: Path) -> bool:
    return (await ask(home, "peers"))["peers"] == []


@pytest.mark.slow
async def test_a_volunteer_leaves_at_any_moment_within_five_seconds(tmp_path: Path) -> None:
    """F22"""
    with trio.fail_after(TEST_SECONDS):
        async with started_run(tmp_path) as run:
            for moment, number in MOMENTS:
                async with run.joining("alice") as one:
                    await one.until(moment)
                    await leaves(one, number)
            async with run.joining("alice") as impatient:
                await impatient.until("began")
                impatient.child.send_signal(signal.SIGINT)
                await leaves(impatient, signal.SIGINT)
            assert not run.organiser.has_ended
