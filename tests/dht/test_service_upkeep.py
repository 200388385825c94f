"""A node's own upkeep: which peers it pings, which links it closes, and what it drops."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from protocols.dht import DhtSettings, acquaintances
from protocols.dht.messages import FIND, FindRequest, Query
from protocols.dht.routing import FAILURES_TO_FORGET, LONGEST_RETRY_SECONDS, QUIET_SECONDS
from protocols.errors import Unreachable
from protocols.testing.world import NodeSettings, SimulatedWorld
from tests.dht.impostors import Impostor, that_greets, that_never_answers
from tests.dht.members import Member, joined, member, simulated, swarm, table_sizes
from tests.dht.publishers import HOUR, note
from tests.dht.test_service_faults import bring, now_of, put_in_table


@simulated
async def test_a_node_that_nobody_can_dial_learns_it_and_is_no_replica(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 4)
    boaster = member(world, "boaster", members[:3], machine=NodeSettings(dialable=False))
    await joined(boaster)
    await trio.sleep(60)
    assert not boaster.dht.statistics().can_be_dialled
    assert all(one.dht.statistics().can_be_dialled for one in members)
    written = await boaster.dht.put("note/boast", "hello", 600)
    await trio.sleep(3)
    assert written.replicas == 4
    assert boaster.dht.statistics().slots_stored == 0
    assert [one.value for one in (await members[0].dht.get("note/boast")).values()] == ["hello"]


@pytest.mark.slow
@simulated
async def test_a_peer_that_vanishes_is_noticed_without_any_lookup(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6)
    await trio.sleep(400)  # until all has settled
    world.crash(members[5].network, silently=True)
    await trio.sleep(QUIET_SECONDS + 120)
    assert members[5].peer not in {
        one.peer for one in members[0].dht._state.table.closest(0, 100)
    }, "it is not passed on any more"


@pytest.mark.slow
@simulated
async def test_quiet_peers_are_asked_seldom(world: SimulatedWorld) -> None:
    members = await swarm(world, 8)
    await trio.sleep(2 * 3600)
    before = [one.dht.statistics().finds_sent for one in members]
    await trio.sleep(2 * 3600)
    for one, earlier in zip(members, before, strict=True):
        assert one.dht.statistics().finds_sent - earlier < 7 * 4 * 2 + 40


@pytest.mark.slow
@simulated
async def test_links_that_were_opened_for_a_lookup_are_closed_when_nobody_needs_them(
    world: SimulatedWorld,
) -> None:
    members: list[Member] = []
    for number in range(24):
        bootstrap = tuple(one.address for one in members[:2])
        settings = DhtSettings(k=3, enough_written=2, bootstrap=bootstrap)
        members.append(member(world, f"node-{number}", settings=settings))
        await joined(members[-1])
    busy = members[7]
    await busy.dht.get_many([f"note/{number}" for number in range(60)])
    before = len(busy.network.links())
    await trio.sleep(acquaintances.IDLE_LINK_SECONDS + 300)
    table = {contact.peer for contact in busy.dht._state.table}
    closed = busy.dht.statistics().idle_links_closed
    assert closed
    assert len(busy.network.links()) < before
    for link in busy.network.links():
        assert link.peer in table or link.inbound or link.open_streams, link
    await trio.sleep(1800)
    again = busy.dht.statistics().idle_links_closed - closed
    assert again <= 10, "nobody opens and closes the same links all the time"


@simulated
async def test_no_more_idle_links_are_kept_than_the_limit(world: SimulatedWorld) -> None:
    members = await swarm(world, 3)
    known = members[0].dht._acquaintances
    others = [world.add_node(f"other-{number}") for number in range(80)]
    for number, other in enumerate(others):
        known.asked_us(other.peer_id, None)
        known.we_opened(other.peer_id)
        known._known[other.peer_id].spoken_at = trio.current_time() - 300 + number
    too_many = [other.peer_id for other in others[: 80 - acquaintances.IDLE_LINKS]]
    assert known.idle_links(trio.current_time()) == too_many


@simulated
async def test_a_peer_that_asks_and_never_answers_does_not_stay_in_the_table(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 5)
    victim = members[0]
    impostor = Impostor(world, "impostor", that_never_answers)
    await impostor.ready.wait()
    put_in_table(victim.dht, impostor)
    impostor.network.learn_addresses(victim.network.peer_id, [victim.address])

    async def ask_on() -> None:
        request = FindRequest((Query(bytes(32)),), impostor.introduction)
        while True:
            await impostor.rpc.call(victim.network.peer_id, FIND, request, timeout=5)
            await trio.sleep(2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_on)
        for number in range(4):
            await victim.dht.get(f"note/{number}")
            await trio.sleep(15)
        await trio.sleep(60)
        named = [one.peer for one in victim.dht._state.table.closest(0, 100)]
        assert impostor.network.peer_id not in named
        nursery.cancel_scope.cancel()


@simulated
async def test_a_peer_that_failed_once_and_answers_again_is_no_longer_sought(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 5)
    world.partition([members[0].network], [members[1].network])
    await members[0].dht.get("note/x")
    await trio.sleep(12)
    assert members[0].dht.statistics().peers_lost == 1
    world.heal()
    await trio.sleep(90)
    assert members[0].dht.statistics().peers_lost == 0
    assert table_sizes(members) == [4] * 5


@pytest.mark.slow
@simulated
async def test_newcomers_that_take_slots_slowly_keep_nothing_else_waiting(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 3)
    for number in range(30):
        await members[0].dht.put(f"note/{number}", "here", 600)
    slow = [Impostor(world, f"slow-{one}", that_greets(wait_seconds=9.0)) for one in range(12)]
    for one in slow:
        await one.ready.wait()
        put_in_table(members[0].dht, one)
    await trio.sleep(1)
    assert sum(one.questions for one in slow)
    done = trio.Event()

    async def work() -> None:
        done.set()

    with trio.fail_after(0.1):
        members[0].dht._state.chore(work)
        await done.wait()
    await trio.sleep(600)
    assert members[0].dht._state.handovers._unfinished == 0


@simulated
async def test_expired_slots_are_dropped_although_nothing_new_is_stored(
    world: SimulatedWorld,
) -> None:
    stranger, node = await swarm(world, 2)
    expires = now_of(node) + HOUR
    slots = [note(key=f"note/{number}", expires=expires) for number in range(300)]
    for start in range(0, 300, 100):
        await bring(stranger, node, *slots[start : start + 100])
    storage = node.dht._state.storage
    assert len(storage) == 300
    await trio.sleep(3600 + 15)
    assert len(storage) == 0


@simulated
async def test_changed_addresses_are_introduced_again(world: SimulatedWorld) -> None:
    settings = DhtSettings(client=True)
    first = member(world, "first")
    one = member(world, "one", settings=DhtSettings(client=True, bootstrap=(first.address,)))
    await joined(first, one)
    await one.dht.get("note/x")
    assert table_sizes([first]) == [0]
    assert settings.client
    # as when a router lets something in at last
    one.dht._state.settings = DhtSettings(bootstrap=(first.address,))
    await trio.sleep(11)
    await one.dht.get("note/x")
    await trio.sleep(5)
    assert table_sizes([first]) == [1]


async def client_and_its_peer(world: SimulatedWorld) -> tuple[Member, Member]:
    """A node that keeps nothing itself, as behind a router, and the only other one."""
    other = member(world, "other")
    settings = DhtSettings(client=True, bootstrap=(other.address,))
    one = member(world, "client", settings=settings)
    await joined(other, one)
    await trio.sleep(30)
    return one, other


async def try_to_put(one: Member, key: str) -> None:
    with suppress(Unreachable):
        await one.dht.put(key, "hello", 600, keep_up=False)


async def seconds_until_a_put(one: Member) -> float:
    began = trio.current_time()
    while True:
        try:
            await one.dht.put("note/back", "hello", 600, keep_up=False)
        except Unreachable:
            await trio.sleep(0.05)
        else:
            return trio.current_time() - began


@simulated
async def test_a_lost_peer_is_dialled_as_soon_as_its_old_link_is_known_to_be_dead(
    world: SimulatedWorld,
) -> None:
    one, other = await client_and_its_peer(world)
    world.partition([one.network], [other.network])
    async with trio.open_nursery() as nursery:  # each is a failure: too many for the table
        for number in range(FAILURES_TO_FORGET):
            nursery.start_soon(try_to_put, one, f"note/{number}")
    assert one.dht.statistics().peers_in_table == 0
    assert one.network.link(other.peer) is not None
    world.break_link(one.network, other.network)
    world.heal()
    assert await seconds_until_a_put(one) < 0.5


@simulated
async def test_a_lost_peer_is_tried_as_soon_as_anything_has_reached_it(
    world: SimulatedWorld,
) -> None:
    one, other = await client_and_its_peer(world)
    world.partition([one.network], [other.network])
    for number in range(FAILURES_TO_FORGET):
        await try_to_put(one, f"note/{number}")
    assert one.dht.statistics().peers_lost == 1
    await trio.sleep(LONGEST_RETRY_SECONDS)  # by now it is tried seldom
    world.heal()
    await one.network.connect(other.peer)
    assert await seconds_until_a_put(one) < 0.5
