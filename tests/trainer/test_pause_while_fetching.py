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
from node.training.trainer import TrainerOptions
from protocols.accumulation.events import CaughtUp
from protocols.accumulation.state_download import FILE_NAME
from protocols.testing.world import SimulatedWorld
from tests.runs.definitions import TEXT
from tests.trainer.training_nodes import training_in
from tests.waiting import PATIENCE_SECONDS, until

DEFINITION: Final = read_definition(
    TEXT.replace(b"width = 16", b"width = 256").replace(b"batch = 64", b"batch = 8\nsteps = 1")
)
"""Its one step is made at once, and its state has 10 MB."""

SLOW_SECONDS: Final = 10.0  # for the whole of it
LONG_ENOUGH: Final = 2.0  # to fetch it all without a limit, if that were not left


@asynccontextmanager
async def complete_run(folder: Path) -> AsyncIterator[tuple[SimulatedWorld, str]]:
    """A world with the run's keeper, which has made its step and stays; and where to join at."""
    torch.set_num_threads(1)
    checkpoints = DEFINITION.checkpoint_settings(folder / "checkpoints", {})
    options = TrainerOptions(begins=True, micro_batch=4, checkpoints=checkpoints)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            SimulatedWorld(seed=1) as world,
            training_in(world, DEFINITION, "ann", folder / "ann", options) as ann,
        ):
            await ann.until("RunComplete")
            (address, *_) = ann.network.addresses()
            yield world, address


@pytest.mark.slow
@pytest.mark.parametrize("keeps_only", [False, True])
async def test_a_pause_leaves_a_state_that_is_being_fetched_where_it_is(
    tmp_path: Path, keeps_only: bool
) -> None:
    state_bytes = 3 * sum(4 * one.numel() for _, one in build_task(DEFINITION).named_parameters)
    folder = tmp_path / "fetching"
    volunteer = TrainerOptions(micro_batch=4, keeps_only=keeps_only, fetching_folder=folder)
    async with (
        complete_run(tmp_path) as (world, address),
        training_in(world, DEFINITION, "ben", tmp_path / "ben", volunteer, address) as ben,
    ):
        world.throttle(ben.network, download_bytes_per_second=state_bytes / SLOW_SECONDS)
        await until((folder / FILE_NAME).exists, PATIENCE_SECONDS)
        assert "CaughtUp" not in ben.shown.kinds()
        ben.session.gate.close("pause", "paused by you")
        await ben.until("Paused")
        world.throttle(ben.network)
        await trio.sleep(LONG_ENOUGH)
        assert "CaughtUp" not in ben.shown.kinds()
        assert "FetchingFailed" not in ben.shown.kinds()
        ben.session.gate.open("pause")
        await ben.until("CaughtUp")
        told = [one for one in ben.shown.kinds() if one in {"Paused", "Resumed", "CaughtUp"}]
        assert told == ["Paused", "Resumed", "CaughtUp"]
        (caught_up,) = (one for one in ben.shown.happenings if isinstance(one, CaughtUp))
        assert caught_up.fetched_bytes < state_bytes, "what had come was kept"


@pytest.mark.slow
async def test_a_node_that_leaves_while_fetching_is_paused_leaves_at_once(tmp_path: Path) -> None:
    options = TrainerOptions(micro_batch=4)
    async with (
        complete_run(tmp_path) as (world, address),
        training_in(world, DEFINITION, "ben", tmp_path / "ben", options, address) as ben,
    ):
        world.throttle(ben.network, download_bytes_per_second=100_000.0)
        await ben.until("FellBehind")
        ben.session.gate.close("pause", "paused by you")
        await ben.until("Paused")
        ben.session.departure.leave()
        await ben.ended.wait()
    assert "CaughtUp" not in ben.shown.kinds()
