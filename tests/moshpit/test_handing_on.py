"""The list of a large group is handed on from member to member, unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import trio

from protocols.errors import Busy, PotluckError
from protocols.identity import PeerId
from protocols.moshpit.handing_on import (
    LEADER_BYTES,
    LISTS_KEPT,
    LONGEST_FETCH_SECONDS,
    MARGIN_SECONDS,
    MOST_WAITING_OF_PEER,
    Way,
    digest_of,
    ways_to,
)
from protocols.moshpit.matchmaking_messages import LIST, ListRequest, MemberList
from protocols.moshpit.roster import Entry
from protocols.moshpit.switchboard import SHOW, Show
from protocols.testing.world import SimulatedWorld
from tests.moshpit.averagers import SETTINGS, average_all, averagers, check_same_result
from tests.moshpit.gatherers import Found, Gatherer, find_all, gatherers, in_order, play, simulated
from tests.moshpit.unsigned_lists import unsigned_list

ENTRY_BYTES = 290  # of a list, with where the member may be dialled


def members(count: int, *, dialled: int | None = None, up: int = 0) -> list[Entry]:
    dialled = count if dialled is None else dialled
    return [
        Entry(
            PeerId(f"p{number:03}"),
            1.0,
            up,
            up,
            number < dialled,
            0,
            1,
            0,
            bytes(16),
            bytes(64),
        )
        for number in range(count)
    ]


def ways(entries: Sequence[Entry]) -> dict[PeerId, Way]:
    return ways_to(entries, entries[0].peer, len(entries) * ENTRY_BYTES)


def lists_sent(entries: Sequence[Entry]) -> Counter[PeerId]:
    """How often each member sends the list, if none fails."""
    leader = entries[0].peer
    return Counter(way.sources[0] if way.sources else leader for way in ways(entries).values())


@pytest.mark.parametrize("count", [2, 8, 15])
def test_a_small_group_has_its_list_from_the_leader(count: int) -> None:
    assert not any(way.sources for way in ways(members(count)).values())


def test_the_bytes_of_lists_that_anybody_sends_grow_with_the_members_and_not_their_square() -> None:
    for count in (16, 64, 200, 256):
        most = max(lists_sent(members(count)).values())
        assert most * count * ENTRY_BYTES <= max(LEADER_BYTES, 3 * count * ENTRY_BYTES)


@pytest.mark.parametrize("dialled", [1, 2, 5, 60, 64])
def test_everybody_is_below_the_leader_and_only_those_hand_on_who_can_be_dialled(
    dialled: int,
) -> None:
    entries = members(64, dialled=dialled)
    found = ways(entries)
    assert found.keys() == {one.peer for one in entries[1:]}
    reduces = {one.peer for one in entries if one.reduces}
    for peer, way in found.items():
        assert set(way.sources) <= reduces - {peer, entries[0].peer}
        depth, above = 0, peer
        while found[above].sources:
            depth, above = depth + 1, found[above].sources[0]
        assert depth < 5


def test_the_time_for_a_list_follows_from_its_bytes_and_the_measured_uploads() -> None:
    unknown = max(way.seconds for way in ways(members(64)).values())
    slow = max(way.seconds for way in ways(members(64, up=10_000)).values())
    fast = max(way.seconds for way in ways(members(64, up=10_000_000)).values())
    assert unknown == slow  # nobody keeps others waiting for long by naming a slow link
    assert 1.0 < unknown < 2.5
    assert fast == pytest.approx(unknown / 80)


async def upload(cast: Sequence[Gatherer], bytes_per_second: float) -> None:
    for one in cast:
        one.world.throttle(one.network, upload_bytes_per_second=bytes_per_second)


def check_one_group(found: Found, cast: Sequence[Gatherer]) -> None:
    assert not found.errors
    assert len(found.groups) == len(cast)
    assert len(found.rosters) == 1


def hoards(one: Gatherer, *, changes: bool) -> None:
    """From now on this member takes lists and hands none on, or a changed one."""
    lists = one.matchmaker._lists

    def keep(member_list: MemberList) -> None:
        if changes:
            changed = msgspec.structs.replace(member_list, places=member_list.places[:1])
            lists._kept[digest_of(member_list)] = changed

    lists.keep = keep  # type: ignore[method-assign]


ONE_MEGABIT = 125_000.0
TEN_MEGABITS = 10 * ONE_MEGABIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "bytes_per_second", "seconds"),
    [
        (32, ONE_MEGABIT / 2, 4.0),  # 4.8 s if the leader sent the list to everybody
        pytest.param(64, ONE_MEGABIT, 6.0, marks=pytest.mark.soak),  # the same
        pytest.param(256, TEN_MEGABITS, 6.0, marks=pytest.mark.soak),  # 15 s
    ],
)
def test_a_large_group_with_slow_uploads_comes_about_long_before_its_deadline(
    count: int, bytes_per_second: float, seconds: float
) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        cast = await gatherers(world, count, settle=1.0)
        await upload(cast, bytes_per_second)
        searches = [one.search(expected=count, group_size=256) for one in cast]
        found = await find_all(cast, searches)
        check_one_group(found, cast)
        assert found.slowest < seconds

    play(scenario)


@pytest.mark.slow
@simulated
async def test_a_member_that_does_not_hand_the_list_on_costs_a_short_time(
    world: SimulatedWorld,
) -> None:
    cast = await gatherers(world, 20, settle=1.0)
    for hostile in in_order(cast)[1:3]:
        hoards(hostile, changes=False)
    found = await find_all(cast, [one.search(expected=20) for one in cast])
    check_one_group(found, cast)
    assert MARGIN_SECONDS < found.slowest < MARGIN_SECONDS + 2.0


@pytest.mark.slow
def test_a_member_that_hands_on_another_list_is_not_believed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        cast = await gatherers(world, 20, settle=1.0)
        hoards(in_order(cast)[1], changes=True)
        found = await find_all(cast, [one.search(expected=20) for one in cast])
        check_one_group(found, cast)

    with caplog.at_level("INFO", "potluck.moshpit"):
        play(scenario)
    assert "has handed on another list than the leader's" in caplog.text


@simulated
async def test_a_fetch_ends_although_no_source_answers(world: SimulatedWorld) -> None:
    leader, source, member = await gatherers(world, 3, settle=0.0)
    begun = trio.current_time()
    lists = member.matchmaker._lists
    fetched = await lists.fetch(bytes(32), (source.peer, leader.peer), 300.0)
    assert isinstance(fetched, PotluckError)
    assert trio.current_time() - begun <= LONGEST_FETCH_SECONDS
    assert not lists.fetches


@simulated
async def test_a_list_that_is_kept_again_is_the_last_to_be_forgotten(world: SimulatedWorld) -> None:
    holder, asker = await gatherers(world, 2, settle=0.0)
    lists = [
        MemberList(unsigned_list([holder.peer, PeerId(f"member {number}")]), ())
        for number in range(LISTS_KEPT + 1)
    ]
    for one in (*lists[:LISTS_KEPT], lists[0], lists[LISTS_KEPT]):
        holder.matchmaker._lists.keep(one)
    first = ListRequest(digest_of(lists[0]))
    assert await asker.rpc.call(holder.peer, LIST, first, timeout=1.0) == lists[0]


@simulated
async def test_calls_for_lists_that_do_not_exist_hold_up_nobody_else(
    world: SimulatedWorld,
) -> None:
    holder, hostile, honest = await gatherers(world, 3, settle=0.0)
    refused = 0

    async def ask(number: int) -> None:
        nonlocal refused
        with trio.move_on_after(2.0):
            try:
                await hostile.rpc.call(
                    holder.peer, LIST, ListRequest(bytes([number]) * 32), timeout=5.0
                )
            except Busy:
                refused += 1

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(ask, number)
        await trio.sleep(0.5)
        member_list = MemberList(unsigned_list([holder.peer, honest.peer]), ())
        holder.matchmaker._lists.keep(member_list)
        request = ListRequest(digest_of(member_list))
        assert await honest.rpc.call(holder.peer, LIST, request, timeout=1.0) == member_list
    assert refused == 50 - MOST_WAITING_OF_PEER


@pytest.mark.slow
@pytest.mark.parametrize(("count", "bytes_per_second"), [(12, 25_000.0), (24, 50_000.0)])
def test_a_round_over_slow_uploads_begins_when_its_members_have_their_list(
    count: int, bytes_per_second: float
) -> None:
    """12: the start overtakes the list on its leader's upload; 24: others hand the list on."""

    async def scenario(world: SimulatedWorld) -> None:
        settings = replace(SETTINGS, matchmaking_seconds=15.0)
        peers = await averagers(world, count, settings=settings)
        for one in peers:
            one.values = 1000
            world.throttle(one.network, upload_bytes_per_second=bytes_per_second)
        check_same_result(await average_all(peers), peers)
        for one in peers:
            last = one.averager.statistics().recent[-1]
            assert (last.attempts, last.failures) == (1, ())

    play(scenario)


def test_a_list_that_is_shown_when_it_has_come_another_way_is_acknowledged() -> None:
    async def scenario(world: SimulatedWorld) -> None:
        one, other = peers = await averagers(world, 2)
        await average_all(peers)
        (roster,) = one.averager._matchmaker._started.values()
        await one.rpc.call(other.peer, SHOW, Show(roster), timeout=5.0)

    play(scenario)
