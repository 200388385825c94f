"""Repeated reading of a key: its cost, the peers that it asks, and that nothing can be hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
import trio

from protocols.dht import Breadth, DhtSettings, Family, Slot
from protocols.dht.contacts import Contact, contact_of
from protocols.dht.ids import node_id_of, position_of
from protocols.dht.messages import FIND, FindRequest, Found, Query, prefix_of_slot
from protocols.dht.reader import (
    FULL_REPLICAS,
    OLD_NAMES_KEPT,
    READ_BYTES,
    TURN_SECONDS,
    VIEWS_KEPT,
    ReadRoom,
    ReplicaQueue,
    View,
    Views,
)
from protocols.testing.world import SimulatedWorld
from tests.dht.impostors import that_greets
from tests.dht.members import Member, joined, member, simulated, swarm
from tests.dht.publishers import HOUR, note, publisher
from tests.dht.test_service_faults import among, bring, now_of, put_in_table

KEY = "note/many"
CROWD = Family("crowd", str, slots_per_key=1024)
LOOKS = 20


def fresh(number: int, expires: int, key: str = KEY, sequence: int = 1) -> list[Slot]:
    return [note(publisher(100 + one), key, str(one), sequence, expires) for one in range(number)]


async def held_by(members: Sequence[Member], slots: Sequence[Slot]) -> None:
    for place, one in enumerate(members):
        for start in range(0, len(slots), 128):
            response = await bring(members[place - 1], one, *slots[start : start + 128])
            assert not any(response.refusals)


async def reader_of(world: SimulatedWorld, members: Sequence[Member], name: str) -> Member:
    """It keeps nothing for others."""
    settings = DhtSettings(bootstrap=tuple(one.address for one in members[:3]), client=True)
    one = member(world, name, settings=settings, families=members[0].families)
    await joined(one)
    return one


def bytes_of(one: Member) -> int:
    return sum(link.bytes_received + link.bytes_sent for link in one.network.links())


def bytes_of_looks(number_of_slots: int, changed: int = 0) -> float:
    """The mean bytes of a look, with this many slots, of which this many change before each."""
    found: list[float] = []

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        members = await swarm(world, 5)
        expires = now_of(members[0]) + HOUR
        await held_by(members, fresh(number_of_slots, expires))
        reader = await reader_of(world, members, "reader")
        assert len((await reader.dht.look(KEY, Breadth.ALL))[0]) == number_of_slots
        before = bytes_of(reader)
        for sequence in range(2, 2 + LOOKS):
            if changed:
                await held_by(members, fresh(changed, expires, sequence=sequence))
            entries, _ = await reader.dht.look(KEY)
            assert len(entries) == number_of_slots
            assert sum(one.sequence == sequence for one in entries.values()) == changed
        found.append((bytes_of(reader) - before) / LOOKS)

    scenario()
    return found[0]


@pytest.mark.slow
def test_a_look_costs_what_has_changed_and_not_what_is_there() -> None:
    few, many = bytes_of_looks(10), bytes_of_looks(200)
    assert many < 1.1 * few
    assert few < 1000
    # a slot of this size takes some 150 bytes, and its name comes with the other answer
    assert bytes_of_looks(200, changed=5) < many + 5 * 250


@pytest.mark.slow
@simulated
async def test_a_thousand_slots_under_one_key_are_found_and_looked_at(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 3, families=[CROWD])
    expires = now_of(members[0]) + HOUR
    await held_by(members, fresh(1000, expires, "crowd/all"))
    reader = await reader_of(world, members, "reader")
    entries, _ = await reader.dht.look("crowd/all")
    assert len(entries) == 1000
    before = bytes_of(reader)
    entries, _ = await reader.dht.look("crowd/all")
    assert len(entries) == 1000
    assert bytes_of(reader) - before < 1000


@simulated
async def test_a_key_read_more_rarely_than_its_slots_live_is_not_searched_for(
    world: SimulatedWorld,
) -> None:
    """At each look all slots are new. One replica sends them; before, each did."""
    number_of_slots, ttl_ms = 50, 20_000
    members = await swarm(world, 8)
    reader = await reader_of(world, members, "reader")
    await held_by(members, fresh(number_of_slots, now_of(members[0]) + ttl_ms))
    entries, _ = await reader.dht.look(KEY, Breadth.ALL)
    found, used = [len(entries)], []
    for sequence in range(2, 6):
        await trio.sleep(1.5 * ttl_ms / 1000)
        expires = now_of(members[0]) + ttl_ms
        await held_by(members, fresh(number_of_slots, expires, sequence=sequence))
        before = bytes_of(reader)
        entries, _ = await reader.dht.look(KEY)
        used.append(bytes_of(reader) - before)
        found.append(sum(one.sequence == sequence for one in entries.values()))
    assert found == [number_of_slots] * 5
    # 130 bytes for each slot, and its name from both that are asked
    assert max(used) < number_of_slots * 200, used


@simulated
async def test_a_key_whose_slots_have_all_moved_is_searched_for(world: SimulatedWorld) -> None:
    members = await swarm(world, 8)
    reader = await reader_of(world, members, "reader")
    *nearer, last = sorted(members, key=lambda one: node_id_of(one.peer) ^ position_of(KEY))
    await held_by(nearer, fresh(4, now_of(members[0]) + 20_000))
    entries, _ = await reader.dht.look(KEY, Breadth.ALL)
    assert len(entries) == 4
    await trio.sleep(30)
    await bring(nearer[0], last, *fresh(4, now_of(last) + 20_000, sequence=2))
    entries, _ = await reader.dht.look(KEY)
    assert [one.sequence for one in entries.values()] == [2] * 4


@pytest.mark.slow
@simulated
async def test_all_replicas_of_a_key_share_the_looks(world: SimulatedWorld) -> None:
    members = await swarm(world, 8)
    await held_by(members, fresh(5, now_of(members[0]) + HOUR))
    readers = [await reader_of(world, members, f"reader-{number}") for number in range(4)]
    for one in readers:
        await one.dht.look(KEY, Breadth.ALL)
    await trio.sleep(60)
    before = [one.dht.statistics().finds_served for one in members]
    for _ in range(60):
        for one in readers:
            await one.dht.look(KEY)
        await trio.sleep(1.0)
    after = [one.dht.statistics().finds_served for one in members]
    served = [now - then for now, then in zip(after, before, strict=True)]
    assert max(served) < 2 * sum(served) / len(served)
    assert min(served) > sum(served) / len(served) / 3


async def check_finds_what_was_written(
    writers: Sequence[Member], readers: Callable[[int], Sequence[Member]], breadth: Breadth
) -> None:
    """One after the other writes; then those readers look, and find it."""
    for number, writer in enumerate(writers):
        await writer.dht.put("note/progress", str(number), 600)
        for reader in readers(number):
            entries, _ = await reader.dht.look("note/progress", breadth)
            assert entries[writer.network.peer_id].value == str(number)


async def settled(world: SimulatedWorld) -> list[Member]:
    members = await swarm(world, 25)
    await trio.sleep(10)
    return members


@pytest.mark.slow
@simulated
async def test_a_look_at_what_a_writer_waits_for_finds_all_that_was_written_before(
    world: SimulatedWorld,
) -> None:
    members = await settled(world)
    await check_finds_what_was_written(
        members[:8], lambda number: members[:: 3 + number], Breadth.FIRST
    )


@pytest.mark.slow
@simulated
async def test_a_look_at_two_replicas_finds_all_that_was_written_before(
    world: SimulatedWorld,
) -> None:
    """The rest of the replicas has it later, and a look asks none of them for the newest."""
    members = await settled(world)
    for one in members:
        await one.dht.look("note/progress", Breadth.ALL)
    await check_finds_what_was_written(
        members[:10], lambda number: members[10 + number :: 5], Breadth.FEW
    )


@pytest.mark.slow
@simulated
async def test_a_replica_that_hides_a_publisher_hides_it_from_nobody(world: SimulatedWorld) -> None:
    hidden = publisher(100)
    shown: list[Slot] = []

    def without_it(query: Query) -> Found:
        """Answers as a replica that has all other slots."""
        some = [one for one in shown if not query.wanted or prefix_of_slot(one) in query.wanted]
        if query.named:
            return Found(names=b"".join(map(prefix_of_slot, some)), cursor=b"1")
        return Found(slots=tuple(some), cursor=b"1")

    members, (liar,) = await among(world, that_greets(answer=without_it), impostors=1)
    reader = await reader_of(world, members, "reader")
    expires = now_of(members[0]) + HOUR
    asked = 0
    for sequence in range(1, 41):
        slots = fresh(10, expires, sequence=sequence)
        await held_by(members, slots)
        shown[:] = [one for one in slots if one.publisher != hidden.public_key]
        put_in_table(reader.dht, liar)
        before = liar.questions
        entries, _ = await reader.dht.look(KEY)
        asked += liar.questions > before
        assert entries[hidden.peer_id].sequence == sequence
        await trio.sleep(1.0)
    assert asked > 5


@simulated
async def test_a_replica_that_names_slots_which_nobody_has_is_asked_no_more(
    world: SimulatedWorld,
) -> None:
    asked_for: list[bytes] = []

    def made_up(query: Query) -> Found:
        if query.wanted:
            asked_for.append(query.wanted)
            return Found()
        return Found(names=bytes(range(160)), cursor=b"1")

    members, _ = await among(world, that_greets(answer=made_up), impostors=1)
    await held_by(members, fresh(3, now_of(members[0]) + HOUR))
    for _ in range(5):
        entries, _ = await members[1].dht.look(KEY, Breadth.ALL)
        assert len(entries) == 3
    assert len(asked_for) <= 2, len(asked_for)


@simulated
async def test_a_replica_that_has_begun_anew_tells_all_that_it_holds(
    world: SimulatedWorld,
) -> None:
    stranger, node = await swarm(world, 2)
    slots = fresh(4, now_of(node) + HOUR)
    await bring(stranger, node, *slots)
    position = bytes(32)

    async def ask(one: Member, query: Query) -> Found:
        response = await stranger.rpc.call(one.peer, FIND, FindRequest((query,)), timeout=10)
        return response.answers[0]

    found = await ask(node, Query(position, KEY))
    assert len(found.slots) == 4
    assert not (await ask(node, Query(position, KEY, since=found.cursor))).slots
    node.crash()
    again = node.restart()
    await joined(again)
    await bring(stranger, again, *slots[:2])
    assert len((await ask(again, Query(position, KEY, since=found.cursor))).slots) == 2


@simulated
async def test_a_reader_at_a_slow_line_gets_all_slots_after_a_few_looks(
    world: SimulatedWorld,
) -> None:
    """Each peer takes longer than a second for them, so all were given up, at each look again."""
    members = await swarm(world, 3, families=[CROWD])
    expires = now_of(members[0]) + HOUR
    await held_by(members, fresh(300, expires, "crowd/all"))
    reader = await reader_of(world, members, "reader")
    assert len((await reader.dht.look("crowd/all"))[0]) == 300
    await held_by(members, fresh(300, expires, "crowd/all", sequence=2))
    world.throttle(reader.network, download_bytes_per_second=8_000)
    found = []
    for _ in range(6):
        entries, _ = await reader.dht.look("crowd/all")
        found.append(sum(one.sequence == 2 for one in entries.values()))
        await trio.sleep(10)
    assert found[-1] == 300, found


@simulated
async def test_a_look_goes_on_where_a_source_is_gone(world: SimulatedWorld) -> None:
    members = await swarm(world, 6)
    await held_by(members, fresh(4, now_of(members[0]) + HOUR))
    reader = await reader_of(world, members, "reader")
    await reader.dht.look(KEY, Breadth.ALL)
    for one in members[2:]:
        await reader.dht.look(KEY)
        one.crash()
        with trio.fail_after(5):
            entries, _ = await reader.dht.look(KEY)
        assert len(entries) == 4


# -- the parts


def contacts(number: int) -> Any:
    return [contact_of(publisher(one).peer_id, ()) for one in range(1, number + 1)]


def test_the_source_is_one_that_writers_wait_for_and_others_have_their_turn() -> None:
    view, replicas, chance = View(1024), contacts(20), Random(1)
    sources, witnesses = set(), set()
    for turn in range(100):
        order = view.turn(replicas, 5, turn * 2 * TURN_SECONDS, chance)
        assert view.bringing_source is None, "what it brought long ago is not brought again"
        again = view.turn(replicas, 5, turn * 2 * TURN_SECONDS + 0.1, chance)
        assert again[:2] == order[:2]
        assert view.bringing_source == order[0].node_id
        assert sorted(one.node_id for one in order) == sorted(one.node_id for one in replicas)
        sources.add(order[0].node_id)
        witnesses.add(order[1].node_id)
    assert sources == {one.node_id for one in replicas[:5]}
    assert witnesses == {one.node_id for one in replicas}


def test_another_takes_the_turn_of_a_source_or_a_witness_that_fails() -> None:
    view, replicas, chance = View(1024), contacts(20), Random(1)
    source, witness, *_ = view.turn(replicas, 5, 0.0, chance)
    view.failed(witness)
    order = view.turn(replicas, 5, 0.0, chance)
    assert order[0] == source
    left = [one for one in replicas if one != source]
    order = view.turn(left, 5, 0.0, chance)
    assert order[0] in left[:5]
    assert view.turn(left[:1], 5, 0.0, chance) == left[:1]


def test_a_view_remembers_a_bounded_number_of_names() -> None:
    view = View(1024)
    slot = note()
    for number in range(OLD_NAMES_KEPT + 100):
        name = number.to_bytes(8, "big")
        signature = slot.signature[:32] + name + slot.signature[40:]
        view.take(msgspec.structs.replace(slot, sequence=number, signature=signature))
    assert len(view._names) <= OLD_NAMES_KEPT + 1
    assert view.missing([name], replica(0)) == []


def replica(number: int) -> Contact:
    return contact_of(publisher(number).peer_id, ())


def test_a_replica_that_cannot_vouch_is_passed_over_until_the_next_survey_and_others_are_not() -> (
    None
):
    view, slot = View(2), note()
    name = prefix_of_slot(slot)
    view.pass_over(replica(0), slot)
    assert view.missing([name], replica(0)) == []
    assert view.missing([name], replica(1)) == [name]
    view.surveyed([replica(0), replica(1)], 0.0)
    assert view.missing([name], replica(0)) == [name]
    view.take(slot)
    assert view.missing([name], replica(0)) == []


def test_a_view_has_no_more_slots_than_a_few_replicas() -> None:
    """One that invents publishers filled it, and the reader sent them on to all others."""
    view = View(2)
    slots = [note(publisher(one), KEY, "", 1, HOUR) for one in range(2 * FULL_REPLICAS + 1)]
    for slot in slots:
        view.take(slot)
    first, *_, last = slots
    assert set(view.slots) == {one.publisher for one in slots} - {last.publisher}
    assert view.missing([prefix_of_slot(last)], replica(0)), "there may be room for it later"
    newer = note(publisher(0), KEY, "", 2, HOUR)
    view.take(newer)
    assert view.slots[first.publisher] == newer


def test_one_reading_of_many_keys_takes_bounded_memory_and_each_key_has_its_share() -> None:
    """Its limit is that of what a node stores, whatever others have stored under the keys."""
    size, keys = 60_000, 32
    share = READ_BYTES // keys // size
    slots = [note(publisher(one), KEY, "x" * size, 1, HOUR) for one in range(3 * share)]
    room = ReadRoom(keys)
    full = [View(1024, room) for _ in range(keys - 1)]
    for view in full:
        for slot in slots:
            view.take(slot)
    taken = sum(len(slot.value) for view in full for slot in view.slots.values())
    assert READ_BYTES * 0.9 < taken < 2 * READ_BYTES
    assert len(full[0].slots) == len(slots), "while there is room, none has to keep to its share"
    last = View(1024, room)
    for slot in slots[: share // 2]:
        last.take(slot)
    assert len(last.slots) == share // 2
    left_out = prefix_of_slot(slots[-1])
    assert full[-1].missing([left_out], replica(0)) == [], "it is not asked for again"
    newer = note(publisher(0), KEY, "y" * size, 2, HOUR)
    full[0].take(newer)
    assert full[0].slots[newer.publisher] == newer, "it needs no room of its own"


def test_views_of_few_keys_are_kept() -> None:
    views = Views()
    first = views.of("note/0", 64)
    assert views.of("note/0", 64) is first
    for number in range(1, VIEWS_KEPT + 1):
        views.of(f"note/{number}", 64)
    assert views.of("note/0", 64) is not first


def test_a_handful_asks_another_for_each_that_fails_or_is_slow() -> None:
    replicas = contacts(5)
    queue = ReplicaQueue(replicas, 2)
    assert queue.next_queries() == replicas[:2]
    queue.failed(replicas[0])
    assert queue.next_queries() == replicas[2:3]
    queue.slow(replicas[1])
    assert queue.next_queries() == replicas[3:4]
    queue.answered(replicas[2], ())
    assert not queue.is_done
    queue.answered(replicas[1], ())  # late, and taken
    assert queue.is_done


def test_a_handful_that_runs_out_is_content_with_whoever_answered() -> None:
    replicas = contacts(2)
    queue = ReplicaQueue(replicas, 2)
    queue.next_queries()
    queue.answered(replicas[0], ())
    queue.slow(replicas[1])
    assert not queue.is_done
    assert queue.waits_for_slow_only
    queue.failed(replicas[1])
    assert queue.is_done
