"""A rest that its owner wants comes before where the run is: nothing is fetched meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import torch
import trio

from node.run.building import build_task
from node.run.definition import read_definition
from node.simulated_network import SimulatedNetwork, SimulatedWorld
from node.trainer.options import TrainerOptions
from node.trainer.trainer import train_run
from protocols.accumulation.events import CaughtUp
from protocols.accumulation.state_kept import FILE_NAME
from tests.runs.definitions import TEXT
from tests.trainer.training_nodes import TrainingNode, training_node
from tests.waiting import PATIENCE_SECONDS, until

DEFINITION: Final = read_definition(
    TEXT.replace(b"width = 16", b"width = 256").replace(b"batch = 64", b"batch = 8\nsteps = 1")
)
"""Its one step is made at once, and its state has 10 MB."""

SLOW_SECONDS: Final = 10.0  # for the whole of it
LONG_ENOUGH: Final = 2.0  # to fetch it all without a limit, if that were not left


@asynccontextmanager
async def training(
    world: SimulatedWorld, name: str, home: Path, options: TrainerOptions, *bootstrap: str
) -> AsyncIterator[TrainingNode]:
    async def train(one: TrainingNode) -> None:
        task = build_task(DEFINITION, peer=name)
        await train_run(one.node, DEFINITION, task, options, one.session)

    async with training_node(world, name, home, train, *bootstrap) as one:
        yield one
        one.session.departure.leave(at_once=True)
        one.session.gate.end()


def network_of(one: TrainingNode) -> SimulatedNetwork:
    assert isinstance(one.node.network, SimulatedNetwork)
    return one.node.network


def keeper(folder: Path) -> TrainerOptions:
    """It stays when the run is complete."""
    checkpoints = DEFINITION.checkpoint_settings(folder / "checkpoints", {})
    return TrainerOptions(begins=True, micro_batch=4, checkpoints=checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize("keeps_only", [False, True])
async def test_a_pause_leaves_a_state_that_is_being_fetched_where_it_is(
    tmp_path: Path, keeps_only: bool
) -> None:
    torch.set_num_threads(1)
    state_bytes = 3 * sum(4 * one.numel() for _, one in build_task(DEFINITION).named_parameters)
    folder = tmp_path / "fetching"
    volunteer = TrainerOptions(micro_batch=4, keeps_only=keeps_only, fetching_folder=folder)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            SimulatedWorld(seed=1) as world,
            training(world, "ann", tmp_path / "ann", keeper(tmp_path)) as ann,
        ):
            await ann.until("RunComplete")
            (address, *_) = network_of(ann).addresses()
            async with training(world, "ben", tmp_path / "ben", volunteer, address) as ben:
                speed = state_bytes / SLOW_SECONDS
                world.throttle(network_of(ben), download_bytes_per_second=speed)
                await until((folder / FILE_NAME).exists, PATIENCE_SECONDS)
                assert "CaughtUp" not in ben.shown.kinds()
                ben.session.gate.close("pause", "paused by you")
                await ben.until("Paused")
                world.throttle(network_of(ben))
                await trio.sleep(LONG_ENOUGH)
                assert "CaughtUp" not in ben.shown.kinds()
                assert "FetchingFailed" not in ben.shown.kinds()
                ben.session.gate.open("pause")
                await ben.until("CaughtUp")
                told = [
                    one for one in ben.shown.kinds() if one in {"Paused", "Resumed", "CaughtUp"}
                ]
                assert told == ["Paused", "Resumed", "CaughtUp"]
                (caught_up,) = (one for one in ben.shown.happenings if isinstance(one, CaughtUp))
                assert caught_up.fetched_bytes < state_bytes, "what had come was kept"


async def test_who_leaves_in_a_rest_from_fetching_leaves_at_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            SimulatedWorld(seed=1) as world,
            training(world, "ann", tmp_path / "ann", keeper(tmp_path)) as ann,
        ):
            await ann.until("RunComplete")
            (address, *_) = network_of(ann).addresses()
            options = TrainerOptions(micro_batch=4)
            async with training(world, "ben", tmp_path / "ben", options, address) as ben:
                world.throttle(network_of(ben), download_bytes_per_second=100_000.0)
                await ben.until("FellBehind")
                ben.session.gate.close("pause", "paused by you")
                await ben.until("Paused")
                ben.session.departure.leave()
                await ben.ended.wait()
    assert "CaughtUp" not in ben.shown.kinds()
