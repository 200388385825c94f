"""An averager refuses wrong calls by name, before anything is sent; and how it ends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import trio

from protocols.errors import ProtocolMisuse
from protocols.moshpit.averager import AveragingCancelled
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.grid import LARGEST_WIDTH, MOST_DIMENSIONS, Grid
from protocols.moshpit.request import RoundRequest
from protocols.testing.world import SimulatedWorld
from tests.dht.members import simulated
from tests.moshpit.averagers import SETTINGS, averagers

LARGEST = Grid(LARGEST_WIDTH, MOST_DIMENSIONS)  # the key of a group on it is too long


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 1},
        {"group_size": LARGEST_GROUP + 1},  # could be listed, and could not agree
        {"matchmaking_seconds": 0.0},
        {"matchmaking_seconds": math.nan},
        {"round_seconds": 0.0},
        {"round_seconds": math.nan},
        {"up_bytes_per_second": math.nan},
        {"down_bytes_per_second": -1.0},
        {"chunk_bytes": 100},
        {"run": ""},
        {"run": "two/words"},
        {"run": "r" * 65},
    ],
)
def test_settings_that_would_fail_in_the_middle_of_a_round_are_refused(
    change: dict[str, Any],
) -> None:
    with pytest.raises(ProtocolMisuse):
        dataclasses.replace(SETTINGS, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": math.nan},
        {"weight": -1.0},
        {"weight": 1e300},
        {"epoch": -1},
        {"epoch": 1 << 63},
        {"expected": 0},
        {"topic": "two/words"},
        {"topic": "t" * 81},
    ],
)
def test_numbers_that_no_member_may_bring_are_refused(change: dict[str, Any]) -> None:
    @simulated
    async def averaging(world: SimulatedWorld) -> None:
        (peer,) = await averagers(world, 1)
        with pytest.raises(ProtocolMisuse):
            await peer.averager.average(
                RoundRequest(peer.vector(), **{"weight": 1.0, "epoch": 0, **change})
            )

    averaging()


@simulated
async def test_a_grid_whose_keys_the_directory_does_not_take_is_refused(
    world: SimulatedWorld,
) -> None:
    (peer,) = await averagers(world, 1)
    request = RoundRequest(
        peer.vector(), weight=1.0, epoch=1 << 62, topic="t" * 80, number=LARGEST.cells - 1
    )
    with pytest.raises(ProtocolMisuse):
        await peer.averager.average(request, LARGEST)


@simulated
async def test_an_averaging_in_another_task_ends_with_its_averager(world: SimulatedWorld) -> None:
    peers = await averagers(world, 2)
    averager, vector = peers[0].averager, peers[0].vector()

    async def average() -> None:
        with pytest.raises(AveragingCancelled):
            await averager.average(RoundRequest(vector, weight=1.0, epoch=0, expected=3))

    with trio.fail_after(1.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(average)
            await trio.sleep(0.05)
            averager.close()
    with pytest.raises(ProtocolMisuse, match="ended"):
        await averager.average(RoundRequest(vector, weight=1.0, epoch=0))
