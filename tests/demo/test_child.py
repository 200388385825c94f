"""A process of the demo and of the benches: its output is read, and nothing is left of it."""

from __future__ import annotations

import os
from pathlib import Path

from node.app.demo.processes import Child, Event


async def test_its_output_is_read_and_no_file_stays_open(tmp_path: Path) -> None:
    told: list[Event] = []
    child = Child("ann", ["version", "--json"], home=tmp_path / "home", folder=tmp_path)
    before = set(os.listdir("/dev/fd"))
    child.start()
    await child.read(lambda _, event: told.append(event))
    assert set(os.listdir("/dev/fd")) == before
    assert child.exit_code == 0
    assert told == child.events != []
