"""`scripts/bench dht`: a real swarm on this machine, and figures of what it really did."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import trio

from lab.bench.dht import DhtEffort, SwarmNode
from lab.bench.processes import open_process
from tests.waiting import PATIENCE_SECONDS

FIGURES = (
    "store_ms_p50",
    "get_ms_p50",
    "get_latest_ms_p50",
    "success_rate",
    "idle_cpu_percent_per_node",
    "idle_bytes_per_second_per_node",
    "nodes",
    "processes",
)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab", "bench", "dht", "--json", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


@pytest.mark.parametrize(("nodes", "processes"), [(2, 2), (16, 16), (17, 3), (64, 8), (65, 9)])
def test_up_to_sixteen_nodes_have_a_process_each_and_of_more_eight_share_one(
    nodes: int, processes: int
) -> None:
    assert DhtEffort.of(nodes).processes == processes


def test_how_many_share_a_process_can_be_said() -> None:
    assert DhtEffort.of(64, per_process=16).processes == 4
    assert DhtEffort.of(8, per_process=8).processes == 1


@pytest.mark.slow
def test_a_swarm_of_one_is_wrong_use() -> None:
    done = bench("--nodes", "1")
    assert done.returncode == 2
    assert "--nodes 2" in done.stdout


@pytest.mark.slow
def test_a_quick_run_prints_every_figure_and_how_nodes_shared_processes() -> None:
    done = bench("--nodes", "3", "--quick", "--pairs", "5", "--per-process", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(name in result for name in FIGURES)
    assert result["success_rate"] == 1.0
    assert (result["nodes"], result["processes"]) == (3, 2)
    assert result["settings"]["nodes_per_process"] == 2
    assert 0 < result["get_ms_p50"] < result["spread"]["get_ms"]["max"] + 0.01


@pytest.mark.slow
async def test_a_read_that_finds_something_else_is_no_success() -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with open_process("a swarm", ["-m", "lab.bench.dht_peer"]) as process:
            first = await process.ask("join", addresses=[])
            second = await process.ask("join", addresses=[first["address"]])
            writer, reader = (SwarmNode(process, one["node"]) for one in (first, second))
            assert (await writer.put("note/a", "x"))["ok"]
            assert (await reader.get("note/a", "x", newest=True))["ok"]
            assert not (await reader.get("note/a", "y", newest=True))["ok"]
            assert not (await reader.get("note/b", "x", newest=False))["ok"]
            assert not (await writer.put("unknown/a", "x"))["ok"]


@pytest.mark.slow
def test_every_figure_is_explained_in_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab", "bench", "dht", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all(figure in done.stdout for figure in FIGURES[:6])
