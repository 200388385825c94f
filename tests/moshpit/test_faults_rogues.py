"""Members send something wrong, or nothing, or receive nothing: the others average without them."""

from __future__ import annotations

import dataclasses

import pytest
import trio

from protocols.moshpit.attempt import LONGEST_OPENING_SECONDS, OPEN_SECONDS
from protocols.moshpit.butterfly import Butterfly
from protocols.moshpit.outcome import Committed
from protocols.moshpit.round import run_round
from protocols.moshpit.settings import AveragerSettings
from protocols.testing.world import NodeSettings, SimulatedWorld, run_simulation
from tests.dht.members import SETTINGS as WORLD
from tests.moshpit.averagers import (
    HOME,
    SETTINGS,
    AveragingPeer,
    average_all,
    averagers,
    check_same_result,
    peer_in,
)
from tests.moshpit.rogues import (
    Frames,
    FramesAndReports,
    FramesAsReducer,
    FramesAsSender,
    FramesForAWhile,
    Liar,
    SendsNaN,
    SendsTooLittle,
    SendsTooMuch,
    SendsTwice,
    Silent,
    StarvesSome,
    StopsReading,
    Trickles,
    run_and_keep_open,
    run_forging,
    run_mute,
    run_tight_lipped,
    run_two_faced,
)
from tests.moshpit.rounds import ORDINARY, Member, Rogue, Setting, one_round

SOON_SECONDS = 10.0
ATTEMPT_SECONDS = 30.0  # half of what a round of the tests' settings may take
FAST_BYTES_PER_SECOND, SLOW_BYTES_PER_SECOND = 1_000_000.0, 10_000.0
FAST = NodeSettings(
    upload_bytes_per_second=FAST_BYTES_PER_SECOND, download_bytes_per_second=FAST_BYTES_PER_SECOND
)
SLOW = NodeSettings(
    upload_bytes_per_second=SLOW_BYTES_PER_SECOND, download_bytes_per_second=SLOW_BYTES_PER_SECOND
)
MANY_VALUES = 128 << 10  # 512 KiB: they take a slow member 52 s


async def three_and(world: SimulatedWorld, kind: type[Butterfly]) -> list[AveragingPeer]:
    """Three honest peers, and one of another kind."""
    peers = await averagers(world, 3, machine=HOME)
    rogue = peer_in(world, "rogue", peers, machine=HOME, kind=kind)
    await rogue.ready.wait()
    return [*peers, rogue]


async def averaged_without_the_last(peers: list[AveragingPeer], within: float) -> None:
    honest, rogue = peers[:-1], peers[-1]
    events = [one.begin(epoch=1, expected=len(peers)) for one in peers]
    with trio.fail_after(within):
        for event in events[:-1]:
            await event.wait()
    ended = [one.ended[-1] for one in honest]
    check_same_result(ended, honest)
    for one in ended:
        assert isinstance(one.outcome, Committed)
        (left_out,) = one.outcome.left_out
        assert left_out.peer == rogue.peer
        assert left_out.reason
        assert one.outcome.rounds[0].attempts == 2


def a_rogue_is_left_out(kind: type[Butterfly], within: float, seed: int = 0) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        peers = await three_and(world, kind)
        await averaged_without_the_last(peers, within)
        check_same_result(await average_all(peers[:-1], epoch=2), peers[:-1])

    run_simulation(scenario, seed=seed, settings=WORLD)


@pytest.mark.slow
def test_values_that_are_not_finite_cost_their_sender_its_place() -> None:
    a_rogue_is_left_out(SendsNaN, SOON_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [SendsTooMuch, SendsTooLittle, SendsTwice],
    ids=lambda k: k.__name__,
)
def test_a_rogue_is_left_out_soon(kind: type[Butterfly]) -> None:
    a_rogue_is_left_out(kind, SOON_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Silent, StopsReading], ids=lambda k: k.__name__)
def test_a_member_that_sends_other_bytes_but_never_opens_is_left_out(
    kind: type[Butterfly],
) -> None:
    a_rogue_is_left_out(kind, SOON_SECONDS + LONGEST_OPENING_SECONDS - OPEN_SECONDS)


@pytest.mark.slow
def test_a_slow_loris_is_left_out_when_half_of_the_time_is_over() -> None:
    a_rogue_is_left_out(Trickles, ATTEMPT_SECONDS + SOON_SECONDS)


async def lies(world: SimulatedWorld) -> None:
    peers = await three_and(world, Liar)
    liar = peers[-1].butterfly
    assert isinstance(liar, Liar)
    liar.cheated = peers[0].peer
    await averaged_without_the_last(peers, SOON_SECONDS)


