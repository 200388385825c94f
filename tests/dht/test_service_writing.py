"""Writing when something is in the way: an earlier life, a newer node, the limits of a message."""

from __future__ import annotations

from collections import Counter

import pytest
import trio

from protocols.dht import Slot, SlotRefused
from protocols.dht import keeper as kept
from protocols.dht.keeper import UnsavedSlots
from protocols.dht.messages import (
    FIND,
    GREET,
    PROTOCOL,
    STORE,
    FindRequest,
    FindResponse,
    GreetRequest,
    GreetResponse,
    Query,
    StoreRequest,
    StoreResponse,
)
from protocols.dht.slots import SlotRefusal, sign_slot
from protocols.dht.storage import slot_bytes
from protocols.dht.writer import LARGEST_PUT
from protocols.errors import LimitExceeded, ProtocolMisuse
from protocols.guard import Caller
from protocols.testing.world import SimulatedWorld
from tests.dht.impostors import Impostor
from tests.dht.members import joined, member, simulated, swarm
from tests.dht.publishers import HOUR, NOW, note, publisher, text
from tests.dht.test_service_faults import now_of, put_in_table


@simulated
async def test_a_publisher_whose_clock_was_ahead_writes_higher_sequences_after_a_restart(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 5)
    writer, now = members[0], now_of(members[0])
    ahead = sign_slot(writer.network.identity, "note/own", text("before"), now + HOUR, now + HOUR)
    for one in members[1:]:
        one.dht._state.keep(ahead)
    written = await writer.dht.put("note/own", "after", 600)
    assert written.slot.sequence == ahead.sequence + 1
    for reader in members:
        found = await reader.dht.get("note/own")
        assert [one.value for one in found.values()] == ["after"]


@simulated
async def test_a_refusal_of_a_newer_node_is_a_refusal(world: SimulatedWorld) -> None:
    async def serve(node: Impostor) -> None:
        def greet(_caller: Caller, _request: GreetRequest) -> GreetResponse:
            return GreetResponse(node.time_ms(), node.introduction, 200)

        def find(_caller: Caller, request: FindRequest) -> FindResponse:
            del request
            return FindResponse(node.time_ms(), (), node.introduction)  # too few

        def store(_caller: Caller, request: StoreRequest) -> StoreResponse:
            reasons = ("For a reason of tomorrow.",)
            return StoreResponse(node.time_ms(), b"\xfa" * len(request.slots), reasons)

        node.rpc.serve(GREET, greet)
        node.rpc.serve(FIND, find)
        node.rpc.serve(STORE, store)

    newer = Impostor(world, "newer", serve)
    one = member(world, "one")
    await joined(one)
    await newer.ready.wait()
    put_in_table(one.dht, newer)
    one.dht._state.storage.limits = one.dht._state.storage._quotas.limits = (
        one.dht._state.settings.storage.__class__(total_bytes=1)
    )
    with pytest.raises(SlotRefused, match="Every peer refused"):
        await one.dht.put("note/x", "x", 600)
    written = (await one.dht.put_many([("note/x", "x", 600)]))[0]
    assert written.refused == Counter({None: 1, SlotRefusal.MEMORY: 1})
    assert one.dht.statistics().own_slots_refused["unknown"] == 2


@simulated
async def test_too_many_at_once_are_refused_before_any_is_kept_up(world: SimulatedWorld) -> None:
    alone = member(world, "alone")
    await joined(alone)
    with pytest.raises(ProtocolMisuse, match="too many at once"):
        await alone.dht.put_many((f"note/{n}", "x", 60) for n in range(LARGEST_PUT + 1))
    assert alone.dht.statistics().slots_published == 0


@simulated
async def test_a_request_for_the_batch_method_is_refused_by_the_single_one(
    world: SimulatedWorld,
) -> None:
    stranger, node = await swarm(world, 2)
    slots = tuple(note(publisher(one), expires=now_of(node) + HOUR) for one in range(1, 10))
    with pytest.raises(LimitExceeded):
        await stranger.rpc.call(node.peer, STORE, StoreRequest(slots), timeout=5)


@simulated
async def test_somebody_who_no_longer_serves_the_directory_leaves_the_table(
    world: SimulatedWorld,
) -> None:
    first, second = await swarm(world, 2)
    second.network.stop_serving(PROTOCOL)
    second.rpc._services.pop(PROTOCOL)
    await first.network.disconnect(second.peer)
    await trio.sleep(30)
    assert first.dht.statistics().peers_in_table == 0


@pytest.mark.slow
@simulated
async def test_addresses_that_do_not_fit_in_an_answer_are_left_out(world: SimulatedWorld) -> None:
    members = await swarm(world, 22)
    node = members[5]
    for contact in list(node.dht._state.table):
        long = contact.with_more_addresses(f"/dns4/{'x' * 200}{n}.example/tcp/1" for n in range(8))
        node.dht._state.table.heard_from(long, trio.current_time())
    queries = tuple(Query(number.to_bytes(32, "big")) for number in range(64))
    response = await members[0].rpc.call(node.peer, FIND, FindRequest(queries), timeout=5)
    assert len(response.answers) == 64
    assert response.answers[0].contacts
    assert not response.answers[-1].contacts


# Waiting for the disk


def many(number: int) -> list[Slot]:
    return [note(publisher(one), expires=NOW + HOUR) for one in range(1, number + 1)]


def test_many_unsaved_slots_are_saved_at_once_and_no_more_are_held_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = slot_bytes(note())
    monkeypatch.setattr(kept, "SAVED_AT_ONCE_BYTES", 2 * size)
    monkeypatch.setattr(kept, "LARGEST_BYTES", 4 * size)
    waiting = UnsavedSlots()
    slots = many(6)
    waiting.add(slots[0])
    waiting.add(slots[0])
    assert not waiting.are_many.is_set()
    for slot in slots[1:]:
        waiting.add(slot)
    assert waiting.are_many.is_set()
    assert waiting.take() == slots[:4]
    assert not waiting.are_many.is_set()
    assert len(waiting) == 0
    waiting.add(slots[5])
    assert waiting.take() == slots[5:]
