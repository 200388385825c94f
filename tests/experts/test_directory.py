"""The directory of experts, on swarms of simulated nodes."""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from random import Random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from protocols.dht import Family, SlotEntry, SlotRefused
from protocols.experts import (
    ANNOUNCE_SECONDS,
    EXPERTS,
    RECORD_SECONDS,
    ExpertDirectory,
    ExpertGrid,
    Host,
    Uid,
    free_cells,
)
from protocols.experts.directory import (
    CACHED_PAIRS,
    CACHED_SECONDS,
    CHECK_SECONDS,
    LARGEST_BITMAP_BYTES,
    LONGEST_ADDRESS,
    MOST_ADDRESSES,
    MOST_PAIRS,
    MOST_RECORDS,
    MOST_SERVERS,
    PAIRS_AT_ONCE,
    RECORD_LIMIT_BYTES,
    Below,
    ExpertSlot,
    bitmap_of,
    experts_key,
    hosts_by_index,
    in_order_of_claim,
    indices_of,
    slots_for,
)
from protocols.experts.grid import LARGEST_DIMENSION
from protocols.identity import PeerId
from protocols.network import Network
from protocols.testing.world import SimulatedWorld, run_simulation
from tests.dht.members import LATENCY_SECONDS, SETTINGS, Member, member, simulated, swarm

GRID = ExpertGrid("ffn", (8, 8))
FAMILIES: tuple[Family, ...] = (EXPERTS,)
RUN = "poem"
ONE, TWO, THREE = (Uid("ffn", cells) for cells in [(3, 1), (3, 7), (5, 0)])
ROOT, ROW = GRID.root, Uid("ffn", (3,))


def directory(of: Member) -> ExpertDirectory:
    return ExpertDirectory(of.network, of.dht, RUN)


def messages_of(*members: Member) -> int:
    """The requests that these nodes have sent so far."""
    counts = [one.dht.statistics() for one in members]
    return sum(one.finds_sent + one.stores_sent + one.greets_sent for one in counts)


def peers_at(below: dict[Uid, object], prefix: Uid) -> dict[int, set[PeerId]]:
    found = below[prefix]
    assert isinstance(found, dict)
    return {index: {host.peer for host in hosts} for index, hosts in found.items()}


# ---- announcing and finding


@simulated
async def test_what_servers_announce_is_found_with_its_hosts(world: SimulatedWorld) -> None:
    members = await swarm(world, 6, FAMILIES)
    await directory(members[1]).announce([ONE, THREE], load=0.25)
    await directory(members[2]).announce([TWO])
    trainer = directory(members[5])
    below = await trainer.active([ROOT, ROW, THREE.parent])
    first, second = members[1].network.peer_id, members[2].network.peer_id
    assert peers_at(below, ROOT) == {3: {first, second}, 5: {first}}
    assert peers_at(below, ROW) == {1: {first}, 7: {second}}
    (host,) = below[ROW][1]
    assert host.load == 0.25
    assert host.since == pytest.approx(members[1].network.wall_time() * 1000, abs=1000)
    assert set(await trainer.live(GRID)) == {ONE, TWO, THREE}


@simulated
async def test_a_server_can_be_dialled_by_a_trainer_that_has_never_met_it(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 3, FAMILIES)
    late = member(world, "late", members[:1], families=FAMILIES)
    await late.ready.wait()
    await late.dht.joined()
    await directory(late).announce([ONE])
    trainer = world.add_node("a trainer that only reads what it is given")
    entries = await members[2].dht.get(experts_key(RUN, ROW))
    slot = entries[late.network.peer_id].value
    trainer.learn_addresses(late.network.peer_id, slot.addresses)
    assert (await trainer.connect(late.network.peer_id)).peer == late.network.peer_id
    await directory(members[2]).active([ROW])
    assert late.address in members[2].network.addresses_of(late.network.peer_id)


