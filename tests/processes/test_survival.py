"""Averaging on real processes of which one is killed or stopped in the middle of it; short.

The long forms are in tests/soak/test_survival.py, and in `scripts/bench survival`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from lab.bench.survival import SurvivalEffort, measure_survival
from lab.bench.survival_churn import ChurnEffort, measure_churn
from tests.processes.children import START_SECONDS
from tests.processes.commands import running_command

VALUES = 200_000


async def test_survivors_of_a_killed_peer_hold_the_same_bits_and_go_on_at_once() -> None:
    """F1"""
    result = await measure_survival(SurvivalEffort(values=VALUES, kills=3))
    assert result["kill"]["failures"] == []
    assert result["kill"]["trials_right"] == 3
    assert result["met"], result["kill"]


async def test_survivors_of_a_stopped_peer_go_on_and_it_commits_nothing_else_later() -> None:
    """F3"""
    result = await measure_survival(SurvivalEffort(values=VALUES, stops=1, seed=3))
    assert result["stop"]["failures"] == []
    assert result["met"], result["stop"]


async def test_rounds_go_on_while_peers_are_killed_and_started() -> None:
    """F1, F4"""
    result = await measure_churn(ChurnEffort(seconds=10.0, peers=5, values=VALUES))
    assert result["failures"] == []
    assert result["kills"] > 0
    assert result["rounds_completed"] > 0
    assert result["met"], result


def processes_of_session(session: int) -> list[int]:
    """The processes in it that are not zombies."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                facts = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(facts[3]) == session and facts[0] != "Z":
                found.append(int(folder.name))
    return found


def children_of(parent: int) -> list[int]:
    threads = Path(f"/proc/{parent}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("really_started")  # it looks for the bench's own forge
async def test_no_process_outlives_a_killed_bench_not_even_a_stopped_one(
    tmp_path: Path,
) -> None:
    words = ("bench", "averaging", "--numel", "1e4", "--rounds", "100000")
    folder = str(tmp_path)  # who is killed leaves its temporary folder where it is
    async with running_command(tmp_path, *words, TMPDIR=folder) as bench:
        assert bench.errors_file is not None
        with trio.fail_after(START_SECONDS):
            while "round 2 of" not in bench.errors_file.read_text():  # noqa: ASYNC110
                await trio.sleep(0.1)
        (forge,) = children_of(bench.process_id)
        forked = [peer for peer in processes_of_session(forge) if peer != forge]
        assert len(forked) == 4
        os.kill(forked[0], signal.SIGSTOP)
        bench.send_signal(signal.SIGKILL)
        with trio.fail_after(START_SECONDS):
            while processes_of_session(forge):  # noqa: ASYNC110
                await trio.sleep(0.1)
