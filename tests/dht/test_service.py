"""Putting, reading and taking back, in a small swarm."""

from __future__ import annotations

import pytest
import trio

from protocols.dht import Contact, DhtSettings, SlotRefused, contact_of
from protocols.dht.messages import without_peer
from protocols.dht.slots import SlotRefusal
from protocols.dht.storage import SLOT_OVERHEAD_BYTES
from protocols.testing.world import SimulatedWorld
from tests.dht.members import Member, joined, member, simulated, swarm, table_sizes
from tests.dht.publishers import note, publisher


def contact(one: Member) -> Contact:
    return contact_of(one.peer, without_peer(one.network.peer_id, [one.address]))


@simulated
async def test_every_node_reads_a_value_that_one_node_puts(world: SimulatedWorld) -> None:
    members = await swarm(world, 8)
    written = await members[1].dht.put("note/hello", "hello", 60)
    assert written.replicas >= 5
    await trio.sleep(2)
    assert written.replicas == 8
    for reader in members:
        for latest_enough in (False, True):
            found = await reader.dht.get("note/hello", latest_enough=latest_enough)
            assert [entry.value for entry in found.values()] == ["hello"]
            assert list(found) == [members[1].peer]


@simulated
async def test_every_publisher_has_a_slot_of_its_own(world: SimulatedWorld) -> None:
    members = await swarm(world, 5)
    for one in members:
        await one.dht.put("note/all", one.network.name, 60)
    found = await members[0].dht.get("note/all")
    assert {peer: entry.value for peer, entry in found.items()} == {
        one.peer: one.network.name for one in members
    }


@simulated
async def test_the_newest_of_one_publisher_holds(world: SimulatedWorld) -> None:
    members = await swarm(world, 5)
    for text in ("first", "second", "third"):
        await members[0].dht.put("note/turn", text, 60)
    found = await members[3].dht.get("note/turn")
    assert [entry.value for entry in found.values()] == ["third"]


@simulated
async def test_a_withdrawn_slot_is_gone_everywhere(world: SimulatedWorld) -> None:
    members = await swarm(world, 5)
    await members[0].dht.put("note/gone", "here", 60)
    await members[1].dht.put("note/gone", "stays", 60)
    await members[0].dht.withdraw("note/gone")
    for reader in members:
        found = await reader.dht.get("note/gone")
        assert [entry.value for entry in found.values()] == ["stays"]


@simulated
async def test_several_values_are_withdrawn_together(world: SimulatedWorld) -> None:
    members = await swarm(world, 5)
    keys = ["note/one", "note/two", "note/three"]
    await members[0].dht.put_many([(key, "here", 60) for key in keys])
    written = await members[0].dht.withdraw_many([*keys[:2], keys[0]])
    assert [one.slot.key for one in written] == keys[:2]
    for reader in members:
        found = await reader.dht.get_many(keys)
        assert [len(found[key]) for key in keys] == [0, 0, 1]


@simulated
async def test_what_others_store_under_one_key_takes_no_room_from_the_others_of_a_reading(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6)
    for one in members[:5]:
        await one.dht.put("note/full", "x" * 1000, 60)
    await members[0].dht.put("note/small", "here", 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocols.dht.reader.READ_BYTES", 3 * (SLOT_OVERHEAD_BYTES + 1000))
        found = await members[5].dht.get_many(["note/full", "note/small"])
    assert len(found["note/small"]) == 1
    assert 1 <= len(found["note/full"]) <= 3


@pytest.mark.slow
@simulated
async def test_a_reader_that_has_some_slots_misses_no_publisher_that_writes_at_that_moment(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 5)
    keys = ["note/a", "note/b"]  # of several keys nothing is remembered from one read to the next
    settings = DhtSettings(bootstrap=(members[0].address,), client=True)
    reader = member(world, "reader", settings=settings)  # which keeps no slots of others
    await joined(reader)
    await reader.dht.put_many([(key, "reader", 60) for key in keys])

    async def write_again_and_again() -> None:
        while True:
            await members[1].dht.put_many([(key, "writer", 60) for key in keys])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_again_and_again)
        await trio.sleep(1)
        for number in range(20):
            found = await reader.dht.get_many(keys, latest_enough=bool(number % 2))
            assert all(found[key].keys() == {reader.peer, members[1].peer} for key in keys)
        nursery.cancel_scope.cancel()


@simulated
async def test_a_slot_that_is_not_kept_up_ends(world: SimulatedWorld) -> None:
    members = await swarm(world, 5)
    await members[0].dht.put("note/short", "here", 60, keep_up=False)
    await trio.sleep(59)
    assert await members[3].dht.get("note/short")
    await trio.sleep(2)
    assert not await members[3].dht.get("note/short")


@pytest.mark.slow
@simulated
async def test_a_slot_is_kept_up_as_long_as_its_publisher_runs(world: SimulatedWorld) -> None:
    members = await swarm(world, 5)
    await members[0].dht.put("note/kept", "here", 60)
    for _ in range(20):
        await trio.sleep(30)
        assert await members[3].dht.get("note/kept")
    members[0].crash()
    await trio.sleep(61)
    assert not await members[3].dht.get("note/kept")


@simulated
async def test_a_node_alone_reads_what_it_wrote(world: SimulatedWorld) -> None:
    alone = member(world, "alone")
    await joined(alone)
    assert (await alone.dht.put("note/self", "me", 60)).replicas == 1
    assert [one.value for one in (await alone.dht.get("note/self")).values()] == ["me"]


@pytest.mark.slow
@simulated
async def test_everybody_in_a_small_swarm_knows_everybody(world: SimulatedWorld) -> None:
    members = await swarm(world, 10)
    await trio.sleep(10)
    assert table_sizes(members) == [9] * 10


@simulated
async def test_a_key_of_no_family_is_refused(world: SimulatedWorld) -> None:
    alone = member(world, "alone")
    await joined(alone)
    with pytest.raises(SlotRefused) as caught:
        await alone.dht.put("nothing/here", "me", 60)
    assert caught.value.refusal is SlotRefusal.UNKNOWN_FAMILY
    with pytest.raises(SlotRefused):
        await alone.dht.get("nothing/here")


@simulated
async def test_a_key_with_more_than_fits_in_one_answer_is_read_whole(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 4)
    expires = int((world.honest_time() + 600) * 1000)
    slots = [note(publisher(one), "note/full", "x" * 4000, 1, expires) for one in range(1, 101)]
    for start in range(0, 100, 8):
        await members[0].dht._requester.store(contact(members[1]), slots[start : start + 8])
    found = await members[2].dht.get("note/full")
    assert set(found) == {one.publisher_peer for one in slots}
    several = await members[3].dht.get_many(["note/none", "note/full", "note/nothing"])
    assert {key: len(entries) for key, entries in several.items()} == {
        "note/none": 0,
        "note/full": 100,
        "note/nothing": 0,
    }
    await trio.sleep(10)
    for one in members:  # whoever read it found the others lacking
        assert len(one.dht._state.storage.get("note/full", 0)) == 100


@simulated
async def test_the_statistics_count_what_was_done(world: SimulatedWorld) -> None:
    members = await swarm(world, 4)
    await members[0].dht.put("note/one", "1", 60)
    await members[0].dht.put_many([("note/two", "2", 60), ("note/three", "3", 60)])
    await members[1].dht.get_many(["note/one", "note/two"])
    assert members[0].dht.statistics().puts == 3
    assert members[0].dht.statistics().slots_published == 3
    assert members[1].dht.statistics().gets == 2
    assert members[2].dht.statistics().slots_taken == 3
    assert members[2].dht.statistics().keys_stored == 3