@simulated
async def test_experts_of_several_grids_are_announced_together(world: SimulatedWorld) -> None:
    members = await swarm(world, 3, FAMILIES)
    other = Uid("attention", (9,))
    await directory(members[0]).announce([ONE, other])
    below = await directory(members[1]).active([ROW, other.parent])
    assert [list(below[one]) for one in (ROW, other.parent)] == [[1], [9]]


@simulated
async def test_a_server_that_dies_is_gone_after_half_a_minute(world: SimulatedWorld) -> None:
    members = await swarm(world, 6, FAMILIES)
    server, trainer = directory(members[1]), directory(members[5])

    async def serve(_network: Network) -> None:
        await server.keep_announcing(lambda: [ONE], lambda: 0.0, lambda _lost: None)

    world.start(members[1].network, serve)
    await trio.sleep(3 * RECORD_SECONDS)
    assert list((await trainer.active([ROW]))[ROW]) == [1], "it is kept up"
    members[1].crash()
    await trio.sleep(RECORD_SECONDS)
    assert await trainer.active([ROW, ROOT]) == {ROW: {}, ROOT: {}}


@simulated
async def test_a_server_that_leaves_is_gone_at_once(world: SimulatedWorld) -> None:
    members = await swarm(world, 6, FAMILIES)
    server, trainer = directory(members[1]), directory(members[5])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            server.keep_announcing, lambda: [ONE, THREE], lambda: 0.0, lambda _lost: None
        )
        await trio.sleep(ANNOUNCE_SECONDS / 2)
        assert set(await trainer.live(GRID)) == {ONE, THREE}
        nursery.cancel_scope.cancel()
    await trio.sleep(CACHED_SECONDS)
    assert await trainer.live(GRID) == {}


@simulated
async def test_an_expert_that_is_given_up_is_gone_with_its_prefixes(world: SimulatedWorld) -> None:
    members = await swarm(world, 6, FAMILIES)
    server = directory(members[1])
    await server.announce([ONE, TWO, THREE])
    await server.announce([TWO])
    below = await directory(members[5]).active([ROOT, ROW, THREE.parent])
    assert [list(below[one]) for one in (ROOT, ROW, THREE.parent)] == [[3], [7], []]


@simulated
async def test_of_experts_with_too_many_prefixes_as_many_are_announced_as_there_may_be(
    world: SimulatedWorld,
) -> None:
    (only,) = await swarm_of_one(world)
    many = [Uid("wide", (row, 0)) for row in range(500)]
    server = directory(only)
    for _ in range(2):
        assert await server.announce(many) == set()
        assert only.dht.statistics().slots_published == MOST_RECORDS
    before = server._hosted
    await server.announce([*many, Uid("also", (1, 0))])
    assert server._hosted == before, "what was announced stays so"


async def swarm_of_one(world: SimulatedWorld) -> list[Member]:
    only = member(world, "alone", families=FAMILIES)
    await only.ready.wait()
    return [only]


@simulated
async def test_a_server_that_is_alone_announces_to_itself(world: SimulatedWorld) -> None:
    (only,) = await swarm_of_one(world)
    experts = directory(only)
    with trio.move_on_after(2 * ANNOUNCE_SECONDS + 1):
        await experts.keep_announcing(lambda: [ONE], lambda: 0.0, lambda _lost: None)
    assert await experts.live(GRID) == {}, "and it withdraws"


# ---- two servers with one uid


@simulated
async def test_of_two_servers_with_one_uid_the_later_one_is_told(world: SimulatedWorld) -> None:
    members = await swarm(world, 6, FAMILIES)
    early, late = directory(members[1]), directory(members[2])
    assert await early.announce([ONE, TWO]) == set()
    await trio.sleep(1)
    assert await late.announce([ONE, THREE]) == {ONE}
    await trio.sleep(2 * RECORD_SECONDS)
    assert await early.announce([ONE, TWO]) == set()


