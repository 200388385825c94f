"""A process of the demo and of the benches: its output is read, and nothing is left of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import trio

from node.app.demo.processes import Child, Event

PATIENCE_SECONDS = 30.0


@pytest.mark.usefixtures("really_started")  # the forge's own socket would be a new file
async def test_its_output_is_read_and_no_file_stays_open(tmp_path: Path) -> None:
    told: list[Event] = []
    child = Child("ann", ["version", "--json"], home=tmp_path / "home", folder=tmp_path)
    before = set(os.listdir("/dev/fd"))
    child.start()
    await child.read(lambda _, event: told.append(event))
    assert set(os.listdir("/dev/fd")) == before
    assert child.exit_code == 0
    assert told == child.events != []


async def test_a_signal_in_the_middle_of_killing_it_may_kill_it_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm of a demo that does not end in time does."""
    # without `exec`, a child of the shell would hold the output for ten minutes
    stays = ("sh", "-c", "exec sleep 600")
    child = Child("ann", ["version"], home=tmp_path / "home", folder=tmp_path, through=stays)
    child.start()
    look, handlers = subprocess.Popen._try_wait, ["kill_all"]  # type: ignore[attr-defined]

    def interrupted(process: Any, flags: int) -> Any:
        """While the standard library holds its lock."""
        if handlers:
            handlers.pop()
            child.kill()
        return look(process, flags)

    monkeypatch.setattr(subprocess.Popen, "_try_wait", interrupted)
    killing = Thread(target=child.kill, daemon=True)
    killing.start()
    killing.join(PATIENCE_SECONDS)
    assert not handlers
    assert not killing.is_alive(), "it waits for itself"
    with trio.fail_after(PATIENCE_SECONDS):
        await child.read(lambda *_: None)
    assert child.exit_code == -9
