"""`potluck demo` whole: every claim of it checked, and a Ctrl-C in its middle.

It is played once for all tests of the default run (tests/demonstrated.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from node.app.demo.story import STEPS
from tests.demonstrated import DEMO_SECONDS, Played
from tests.processes.children import Child, started

GONE_SECONDS = 60.0  # the promise is five; this test is about whether all of it goes
MANY_TIMES = 20


async def played(folder: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """The demo with its temporary folder in this one: its exit code, and what it printed."""
    async with demo_in(folder, *flags) as child:
        with trio.fail_after(DEMO_SECONDS):
            printed = await child.read_rest()
            code = await child.exit_code()
    return code, [json.loads(line) for line in printed.splitlines()]


def demo_in(folder: Path, *flags: str, errors_to: int | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "node", "demo", *flags, "--json"]
    return started(command, {"TMPDIR": str(folder)}, errors_to=errors_to)


def check(code: int, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Insist on everything that the demo claims."""
    summary = events[-1]
    assert code == 0, summary
    assert summary["event"] == "summary"
    assert summary["failures"] == []
    assert summary["loss_last"] < 0.6 * summary["loss_first"]
    assert summary["digests_equal"]
    assert set(summary["digests"]) == {"ann", "ben", "dora", "checkpoint"}
    assert len(set(summary["digests"].values())) == 1
    assert [one["name"] for one in summary["killed"]] == ["cleo"]
    assert 0 < summary["killed"][0]["epoch"] < STEPS
    assert summary["late"]["caught_up_with"] > 0
    assert summary["late"]["samples"] > 0
    assert summary["checkpoint_epoch"] == summary["steps"] == STEPS
    assert summary["health"]["status"] == 200
    brought = {one["name"]: one["samples"] for one in summary["contributions"]}
    assert set(brought) == {"ann", "ben", "cleo", "dora"}
    assert all(samples > 0 for samples in brought.values())
    (batch,) = (event["batch"] for event in events if event["event"] == "definition")
    assert sum(brought.values()) >= 0.5 * batch * STEPS
    assert {one["name"] for one in summary["credit"]["people"]} == set(brought)
    assert len(summary["credit"]["helpers"]) == 1
    assert [epoch for epoch, _ in summary["curve"]] == sorted({e for e, _ in summary["curve"]})
    assert summary["sample"].startswith("def ")
    kinds = [event["event"] for event in events]
    order = ["auth_server", "enrolled", "definition", "backbone", "joining", "training", "late"]
    assert [kind for kind in kinds if kind in order] == order
    return summary


@pytest.mark.slow
@pytest.mark.xdist_group("demo")
def test_the_demo_keeps_what_it_promises(the_demo: Played) -> None:
    summary = check(the_demo.exit_code, the_demo.events)
    everything_is_kept(summary)
    assert processes_in(the_demo.folder) == []


@pytest.mark.soak
@pytest.mark.xdist_group("demo")
async def test_on_a_device_twenty_times_as_fast_the_demo_shows_everything_and_ends(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.processes.fast_device", "--json"]
    async with started(command, {"TMPDIR": str(tmp_path)}) as child:
        with trio.fail_after(DEMO_SECONDS):
            printed = await child.read_rest()
            code = await child.exit_code()
    events = [json.loads(line) for line in printed.splitlines()]
    summary = events[-1]
    assert (code, summary["failures"]) == (0, []), summary
    assert [one["name"] for one in summary["killed"]] == ["cleo"]
    assert summary["late"]["samples"] > 0
    assert summary["digests_equal"]
    assert processes_in(tmp_path) == []


@pytest.mark.soak
async def test_the_demo_of_experts_loses_none_of_them(tmp_path: Path) -> None:
    code, events = await played(tmp_path / "t", "--experts")
    summary = events[-1]
    assert (code, summary["failures"]) == (0, []), summary
    assert summary["lost"] > 0
    assert summary["live"] == summary["experts"]
    assert summary["loss_last"] < summary["loss_first"]
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "until"), [((), "joining"), (("--experts",), "step")])
async def test_ctrl_c_ends_every_process_of_the_demo_and_removes_its_folder(
    flags: Sequence[str], until: str, tmp_path: Path
) -> None:
    """The one of experts when its trainers have made a step. The soak plays it to its end."""
    async with demo_in(tmp_path / "t", *flags, errors_to=subprocess.STDOUT) as child:
        with trio.fail_after(DEMO_SECONDS):
            await until_it_tells(child, until)
            assert len(processes_in(tmp_path)) >= 2
        child.send_signal(signal.SIGINT)
        with trio.fail_after(GONE_SECONDS):
            told = await child.read_rest()
            assert await child.exit_code() == 130
    assert told.splitlines()[-1].startswith(b"stopped: all processes of the demo have ended")
    assert processes_in(tmp_path) == []
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.soak
async def test_the_demo_goes_well_many_times_in_a_row(tmp_path: Path) -> None:
    for number in range(MANY_TIMES):
        folder = tmp_path / str(number)
        check(*await played(folder))
        assert list(folder.iterdir()) == []


def everything_is_kept(summary: dict[str, Any]) -> None:
    assert Path(summary["checkpoint"]).is_dir()
    assert Path(summary["folder"], "run", "run.toml").is_file()


async def until_it_tells(child: Child, kind: str) -> None:
    while True:
        line = await child.read_line()
        assert line, "the demo ended before"
        if json.loads(line).get("event") == kind:
            return


def processes_in(folder: Path) -> list[str]:
    """The command lines of those that work inside this folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                inside = os.readlink(process / "cwd").startswith(str(folder))
                words = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if inside:
                found.append(words.replace(b"\0", b" ").decode())
    return found
