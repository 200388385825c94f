"""Putting, reading and taking back, in a small swarm."""

from __future__ import annotations

import pytest
import trio

from node.simulated_network import SimulatedWorld
from protocols.dht.refusals import SlotRefusal, SlotRefused
from tests.dht.members import joined, member, simulated, swarm, table_sizes


@simulated
async def test_what_one_node_puts_every_node_reads(world: SimulatedWorld) -> None:
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
async def test_what_was_withdrawn_is_gone_everywhere(world: SimulatedWorld) -> None:
    members = await swarm(world, 5)
    await members[0].dht.put("note/gone", "here", 60)
    await members[1].dht.put("note/gone", "stays", 60)
    await members[0].dht.withdraw("note/gone")
    for reader in members:
        found = await reader.dht.get("note/gone")
        assert [entry.value for entry in found.values()] == ["stays"]


@simulated
async def test_a_slot_that_is_not_kept_up_ends(world: SimulatedWorld) -> None:
    members = await swarm(world, 5)
    await members[0].dht.put("note/short", "here", 60, keep_up=False)
    await trio.sleep(59)
    assert await members[3].dht.get("note/short")
    await trio.sleep(2)
    assert not await members[3].dht.get("note/short")


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
