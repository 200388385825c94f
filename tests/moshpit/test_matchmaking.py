"""Peers that look for a group under one key find each other, whatever happens meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio

from protocols.moshpit.group import Group, Late, NobodyElse, NoGroup
from protocols.moshpit.group_search import SHORTEST_SILENCE_SECONDS
from protocols.moshpit.matchmaking import group_key
from protocols.testing.world import SimulatedWorld
from tests.moshpit.gatherers import (
    EPOCH,
    LATENCY_SECONDS,
    WITHOUT_LATENCY,
    Found,
    Gatherer,
    find,
    find_all,
    gatherers,
    in_order,
    play,
    simulated,
)

ROUND_TRIP = 2 * LATENCY_SECONDS
OVERHEAD_SECONDS = 0.5  # the bar, of virtual time


@simulated
async def test_all_members_hold_the_same_list_and_the_first_of_the_order_leads(
    world: SimulatedWorld,
) -> None:
    cast = await gatherers(world, 5)
    found = await find_all(cast)
    assert len(found.groups) == 5
    assert len(found.rosters) == 1
    (group,) = found.rosters.values()
    assert group.members == tuple(one.peer for one in in_order(cast))
    assert group.roster.leader == in_order(cast)[0].peer
    assert group.leader == 0


@simulated
async def test_the_list_says_what_everybody_brings(world: SimulatedWorld) -> None:
    cast = await gatherers(world, 3)
    searches = [one.search(weight=float(number)) for number, one in enumerate(cast)]
    found = await find_all(cast, searches)
    (group,) = found.rosters.values()
    weights = {entry.peer: entry.weight for entry in group.roster.entries}
    assert weights == {one.peer: float(number) for number, one in enumerate(cast)}


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_warm_peers_need_far_less_than_half_a_second(count: int) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        cast = await gatherers(world, count)
        for epoch in range(4):
            key = group_key("poem", epoch, 0, "all")
            expected = count if epoch % 2 else None
            searches = [one.search(key=key, epoch=epoch, expected=expected) for one in cast]
            found = Found()
            async with trio.open_nursery() as nursery:
                for one, search in zip(cast, searches, strict=True):
                    nursery.start_soon(find, one, search, found)
            assert len(found.rosters) == 1
            assert len(found.groups) == count
            assert found.slowest < (0.01 if expected else OVERHEAD_SECONDS / 2)

    play(scenario, settings=WITHOUT_LATENCY)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_peers_that_arrive_over_two_seconds_are_one_group_if_they_expect_each_other(
    seed: int,
) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 20)
    hidden = [number for number in range(1, count) if chance.random() < 0.2]

    async def scenario(world: SimulatedWorld) -> None:
        cast = await gatherers(world, count, behind_nat=hidden, settle=2.0)
        delays = [chance.uniform(0.0, 2.0) for _ in cast]
        searches = [one.search(expected=count, seconds=20.0) for one in cast]
        found = await find_all(cast, searches, delays)
        assert len(found.groups) == count
        assert len(found.rosters) == 1
        assert found.slowest <= max(delays) + OVERHEAD_SECONDS

    play(scenario, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_peers_that_expect_nobody_in_particular_are_in_one_group_each_or_late(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(3, 12)

    async def scenario(world: SimulatedWorld) -> None:
        cast = await gatherers(world, count, settle=2.0)
        found = await find_all(cast, delays=[chance.uniform(0.0, 2.0) for _ in cast])
        assert found.ended == count
        assert found.groups
        assert all(type(error) is Late for error in found.errors.values())
        listed = [peer for group in found.rosters.values() for peer in group.members]
        assert sorted(listed) == sorted(found.groups)
        for error in found.errors.values():
            assert isinstance(error, Late)
            assert error.roster is not None
            assert error.roster.round_id in found.rosters

    play(scenario, seed=seed)


async def without(
    world: SimulatedWorld, cast: Sequence[Gatherer], victim: Gatherer, how: str, after: float
) -> Found:
    """All peers search; after a while one is killed, silently or not, or stopped."""
    found = Found()
    count = len(cast)
    for one in cast:
        world.start(
            one.network,
            lambda _network, one=one: find(one, one.search(expected=count), found),  # type: ignore[misc]
        )
    await trio.sleep(after)
    if how == "stopped":
        world.stop(victim.network)
    else:
        world.crash(victim.network, silently=how == "cut off")
    survivors = {one.peer for one in cast if one is not victim}
    await found.until(survivors)
    found.check()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "cut off", "stopped"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_peer_that_vanishes_while_the_others_wait_costs_one_timeout(how: str, place: int) -> None:
    """The fifth never comes, so that the list stays open until it is no longer waited for."""

    async def scenario(world: SimulatedWorld) -> None:
        *cast, missing = await gatherers(world, 5)
        found = Found()
        for one in cast:
            world.start(
                one.network,
                lambda _network, one=one: find(one, one.search(expected=5, seconds=20.0), found),  # type: ignore[misc]
            )
        await trio.sleep(0.4)
        victim = in_order(cast)[place]
        world.crash(victim.network, silently=how == "cut off") if how != "stopped" else world.stop(
            victim.network
        )
        died = trio.current_time()
        survivors = {one.peer for one in cast if one is not victim}
        await trio.sleep(SHORTEST_SILENCE_SECONDS + 0.6)
        world.start(
            missing.network,
            lambda _network: find(missing, missing.search(expected=4, seconds=20.0), found),
        )
        await found.until(survivors | {missing.peer})
        found.check()
        live = [found.groups[peer] for peer in survivors | {missing.peer}]
        assert len({group.round_id for group in live}) == 1
        # a timeout each for those who waited and for the one that came, and the time for which
        # the fifth is waited for
        assert trio.current_time() - died < 6.0

    play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "cut off", "stopped"])
@pytest.mark.parametrize("seed", range(5))
def test_one_peer_may_vanish_at_any_moment(how: str, seed: int) -> None:
    chance = random.Random(f"{how} {seed}")

    async def scenario(world: SimulatedWorld) -> None:
        cast = await gatherers(world, chance.randint(3, 7), settle=3.0)
        victim = chance.choice(cast)
        found = await without(world, cast, victim, how, chance.uniform(0.0, 0.3))
        live = {peer: group for peer, group in found.groups.items() if peer != victim.peer}
        assert len(live) == len(cast) - 1
        assert len({group.round_id for group in live.values()}) == 1
        assert max(found.seconds[peer] for peer in live) < 5.0

    play(scenario, seed=seed)


@simulated
async def test_a_peer_alone_is_told_so_at_the_deadline_or_at_once(world: SimulatedWorld) -> None:
    one, other = await gatherers(world, 2)
    found = Found()
    await find(one, one.search(seconds=2.0), found)
    assert isinstance(found.errors[one.peer], NobodyElse)
    assert found.seconds[one.peer] == pytest.approx(2.0, abs=0.1)
    await find(other, other.search(key=group_key("poem", 8, 0, "all"), epoch=8, expected=1), found)
    assert isinstance(found.errors[other.peer], NobodyElse)
    assert found.seconds[other.peer] < 5 * ROUND_TRIP


@simulated
async def test_a_straggler_is_late_and_is_shown_the_list(world: SimulatedWorld) -> None:
    cast = await gatherers(world, 4)
    found = await find_all(cast, delays=[0.0, 0.0, 0.0, 1.5])
    late = found.errors[cast[3].peer]
    assert isinstance(late, Late)
    assert late.roster == found.groups[cast[0].peer].roster
    assert found.seconds[cast[3].peer] < 1.0
    assert late.why
    assert late.advice


@simulated
async def test_a_peer_that_may_be_a_group_by_itself_shows_its_list_to_those_that_come_later(
    world: SimulatedWorld,
) -> None:
    cast = await gatherers(world, 3)
    first, *others = cast
    searches = [replace(one.search(seconds=2.0), may_be_one=one is not others[1]) for one in cast]
    found = Found()
    group = await find(first, searches[0], found)
    assert isinstance(group, Group)
    assert group.members == (first.peer,)
    late = await find(others[0], searches[1], found)
    assert isinstance(late, Late)
    assert late.roster == group.roster
    refuses = await find(others[1], searches[2], found)
    assert isinstance(refuses, NoGroup)
    assert "has 1 members" in str(refuses)


@simulated
async def test_two_groups_under_two_keys_do_not_meet(world: SimulatedWorld) -> None:
    cast = await gatherers(world, 6)
    keys = [group_key("poem", EPOCH, 0, str(number % 2)) for number in range(6)]
    searches = [one.search(key=key) for one, key in zip(cast, keys, strict=True)]
    found = Found()
    async with trio.open_nursery() as nursery:
        for one, search in zip(cast, searches, strict=True):
            nursery.start_soon(find, one, search, found)
    groups = list(found.rosters.values())
    assert sorted(len(group.members) for group in groups) == [3, 3]
    assert {group.roster.key for group in groups} == set(keys)


@simulated
async def test_one_peer_can_look_for_two_groups_at_once(world: SimulatedWorld) -> None:
    cast = await gatherers(world, 3)
    both = Found(), Found()
    async with trio.open_nursery() as nursery:
        for one in cast:
            for number, found in enumerate(both):
                search = one.search(key=group_key("poem", EPOCH, number, "all"))
                nursery.start_soon(find, one, search, found)
    assert all(len(found.groups) == 3 for found in both)


@simulated
async def test_peers_that_can_only_dial_out_are_members_and_never_lead(
    world: SimulatedWorld,
) -> None:
    cast = await gatherers(world, 6, behind_nat=[1, 2, 3, 4])
    found = await find_all(cast)
    assert len(found.groups) == 6
    (group,) = found.rosters.values()
    leader = group.roster.entries[group.leader]
    assert leader.reduces
    assert [entry.peer for entry in group.roster.entries if not entry.reduces] == [
        one.peer for one in in_order(cast[1:5])
    ]


@simulated
async def test_peers_that_can_only_dial_out_make_no_group_among_themselves(
    world: SimulatedWorld,
) -> None:
    _server, *cast = await gatherers(world, 3, behind_nat=[1, 2])
    found = await find_all(cast, [one.search(seconds=2.0) for one in cast])
    for one in cast:
        assert isinstance(found.errors[one.peer], NoGroup)
        assert not isinstance(found.errors[one.peer], NobodyElse)
        assert found.seconds[one.peer] < 2.5


@simulated
async def test_peers_with_another_layout_are_named_and_keep_nobody_waiting(
    world: SimulatedWorld,
) -> None:
    cast = await gatherers(world, 4)
    searches = [one.search(seconds=3.0) for one in cast]
    searches[1] = cast[1].search(layout=bytes(32), seconds=3.0)
    found = Found()
    async with trio.open_nursery() as nursery:
        for one, search in zip(cast, searches, strict=True):
            nursery.start_soon(find, one, search, found)
    assert len(found.groups) == 3
    assert max(found.seconds[peer] for peer in found.groups) < 1.0
    error = found.errors[cast[1].peer]
    assert "another layout" in str(error)


@pytest.mark.slow
@simulated
async def test_ghosts_of_dead_peers_do_not_cost_the_deadline(world: SimulatedWorld) -> None:
    cast = await gatherers(world, 8)
    order = in_order(cast)
    dead, live = order[:4], order[4:]
    found = Found()
    for one in dead:
        world.start(
            one.network,
            lambda _network, one=one: find(one, one.search(expected=9), found),  # type: ignore[misc]
        )
    await trio.sleep(0.5)
    for one in dead:
        world.crash(one.network, silently=True)
    groups = await find_all(live)
    assert len(groups.groups) == 4
    assert len(groups.rosters) == 1
    assert groups.slowest < 5.0


@simulated
async def test_a_search_that_was_given_up_keeps_nobody_waiting(world: SimulatedWorld) -> None:
    cast = await gatherers(world, 4)
    with trio.move_on_after(0.3):
        await cast[0].matchmaker.find_group(cast[0].search(expected=9))
    found = await find_all(cast[1:])
    assert len(found.groups) == 3
    assert found.slowest < OVERHEAD_SECONDS
    assert all(cast[0].peer not in group.members for group in found.groups.values())


@simulated
async def test_a_leader_that_gives_up_sends_those_away_who_wait_for_it(
    world: SimulatedWorld,
) -> None:
    cast = in_order(await gatherers(world, 3))
    found = Found()
    async with trio.open_nursery() as nursery:
        for one in cast[1:]:
            nursery.start_soon(find, one, one.search(expected=9), found)
        with trio.move_on_after(0.5):
            await cast[0].matchmaker.find_group(cast[0].search(expected=9))
    assert len(found.groups) == 2
    assert found.groups[cast[1].peer].roster.leader == cast[1].peer


@simulated
async def test_the_same_key_can_be_used_again(world: SimulatedWorld) -> None:
    cast = await gatherers(world, 4)
    for _ in range(3):
        found = await find_all(cast)
        assert len(found.groups) == 4
        assert len(found.rosters) == 1


@simulated
async def test_peers_that_were_in_two_groups_meet_again_without_the_directory(
    world: SimulatedWorld,
) -> None:
    """Those of a cohort, after a round while their network was cut and their directory slow."""
    cast = await gatherers(world, 4)

    async def meet(some: Sequence[Gatherer], epoch: int) -> None:
        key, found = group_key("poem", epoch, 0, "all"), Found()
        async with trio.open_nursery() as nursery:
            for one in some:
                search = one.search(key=key, epoch=epoch, expected=len(some))
                nursery.start_soon(find, one, search, found)
        found.check(key, epoch)
        assert len(found.groups) == len(some)
        assert len(found.rosters) == 1

    async def says_nothing(*_: object, **__: object) -> None:
        await trio.sleep_forever()

    await meet(cast, EPOCH)
    halves = cast[:2], cast[2:]
    cuts = world.partition(*([one.network for one in half] for half in halves))
    async with trio.open_nursery() as nursery:
        for half in halves:
            nursery.start_soon(meet, half, EPOCH + 1)
    world.heal(cuts)
    for one in cast:
        one.dht.get = one.dht.put = says_nothing  # type: ignore[assignment,method-assign]
    await meet(cast, EPOCH + 2)


@pytest.mark.parametrize("count", [5, pytest.param(14, marks=pytest.mark.slow)])
def test_more_than_a_group_may_have_become_several_and_nobody_is_left_out(count: int) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        cast = await gatherers(world, count)
        found = await find_all(cast, [one.search(group_size=4) for one in cast])
        assert len(found.groups) == count
        sizes = [len(group.members) for group in found.rosters.values()]
        assert sum(sizes) == count
        assert max(sizes) <= 4
        assert found.slowest < 1.0
        order = [one.peer for one in in_order(cast)]
        firsts = sorted(group.members for group in found.rosters.values())
        together = sorted(firsts, key=lambda members: order.index(members[0]))
        assert [peer for members in together for peer in members] == order

    play(scenario)


@simulated
async def test_peers_that_a_leader_leaves_out_make_the_group_that_is_needed_at_once(
    world: SimulatedWorld,
) -> None:
    """It lists one of those that have joined, and tells the others that it has begun."""
    cast = await gatherers(world, 6)
    liar, *_ = in_order(cast)
    searches = [
        replace(one.search(expected=6), group_size=2, splits=False)
        if one is liar
        else replace(one.search(expected=6), splits=False, fewest=4)
        for one in cast
    ]
    found = await find_all(cast, searches)
    assert not found.errors
    assert sorted(len(group.members) for group in found.rosters.values()) == [2, 4]
    assert found.slowest < 2.0


@pytest.mark.slow
@simulated
async def test_a_peer_that_has_averaged_before_publishes_no_slot_unless_it_leads(
    world: SimulatedWorld,
) -> None:
    cast = await gatherers(world, 6)
    for epoch in (1, 2):
        key = group_key("poem", epoch, 0, "all", topic=f"history-{epoch}")
        found = Found()
        async with trio.open_nursery() as nursery:
            for one in cast:
                search = one.search(key=key, epoch=epoch, expected=6)
                nursery.start_soon(find, one, search, found)
        assert len(found.rosters) == 1
        slots = await cast[0].dht.get(key)
        assert len(slots) == 1 if epoch == 2 else len(slots) > 1


@simulated
async def test_clocks_do_not_matter(world: SimulatedWorld) -> None:
    cast = await gatherers(world, 4)
    world.set_clock_skew(cast[1].network, 400.0)
    world.set_clock_skew(cast[2].network, -400.0)
    found = await find_all(cast)
    assert len(found.groups) == 4


@pytest.mark.soak
def test_many_searches_in_a_row_with_faults() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        how = chance.choice(["killed", "cut off", "stopped"])

        async def scenario(
            world: SimulatedWorld, chance: random.Random = chance, how: str = how
        ) -> None:
            cast = await gatherers(world, chance.randint(3, 20), settle=3.0)
            victim = chance.choice(cast)
            found = await without(world, cast, victim, how, chance.uniform(0.0, 0.3))
            live = {peer: group for peer, group in found.groups.items() if peer != victim.peer}
            assert len(live) == len(cast) - 1
            assert len({group.round_id for group in live.values()}) == 1

        play(scenario, seed=seed)
