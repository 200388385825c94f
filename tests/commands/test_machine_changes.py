"""A machine that slept, or has another address: dead links go, and the others are looked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import trio

from node.core.machine_changes import (
    ASLEEP_SECONDS,
    LOOK_SECONDS,
    SIGN_OF_LIFE_SECONDS,
    MachineWatch,
)
from protocols.dht import DhtSettings
from protocols.testing.world import SimulatedWorld
from tests.dht.members import Member, joined, member, simulated

NIGHT_SECONDS = 8 * 3600.0
SOON_SECONDS = 2 * LOOK_SECONDS + SIGN_OF_LIFE_SECONDS


@dataclass
class Laptop:
    """A member on a machine whose clock says how long it has slept in all."""

    one: Member
    slept: float = 0.0
    told: list[str] = field(default_factory=list)

    def watched(self, world: SimulatedWorld) -> Laptop:
        watch = MachineWatch(
            self.one.network, self.one.dht, elapsed=lambda: trio.current_time() + self.slept
        )
        watch.follow(self.told.append)
        world.nursery.start_soon(watch.run)
        return self


async def swarm(world: SimulatedWorld) -> tuple[Member, Laptop]:
    keeper = member(world, "keeper")
    await joined(keeper)
    volunteer = member(world, "volunteer", [keeper])
    await joined(volunteer)
    laptop = Laptop(volunteer).watched(world)
    await trio.sleep(LOOK_SECONDS)  # it has looked once
    return keeper, laptop


@simulated
async def test_links_that_died_in_its_sleep_are_given_up_and_the_others_found(
    world: SimulatedWorld,
) -> None:
    keeper, laptop = await swarm(world)
    cuts = world.partition([keeper.network], [laptop.one.network])  # nothing arrives, none says so
    laptop.slept = NIGHT_SECONDS
    await trio.sleep(SOON_SECONDS)
    assert laptop.told == ["this machine slept for 8 h 0 min: checking which peers are still there"]
    assert laptop.one.network.links() == ()
    world.heal(cuts)
    await trio.sleep(LOOK_SECONDS)
    laptop.slept += NIGHT_SECONDS  # and now it wakes where there is a network
    await trio.sleep(SOON_SECONDS)
    assert [link.peer for link in laptop.one.network.links()] == [keeper.network.peer_id]


@simulated
async def test_links_that_live_stay_as_they_are(world: SimulatedWorld) -> None:
    keeper, laptop = await swarm(world)
    before = laptop.one.network.link(keeper.network.peer_id)
    laptop.slept = NIGHT_SECONDS
    await trio.sleep(SOON_SECONDS)
    after = laptop.one.network.link(keeper.network.peer_id)
    assert before is not None
    assert after is not None
    assert after.connected_at == before.connected_at


@pytest.mark.slow
@simulated
async def test_a_node_without_join_addresses_asks_the_peers_that_it_lost(
    world: SimulatedWorld,
) -> None:
    first = member(world, "first")
    await joined(first)
    second = member(world, "second", [first])
    await joined(second)
    laptop = Laptop(first).watched(world)
    await trio.sleep(LOOK_SECONDS)
    assert first.dht.statistics().peers_in_table == 1
    second.crash()
    await trio.sleep(NIGHT_SECONDS / 2)
    second.restart(DhtSettings())  # it knows nobody: only the first can find it
    await trio.sleep(SOON_SECONDS)
    assert first.dht.statistics().peers_in_table == 0  # by itself it would try in some minutes
    laptop.slept = NIGHT_SECONDS
    await trio.sleep(SOON_SECONDS)
    assert first.dht.statistics().peers_in_table == 1


@simulated
async def test_a_busy_machine_has_not_slept(world: SimulatedWorld) -> None:
    _, laptop = await swarm(world)
    for _ in range(20):
        laptop.slept += ASLEEP_SECONDS / 3
        await trio.sleep(LOOK_SECONDS)
    assert laptop.told == []


def test_a_cable_that_is_pulled_and_put_back_is_noticed_although_loopback_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        _, laptop = await swarm(world)
        loopback = "/ip4/127.0.0.1/tcp/4001"
        outside = laptop.one.network.listened_addresses()

        def listened(*places: str) -> None:
            monkeypatch.setattr(laptop.one.network, "listened_addresses", lambda: places)

        listened(*outside, loopback)
        await trio.sleep(2 * LOOK_SECONDS)
        listened(loopback)
        await trio.sleep(2 * LOOK_SECONDS)
        assert laptop.told == []
        listened(*outside, loopback)
        await trio.sleep(2 * LOOK_SECONDS)
        assert laptop.told == ["this machine has an address again: looking for the others"]

    scenario()
