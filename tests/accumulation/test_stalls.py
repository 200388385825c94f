"""How long a run stalls when peers leave, die and come: whole peers in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import trio

from lab.simulate.virtual_trainer import TARGET, Manner, Trainer, forks, longest_gap, trainer
from protocols.testing.link_model import LinkSettings
from protocols.testing.settings import WorldSettings
from protocols.testing.world import SimulatedWorld, run_simulation
from tests.dht.members import simulated

STALL_SECONDS = 30.0  # the bar of a run with churn
EPOCH_ALONE_SECONDS = TARGET / 8  # at Manner's rate
WATCHED_SECONDS = 60.0
SLOW_LINKS = WorldSettings(link=LinkSettings(latency_seconds=0.1))
RESTARTED_SECONDS = 10.0
LET_IN_SECONDS = 15.0  # a third of it is to meet them, over round trips of 0.2 s


async def grown(world: SimulatedWorld, size: int, first: Trainer | None = None) -> list[Trainer]:
    """Add peers, and wait until all have made steps together."""
    peers = [] if first is None else [first]
    while len(peers) < size + (first is not None):
        peers.append(trainer(world, f"peer-{len(peers)}", Manner(), peers))
        await trio.sleep(0.2)
    with trio.fail_after(200):
        while min(one.epoch for one in peers) < 3 or len({one.epoch for one in peers}) > 1:
            await peers[0].tracker.changed()
    return peers


@pytest.mark.slow
@simulated
async def test_a_peer_that_leaves_causes_no_stall(world: SimulatedWorld) -> None:
    peers = await grown(world, 2)
    began = trio.current_time()
    await peers[0].leave()
    await trio.sleep(WATCHED_SECONDS)
    gap = longest_gap(peers[1:], began, trio.current_time())
    assert gap < EPOCH_ALONE_SECONDS + 1.0


@pytest.mark.slow
@simulated
async def test_the_last_peer_goes_on_once_the_dead_ones_are_forgotten(
    world: SimulatedWorld,
) -> None:
    peers = await grown(world, 3)
    began = trio.current_time()
    for one in peers[:2]:
        one.kill()
    await trio.sleep(WATCHED_SECONDS)
    assert longest_gap(peers[2:], began, trio.current_time()) < STALL_SECONDS, peers[2].words


@pytest.mark.slow
@simulated
async def test_three_newcomers_and_the_keeper_go_on_and_are_all_in_the_steps(
    world: SimulatedWorld,
) -> None:
    """They begin in rounds without the peers that died, so each doubts living peers."""
    keeper = trainer(world, "keeper", Manner(seconds=0.5, samples=0))
    peers = await grown(world, 3, keeper)
    for one in peers[1:]:
        one.kill()
    await trio.sleep(0.2)
    began = trio.current_time()
    fresh = [keeper]
    for number in range(3):
        fresh.append(trainer(world, f"fresh-{number}", Manner(), list(fresh)))
    await trio.sleep(WATCHED_SECONDS)
    assert longest_gap(fresh, began, trio.current_time()) < STALL_SECONDS
    assert not forks([*peers, *fresh])
    last = max(step for one in fresh for step in one.steps)
    assert last.members == len(fresh), "the last step was made by all"


@pytest.mark.slow
def test_a_third_peer_gets_in_although_the_others_steps_are_shorter_than_it_needs_to_follow() -> (
    None
):
    """It must learn of the last step and take it over while the others compute for the next one.
    Now and then a list stays open a moment longer for it."""
    let_in: list[float] = []

    async def scenario(world: SimulatedWorld) -> None:
        manner = Manner(seconds=0.15)  # eight batches are a step: 0.6 s of two
        pair = [trainer(world, "first", manner)]
        pair.append(trainer(world, "second", manner, pair))
        await trio.sleep(20.0)
        began = trio.current_time()
        trainer(world, "third", manner, pair)
        await trio.sleep(STALL_SECONDS)
        let_in.extend(step.at - began for step in pair[0].steps if step.members == len(pair) + 1)

    run_simulation(scenario, settings=SLOW_LINKS)
    assert let_in
    assert let_in[0] < LET_IN_SECONDS
    assert len(let_in) > 1, "and it stays in"


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.soak)])
def test_after_a_common_restart_volunteers_get_into_the_steps_of_a_keeper_that_goes_on_alone(
    count: int,
) -> None:
    """All start at once: a keeper that trains, with its checkpoint, and volunteers at epoch 0. A
    state takes longer to arrive than the keeper needs for a step."""
    moments: list[float] = []

    async def scenario(world: SimulatedWorld) -> None:
        alone = Manner(seconds=0.07, samples=TARGET // 4, restored=7)
        keeper = trainer(world, "keeper", alone)
        began = trio.current_time()
        volunteer = replace(alone, restored=0, begins=False)
        peers = [keeper]
        for number in range(count):
            peers.append(trainer(world, f"volunteer-{number}", volunteer, [keeper]))
        await trio.sleep(STALL_SECONDS)
        for one in peers[1:]:
            moments.append(min((step.at for step in one.steps), default=math.inf) - began)
        assert not forks(peers)
        assert keeper.steps[0].epoch > alone.restored

    run_simulation(scenario)
    assert len(moments) == count
    assert max(moments) < RESTARTED_SECONDS, moments
