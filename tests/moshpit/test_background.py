"""An averaging beside the training: waited for, cancelled, or ended with its averager."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from node.simulated_network import SimulatedWorld
from protocols.errors import ProtocolMisuse
from protocols.moshpit.background import Averaging, AveragingCancelled
from protocols.moshpit.outcome import Alone, Outcome
from tests.dht.members import simulated

SECONDS = 10.0


async def slowly() -> Outcome:
    await trio.sleep(SECONDS)
    return Alone(())


async def wrongly() -> Outcome:
    raise ProtocolMisuse("The vector is too short.")


@simulated
async def test_the_outcome_can_be_waited_for_by_several(world: SimulatedWorld) -> None:
    averaging = Averaging(slowly)
    outcomes: list[Outcome] = []

    async def wait() -> None:
        outcomes.append(await averaging.outcome())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(averaging.run)
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.sleep(SECONDS / 2)
        assert not averaging.done
    assert len(outcomes) == 2
    assert world.now() == SECONDS


@simulated
async def test_who_waits_for_a_cancelled_one_is_told(world: SimulatedWorld) -> None:
    averaging = Averaging(slowly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(averaging.run)
        await trio.sleep(SECONDS / 2)
        await averaging.cancel()
        await averaging.cancel()  # twice is harmless
    assert averaging.done
    assert world.now() == SECONDS / 2
    with pytest.raises(AveragingCancelled):
        await averaging.outcome()


@simulated
async def test_who_waits_is_told_when_the_averager_ends(world: SimulatedWorld) -> None:
    averaging = Averaging(slowly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(averaging.run)
        nursery.cancel_scope.cancel()
    assert world.now() == 0.0
    with pytest.raises(AveragingCancelled):
        await averaging.outcome()


@simulated
async def test_a_mistake_of_the_caller_comes_out_of_the_outcome(world: SimulatedWorld) -> None:
    averaging = Averaging(wrongly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(averaging.run)
    assert world.now() == 0.0
    for _ in range(2):
        with pytest.raises(ProtocolMisuse):
            await averaging.outcome()
