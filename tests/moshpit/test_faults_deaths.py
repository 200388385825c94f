"""Members die in any phase of a round: the survivors soon hold one result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from protocols.moshpit.outcome import Committed, Discarded
from protocols.testing.world import SimulatedWorld, run_simulation
from tests.dht.members import SETTINGS as WORLD
from tests.moshpit.averagers import (
    AveragingPeer,
    Ended,
    average_all,
    check_same_result,
    counted,
)
from tests.moshpit.phases import EPOCH, EXCHANGE, PHASES, ready_for_a_round, undisturbed

DEATH_SECONDS = 5.0  # from a death to the end of the round for all survivors
NEXT_ROUND_SECONDS = 1.0  # of matchmaking without the dead


async def survivors_agree(
    peers: Sequence[AveragingPeer], victims: Sequence[AveragingPeer], after: float
) -> list[Ended]:
    """Begin a round, kill these after some seconds, and check how it ends for the others."""
    survivors = [one for one in peers if one not in victims]
    events = {one: one.begin(epoch=EPOCH, expected=len(peers)) for one in peers}
    await trio.sleep(after)
    for victim in victims:
        victim.kill()
    died = trio.current_time()
    with trio.fail_after(DEATH_SECONDS):
        for one in survivors:
            await events[one].wait()
    ended = [one.ended[-1] for one in survivors]
    assert all(one.ended <= died + DEATH_SECONDS for one in ended)
    return ended


async def next_round_is_quick(survivors: Sequence[AveragingPeer]) -> None:
    ended = await average_all(survivors, epoch=3)
    check_same_result(ended, survivors)
    for one in ended:
        assert one.outcome.rounds[0].matchmaking_seconds < NEXT_ROUND_SECONDS
        assert one.outcome.rounds[0].attempts == 1


async def one_of_four_dies(
    world: SimulatedWorld, phase: str, part: float, leader_dies: bool
) -> None:
    moments = undisturbed(4, world.seed)
    peers = await ready_for_a_round(world, 4)
    victim = peers[moments.leader if leader_dies else moments.leader - 1]
    ended = await survivors_agree(peers, [victim], moments.at(phase, part))
    members = counted(ended, peers)
    survivors = [one for one in peers if one is not victim]
    assert set(survivors) <= set(members)
    check_same_result(ended, members)
    if victim.ended:
        check_same_result([*ended, victim.ended[-1]], members)
    if victim not in members and phase == EXCHANGE:
        assert isinstance(ended[0].outcome, Committed)
        # nobody, if it died so early that the others found each other without it
        assert [one.peer for one in ended[0].outcome.left_out] in ([], [victim.peer])
    await next_round_is_quick(survivors)


@pytest.mark.slow
@pytest.mark.parametrize("leader_dies", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("part", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("phase", PHASES)
def test_one_of_four_dies_and_the_others_hold_one_result(
    phase: str, part: float, leader_dies: bool
) -> None:
    undisturbed(4, 0)
    run_simulation(one_of_four_dies, phase, part, leader_dies, seed=0, settings=WORLD)


@pytest.mark.slow
def test_a_member_that_dies_in_the_exchange_is_left_out() -> None:
    undisturbed(4, 1)
    run_simulation(one_of_four_dies, EXCHANGE, 0.5, False, seed=1, settings=WORLD)


async def several_die(world: SimulatedWorld, count: int, dying: int, phase: str) -> None:
    """With a quorum, the others commit; without one, all keep their own values."""
    after = undisturbed(count, world.seed).at(phase, 0.5)
    peers = await ready_for_a_round(world, count)
    victims, survivors = peers[:dying], peers[dying:]
    ended = await survivors_agree(peers, victims, after)
    if 2 * len(survivors) > count:
        check_same_result(ended, counted(ended, peers))
    elif phase == EXCHANGE:
        for one in ended:
            assert isinstance(one.outcome, Discarded)
            # two of four are enough to say that nobody can commit any more; one is not
            assert one.outcome.in_doubt is (2 * len(survivors) < count)
    if len(survivors) > 1:
        await next_round_is_quick(survivors)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("count", "dying"), [(4, 2), (5, 2), (4, 3)])
def test_several_die_at_once(count: int, dying: int, phase: str) -> None:
    undisturbed(count, 0)
    run_simulation(several_die, count, dying, phase, seed=0, settings=WORLD)


async def all_die(world: SimulatedWorld) -> None:
    peers = await ready_for_a_round(world, 4)
    after = undisturbed(4, world.seed).at(EXCHANGE, 0.5)
    await survivors_agree(peers, peers, after)
    again = [
        AveragingPeer(world, world.restart(one.network), [peers[0].network.address], one.settings)
        for one in peers
    ]
    for one in again:
        await one.ready.wait()
    check_same_result(await average_all(again, epoch=2), again)


@pytest.mark.slow
def test_when_all_have_died_those_who_start_again_average() -> None:
    undisturbed(4, 0)
    run_simulation(all_die, seed=0, settings=WORLD)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_death_at_any_moment(seed: int) -> None:
    undisturbed(4, seed)
    phase = PHASES[seed % 3]
    run_simulation(
        one_of_four_dies, phase, (seed * 0.37) % 1.0, seed % 2 == 0, seed=seed, settings=WORLD
    )
