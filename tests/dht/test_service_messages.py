"""How many messages things cost: batches, repairs, copies, watching, keeping up."""

from __future__ import annotations

from contextlib import aclosing

import pytest
import trio

from protocols.dht import DhtSettings, contact_of
from protocols.dht.ids import position_of
from protocols.dht.messages import without_peer
from protocols.dht.publisher import PublishingSettings
from protocols.dht.reader import FullRead, ReplicaReply
from protocols.dht.watches import Change
from protocols.dht.writer import SPARE_WRITES
from protocols.testing.world import LinkSettings, SimulatedWorld
from tests.dht.members import Member, joined, member, simulated, swarm


def stores_of(one: Member) -> int:
    return one.dht.statistics().stores_sent


@pytest.mark.slow
@simulated
async def test_hundreds_of_keys_cost_a_few_messages_a_neighbour(world: SimulatedWorld) -> None:
    members = await swarm(world, 8)
    before = stores_of(members[0])
    entries = [(f"note/{number}", str(number), 600.0) for number in range(300)]
    written = await members[0].dht.put_many(entries)
    assert [one.replicas >= 5 for one in written] == [True] * 300
    assert stores_of(members[0]) - before == 3 * 7  # batches of 128 slots
    before = members[3].dht.statistics().finds_sent
    found = await members[3].dht.get_many([key for key, _, _ in entries])
    assert {key: [one.value for one in of.values()] for key, of in found.items()} == {
        key: [value] for key, value, _ in entries
    }
    assert members[3].dht.statistics().finds_sent - before <= 12 * 7


@pytest.mark.slow
@simulated
async def test_keeping_up_hundreds_of_keys_costs_a_few_messages_a_neighbour(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 8)
    await members[0].dht.put_many([(f"note/{number}", "x", 3600.0) for number in range(200)])
    before = stores_of(members[0])
    await trio.sleep(600)
    republished = members[0].dht.statistics().republished
    assert 200 <= republished <= 400
    assert stores_of(members[0]) - before <= 16 * 7  # at most so many instants, two messages each


@pytest.mark.slow
@simulated
async def test_slots_written_one_by_one_reach_the_rest_in_shared_messages(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 12)
    before = stores_of(members[0])
    for number in range(20):
        await members[0].dht.put(f"note/{number}", "x", 600)
    await trio.sleep(5)
    for number in range(20):
        for one in members:
            assert one.dht._state.storage.get(f"note/{number}", 0)
    assert stores_of(members[0]) - before < 20 * 11 * 0.8


@pytest.mark.slow
@simulated
async def test_answers_that_come_after_a_write_has_returned_do_not_hurry_the_rest(
    world: SimulatedWorld,
) -> None:
    writer = member(world, "writer")
    others: list[Member] = []
    for number in range(1, 12):
        one = member(world, f"node-{number}", [writer])
        world.set_path(writer.network, one.network, LinkSettings(0.01 * number))
        others.append(one)
    await joined(writer, *others)
    await trio.sleep(30)
    before = stores_of(writer)
    await writer.dht.put("note/one", "x", 600)
    await trio.sleep(DhtSettings().rest_seconds / 2)
    waited_for = DhtSettings().enough_written - 1  # it keeps one itself
    assert stores_of(writer) - before == waited_for + SPARE_WRITES
    await trio.sleep(5)
    assert stores_of(writer) - before == len(others)
    assert all(one.dht._state.storage.get("note/one", 0) for one in others)


@pytest.mark.slow
@simulated
async def test_a_read_mends_replicas_that_lack_something(world: SimulatedWorld) -> None:
    members = await swarm(world, 6)
    keys = [f"note/{number}" for number in range(20)]
    for key in keys:
        await members[0].dht.put(key, "here", 3600, keep_up=False)
    late = member(world, "late", members[:1])
    await joined(late)
    await trio.sleep(30)

    def lacking() -> list[str]:
        return [key for key in keys if not late.dht._state.storage.get(key, 0)]

    assert lacking()
    for key in lacking():
        await members[1].dht.get(key)
    await trio.sleep(5)
    assert not lacking()
    assert members[1].dht.statistics().slots_repaired


@pytest.mark.slow
@simulated
async def test_a_hot_key_is_copied_to_the_way_for_a_short_while(world: SimulatedWorld) -> None:
    # a table of three: so that there is a way, in a swarm that is quick to simulate
    small = DhtSettings(k=3, enough_replicas=2, enough_written=2)
    members: list[Member] = []
    for number in range(40):
        bootstrap = tuple(one.address for one in members[:2])
        settings = DhtSettings(k=3, enough_replicas=2, enough_written=2, bootstrap=bootstrap)
        members.append(member(world, f"node-{number}", settings=settings))
        await joined(members[-1])
    assert small.k == 3
    await members[0].dht.put("note/hot", "rush", 3600)
    await trio.sleep(10)
    for one in members:
        found = await one.dht.get("note/hot", latest_enough=True)
        assert [entry.value for entry in found.values()] == ["rush"]
    assert sum(one.dht.statistics().copies_cached for one in members)
    await trio.sleep(60)
    for one in members:
        await one.dht.get("note/nothing", latest_enough=True)
        one.dht._state.storage.cache.expire(one.dht._state.now_ms())
    assert not sum(one.dht.statistics().copies_cached for one in members)


@simulated
async def test_copies_of_a_key_count_as_one_replica_however_many_send_some(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 4)
    key = "note/hot"
    read = FullRead(members[0].dht._state, position_of(key), key, replicas_wanted=2)
    some = [
        ReplicaReply(contact_of(one.peer, ()), (b"a name",), b"", whole=True) for one in members[1:]
    ]
    read.heard(some[0], copied=True)
    read.heard(some[1], copied=True)
    assert not read.has_enough
    read.heard(some[2], copied=False)
    assert read.has_enough


