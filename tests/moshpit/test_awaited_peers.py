"""Rounds of peers that await each other by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from protocols.moshpit.outcome import Alone, Committed, Discarded
from protocols.testing.world import SimulatedWorld
from tests.dht.members import simulated
from tests.moshpit.averagers import (
    SETTINGS,
    AveragingPeer,
    average_all,
    averagers,
    check_same_result,
)

LATE_SECONDS = 3.0  # of SETTINGS.matchmaking_seconds; a list without names is closed before
ROUND_TRIPS_SECONDS = 0.5
COMES_AFTER_SECONDS = 0.3  # before the quiet is over in which a list waits for who is missing


def begin(one: AveragingPeer, counted: Sequence[AveragingPeer], *, named: bool) -> trio.Event:
    awaited = frozenset(peer.peer for peer in counted) if named else None
    return one.begin(epoch=1, expected=len(counted), awaited=awaited)


async def newcomer_comes_first(world: SimulatedWorld, *, named: bool) -> list[AveragingPeer]:
    """Three know only each other; another peer comes before the last of them."""
    *counted, newcomer = peers = await averagers(world, 4)
    await average_all(peers)
    *prompt, last = counted
    events = [begin(one, counted, named=named) for one in (*prompt, newcomer)]
    await trio.sleep(LATE_SECONDS)
    events.append(begin(last, counted, named=named))
    with trio.fail_after(20.0):
        for event in events:
            await event.wait()
    return peers


@simulated
async def test_a_newcomer_leaves_nobody_outside(world: SimulatedWorld) -> None:
    peers = await newcomer_comes_first(world, named=True)
    check_same_result([one.ended[-1] for one in peers], peers)


@simulated
async def test_without_names_a_newcomer_takes_the_place_of_a_counted_peer(
    world: SimulatedWorld,
) -> None:
    *inside, outside = (await newcomer_comes_first(world, named=False))[:3]
    assert all(isinstance(one.ended[-1].outcome, Committed) for one in inside)
    outcome = outside.ended[-1].outcome
    assert isinstance(outcome, Discarded)
    assert set(outcome.begun_without) > {one.peer for one in inside}


@simulated
async def test_a_slow_peer_is_waited_for_until_the_deadline(
    world: SimulatedWorld,
) -> None:
    *prompt, slow = peers = await averagers(world, 4)
    await average_all(peers)
    events = [begin(one, peers, named=True) for one in prompt]
    with trio.fail_after(20.0):
        for event in events:
            await event.wait()
    ended = [one.ended[-1] for one in prompt]
    check_same_result(ended, prompt)
    deadline = SETTINGS.matchmaking_seconds
    assert all(deadline - 0.1 <= one.seconds < deadline + 2 * ROUND_TRIPS_SECONDS for one in ended)
    assert slow.alive


@simulated
async def test_a_newcomer_without_known_addresses_is_not_taken_for_gone(
    world: SimulatedWorld,
) -> None:
    peers = await averagers(world, 3)
    await average_all(peers)
    unknown = world.add_node("unknown")
    awaited = frozenset((*(one.peer for one in peers), unknown.peer_id))
    events = [one.begin(epoch=1, expected=4, awaited=awaited) for one in peers]
    await trio.sleep(COMES_AFTER_SECONDS)
    newcomer = AveragingPeer(world, unknown, [peers[0].network.address], SETTINGS)
    await newcomer.ready.wait()
    events.append(newcomer.begin(epoch=1, expected=4, awaited=awaited))
    with trio.fail_after(20.0):
        for event in events:
            await event.wait()
    everybody = [*peers, newcomer]
    check_same_result([one.ended[-1] for one in everybody], everybody)


async def seconds_without(world: SimulatedWorld, *, named: bool, silently: bool) -> float:
    *survivors, dead = peers = await averagers(world, 4)
    await average_all(peers)
    dead.kill(silently=silently)
    await trio.sleep(0.1)
    events = [begin(one, peers, named=named) for one in survivors]
    with trio.fail_after(20.0):
        for event in events:
            await event.wait()
    ended = [one.ended[-1] for one in survivors]
    check_same_result(ended, survivors)
    return max(one.seconds for one in ended)


@simulated
async def test_a_peer_that_awaits_only_dead_ones_is_alone_before_the_deadline(
    world: SimulatedWorld,
) -> None:
    one, *others = await averagers(world, 3)
    await average_all([one, *others])
    for other in others:
        world.crash(other.network)
    await trio.sleep(ROUND_TRIPS_SECONDS)
    with trio.fail_after(SETTINGS.matchmaking_seconds):
        await begin(one, [one, *others], named=True).wait()
    assert isinstance(one.ended[-1].outcome, Alone)
    assert one.ended[-1].seconds < SETTINGS.matchmaking_seconds / 2


@pytest.mark.slow
def test_awaiting_a_dead_peer_by_name_takes_no_longer_than_without_names() -> None:
    for silently in (False, True):
        seconds: dict[bool, float] = {}
        for named in (False, True):
            play_into(seconds, named=named, silently=silently)
        assert seconds[True] <= seconds[False] + ROUND_TRIPS_SECONDS, (silently, seconds)


def play_into(seconds: dict[bool, float], *, named: bool, silently: bool) -> None:
    @simulated
    async def play(world: SimulatedWorld) -> None:
        seconds[named] = await seconds_without(world, named=named, silently=silently)

    play()


@simulated
async def test_a_peer_that_begins_anew_later_is_told_and_waited_for(world: SimulatedWorld) -> None:
    """A round has failed, and one of two members begins its next attempt at once."""
    prompt, slow = peers = await averagers(world, 2)
    events = [begin(one, peers, named=True) for one in peers]
    for event in events:
        await event.wait()
    asked: list[int] = []
    slow.averager.when_asked(lambda epoch, _begins: asked.append(epoch))
    first = begin(prompt, peers, named=True)
    await trio.sleep(LATE_SECONDS)
    assert set(asked) == {1}
    assert not first.is_set()
    second = begin(slow, peers, named=True)
    with trio.fail_after(20.0):
        await first.wait()
        await second.wait()
    check_same_result([one.ended[-1] for one in peers], peers)


async def one_comes_after_a_round(
    world: SimulatedWorld, *, applied: bool
) -> tuple[list[AveragingPeer], trio.Event]:
    """Two of three have averaged, and the third looks for their group."""
    *pair, late = peers = await averagers(world, 3)
    await average_all(peers)
    await average_all(pair, epoch=1)
    for one in pair:
        one.averager.confirm(applied=applied)
    comes = late.begin(epoch=1, expected=3)
    await trio.sleep(COMES_AFTER_SECONDS)
    return peers, comes


@simulated
async def test_who_comes_after_a_round_that_is_applied_is_shown_its_list(
    world: SimulatedWorld,
) -> None:
    (*pair, late), comes = await one_comes_after_a_round(world, applied=True)
    with trio.fail_after(20.0):
        await comes.wait()
    outcome = late.ended[-1].outcome
    assert isinstance(outcome, Discarded)
    assert set(outcome.begun_without) >= {one.peer for one in pair}


@simulated
async def test_who_comes_after_a_round_of_which_nothing_came_is_in_the_next_one(
    world: SimulatedWorld,
) -> None:
    peers, comes = await one_comes_after_a_round(world, applied=False)
    again = [one.begin(epoch=1, expected=3) for one in peers[:2]]
    with trio.fail_after(20.0):
        for event in (comes, *again):
            await event.wait()
    check_same_result([one.ended[-1] for one in peers], peers)


@simulated
async def test_who_claims_to_come_for_many_counts_as_one_in_a_group_without_cohorts(
    world: SimulatedWorld,
) -> None:
    honest, liar = peers = await averagers(world, 2)
    events = [honest.begin(expected=2), liar.begin(expected=2, peers=60_000)]
    with trio.fail_after(20.0):
        for event in events:
            await event.wait()
    for one in peers:
        outcome = one.ended[-1].outcome
        assert isinstance(outcome, Committed)
        assert outcome.peers == 2
