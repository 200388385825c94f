"""Swarms that are split, restarted, started all at once, cut off from where they began."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import pytest
import trio

from protocols.dht import Contact, DhtSettings, Joined, KeepingFailed, KeptSlot, contact_of
from protocols.dht.slots import SlotRefusal
from protocols.testing.world import NodeSettings, SimulatedWorld, run_simulation
from tests.dht.members import (
    SETTINGS,
    Member,
    joined,
    member,
    simulated,
    swarm,
    table_sizes,
)
from tests.dht.publishers import note
from tests.dht.test_service_faults import bring, refusal_of

# Whole swarms through hours of virtual time: together half a minute, too much for `--fast`.
pytestmark = pytest.mark.slow

HOUR = 3600.0


class MemoryKeeper:
    """Keeps what it is given, as a disk would."""

    def __init__(self) -> None:
        self.contacts: list[Contact] = []
        self.slots: dict[tuple[str, bytes], KeptSlot] = {}

    @property
    def blocks(self) -> bool:
        return False

    def load_contacts(self) -> Sequence[Contact]:
        return list(self.contacts)

    def save_contacts(self, contacts: Sequence[Contact]) -> None:
        self.contacts = list(contacts)

    def load_slots(self) -> Sequence[KeptSlot]:
        return list(self.slots.values())

    def save_slots(self, slots: Sequence[KeptSlot], now_ms: int) -> None:
        self.slots.update({(one.slot.key, one.slot.publisher): one for one in slots})
        over = [where for where, one in self.slots.items() if one.forget_at <= now_ms]
        for where in over:
            del self.slots[where]


async def read_everywhere(members: Sequence[Member], key: str, expected: Sequence[str]) -> None:
    for reader in members:
        found = await reader.dht.get(key)
        assert sorted(one.value for one in found.values()) == sorted(expected), reader.network.name


@simulated
async def test_a_swarm_split_for_ten_minutes_is_one_again_and_has_both_halves_slots(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 16)
    left, right = members[:8], members[8:]
    world.partition([one.network for one in left], [one.network for one in right])
    await trio.sleep(60)
    await left[0].dht.put("note/both", "left", HOUR)
    await right[0].dht.put("note/both", "right", HOUR)
    await left[1].dht.put("note/left", "left", HOUR)
    await read_everywhere(left, "note/both", ["left"])
    await trio.sleep(540)
    await read_everywhere(right, "note/both", ["right"])
    world.heal()
    await trio.sleep(360)
    await read_everywhere(members, "note/both", ["left", "right"])
    await read_everywhere(members, "note/left", ["left"])
    assert table_sizes(members) == [15] * 16


@simulated
async def test_when_a_cut_heals_a_node_does_not_search_for_each_peer_that_is_back(
    world: SimulatedWorld,
) -> None:
    """A thousand peers searched for each of hundreds, which took their links for a minute."""
    members = await swarm(world, 32)
    await trio.sleep(150)  # they have settled
    left, right = members[:16], members[16:]
    world.partition([one.network for one in left], [one.network for one in right])
    await trio.sleep(60)
    world.heal()
    before = [one.dht.statistics().finds_sent for one in members]
    await trio.sleep(60)
    sent = [one.dht.statistics().finds_sent - old for one, old in zip(members, before, strict=True)]
    assert min(table_sizes(members)) > 24, table_sizes(members)
    assert sorted(sent)[16] < 290, "a search for each of the other half takes 350"


@simulated
async def test_a_swarm_whose_nodes_all_restart_at_once_finds_itself_and_its_slots(
    world: SimulatedWorld,
) -> None:
    members: list[Member] = []
    for number in range(8):
        keeper = MemoryKeeper()
        members.append(member(world, f"node-{number}", members[:2], keeper=keeper))
        await joined(members[-1])
    await members[5].dht.put("note/kept", "still here", HOUR)
    await trio.sleep(120)
    for one in members:
        one.crash()
    # nobody has a bootstrap address any more: there is only what each has kept
    members = [one.restart(DhtSettings()) for one in members]
    await joined(*members)
    await trio.sleep(60)
    assert table_sizes(members) == [7] * 8
    await read_everywhere(members, "note/kept", ["still here"])


@simulated
async def test_a_node_rejoins_with_all_bootstrap_addresses_dead(world: SimulatedWorld) -> None:
    first, second, third = await swarm(world, 3)
    keeper = MemoryKeeper()
    one = member(world, "one", [first], keeper=keeper)
    await joined(one)
    await trio.sleep(60)
    await one.leave()
    first.crash()
    second.crash()
    again = one.restart()
    await joined(again)
    assert again.dht.bootstrap_state().joined is Joined.JOINED
    await third.dht.put("note/alive", "yes", 60)
    await read_everywhere([again], "note/alive", ["yes"])


@pytest.mark.parametrize("seed", range(100))
def test_eight_nodes_that_start_in_the_same_instant_make_one_swarm(seed: int) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        networks = [world.add_node(f"node-{number}") for number in range(8)]
        # each repetition another choice of the common addresses, one or more of the eight
        common = world.chance.sample(networks, 1 + seed % 8)
        settings = DhtSettings(bootstrap=tuple(one.address for one in common))
        members = [Member(world, network, settings) for network in networks]
        with trio.fail_after(120):
            await joined(*members)
        await trio.sleep(15)
        assert table_sizes(members) == [7] * 8
        await members[0].dht.put("note/one", "swarm", 60)
        await read_everywhere(members, "note/one", ["swarm"])

    run_simulation(scenario, seed=seed, settings=SETTINGS)


@simulated
async def test_nodes_that_meet_in_two_groups_first_are_one_swarm_in_the_end(
    world: SimulatedWorld,
) -> None:
    networks = [world.add_node(f"node-{number}") for number in range(8)]
    world.partition(networks[:4], networks[4:])
    settings = DhtSettings(bootstrap=tuple(one.address for one in networks))
    members = [Member(world, network, settings) for network in networks]
    await joined(*members)
    await trio.sleep(60)
    assert table_sizes(members) == [3] * 8
    world.heal()
    await trio.sleep(10 * 60)
    assert table_sizes(members) == [7] * 8


@simulated
async def test_clocks_that_are_hours_off_do_not_matter(world: SimulatedWorld) -> None:
    skews = [0.0, 3 * HOUR, -5 * HOUR, 0.0, 0.0, 0.4]
    members: list[Member] = []
    for number, skew in enumerate(skews):
        machine = NodeSettings(clock_skew_seconds=skew)
        members.append(member(world, f"node-{number}", members[:3], machine=machine))
        await joined(members[-1])
        await trio.sleep(5)
    for writer in members:
        await writer.dht.put(f"note/{writer.network.name}", "on time", 60, keep_up=False)
        await read_everywhere(members, f"note/{writer.network.name}", ["on time"])
    offset = members[1].dht.statistics().clock_offset_ms
    assert abs(offset + 3 * HOUR * 1000) < 1000
    await trio.sleep(58)
    await read_everywhere(members, "note/node-5", ["on time"])
    await trio.sleep(4)
    await read_everywhere(members, "note/node-5", [])


@simulated
async def test_a_peer_in_client_mode_reads_and_writes_and_is_in_nobodys_table(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 4)
    settings = DhtSettings(bootstrap=(members[0].address,), client=True)
    client = member(world, "client", settings=settings, machine=NodeSettings(dialable=False))
    await joined(client)
    await client.dht.put("note/client", "hello", 60)
    await read_everywhere([*members, client], "note/client", ["hello"])
    await client.dht.withdraw("note/client")
    await read_everywhere([*members, client], "note/client", [])
    await trio.sleep(60)
    assert table_sizes(members) == [3] * 4
    assert client.dht.statistics().peers_in_table == 4
    assert client.dht.statistics().slots_stored == 0


@simulated
async def test_a_peer_that_only_says_that_it_can_be_dialled_is_not_passed_on(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 4)
    behind_nat = member(world, "boaster", members[:1], machine=NodeSettings(dialable=False))
    await joined(behind_nat)
    await behind_nat.dht.put("note/boast", "hello", 60)
    await trio.sleep(60)
    assert table_sizes(members) == [3] * 4
    assert sum(one.dht.statistics().peers_not_dialable for one in members)


@simulated
async def test_a_newcomer_is_given_the_slots_that_it_is_closer_to(world: SimulatedWorld) -> None:
    members = await swarm(world, 6)
    for number in range(40):
        await members[number % 6].dht.put(f"note/{number}", "here", HOUR)
    newcomer = member(world, "newcomer", members[:1])
    await joined(newcomer)
    await trio.sleep(30)
    held = newcomer.dht.statistics().slots_stored
    assert held > 5  # about a quarter: it is the closest or second closest of seven
    assert held == len({slot.key for slot in newcomer.dht._state.storage.slots(0)})


@simulated
async def test_a_node_that_cannot_join_reports_how_each_address_failed_and_goes_on_trying(
    world: SimulatedWorld,
) -> None:
    late = world.add_node("late")
    world.crash(late)
    settings = DhtSettings(bootstrap=(late.address,))
    one = member(world, "one", settings=settings)
    await one.ready.wait()
    await trio.sleep(600)
    state = one.dht.bootstrap_state()
    assert state.joined is Joined.TRYING
    (address,) = state.addresses
    assert address.address == late.address
    assert "refused" in address.failure
    assert 8 < address.attempts < 80  # ever more rarely, and at least four times a minute
    assert not one.dht._bootstrap.joined.is_set()
    Member(world, world.restart(late), DhtSettings())
    with trio.fail_after(61):
        await joined(one)


@simulated
async def test_the_same_complaint_is_not_logged_again(world: SimulatedWorld) -> None:
    away = [world.add_node(name) for name in ("first", "second")]
    for one in away:
        world.crash(one)
    settings = DhtSettings(bootstrap=tuple(one.address for one in away))
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("potluck.dht")
    logger.addHandler(handler)
    try:
        one = member(world, "one", settings=settings)
        await one.ready.wait()
        await trio.sleep(600)
    finally:
        logger.removeHandler(handler)
    assert len(heard) == len(away), heard
    assert all(said.startswith("cannot join at ") for said in heard)


@simulated
async def test_a_node_comes_back_to_an_address_that_was_down_for_longer_than_lost_peers_are_sought(
    world: SimulatedWorld,
) -> None:
    first = member(world, "first")
    one = member(world, "one", [first])
    await joined(first, one)
    first.crash()
    await trio.sleep(30 * HOUR)
    assert one.dht.bootstrap_state().joined is Joined.TRYING
    again = first.restart()
    await trio.sleep(61)
    assert one.dht.bootstrap_state().joined is Joined.JOINED
    assert table_sizes([again, one]) == [1, 1]


@simulated
async def test_a_cache_of_peers_that_are_all_gone_does_not_delay_a_node_whose_bootstrap_answers(
    world: SimulatedWorld,
) -> None:
    """Each of them takes ten seconds, and they were all tried before the node had joined."""
    first = member(world, "first")
    await joined(first)
    keeper = MemoryKeeper()
    for number in range(100):
        gone = member(world, f"gone-{number}")
        await gone.ready.wait()
        body, _, peer = gone.address.rpartition("/p2p/")
        keeper.contacts.append(contact_of(peer, (body,)))
        world.crash(gone.network, silently=True)
    began = trio.current_time()
    one = member(world, "one", [first], keeper=keeper)
    await joined(one)
    assert trio.current_time() - began < 3.0


@simulated
async def test_a_node_whose_network_is_back_does_not_first_try_all_that_it_knew(
    world: SimulatedWorld,
) -> None:
    """With 128 of them, eight at once and twenty seconds each, it took five minutes."""
    first = member(world, "first")
    await joined(first)
    keeper = MemoryKeeper()
    for number in range(100):
        gone = member(world, f"gone-{number}")
        await gone.ready.wait()
        body, _, peer = gone.address.rpartition("/p2p/")
        keeper.contacts.append(contact_of(peer, (body,)))
        world.crash(gone.network, silently=True)
    world.crash(first.network, silently=True)
    one = member(world, "one", [first], keeper=keeper)
    await one.ready.wait()
    await trio.sleep(11)
    first.restart()
    began = trio.current_time()
    one.dht.try_again_now()
    await joined(one)
    assert trio.current_time() - began < 3.0


class FullDisk(MemoryKeeper):
    def save_contacts(self, contacts: Sequence[Contact]) -> None:  # noqa: ARG002
        raise KeepingFailed("The disk is full.")

    def save_slots(self, slots: Sequence[KeptSlot], now_ms: int) -> None:  # noqa: ARG002
        raise KeepingFailed("The disk is full.")


@simulated
async def test_a_full_disk_costs_only_the_stored_slots(
    world: SimulatedWorld,
) -> None:
    first = member(world, "first", keeper=FullDisk())
    second = member(world, "second", [first])
    await joined(first, second)
    await second.dht.put("note/kept", "in memory", HOUR)
    await trio.sleep(300)
    await read_everywhere([first, second], "note/kept", ["in memory"])
    await first.leave()


@simulated
async def test_slots_on_disk_that_were_changed_there_are_not_believed(
    world: SimulatedWorld,
) -> None:
    keeper = MemoryKeeper()
    good = note(key="note/good", expires=int((world.honest_time() + HOUR) * 1000))
    keeper.slots["note/good", good.publisher] = KeptSlot(good, good.expires)
    changed = msgspec.structs.replace(good, key="note/changed")
    keeper.slots["note/changed", good.publisher] = KeptSlot(changed, changed.expires)
    one = member(world, "one", keeper=keeper)
    await joined(one)
    await trio.sleep(10)
    assert list(await one.dht.get("note/good"))
    assert not await one.dht.get("note/changed")


@simulated
async def test_a_caller_that_waits_for_the_directory_when_it_ends_is_told(
    world: SimulatedWorld,
) -> None:
    first, second = await swarm(world, 2)
    second.crash()
    first.network.world.partition([first.network], [second.network])

    async def read_on() -> None:
        while True:
            await first.dht.get("note/x")
            await trio.sleep(1)

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await read_on()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.sleep(3)
        await first.leave()
    with pytest.raises(trio.ClosedResourceError):
        await first.dht.put("note/x", "late", 60)


@simulated
async def test_a_look_that_the_directory_begins_as_it_ends_is_no_error(
    world: SimulatedWorld,
) -> None:
    one, _ = await swarm(world, 2)
    nursery = one.dht._state.nursery

    async def look_at_the_end() -> None:
        with trio.CancelScope(shield=True):
            while not nursery.cancel_scope.cancel_called:
                await trio.lowlevel.checkpoint()
        await one.dht._reader.closest([0])

    nursery.start_soon(look_at_the_end)
    await one.leave()


@simulated
async def test_a_crashed_third_of_the_swarm_costs_no_slot(world: SimulatedWorld) -> None:
    members = await swarm(world, 12)
    for number in range(12):
        await members[number].dht.put(f"note/{number}", "here", HOUR, keep_up=False)
    await trio.sleep(2)
    for one in members[:4]:
        one.crash()
    for number in range(12):
        await read_everywhere(members[4:7], f"note/{number}", ["here"])


@simulated
async def test_an_older_slot_cannot_be_replayed_after_a_backbone_has_restarted(
    world: SimulatedWorld,
) -> None:
    backbone = member(world, "backbone", keeper=MemoryKeeper())
    stranger = member(world, "stranger", [backbone])
    await joined(backbone, stranger)
    now = int(world.honest_time() * 1000)
    long_lived = note(sequence=1, expires=now + 12 * 3_600_000)
    short_lived = note(sequence=2, value="newer", expires=now + 60_000)
    for slot in (long_lived, short_lived):
        await bring(stranger, backbone, slot)
    await trio.sleep(120)
    backbone.crash()
    await trio.sleep(10)
    again = backbone.restart()
    await joined(again)
    await trio.sleep(20)
    code, _ = await refusal_of(stranger, again, long_lived)
    assert code is SlotRefusal.OLDER_SEQUENCE


@simulated
async def test_peers_that_have_punched_links_keep_each_others_slots_while_all_others_are_away(
    world: SimulatedWorld,
) -> None:
    """Peers behind routers are in no table. Without those that can be dialled they have nobody to
    ask but one another."""
    backbone = member(world, "backbone")
    await joined(backbone)
    homes = [
        member(world, name, [backbone], machine=NodeSettings(dialable=False))
        for name in ("left", "right", "far")
    ]
    await joined(*homes)
    left, right, far = homes
    for one, other in ((left, right), (right, far), (far, left)):
        one.network.link_to(other.network, other.address, punched=True)
    await left.dht.put("note/before", "there", HOUR)
    assert table_sizes(homes) == [1, 1, 1]

    backbone.crash()
    await trio.sleep(1)
    await left.dht.put("note/meanwhile", "from left", HOUR)
    await right.dht.put("note/meanwhile", "from right", HOUR)
    for one in homes:
        found = await one.dht.get("note/meanwhile")
        assert {entry.value for entry in found.values()} == {"from left", "from right"}
    assert table_sizes(homes) == [0, 0, 0], "nobody else is told of them"

    backbone = backbone.restart()
    await joined(backbone)
    await trio.sleep(DhtSettings().longest_retry_seconds)
    assert table_sizes(homes) == [1, 1, 1]
    await far.dht.put("note/after", "from far", HOUR)
    assert {entry.value for entry in (await left.dht.get("note/after")).values()} == {"from far"}


@simulated
async def test_a_bootstrap_peer_that_is_linked_again_is_joined_at_once(
    world: SimulatedWorld,
) -> None:
    backbone = member(world, "backbone")
    home = member(world, "home", [backbone], machine=NodeSettings(dialable=False))
    await joined(backbone, home)
    backbone.crash()
    await trio.sleep(200)
    assert table_sizes([home]) == [0]
    backbone.restart()
    await home.network.connect(backbone.network.peer_id)
    await trio.sleep(1)
    assert table_sizes([home]) == [1]
