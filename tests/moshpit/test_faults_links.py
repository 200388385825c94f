"""Members stop and go on, links flap, networks split: one result for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import trio

from protocols.moshpit.outcome import Alone, Committed, Discarded, LeftOut
from protocols.testing.world import SimulatedWorld, run_simulation
from tests.dht.members import SETTINGS as WORLD
from tests.moshpit.averagers import (
    HOME,
    AveragingPeer,
    average_all,
    averagers,
    check_no_private_mix,
    check_same_result,
    counted,
)
from tests.moshpit.phases import EPOCH, EXCHANGE, PHASES, ready_for_a_round, undisturbed

STOP_SECONDS = 10.0  # from a stop to the end of the round for all others
AWAY_SECONDS = 60.0
FOUND_SECONDS = 5.0  # it notices that it was away, and asks all whom it knew

FLAP_SECONDS = 2.0
LONGEST_ROUND_SECONDS = 60.0


def begin_all(peers: Sequence[AveragingPeer], epoch: int) -> list[trio.Event]:
    return [one.begin(epoch=epoch, expected=len(peers)) for one in peers]


async def ended_within(events: Sequence[trio.Event], seconds: float) -> None:
    with trio.fail_after(seconds):
        for event in events:
            await event.wait()


# F3: a member is stopped and continues


async def one_stops(world: SimulatedWorld, phase: str, part: float, leader_stops: bool) -> None:
    moments = undisturbed(4, world.seed)
    after = moments.at(phase, part)
    peers = await ready_for_a_round(world, 4)
    victim = peers[moments.leader if leader_stops else moments.leader - 1]
    others = [one for one in peers if one is not victim]
    events = begin_all(peers, epoch=EPOCH)
    await trio.sleep(after)
    world.stop(victim.network)
    stopped = trio.current_time()
    await ended_within([events[peers.index(one)] for one in others], STOP_SECONDS)
    ended = [one.ended[-1] for one in others]
    members = counted(ended, peers)
    assert set(others) <= set(members)
    check_same_result(ended, members)
    check_same_result(await average_all(others, epoch=3, within=STOP_SECONDS), others)

    await trio.sleep_until(stopped + AWAY_SECONDS)
    world.resume(victim.network)
    await ended_within([events[peers.index(victim)]], LONGEST_ROUND_SECONDS)
    check_no_private_mix([*ended, victim.ended[-1]], peers)
    await trio.sleep(FOUND_SECONDS)  # it finds the others again
    check_same_result(await average_all(peers, epoch=4), peers)


@pytest.mark.slow
@pytest.mark.parametrize("leader_stops", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("phase", PHASES)
def test_one_of_four_is_stopped_and_continues(phase: str, leader_stops: bool) -> None:
    undisturbed(4, 0)
    run_simulation(one_stops, phase, 0.5, leader_stops, seed=0, settings=WORLD)


async def one_pauses(world: SimulatedWorld, seconds: float) -> None:
    """The stop is shorter than any member's patience, so nothing happens."""
    after = undisturbed(4, world.seed).at(EXCHANGE, 0.5)
    peers = await ready_for_a_round(world, 4)
    events = begin_all(peers, epoch=EPOCH)
    await trio.sleep(after)
    world.stop(peers[1].network)
    await trio.sleep(seconds)
    world.resume(peers[1].network)
    await ended_within(events, STOP_SECONDS)
    check_same_result([one.ended[-1] for one in peers], peers)


@pytest.mark.slow
def test_a_short_pause_costs_nobody_anything() -> None:
    undisturbed(4, 0)
    run_simulation(one_pauses, 1.0, seed=0, settings=WORLD)


# F4: links that flap


async def links_flap(world: SimulatedWorld, victims: int) -> None:
    """The links of some members are lost every two seconds, for ten rounds."""
    peers = await averagers(world, 4, machine=HOME)
    committed = 0

    async def flap() -> None:
        while True:
            await trio.sleep(FLAP_SECONDS)
            for victim in peers[:victims]:
                for other in peers:
                    if other is not victim:
                        world.break_link(victim.network, other.network)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flap)
        for epoch in range(10):
            events = begin_all(peers, epoch)
            await ended_within(events, LONGEST_ROUND_SECONDS)
            committed += check_no_private_mix([one.ended[-1] for one in peers], peers)
        nursery.cancel_scope.cancel()
    assert committed >= 20
    check_same_result(await average_all(peers, epoch=100), peers)


@pytest.mark.slow
@pytest.mark.parametrize("victims", [1, 4])
def test_links_that_are_lost_every_two_seconds(victims: int) -> None:
    undisturbed(4, 0)
    run_simulation(links_flap, victims, seed=0, settings=WORLD)


# F5: partitions


Damage = Callable[[SimulatedWorld, Sequence[AveragingPeer]], None]


def deaf(world: SimulatedWorld, peers: Sequence[AveragingPeer]) -> None:
    """Nothing reaches the first member, but its messages arrive."""
    world.cut([one.network for one in peers[1:]], [peers[0].network])


def mute(world: SimulatedWorld, peers: Sequence[AveragingPeer]) -> None:
    world.cut([peers[0].network], [one.network for one in peers[1:]])


def one_pair(world: SimulatedWorld, peers: Sequence[AveragingPeer]) -> None:
    """Two cannot reach each other; all others can."""
    world.partition([peers[0].network], [peers[1].network])


def halves(world: SimulatedWorld, peers: Sequence[AveragingPeer]) -> None:
    world.partition([one.network for one in peers[:2]], [one.network for one in peers[2:]])


async def net_comes_apart(world: SimulatedWorld, damage: Damage, phase: str) -> None:
    after = undisturbed(4, world.seed).at(phase, 0.5)
    peers = await ready_for_a_round(world, 4)
    events = begin_all(peers, epoch=EPOCH)
    await trio.sleep(after)
    damage(world, peers)
    await ended_within(events, LONGEST_ROUND_SECONDS)
    ended = [one.ended[-1] for one in peers]
    committed = check_no_private_mix(ended, peers)
    if damage is not halves and phase == EXCHANGE:
        assert committed >= 3
    for one in ended:
        assert isinstance(one.outcome, Committed | Discarded | LeftOut | Alone)
    world.heal()
    await trio.sleep(30.0)  # links that were given up come back
    check_same_result(await average_all(peers, epoch=3), peers)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("damage", [deaf, mute, one_pair, halves], ids=lambda one: one.__name__)
def test_the_net_comes_apart_and_is_healed(damage: Damage, phase: str) -> None:
    undisturbed(4, 0)
    run_simulation(net_comes_apart, damage, phase, seed=0, settings=WORLD)
