"""A disk that fills while a node trains costs what would have been kept, and not the training."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch
import trio

from node.run.signed import read_signed, sign_definition
from node.training.happenings import Left
from node.training.join.participation import Participation, take_part
from node.training.session import TrainingSession
from protocols.testing.world import SimulatedWorld
from tests.access.members import running_node, write_key
from tests.homes import full_disk, home_in
from tests.joining.homes import files_below
from tests.runs.definitions import FINGERPRINT, NAME, NOW_MS, ORGANISER, TEXT
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS, until

STEPS: Final = 3


@pytest.mark.slow
async def test_it_trains_on_says_so_and_leaves_nothing_half_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    data = sign_definition(TEXT, ORGANISER, now_ms=NOW_MS)
    signed = read_signed(data, run=NAME, organiser=FINGERPRINT)
    home = home_in(tmp_path)
    shown = Recorded()
    session = TrainingSession(shown)
    session.entered()
    left: list[Left | None] = []
    async with SimulatedWorld(seed=1) as world:
        write_key(home.key_file, world.identity_of("ann"))
        async with running_node(world, "ann", home) as node, trio.open_nursery() as nursery:

            async def train() -> None:
                part = Participation(NAME, FINGERPRINT, signed=signed, begins=True)
                left.append(await take_part(node, part, session))

            nursery.start_soon(train)
            await until(lambda: "StepTaken" in shown.kinds(), PATIENCE_SECONDS)
            with full_disk():
                before = shown.kinds().count("StepTaken")
                await until(
                    lambda: shown.kinds().count("StepTaken") >= before + STEPS, PATIENCE_SECONDS
                )
                session.departure.leave()
                await until(lambda: bool(left), PATIENCE_SECONDS)
    assert left[0] is not None
    assert session.account.epoch >= STEPS
    assert any("cannot be saved: File too large" in said for said in caplog.messages)
    kept = {name for name in files_below(tmp_path) if "/run/" not in f"/{name}"}
    assert kept == {"identity.key"}, "and nothing half written"