def test_a_reducer_that_tells_two_stories_is_found_out() -> None:
    run_simulation(lies, seed=0, settings=WORLD)


# A leader that reduces, tells two stories, and proposes to each member its own


@pytest.mark.parametrize(
    "cast",
    [
        pytest.param("rrr", id="three"),
        pytest.param("rrrr", id="four", marks=pytest.mark.slow),
        pytest.param("rdrr", id="one that is cheated can only dial out", marks=pytest.mark.slow),
    ],
)
def test_a_two_faced_leader_gets_no_two_results_committed(cast: str) -> None:
    ended = one_round(cast, rogue=Rogue(0, Liar, run_two_faced))
    ended.check()
    honest = ended.members[1:]
    for one in honest:
        assert one.committed is not None
        assert one.finished is not None
        assert one.committed.members == tuple(range(1, len(cast)))
        assert one.finished.excluded[0].code == "lied"
    assert max(one.ended for one in honest) < SOON_SECONDS


@pytest.mark.slow
def test_a_member_that_cannot_compare_may_commit_alone_and_no_two_results_differ() -> None:
    """Members 1 and 2 can only dial out, so neither hears what the other has; 2 was not cheated."""
    ended = one_round("rddr", rogue=Rogue(0, Liar, run_two_faced))
    ended.check()
    assert [one.place for one in ended.members[1:] if one.committed] in ([], [2])


# F24: a member a hundred times slower than the others


async def one_is_slow(
    world: SimulatedWorld, settings: AveragerSettings, slow_settings: AveragerSettings
) -> list[AveragingPeer]:
    peers = await averagers(world, 3, machine=FAST, settings=settings)
    peers.append(peer_in(world, "slow", peers, machine=SLOW, settings=slow_settings))
    await peers[-1].ready.wait()
    for one in peers:
        one.values = MANY_VALUES
    return peers


async def too_slow(world: SimulatedWorld) -> None:
    peers = await one_is_slow(world, SETTINGS, SETTINGS)
    await averaged_without_the_last(peers, ATTEMPT_SECONDS + SOON_SECONDS)


@pytest.mark.slow
def test_a_member_too_slow_for_the_round_is_left_out() -> None:
    run_simulation(too_slow, seed=0, settings=WORLD)


async def slow_and_planned_for(world: SimulatedWorld) -> None:
    """A member that declares its low speed reduces nothing, and its own data is waited for."""
    fast = dataclasses.replace(
        SETTINGS,
        up_bytes_per_second=FAST_BYTES_PER_SECOND,
        down_bytes_per_second=FAST_BYTES_PER_SECOND,
        round_seconds=400.0,
    )
    slow = dataclasses.replace(
        fast,
        up_bytes_per_second=SLOW_BYTES_PER_SECOND,
        down_bytes_per_second=SLOW_BYTES_PER_SECOND,
    )
    peers = await one_is_slow(world, fast, slow)
    ended = await average_all(peers, within=120.0)
    check_same_result(ended, peers)
    # 52 s for its values; with a quarter of the vector to reduce it would be twice as long
    assert all(52.0 < one.seconds < 60.0 for one in ended)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_slow_member_that_says_so_is_planned_for(seed: int) -> None:
    """Its questions to the coordinator wait behind its own chunks: it took it for dead, and the
    others began again."""
    run_simulation(slow_and_planned_for, seed=seed, settings=WORLD)


# A member that is alive, and does not say what it holds


@pytest.mark.parametrize(
    ("cast", "place"),
    [
        pytest.param("rrr", 2, id="of three"),
        pytest.param("rrrrrrrrr", 8, id="last of nine"),
        pytest.param("rddr", 3, id="one of two reducers"),
        pytest.param("rrdrrd", 2, id="it can only dial out"),
    ],
)
def test_a_member_that_does_not_say_what_it_holds_costs_some_seconds(cast: str, place: int) -> None:
    ended = one_round(cast, rogue=Rogue(place, Butterfly, run_tight_lipped))
    ended.check()
    for one in ended.members:
        if one.place != place:
            assert one.committed is not None
            assert one.committed.members == tuple(range(len(cast)))  # it has brought its values
            assert_nobody_is_blamed(one)
            assert one.ended < SOON_SECONDS


@pytest.mark.parametrize("place", [1, 2])
def test_a_silent_reducer_costs_no_more_where_the_one_that_leads_reduces_nothing(
    place: int,
) -> None:
    rates = {0: (1_000, 1_000_000)} | dict.fromkeys((1, 2), (1_000_000, 1_000_000))
    ended = one_round(
        "rrr", rogue=Rogue(place, Butterfly, run_tight_lipped), setting=Setting(declared=rates)
    )
    ended.check()
    for one in ended.members:
        if one.place != place:
            assert one.committed is not None
            assert one.finished is not None
            assert one.finished.cut is not None
            assert {part.reducer for part in one.finished.cut.parts} == {1, 2}
            assert_nobody_is_blamed(one)
            assert one.ended < SOON_SECONDS