async def next_change(changes: object) -> Change:
    with trio.fail_after(60):
        return await changes.__anext__()  # type: ignore[attr-defined, no-any-return]


@simulated
async def test_a_watcher_sees_what_is_there_what_changes_and_what_ends(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 4)
    await members[0].dht.put("note/watched", "first", 600)
    async with aclosing(members[1].dht.watch("note/watched")) as changes:
        change = await next_change(changes)
        assert change.entry is not None
        assert (change.publisher, change.entry.value) == (members[0].peer, "first")
        await members[0].dht.put("note/watched", "second", 600)
        change = await next_change(changes)
        assert change.entry is not None
        assert change.entry.value == "second"
        await members[0].dht.withdraw("note/watched")
        change = await next_change(changes)
        assert (change.publisher, change.entry) == (members[0].peer, None)
        await members[2].dht.put("note/watched", "short", 30, keep_up=False)
        assert (await next_change(changes)).entry is not None
        began = trio.current_time()
        assert (await next_change(changes)).entry is None
        assert 29 <= trio.current_time() - began <= 32
        assert members[1].dht.statistics().watched_keys == 1
    assert members[1].dht.statistics().watched_keys == 0


@pytest.mark.slow
@simulated
async def test_watching_what_does_not_change_is_cheap(world: SimulatedWorld) -> None:
    members = await swarm(world, 6)
    client = member(
        world, "client", settings=DhtSettings(bootstrap=(members[0].address,), client=True)
    )
    await joined(client)
    await members[0].dht.put("note/watched", "x" * 4000, 3600)
    await trio.sleep(100)
    async with aclosing(client.dht.watch("note/watched")) as changes:
        await next_change(changes)
        await trio.sleep(600)
        before = client.dht.statistics().finds_sent
        links = sum(link.bytes_received for link in client.network.links())
        await trio.sleep(600)
        assert client.dht.statistics().finds_sent - before <= 600 / 10 * 5
        received = sum(link.bytes_received for link in client.network.links()) - links
        assert received < 600 * 100


@simulated
async def test_two_watchers_of_a_key_share_its_reads(world: SimulatedWorld) -> None:
    members = await swarm(world, 4)
    await members[0].dht.put("note/watched", "here", 600)
    async with (
        aclosing(members[1].dht.watch("note/watched")) as one,
        aclosing(members[1].dht.watch("note/watched")) as other,
    ):
        await next_change(one)
        gets = members[1].dht.statistics().gets
        await next_change(other)
        assert members[1].dht.statistics().gets == gets


@pytest.mark.slow
@simulated
async def test_a_slot_is_repeated_to_those_who_are_closest_by_then(world: SimulatedWorld) -> None:
    publishing = PublishingSettings(longest_interval_seconds=60)
    first = member(world, "first", settings=DhtSettings(publishing=publishing))
    await joined(first)
    await first.dht.put("note/early", "here", 3600)
    others = []
    for number in range(5):
        others.append(member(world, f"other-{number}", [first]))
        await joined(others[-1])
    await trio.sleep(120)
    for one in others:
        assert one.dht._state.storage.get("note/early", 0)


@simulated
async def test_no_replica_is_sent_a_slot_that_it_has(world: SimulatedWorld) -> None:
    members = await swarm(world, 8)
    await trio.sleep(60)
    reader = members[0].dht
    contacts = reader._state.table.closest(0)
    other = members[1].network
    contact = contact_of(other.peer_id, without_peer(other.peer_id, other.addresses()))
    assert contact in contacts
    answers: list[int] = []
    ask = reader._requester.find

    async def listen(*arguments: object) -> object:
        response = await ask(*arguments)  # type: ignore[arg-type]
        answers.extend(len(found.contacts) for found in response.answers)
        return response

    reader._requester.find = listen  # type: ignore[method-assign, assignment]
    await reader.get("note/nothing")
    assert answers
    assert not any(answers)


@pytest.mark.slow
@simulated
async def test_a_watcher_sees_a_slot_that_it_receives_without_asking_anybody(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 4)
    async with aclosing(members[1].dht.watch("note/busy")) as changes:
        await members[0].dht.put("note/busy", "0", 600)
        await next_change(changes)
        await trio.sleep(100)
        before = members[1].dht.statistics().finds_sent
        seen = 0
        began = trio.current_time()
        for number in range(1, 101):
            await members[0].dht.put("note/busy", str(number), 600)
            change = await next_change(changes)
            assert change.entry is not None
            seen += change.entry.value == str(number)
            await trio.sleep(0.01)
        assert seen == 100
        seconds = trio.current_time() - began
        # a read a second or so, of at most four messages each
        assert members[1].dht.statistics().finds_sent - before <= 4 * (seconds + 2)


@pytest.mark.slow
@simulated
async def test_of_many_writes_the_farther_replicas_get_only_the_last(world: SimulatedWorld) -> None:
    members = await swarm(world, 12)
    await trio.sleep(60)
    sent = members[0].dht.statistics().slots_sent
    for number in range(10):
        await members[0].dht.put("note/often", str(number), 600)
    written = members[0].dht.statistics().slots_sent - sent
    await trio.sleep(3)
    assert members[0].dht.statistics().slots_sent - sent - written <= 11
    for one in members:
        (slot,) = one.dht._state.storage.get("note/often", 0)
        assert b"9" in slot.value
