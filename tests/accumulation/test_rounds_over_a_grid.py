"""Rounds over a grid in the lifecycle: one history if the grid was whole, and another one for peers
that know that their own part of it was not. Virtual time."""

from __future__ import annotations

import pytest
import trio
from torch import equal

from protocols.accumulation.lifecycle import Ending
from protocols.accumulation.rounds import OVER_A_GRID, averaged
from protocols.moshpit.grid import Grid
from protocols.moshpit.outcome import Verdict
from protocols.testing.world import SimulatedWorld
from tests.dht.members import simulated
from tests.moshpit.averagers import AveragingPeer, Ended, averagers

GRID = Grid(width=2, dimensions=2)
KILLED = 1


async def over_the_grid(peers: list[AveragingPeer], killed_after: float | None) -> list[Ended]:
    """The endings of the living peers."""
    done = [
        one.begin(
            expected=GRID.cells, grid=GRID, number=number, weight=3.0 + number % 2, votes=number % 2
        )
        for number, one in enumerate(peers)
    ]
    if killed_after is not None:
        await trio.sleep(killed_after)
        peers[KILLED].kill()
    with trio.fail_after(200.0):
        for one, event in zip(peers, done, strict=True):
            if one.alive:
                await event.wait()
    return [one.ended[-1] for one in peers if one.alive]


@simulated
async def test_a_whole_grid_gives_all_the_same_bits_and_the_same_history(
    world: SimulatedWorld,
) -> None:
    ended = await over_the_grid(await averagers(world, GRID.cells), None)
    first = ended[0].result
    assert first is not None
    for one in ended:
        told = averaged(one.outcome)
        assert (told.ending, told.digest) == (Ending.COMMITTED, OVER_A_GRID)
        assert told.weight == pytest.approx(14.0)
        assert told.votes == pytest.approx(2.0)
        assert one.result is not None
        assert equal(one.result, first)


@simulated
async def test_a_peer_that_knows_that_its_part_of_the_grid_failed_has_its_own_history(
    world: SimulatedWorld,
) -> None:
    ended = await over_the_grid(await averagers(world, GRID.cells), killed_after=0.3)
    kinds = set()
    for one in ended:
        rounds = one.outcome.rounds
        is_whole = all(this.verdict is Verdict.COMMITTED and not this.excluded for this in rounds)
        told = averaged(one.outcome)
        assert told.ending is Ending.COMMITTED
        assert (told.digest == OVER_A_GRID) is is_whole
        kinds.add(is_whole)
    assert False in kinds