def test_a_member_that_is_asked_once_more_and_says_nothing_costs_no_more_seconds() -> None:
    ended = one_round("rrrr", rogue=Rogue(2, Butterfly, run_mute))
    ended.check()
    for one in ended.members:
        if one.place != 2:
            assert one.committed is not None
            assert_nobody_is_blamed(one)
            assert one.ended < SOON_SECONDS


def test_a_leader_that_is_kept_waiting_for_long_is_not_taken_for_idle() -> None:
    """The others have the result long before it has. Nor does the one that did so say anything."""
    rogue = type("Rogue", (FramesForAWhile,), {"framed": frozenset({0})})
    ended = one_round("rrrr", rogue=Rogue(3, rogue, run_tight_lipped))
    ended.check()
    for one in ended.members[:3]:
        assert one.committed is not None
        assert_nobody_is_blamed(one)


def assert_nobody_is_blamed(one: Member) -> None:
    assert one.finished is not None
    assert not one.finished.excluded
    assert not one.finished.course.idle


def test_a_member_that_says_another_result_when_it_is_asked_once_more_harms_nobody() -> None:
    ended = one_round("rrrr", rogue=Rogue(1, Butterfly, run_forging))
    ended.check()
    for one in ended.members:
        if one.place != 1:
            assert one.committed is not None
            assert {0, 2, 3} <= set(one.committed.members)
            assert one.finished is not None
            assert one.finished.excluded.keys() <= {1}
            assert not one.finished.course.idle
            assert one.ended < SOON_SECONDS


# A member that keeps others from ending their exchange, so that they cannot say what they hold

SOME_SECONDS = Setting(  # of exchange: some three
    values=200_000,
    round_seconds=120.0,
    chunk_bytes=16 << 10,
    up=dict.fromkeys(range(5), FAST_BYTES_PER_SECOND / 2),
    down=dict.fromkeys(range(5), FAST_BYTES_PER_SECOND / 2),
)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(ORDINARY, id="at once"),
        pytest.param(SOME_SECONDS, id="after some seconds", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("kind", "cast", "place", "framed"),
    [
        pytest.param(FramesAsSender, "rrrrr", 4, {1}, id="by a sender"),
        pytest.param(FramesAsReducer, "rrrrr", 1, {4}, id="by a reducer"),
        pytest.param(FramesAndReports, "rrrrr", 1, {4}, id="by one that reports"),
        pytest.param(FramesAsSender, "rrrrr", 4, {0}, id="the one that leads"),
        pytest.param(FramesAndReports, "rrr", 2, {0}, id="the one that leads, of three"),
        pytest.param(FramesAsSender, "rrrrr", 0, {2}, id="by the one that leads"),
        pytest.param(FramesAsReducer, "rddrr", 3, {1}, id="one that can only dial out"),
        pytest.param(FramesAsReducer, "rrrrr", 4, {0, 1, 2}, id="most of them"),
        pytest.param(FramesAsReducer, "rarrd", 3, {1}, id="one that brings no data"),
        pytest.param(StarvesSome, "rrrrr", 1, {4}, id="which lacks averages"),
        pytest.param(StarvesSome, "rrrrr", 4, {0}, id="the one that leads lacks averages"),
    ],
)
def test_a_member_that_keeps_others_from_ending_their_exchange_is_left_out_alone(
    kind: type[Frames], cast: str, place: int, framed: set[int], setting: Setting
) -> None:
    calm = one_round(cast, setting=setting)
    rogue = type(kind.__name__, (kind,), {"framed": frozenset(framed)})
    way = run_and_keep_open if kind is FramesAndReports else run_round
    ended = one_round(cast, rogue=Rogue(place, rogue, way), setting=setting)
    ended.check()
    honest = [one for one in ended.members if one.place != place]
    took = max(one.finished.course.exchange_seconds for one in calm.members if one.finished)
    for one in honest:
        assert one.committed is not None
        assert one.committed.members == tuple(each.place for each in honest)
        assert one.finished is not None
        assert one.finished.excluded.keys() == {place}
        is_seen_idle = one.finished.course.idle
        assert not is_seen_idle or 2 * len(framed) > len(cast)  # then nobody knows better
        longest = 14.0 + 3.0 * took if framed & {0} or place == 0 else SOON_SECONDS + took
        assert one.ended < calm.members[one.place].ended + longest
