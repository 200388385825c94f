"""What travels in a query and its answer: packed slots, and no more peers than are of use."""

from __future__ import annotations

import tracemalloc
import zlib
from functools import cache

import pytest

from protocols.dht import Breadth, Slot
from protocols.dht.contacts import Contact, contact_of
from protocols.dht.ids import node_id_of, position_of
from protocols.dht.messages import (
    FIND,
    PACKED_BYTES_AT_LEAST,
    PACKED_BYTES_PER_ANSWER,
    FindRequest,
    Found,
    Query,
    pack_slots,
    prefix_of_id,
    unpack_slots,
    without_peer,
)
from protocols.errors import MalformedMessage
from protocols.rpc import decode, encode
from protocols.testing.world import SimulatedWorld
from tests.dht.impostors import Impostor, that_greets
from tests.dht.members import Member, simulated, swarm
from tests.dht.publishers import HOUR, note, publisher
from tests.dht.test_repeated_reads import fresh, held_by, reader_of
from tests.dht.test_service_faults import among, bring, now_of, put_in_table

KEY = "note/many"
ROOM = PACKED_BYTES_PER_ANSWER
POSITION = position_of(KEY).to_bytes(32, "big")


def alike(number: int) -> tuple[Slot, ...]:
    """Slots whose values are the same for the most part, as those of a step's peers."""
    same = "epoch 1234, history 5a2f17c09be4, torch 2.13.0, a cohort of 32, of which this is "
    return tuple(note(publisher(one), KEY, f"{same}{one}", 1, HOUR) for one in range(number))


def test_packed_slots_are_the_same_and_take_little_more_than_half() -> None:
    slots = alike(12)
    packed, size = pack_slots(slots, ROOM)
    assert size == len(encode(slots))
    assert len(packed) < 0.6 * size
    assert unpack_slots(packed, size) == (slots, size)


def test_what_saves_nothing_or_is_too_much_is_not_packed() -> None:
    assert pack_slots((), ROOM) == (b"", 0)
    assert pack_slots(alike(1), ROOM) == (b"", 0)
    assert pack_slots(alike(12), len(encode(alike(12))) - 1) == (b"", 0)
    assert pack_slots(alike(2), PACKED_BYTES_AT_LEAST - 1) == (b"", 0)
    assert pack_slots(alike(2), ROOM)[1] == PACKED_BYTES_AT_LEAST  # a try counts


PACKED = zlib.compress(encode(alike(3)))


@cache
def bomb() -> bytes:
    return zlib.compress(bytes(16 << 20), 9)


BAD = {
    "no zlib": b"\x00\x01\x02",
    "cut off": PACKED[:-5],
    "more behind it": PACKED + b"x",
    "no slots": zlib.compress(encode(["a", "b"])),
    "too much": b"",
}


@pytest.mark.parametrize("name", BAD)
def test_packed_bytes_that_are_not_slots_are_malformed_and_take_no_memory(name: str) -> None:
    packed = BAD[name] or bomb()
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            unpack_slots(packed, ROOM)
        assert tracemalloc.get_traced_memory()[1] < 8 * ROOM
    finally:
        tracemalloc.stop()


def test_packed_slots_beyond_the_room_are_malformed() -> None:
    packed, size = pack_slots(alike(12), ROOM)
    with pytest.raises(MalformedMessage):
        unpack_slots(packed, size - 1)


def contact_to(impostor: Impostor) -> Contact:
    network = impostor.network
    return contact_of(network.peer_id, without_peer(network.peer_id, network.addresses()))


async def ask(stranger: Member, node: Member, *queries: Query) -> tuple[Found, ...]:
    response = await stranger.rpc.call(node.peer, FIND, FindRequest(queries), timeout=10)
    return response.answers


@simulated
async def test_slots_are_packed_only_for_those_who_allow_it_and_within_a_limit(
    world: SimulatedWorld,
) -> None:
    stranger, node = await swarm(world, 2)
    slots = tuple(fresh(12, now_of(node) + HOUR))
    await bring(stranger, node, *slots)
    (plain,) = await ask(stranger, node, Query(POSITION, KEY))
    assert (plain.slots, plain.packed) == (slots, b"")
    many = await ask(stranger, node, *[Query(POSITION, KEY, packs=True)] * 30)
    unpacked = [unpack_slots(one.packed, ROOM) for one in many if one.packed]
    assert len(unpacked) == ROOM // max(len(encode(slots)), PACKED_BYTES_AT_LEAST) < 30
    assert all(got == slots for got, _ in unpacked)
    assert all(one.slots == slots for one in many if not one.packed)


@simulated
async def test_an_answer_names_no_more_peers_than_are_wanted(world: SimulatedWorld) -> None:
    members = await swarm(world, 9)

    async def named(query: Query) -> int:
        (found,) = await ask(members[0], members[1], query)
        return len(found.contacts)

    assert await named(Query(POSITION)) == 7  # all but those two
    known = b"".join(prefix_of_id(node_id_of(one.peer)) for one in members[2:5])
    assert await named(Query(POSITION, known=known)) == 4
    assert await named(Query(POSITION, known=known, contacts=3)) == 3
    assert await named(Query(POSITION, KEY, contacts=0)) == 0


@simulated
async def test_a_node_asks_for_packed_slots_and_for_peers_where_they_are_of_use(
    world: SimulatedWorld,
) -> None:
    asked: list[Query] = []

    def nothing(query: Query) -> Found:
        asked.append(query)
        return Found(cursor=b"1")

    members, (impostor,) = await among(world, that_greets(answer=nothing), impostors=1)
    await held_by(members, fresh(3, now_of(members[0]) + HOUR))
    reader = await reader_of(world, members, "reader")
    put_in_table(reader.dht, impostor)
    asked.clear()
    await reader.dht.look(KEY, Breadth.ALL)
    await reader.dht.look(KEY, Breadth.ALL)
    survey, look = asked
    assert (survey.packs, survey.contacts) == (True, 20)
    assert (look.packs, look.contacts) == (True, 0)
    await reader.dht._reader.closest([position_of(KEY)], 8)
    assert asked[-1].contacts == 8


WRONG = {
    "a bomb": lambda: Found(packed=bomb()),
    "slots beside": lambda: Found(slots=alike(2), packed=PACKED),
    "together too many": lambda: Found(packed=pack_slots(alike(90), ROOM)[0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_peer_that_packs_too_much_is_avoided_and_hides_nothing(name: str) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        answer = [Found()]
        members, (bad,) = await among(world, that_greets(answer=lambda _: answer[0]), impostors=1)
        await held_by(members, fresh(3, now_of(members[0]) + HOUR))
        reader = await reader_of(world, members, "reader")
        answer[0] = WRONG[name]()
        queries = [Query(POSITION, KEY, packs=True)] * 2
        with pytest.raises(MalformedMessage):
            await reader.dht._reader._requester.find(contact_to(bad), queries)
        assert reader.rpc.avoided_for(bad.network.peer_id) > 0
        put_in_table(reader.dht, bad)
        entries, _ = await reader.dht.look(KEY, Breadth.ALL)
        assert len(entries) == 3

    scenario()


def test_nodes_that_know_nothing_of_packing_understand_queries_and_answers() -> None:
    """Fields are appended: an older node ignores them, and sends none."""
    query, found = Query(POSITION, KEY, packs=True), Found(slots=alike(2))
    old_query, old_found = decode(list, encode(query))[:7], decode(list, encode(found))[:6]
    assert decode(Query, encode(old_query)) == Query(POSITION, KEY)
    assert decode(Found, encode(old_found)) == found
