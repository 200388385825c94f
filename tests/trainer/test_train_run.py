"""A session's training thread ends with the node, wherever it waits."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch
import trio

from node.configuration import read_configuration
from node.run.building import build_task
from node.run.definition import read_definition
from node.simulated_network import SimulatedWorld
from node.trainer.options import TrainerOptions
from node.trainer.session import Session
from node.trainer.trainer import train_run
from tests.access.members import running_node, write_key
from tests.runs.definitions import TEXT
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS, until

ENDING_SECONDS: Final = 30.0  # it takes milliseconds; without an end of its own it is for ever


@pytest.mark.slow
async def test_a_node_that_ends_in_a_pause_does_not_wait_for_it_to_be_over(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    definition = read_definition(TEXT)
    task = build_task(definition)
    options = TrainerOptions(micro_batch=1, begins=True)
    shown = Recorded()
    home = read_configuration(environment={"POTLUCK_HOME": str(tmp_path)})
    async with SimulatedWorld(seed=1) as world:
        write_key(home.key_file, world.identity_of("ann"))
        async with running_node(world, "ann", home) as node, trio.open_nursery() as nursery:
            session, scope, ended = Session(shown), trio.CancelScope(), trio.Event()
            session.entered()

            async def train() -> None:
                with scope:
                    await train_run(node, definition, task, options, session)
                ended.set()

            nursery.start_soon(train)
            await until(lambda: "Began" in shown.kinds(), PATIENCE_SECONDS)
            session.gate.close("pause", "paused by you")
            await until(lambda: "Paused" in shown.kinds(), PATIENCE_SECONDS)
            scope.cancel()  # as a pass does that is taken back
            with trio.move_on_after(ENDING_SECONDS):
                await ended.wait()
            has_ended = ended.is_set()
            session.gate.end()  # or a thread that waits would keep the test from ending
    assert has_ended
