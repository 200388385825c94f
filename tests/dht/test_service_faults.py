"""The directory when peers lie, are slow or silent, and when what is brought is not right."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import trio

from protocols.dht import Dht, DhtSettings, Slot, SlotRefused, contact_of
from protocols.dht.messages import STORE, STORE_MANY, StoreRequest, StoreResponse, without_peer
from protocols.dht.slots import SlotRefusal, sign_slot
from protocols.dht.storage import StorageLimits
from protocols.errors import PotluckError
from protocols.testing.world import SimulatedWorld
from tests.dht.impostors import (
    Impostor,
    that_answers_with_garbage,
    that_greets,
    that_never_answers,
)
from tests.dht.members import Member, joined, member, simulated, swarm
from tests.dht.publishers import ALICE, DAY, HOUR, note, text


def now_of(one: Member) -> int:
    return int(one.network.wall_time() * 1000)


async def bring(stranger: Member, to: Member, *slots: Slot) -> StoreResponse:
    """Bring slots to one node, as anybody can who speaks the protocol."""
    stranger.network.learn_addresses(to.network.peer_id, [to.address])
    method = STORE if len(slots) <= 8 else STORE_MANY
    return await stranger.rpc.call(to.network.peer_id, method, StoreRequest(slots), timeout=60)


async def refusal_of(stranger: Member, to: Member, slot: Slot) -> tuple[SlotRefusal, str]:
    response = await bring(stranger, to, slot)
    assert response.refusals[0], "the slot was taken"
    return SlotRefusal(response.refusals[0]), response.reasons[0]


def forged(now: int) -> Slot:
    return msgspec.structs.replace(note(ALICE, expires=now + HOUR), value=text("changed"))


def of_another(now: int) -> Slot:
    signed = note(expires=now + HOUR)
    return msgspec.structs.replace(signed, publisher=bytes(range(32)))


def oversized(now: int) -> Slot:
    return note(value="x" * 5000, expires=now + HOUR)


def of_wrong_schema(now: int) -> Slot:
    return sign_slot(ALICE, "note/number", msgspec.msgpack.encode(7), 1, now + HOUR)


def of_next_year(now: int) -> Slot:
    return note(expires=now + 365 * DAY)


def over(now: int) -> Slot:
    return note(expires=now - 1)


def of_no_family(now: int) -> Slot:
    return sign_slot(ALICE, "unheard/of", text("x"), 1, now + HOUR)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (forged, SlotRefusal.BAD_SIGNATURE),
        (of_another, SlotRefusal.BAD_SIGNATURE),
        (oversized, SlotRefusal.TOO_LARGE),
        (of_wrong_schema, SlotRefusal.WRONG_SCHEMA),
        (of_next_year, SlotRefusal.EXPIRY_TOO_FAR),
        (over, SlotRefusal.EXPIRED),
        (of_no_family, SlotRefusal.UNKNOWN_FAMILY),
    ],
)
def test_a_slot_that_is_not_right_is_refused_with_its_reason(
    make: Callable[[int], Slot], refusal: SlotRefusal
) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        stranger, node = await swarm(world, 2)
        code, reason = await refusal_of(stranger, node, make(now_of(node)))
        assert code is refusal
        assert reason
        assert node.dht.statistics().slots_refused == {refusal.name.lower(): 1}
        assert node.dht.statistics().slots_stored == 0

    scenario()


@simulated
async def test_a_replayed_older_sequence_is_refused_and_shown_the_newer(
    world: SimulatedWorld,
) -> None:
    stranger, node = await swarm(world, 2)
    now = now_of(node)
    old, new = (note(sequence=number, value=str(number), expires=now + HOUR) for number in (1, 2))
    assert (await bring(stranger, node, old)).refusals == b"\0"
    assert (await bring(stranger, node, new)).refusals == b"\0"
    response = await bring(stranger, node, old)
    assert response.refusals[0] == SlotRefusal.OLDER_SEQUENCE
    assert response.newer == (new,)


@simulated
async def test_a_withdrawn_slot_cannot_be_brought_back(world: SimulatedWorld) -> None:
    members = await swarm(world, 4)
    await members[0].dht.put("note/gone", "here", 600)
    await trio.sleep(2)
    stolen = members[1].dht._state.storage.get("note/gone", now_of(members[1]))[0]
    await members[0].dht.withdraw("note/gone")
    await trio.sleep(2)
    members[0].crash()
    code, _ = await refusal_of(members[1], members[2], stolen)
    assert code is SlotRefusal.OLDER_SEQUENCE
    assert not await members[3].dht.get("note/gone")


@simulated
async def test_a_thousand_keys_of_one_publisher_stop_at_the_limit_and_harm_nobody(
    world: SimulatedWorld,
) -> None:
    stranger, other, node = await swarm(world, 3)
    expires = now_of(node) + HOUR
    kept = note(other.network.identity, "note/kept", expires=expires)
    await bring(other, node, kept)
    keys = [note(ALICE, f"note/{number}", expires=expires) for number in range(1000)]
    refusals = b""
    for start in range(0, 1000, 100):
        refusals += (await bring(stranger, node, *keys[start : start + 100])).refusals
    limit = StorageLimits().keys_per_publisher
    assert refusals == bytes(limit) + bytes([SlotRefusal.KEYS_PER_PUBLISHER]) * (1000 - limit)
    found = await other.dht.get("note/kept")
    assert len(found) == 1
    with_room = note(other.network.identity, "note/more", expires=expires)
    assert (await bring(other, node, with_room)).refusals == b"\0"


@simulated
async def test_a_full_node_refuses_and_drops_nothing(world: SimulatedWorld) -> None:
    stranger = member(world, "stranger")
    settings = DhtSettings(storage=StorageLimits(total_bytes=5000))
    small = member(world, "small", settings=settings)
    await joined(stranger, small)
    expires = now_of(small) + HOUR
    slots = [note(ALICE, f"note/{number}", expires=expires) for number in range(8)]
    refusals = (await bring(stranger, small, *slots)).refusals
    assert refusals == bytes(4) + bytes([SlotRefusal.MEMORY]) * 4
    assert small.dht.statistics().slots_stored == 4


@simulated
async def test_a_put_that_nobody_takes_says_why(world: SimulatedWorld) -> None:
    alone = member(world, "alone", settings=DhtSettings(storage=StorageLimits(total_bytes=1)))
    await joined(alone)
    with pytest.raises(SlotRefused) as caught:
        await alone.dht.put("note/big", "hello", 60)
    assert caught.value.refusal is SlotRefusal.MEMORY
    assert "allows itself" in str(caught.value)


@simulated
async def test_a_slot_that_every_node_would_refuse_is_refused_before_it_is_sent(
    world: SimulatedWorld,
) -> None:
    alone = member(world, "alone")
    await joined(alone)
    for value, ttl, refusal in [
        (7, 60, SlotRefusal.WRONG_SCHEMA),
        ("x" * 5000, 60, SlotRefusal.TOO_LARGE),
        ("x", 365 * 24 * 3600, SlotRefusal.EXPIRY_TOO_FAR),
    ]:
        with pytest.raises(SlotRefused) as caught:
            await alone.dht.put("note/wrong", value, ttl)
        assert caught.value.refusal is refusal


# Peers that answer wrongly


async def among(
    world: SimulatedWorld, answer: Callable[[Impostor], Awaitable[None]], impostors: int = 3
) -> tuple[list[Member], list[Impostor]]:
    """A swarm of six, in whose tables are as many impostors."""
    members = await swarm(world, 6)
    bad = [Impostor(world, f"impostor-{number}", answer) for number in range(impostors)]
    for one in bad:
        await one.ready.wait()
        for victim in members:
            put_in_table(victim.dht, one)
    return members, bad


def put_in_table(dht: Dht, impostor: Impostor) -> None:
    """Put it into the table, as if it had behaved until now."""
    network = impostor.network
    contact = contact_of(network.peer_id, without_peer(network.peer_id, network.addresses()))
    dht._state.table.heard_from(contact, trio.current_time())


async def put_and_get_everywhere(members: list[Member]) -> float:
    """Write and read at every node; the seconds that the slowest took."""
    slowest = 0.0
    for number, writer in enumerate(members):
        began = trio.current_time()
        await writer.dht.put(f"note/{number}", str(number), 600)
        for reader in members:
            began = trio.current_time()
            found = await reader.dht.get(f"note/{number}")
            assert [entry.value for entry in found.values()] == [str(number)]
        slowest = max(slowest, trio.current_time() - began)
    return slowest


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        that_never_answers,
        that_answers_with_garbage,
        that_greets(wait_seconds=30.0),
    ],
    ids=["never", "garbage", "after 30 s"],
)
def test_peers_that_do_not_answer_properly_cost_a_little_time_and_nothing_else(
    answer: Callable[[Impostor], Awaitable[None]],
) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        members, bad = await among(world, answer)
        slowest = await put_and_get_everywhere(members)
        assert slowest < 3
        assert sum(one.questions for one in bad)
        await trio.sleep(60)
        assert await put_and_get_everywhere(members) < 1.5

    scenario()


@simulated
async def test_a_peer_that_passes_on_forged_slots_is_not_believed(world: SimulatedWorld) -> None:
    lie = forged(int(world.honest_time() * 1000))
    members, bad = await among(world, that_greets((lie,)), impostors=1)
    await members[0].dht.put("note/hello", "truth", 600)
    for reader in members:
        found: dict[Any, Any] = await reader.dht.get("note/hello")
        assert {peer: one.value for peer, one in found.items()} == {members[0].peer: "truth"}
    assert sum(one.dht.statistics().bad_slots_read for one in members)
    assert sum(one.questions for one in bad)


@simulated
async def test_slots_under_other_keys_than_asked_for_are_not_taken(world: SimulatedWorld) -> None:
    stray = note(ALICE, "note/stray", expires=int(world.honest_time() * 1000) + HOUR)
    members, _ = await among(world, that_greets((stray,)), impostors=1)
    assert not await members[0].dht.get("note/hello")


@simulated
async def test_a_peer_that_brings_forgeries_again_and_again_is_avoided(
    world: SimulatedWorld,
) -> None:
    stranger, node, other = await swarm(world, 3)
    lies = [forged(now_of(node))] * 8
    for _ in range(4):
        assert set((await bring(stranger, node, *lies)).refusals) == {SlotRefusal.BAD_SIGNATURE}
    with suppress(PotluckError):  # the straw that breaks it may still be answered
        await bring(stranger, node, *lies)
    assert node.rpc.avoided_for(stranger.peer) > 0
    with pytest.raises(PotluckError):
        await bring(stranger, node, *lies)
    assert node.dht.statistics().slots_refused["bad_signature"] <= 48
    assert not other.rpc.avoided_for(stranger.peer)


@simulated
async def test_a_peer_that_passes_on_a_forgery_is_avoided_for_a_while(
    world: SimulatedWorld,
) -> None:
    lie = forged(int(world.honest_time() * 1000))
    members, bad = await among(world, that_greets((lie,)), impostors=1)
    await members[0].dht.get("note/hello")
    assert members[0].rpc.avoided_for(bad[0].network.peer_id) > 0