@simulated
async def test_an_old_server_does_not_take_what_a_younger_one_already_hosts(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    old, young = directory(members[1]), directory(members[2])
    await old.announce([ONE])
    await trio.sleep(1)
    await young.announce([TWO])
    await trio.sleep(1)
    assert await old.announce([ONE, TWO]) == {TWO}
    assert await old.announce([ONE]) == set()
    assert await young.announce([TWO]) == set()


async def claim_of(one: Member, uid: Uid, reader: Member) -> int:
    """Since when this server says that it hosts the expert."""
    below = (await directory(reader).read([uid.parent]))[uid.parent]
    (since,) = [host.since for host in below[uid.cells[-1]] if host.peer == one.peer]
    return since


@simulated
async def test_experts_are_as_old_as_before_when_a_younger_one_beside_them_is_given_up(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    old, young = directory(members[1]), directory(members[2])
    await old.announce([ONE])
    before = await claim_of(members[1], ONE, members[5])
    await trio.sleep(1)
    await young.announce([TWO])
    await trio.sleep(1)
    assert await old.announce([ONE, TWO]) == {TWO}
    assert await claim_of(members[1], ONE, members[5]) > before, "a slot has one date"
    await old.announce([ONE])
    assert await claim_of(members[1], ONE, members[5]) == before


@simulated
async def test_a_won_contest_makes_the_experts_beside_it_older_only_while_it_lasts(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    early, late = directory(members[1]), directory(members[2])

    async def further(_peer: PeerId, uids: Collection[Uid]) -> Collection[Uid]:
        return uids

    await early.announce([ONE])
    contested = await claim_of(members[1], ONE, members[5])
    await trio.sleep(1)
    assert await late.announce([ONE, TWO], 0.0, further) == set()
    own = await claim_of(members[2], TWO, members[5])
    await late.announce([ONE, TWO, Uid("ffn", (3, 6))], 0.0, further)
    assert await claim_of(members[2], TWO, members[5]) == contested - 1, "another changes nothing"
    lost: frozenset[Uid] = frozenset()
    while not lost:
        await trio.sleep(ANNOUNCE_SECONDS)
        await late.announce([ONE, TWO], 0.0, further)
        lost = await early.announce([ONE])
    await early.announce([])
    for _ in range(5):
        await trio.sleep(ANNOUNCE_SECONDS)
        await late.announce([ONE, TWO], 0.0, further)
    assert await claim_of(members[2], TWO, members[5]) == own > contested


@simulated
async def test_a_server_whose_own_slot_is_not_read_keeps_what_it_had_first(
    world: SimulatedWorld,
) -> None:
    """A reading leaves out the slots with the most indices if others claim too many."""
    members = await swarm(world, 6, FAMILIES)
    early, late = directory(members[1]), directory(members[2])
    await early.announce([ONE])
    await trio.sleep(1)
    assert await late.announce([ONE]) == {ONE}
    whole = early.read

    async def without_it(prefixes: Iterable[Uid]) -> dict[Uid, Below]:
        return {
            prefix: {
                index: tuple(host for host in hosts if host.peer == members[2].peer)
                for index, hosts in below.items()
            }
            for prefix, below in (await whole(prefixes)).items()
        }

    await trio.sleep(CHECK_SECONDS - 1)
    await late.announce([ONE])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(early, "read", without_it)
        assert await early.announce([ONE]) == set()


@pytest.mark.parametrize("seed", range(5))
def test_of_servers_that_begin_in_the_same_instant_exactly_one_keeps_each_expert(seed: int) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        members = await swarm(world, 6, FAMILIES)
        hosted = {one.peer: {ONE, TWO, THREE} for one in members[:3]}
        async with trio.open_nursery() as nursery:
            for one in members[:3]:
                mine = hosted[one.peer]
                nursery.start_soon(
                    directory(one).keep_announcing,
                    lambda mine=mine: frozenset(mine),
                    lambda: 0.0,
                    mine.difference_update,
                )
            await trio.sleep(ANNOUNCE_SECONDS)
            kept = [uid for mine in hosted.values() for uid in mine]
            assert sorted(kept) == sorted({ONE, TWO, THREE})
            below = await directory(members[5]).live(GRID)
            assert {uid: hosts[0].peer for uid, hosts in below.items()} == {
                uid: peer for peer, mine in hosted.items() for uid in mine
            }
            nursery.cancel_scope.cancel()

    run_simulation(scenario, seed=seed, settings=SETTINGS)


@pytest.mark.slow
@simulated
async def test_two_halves_of_a_split_swarm_agree_again_when_it_is_healed(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    left, right = members[:3], members[3:]
    world.partition([one.network for one in left], [one.network for one in right])
    await trio.sleep(60)
    lost: list[str] = []
    told = trio.Event()
    async with trio.open_nursery() as nursery:
        for one in (left[0], right[0]):
            mine = {ONE}

            def stop(uids: Iterable[Uid], mine: set[Uid] = mine, name: str = one.peer) -> None:
                mine.difference_update(uids)
                lost.append(name)
                told.set()

            nursery.start_soon(
                directory(one).keep_announcing,
                lambda mine=mine: frozenset(mine),
                lambda: 0.0,
                stop,
            )
            await trio.sleep(RECORD_SECONDS)
        assert not lost
        world.heal()
        with trio.fail_after(600):
            await told.wait()
        await trio.sleep(2 * RECORD_SECONDS)
        assert lost == [right[0].peer]
        nursery.cancel_scope.cancel()


@given(
    st.lists(
        st.tuples(st.text(max_size=3), st.integers(0, 3)), min_size=1, max_size=6, unique=True
    ),
    st.randoms(use_true_random=False),
)
def test_all_order_the_same_claims_alike(claims: list[tuple[str, int]], chance: Random) -> None:
    hosts = [Host(PeerId(peer), since=since) for peer, since in claims]
    shuffled = [replace_load(host, chance.random()) for host in chance.sample(hosts, len(hosts))]
    order = in_order_of_claim(ONE, hosts)
    assert [one.peer for one in in_order_of_claim(ONE, shuffled)] == [one.peer for one in order]
    assert order[0].since == min(host.since for host in hosts)


def replace_load(host: Host, load: float) -> Host:
    """Its load says nothing about its claim."""
    return Host(host.peer, load, host.since)


def test_no_server_wins_every_tie() -> None:
    hosts = [Host(PeerId("a")), Host(PeerId("b"))]
    first = {in_order_of_claim(GRID.at(number), hosts)[0].peer for number in range(GRID.cells)}
    assert first == {"a", "b"}


# ---- the cache


@simulated
async def test_what_was_just_read_costs_no_message(world: SimulatedWorld) -> None:
    members = await swarm(world, 6, FAMILIES)
    await directory(members[1]).announce([ONE])
    trainer = directory(members[5])
    nowhere = Uid("ffn", (7,))
    first = await trainer.active([ROOT, ROW, nowhere])
    before = messages_of(members[5])
    assert await trainer.active([ROW, nowhere]) == {one: first[one] for one in (ROW, nowhere)}
    assert messages_of(members[5]) == before
    await trio.sleep(CACHED_SECONDS)
    await trainer.active([ROW])
    assert messages_of(members[5]) > before


@pytest.mark.slow
@simulated
async def test_tasks_that_read_the_same_at_once_share_a_reading(world: SimulatedWorld) -> None:
    members = await swarm(world, 24, FAMILIES)
    await directory(members[1]).announce([ONE, THREE])
    gets = members[5].dht.statistics().gets
    trainer = directory(members[5])
    async with trio.open_nursery() as nursery:
        for prefixes in ([ROOT, ROW], [ROW, THREE.parent], [ROOT, THREE.parent]):
            nursery.start_soon(trainer.active, prefixes)
    assert members[5].dht.statistics().gets - gets == 3


@simulated
async def test_while_one_task_reads_anew_the_others_use_what_was_read(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    await directory(members[1]).announce([ONE])
    trainer = directory(members[5])
    old = await trainer.active([ROW])
    await directory(members[2]).announce([TWO])
    await trio.sleep(CACHED_SECONDS + LATENCY_SECONDS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.active, [ROW])
        await trio.sleep(LATENCY_SECONDS)  # it is under way, and needs a round trip
        assert await trainer.active([ROW]) == old
    assert list((await trainer.active([ROW]))[ROW]) == [1, 7]


@pytest.mark.slow
@simulated
async def test_a_reader_that_is_cancelled_leaves_its_reading_to_those_that_wait(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 24, FAMILIES)
    await directory(members[1]).announce([ONE])
    trainer = directory(members[5])
    scope = trio.CancelScope()

    async def read_and_be_cancelled() -> None:
        with scope:
            await trainer.active([ROW])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_and_be_cancelled)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(trio.sleep, 0)
        with trio.move_on_after(0.001):
            await trainer.active([ROW])
        scope.cancel()
        assert list((await trainer.active([ROW]))[ROW]) == [1]
    assert scope.cancelled_caught


@simulated
async def test_the_cache_is_bounded_and_readings_beyond_it_are_still_whole(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 3, FAMILIES)
    await directory(members[1]).announce([ONE, THREE])
    trainer = directory(members[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocols.experts.directory.CACHED_PAIRS", 1)
        below = await trainer.active([ROOT, ROW])
    assert [list(below[one]) for one in (ROOT, ROW)] == [[3, 5], [1]]
    assert trainer._cached_pairs <= 1
    assert CACHED_PAIRS > 1


# ---- servers that fail


@simulated
async def test_a_server_that_failed_is_left_out_until_it_announces_itself_again(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    server, trainer = directory(members[1]), directory(members[5])
    await server.announce([ONE, TWO])
    await directory(members[2]).announce([THREE])
    assert await usable(trainer) == {ONE, TWO, THREE}
    trainer.forget(members[1].network.peer_id)
    assert await usable(trainer) == {THREE}, "what is cached"
    await trio.sleep(CACHED_SECONDS)
    assert await usable(trainer) == {THREE}, "and what is read anew"
    await server.announce([ONE, TWO])
    await trio.sleep(CACHED_SECONDS)
    assert await usable(trainer) == {ONE, TWO, THREE}


async def usable(trainer: ExpertDirectory) -> set[Uid]:
    """The experts below the prefixes of this test that a trainer would call."""
    below = await trainer.active([ROW, THREE.parent])
    return {prefix.child(index) for prefix, indices in below.items() for index in indices}


@simulated
async def test_a_server_that_failed_is_left_out_also_when_many_others_were_heard_since(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    await directory(members[1]).announce([ONE])
    await directory(members[2]).announce([THREE])
    for failing, left in ((members[1], THREE), (members[2], ONE)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("protocols.experts.directory.REMEMBERED_SERVERS", 1)
            trainer = directory(members[5])
        assert await usable(trainer) == {ONE, THREE}
        trainer.forget(failing.peer)
        assert await usable(trainer) == {left}


@simulated
async def test_a_server_that_failed_still_hosts_its_experts_for_other_servers(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    failing, server = directory(members[1]), directory(members[5])
    await failing.announce([ONE])
    peer = members[1].network.peer_id
    for _ in range(2):  # what is cached, and what is read anew
        assert set(await server.live(GRID)) == {ONE}
        server.forget(peer)
        server.forget_expert(ONE)
        assert (await server.active([ROW]))[ROW] == {}
        assert peers_at(await server.hosts([ROW]), ROW) == {1: {peer}}
        assert peers_at(await server.read([ROW]), ROW) == {1: {peer}}
    assert await server.announce([ONE]) == {ONE}


@simulated
async def test_others_have_their_turn_while_a_failed_server_is_taken_out_of_what_is_cached(
    world: SimulatedWorld,
) -> None:
    (only,) = await swarm_of_one(world)
    trainer = directory(only)
    peers = [PeerId(f"server-{number}") for number in range(CACHED_PAIRS // LARGEST_DIMENSION - 1)]
    with stored_at(only, {ROW: dict.fromkeys(peers, FULL)}):
        await trainer.active([ROW])
    async with counting_turns() as turns:
        trainer.forget(peers[0])
        below = (await trainer.active([ROW]))[ROW]
    assert {host.peer for host in below[7]} == {*peers[1:]}
    assert turns() >= len(peers) * LARGEST_DIMENSION // PAIRS_AT_ONCE // 2


@simulated
async def test_a_failed_server_is_taken_out_of_a_reading_once_for_all_searches(
    world: SimulatedWorld,
) -> None:
    (only,) = await swarm_of_one(world)
    trainer = directory(only)
    peers = [PeerId(f"server-{number}") for number in range(4)]
    found: list[Below] = []

    async def search() -> None:
        found.append((await trainer.active([ROW]))[ROW])

    with stored_at(only, {ROW: dict.fromkeys(peers, FULL)}):
        await search()
        trainer.forget(peers[0])
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(search)
        trainer.forget(peers[1])
        await search()
        trainer.forget(PeerId("elsewhere"))
        await search()
    before, *once, after, still_after = found
    assert all(below is once[0] for below in once)
    assert [len(below[7]) for below in (before, once[0], after)] == [4, 3, 2]
    assert still_after is after, "a server that is not below this prefix changes nothing"


@simulated
async def test_a_search_that_is_cancelled_leaves_the_failed_servers_to_those_that_wait(
    world: SimulatedWorld,
) -> None:
    (only,) = await swarm_of_one(world)
    trainer = directory(only)
    peers = [PeerId(f"server-{number}") for number in range(4)]
    scope = trio.CancelScope()

    async def search_and_be_cancelled() -> None:
        with scope:
            await trainer.active([ROW])

    with stored_at(only, {ROW: dict.fromkeys(peers, FULL)}):
        await trainer.active([ROW])
        trainer.forget(peers[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(search_and_be_cancelled)
            await trio.lowlevel.checkpoint()
            scope.cancel()
            with trio.fail_after(1):
                below = (await trainer.active([ROW]))[ROW]
    assert scope.cancelled_caught
    assert {host.peer for host in below[7]} == {*peers[1:]}


@contextmanager
def stored_at(one: Member, slots: Mapping[Uid, Mapping[PeerId, ExpertSlot]]) -> Iterator[None]:
    """This node reads these slots: more than a test can have signed."""
    stored = {experts_key(RUN, prefix): under for prefix, under in slots.items()}

    async def get_many(keys: Iterable[str], **_: bool) -> dict[str, dict[PeerId, SlotEntry]]:
        return {
            key: {peer: SlotEntry(peer, slot, 0, 1) for peer, slot in stored[key].items()}
            for key in keys
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.dht, "get_many", get_many)
        yield


@simulated
async def test_a_reading_of_many_prefixes_is_bounded_and_the_honest_ones_are_whole(
    world: SimulatedWorld,
) -> None:
    (only,) = await swarm_of_one(world)
    liars = [PeerId(f"liar-{number}") for number in range(100)]
    rows = [Uid("ffn", (row,)) for row in range(20)]
    slots = {row: dict.fromkeys(liars, FULL) for row in rows}
    servers = [PeerId(f"server-{number}") for number in range(90)]
    slots[rows[7]] = dict.fromkeys(servers, ExpertSlot(bitmap_of(range(256))))
    with stored_at(only, slots):
        for read in (directory(only).read, directory(only).hosts):
            found = await read(rows)
            assert set(found) == set(rows)
            assert {len(hosts) for hosts in found[rows[7]].values()} == {len(servers)}
            pairs = sum(len(hosts) for below in found.values() for hosts in below.values())
            assert MOST_PAIRS <= pairs <= 2 * MOST_PAIRS + len(rows) * LARGEST_DIMENSION
            assert all(found.values()), "each has its part"


@simulated
async def test_a_reading_in_several_parts_is_bounded_as_a_whole(world: SimulatedWorld) -> None:
    (only,) = await swarm_of_one(world)
    most = 32 * LARGEST_DIMENSION
    liars = [PeerId(f"liar-{number}") for number in range(16)]
    rows = [Uid("ffn", (row,)) for row in range(32)]
    with (
        stored_at(only, {row: dict.fromkeys(liars, FULL) for row in rows}),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("protocols.experts.directory.KEYS_AT_ONCE", 4)
        patch.setattr("protocols.experts.directory.MOST_PAIRS", most)
        found = await directory(only).hosts(rows)
    pairs = sum(len(hosts) for below in found.values() for hosts in below.values())
    assert most <= pairs <= 2 * most
    assert all(found.values()), "each has its part"


@simulated
async def test_one_server_that_claims_all_below_many_prefixes_takes_no_pairs_from_others(
    world: SimulatedWorld,
) -> None:
    (only,) = await swarm_of_one(world)
    rows = [Uid("ffn", (row,)) for row in range(64)]
    slots = {row: {PeerId("liar"): FULL} for row in rows}
    servers = [PeerId(f"server-{number}") for number in range(8)]
    slots[rows[7]] = dict.fromkeys(servers, ExpertSlot(bitmap_of(range(256))))
    with stored_at(only, slots), pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocols.experts.directory.MOST_PAIRS", 16 * (1 + LARGEST_DIMENSION))
        found = await directory(only).hosts(rows)
    assert {len(hosts) for hosts in found[rows[7]].values()} == {len(servers)}


@simulated
async def test_an_expert_that_its_server_denies_is_left_out_until_the_next_reading(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 6, FAMILIES)
    await directory(members[1]).announce([ONE, TWO])
    trainer = directory(members[5])
    await trainer.active([ROW])
    trainer.forget_expert(ONE)
    trainer.forget_expert(THREE)
    assert list((await trainer.active([ROW]))[ROW]) == [7]
    await trio.sleep(CACHED_SECONDS)
    assert list((await trainer.active([ROW]))[ROW]) == [1, 7]


# ---- the slots


@given(st.sets(st.integers(0, 4095), min_size=1))
def test_a_bitmap_is_read_as_it_is_written(indices: set[int]) -> None:
    bitmap = bitmap_of(indices)
    assert indices_of(bitmap) == sorted(indices)
    assert len(bitmap) == max(indices) // 8 + 1 <= LARGEST_BITMAP_BYTES


def test_a_bitmap_has_the_bytes_that_are_documented() -> None:
    assert bitmap_of([0, 9, 10]) == bytes([0b1, 0b110])


def test_only_the_longest_prefixes_say_where_the_server_is() -> None:
    slots = slots_for([ONE, TWO, THREE], 1.5, {ROW: 7, THREE.parent: 8}, ["somewhere"])
    assert slots == {
        ROOT: ExpertSlot(bitmap_of([3, 5])),
        ROW: ExpertSlot(bitmap_of([1, 7]), 1.5, 7, ("somewhere",)),
        THREE.parent: ExpertSlot(bitmap_of([0]), 1.5, 8, ("somewhere",)),
    }


async def test_an_index_has_the_hosts_of_all_slots_that_name_it() -> None:
    slots = [(PeerId("a"), ExpertSlot(b"\x03")), (PeerId("b"), ExpertSlot(b"\x06", 2.0, 5))]
    a, b = Host(PeerId("a")), Host(PeerId("b"), 2.0, 5)
    assert await hosts_by_index(slots) == {0: (a,), 1: (a, b), 2: (b,)}


FULL = ExpertSlot(bytes([0xFF]) * LARGEST_BITMAP_BYTES)


@asynccontextmanager
async def counting_turns() -> AsyncIterator[Callable[[], int]]:
    """How many turns another task has had since the beginning of the block."""
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        yield lambda: turns
        nursery.cancel_scope.cancel()


async def test_others_have_their_turn_while_a_full_prefix_is_read_and_its_pairs_are_bounded() -> (
    None
):
    slots = [(PeerId(f"liar-{number}"), FULL) for number in range(MOST_SERVERS - 1)]
    honest = PeerId("honest")
    async with counting_turns() as turns:
        below = await hosts_by_index([*slots, (honest, ExpertSlot(bitmap_of([7])))])
    pairs = sum(map(len, below.values()))
    assert MOST_PAIRS - LARGEST_DIMENSION <= pairs <= MOST_PAIRS
    assert turns() >= pairs // PAIRS_AT_ONCE // 2, "trio chooses the order of each turn by chance"
    assert honest in {host.peer for host in below[7]}, "those that claim the most go first"


def test_a_reading_of_honest_servers_is_always_whole() -> None:
    assert MOST_SERVERS * MOST_RECORDS <= MOST_PAIRS


def test_the_largest_slot_fits_and_what_is_larger_is_cut() -> None:
    uids = [Uid("ffn", (row,)) for row in range(4096)]
    addresses = ["x" * (LONGEST_ADDRESS + 1), *(str(n) * LONGEST_ADDRESS for n in range(9))]
    (slot,) = slots_for(uids, 1e30, {ROOT: 1 << 53}, addresses).values()
    assert len(slot.addresses) == MOST_ADDRESSES
    assert len(EXPERTS.encode(slot)) <= RECORD_LIMIT_BYTES
    assert EXPERTS.check is not None
    assert EXPERTS.check(experts_key(RUN, ROOT), slot) is None


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        ("experts/poem/FFN", ExpertSlot(b"\x01")),
        ("experts/poem/ffn.01", ExpertSlot(b"\x01")),
        ("experts/poem/", ExpertSlot(b"\x01")),
        ("experts/poem/ffn.1.2.3.4", ExpertSlot(b"\x01")),
        ("experts/poem/ffn", ExpertSlot(b"\x01\x00")),
        ("experts/poem/ffn", ExpertSlot(b"\x01", float("nan"))),
    ],
)
def test_a_slot_outside_of_the_grammar_is_refused_everywhere(key: str, slot: ExpertSlot) -> None:
    assert EXPERTS.check is not None
    assert EXPERTS.check(key, slot)


@pytest.mark.parametrize(
    "slot",
    [
        ExpertSlot(b""),
        ExpertSlot(b"\x01" * 513),
        ExpertSlot(b"\x01", -1.0),
        ExpertSlot(b"\x01", 1e7),
        ExpertSlot(b"\x01", 0.0, -1),
        ExpertSlot(b"\x01", 0.0, 0, ("x",) * 7),
        ExpertSlot(b"\x01", 0.0, 0, ("x" * 201,)),
    ],
)
def test_a_slot_beyond_a_limit_is_refused(slot: ExpertSlot) -> None:
    with pytest.raises(SlotRefused):
        EXPERTS.encode(slot)


# ---- the cost of announcing

MOST_MESSAGES_PER_SECOND = 20.0
MEASURED_SECONDS = 60.0


@pytest.mark.parametrize(
    ("servers", "experts", "sizes"),
    [
        pytest.param(20, 1_000, (40, 40), id="small", marks=pytest.mark.slow),
        pytest.param(100, 10_000, (128, 128), id="large", marks=pytest.mark.soak),
    ],
)
def test_announcing_costs_a_server_few_messages(
    servers: int, experts: int, sizes: tuple[int, ...]
) -> None:
    grid = ExpertGrid("ffn", sizes)

    async def scenario(world: SimulatedWorld) -> None:
        members = await swarm(world, servers, FAMILIES)
        hosted: list[Sequence[Uid]] = []
        live: list[Uid] = []
        for seed in range(servers):
            hosted.append(free_cells(grid, live, experts // servers, Random(seed)))
            live += hosted[-1]
        async with trio.open_nursery() as nursery:
            for one, uids in zip(members, hosted, strict=True):
                nursery.start_soon(
                    directory(one).keep_announcing,
                    lambda uids=uids: uids,
                    lambda: 0.0,
                    lambda lost: pytest.fail(f"nobody else has {lost}"),
                )
            await trio.sleep(RECORD_SECONDS)
            before = messages_of(*members)
            await trio.sleep(MEASURED_SECONDS)
            sent = messages_of(*members) - before
            assert set(await directory(members[0]).live(grid)) == set(live)
            nursery.cancel_scope.cancel()
        per_second = sent / servers / MEASURED_SECONDS
        # each request is answered, and each server answers as many as it sends
        assert 0 < 2 * per_second < MOST_MESSAGES_PER_SECOND

    run_simulation(scenario, settings=SETTINGS)
