"""The end of a run that has one: its last step is on the keeper's disk, whoever made it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch
import trio

from node.run.checkpoints import Checkpoints
from node.run.definition import read_definition
from node.training.happenings import RunComplete
from node.training.trainer import TrainerOptions
from protocols.accumulation.events import CaughtUp, StepTaken
from protocols.accumulation.known import LONGEST_READ_SECONDS
from protocols.accumulation.progress_slot import SLOT_SECONDS
from protocols.testing.world import SimulatedWorld
from tests.runs.definitions import with_line
from tests.trainer.training_nodes import TrainingNode, training_in
from tests.waiting import PATIENCE_SECONDS, until

STEPS: Final = 6
STOPPED_AT: Final = 3
AVERAGING: Final = b"[averaging]\ngrace_seconds = 1.0\nround_seconds = 20.0\n"


def complete(one: TrainingNode) -> RunComplete | None:
    found = [each for each in one.shown.happenings if isinstance(each, RunComplete)]
    return found[0] if found else None


def epoch_of(one: TrainingNode) -> int:
    """By its own steps, or by those of others that it has taken over."""
    made = [each.epoch + 1 for each in one.shown.happenings if isinstance(each, StepTaken)]
    taken_over = [each.epoch for each in one.shown.happenings if isinstance(each, CaughtUp)]
    return max([0, *made, *taken_over])


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["delayed = true", pytest.param("local_steps = 4\nfragments = 2", marks=pytest.mark.soak)],
)
async def test_volunteers_do_not_leave_with_a_last_step_that_the_keeper_is_without(
    how: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    definition = read_definition(with_line(f"steps = {STEPS}\n{how}") + AVERAGING)
    checkpoints = definition.checkpoint_settings(tmp_path / "checkpoints", {})
    keeps = TrainerOptions(begins=True, keeps_only=True, checkpoints=checkpoints)
    volunteer = TrainerOptions(micro_batch=4)
    with trio.fail_after(2 * PATIENCE_SECONDS):  # it waits four times, and each may be slow
        async with (
            SimulatedWorld(seed=1) as world,
            training_in(world, definition, "keeper", tmp_path / "keeper", keeps) as keeper,
        ):
            network = keeper.network
            (address, *_) = network.addresses()
            async with (
                training_in(world, definition, "ann", tmp_path / "ann", volunteer, address) as ann,
                training_in(world, definition, "ben", tmp_path / "ben", volunteer, address) as ben,
            ):
                await until(lambda: epoch_of(ann) >= STOPPED_AT, PATIENCE_SECONDS)
                world.stop(network)
                unknown_at = trio.current_time() + SLOT_SECONDS + 2 * LONGEST_READ_SECONDS
                await until(lambda: bool(complete(ann) and complete(ben)), PATIENCE_SECONDS)
                await trio.sleep_until(unknown_at)  # the keeper's slot has expired
                assert not ann.ended.is_set()
                assert not ben.ended.is_set()
                world.resume(network)
                for one in (ann, ben):
                    await one.ended.wait()
                await until(lambda: complete(keeper) is not None, PATIENCE_SECONDS)
                assert complete(keeper) == complete(ann) == complete(ben)
                await until(lambda: newest(tmp_path) == STEPS, PATIENCE_SECONDS)


def newest(folder: Path) -> int:
    found = Checkpoints(folder / "checkpoints").newest()
    return 0 if found is None else found.state.epoch
