"""Members that are alive but hold up a round. One that sends no values, returns no averages, or
receives nothing is soon left out, and no honest one with it. A slow link is none of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
import trio

from protocols.identity import PeerId
from protocols.moshpit.attempt import LATE_GRACE_SECONDS
from protocols.moshpit.ballots import Ballot, Suspicion
from protocols.moshpit.blame import Blame
from protocols.moshpit.butterfly import Butterfly
from protocols.moshpit.group_round import ROUND_OF_DOUBT_SECONDS, Doubts
from protocols.moshpit.outcome import Committed
from protocols.moshpit.round import run_round
from protocols.moshpit.settings import ROUND_SECONDS
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)
from tests.dht.members import SETTINGS as WORLD
from tests.moshpit.averagers import (
    SETTINGS,
    average_all,
    averagers,
    check_same_result,
    peer_in,
)
from tests.moshpit.rogues import (
    KeepsItsValues,
    ReadsNothing,
    ReturnsNothing,
    SendsToSome,
    StopsHalfway,
    WaitsBeforeEachChunk,
)
from tests.moshpit.rounds import Rogue, RoundEnded, Setting, one_round

MEGABIT = 125_000  # bytes per second
SLOWER = MEGABIT / 2
FAST_MACHINE = NodeSettings(
    upload_bytes_per_second=20 * MEGABIT, download_bytes_per_second=20 * MEGABIT
)
FAST = 400 * MEGABIT
OTHERS_END_SECONDS = 1.2  # of a round of `ROUND` to which nothing happens, at the latest
SOON_SECONDS = 10.0

ROUND = Setting(values=1 << 16, round_seconds=ROUND_SECONDS, chunk_bytes=16 << 10)


def of_machines(rate: float, members: int, *, declared: bool) -> Setting:
    rates = dict.fromkeys(range(members), rate)
    told = {place: (int(rate), int(rate)) for place in rates} if declared else {}
    return Setting(
        values=ROUND.values,
        round_seconds=ROUND.round_seconds,
        chunk_bytes=ROUND.chunk_bytes,
        up=rates,
        down=rates,
        declared=told,
    )


def check_only_one_is_left_out(ended: RoundEnded, rogue: int) -> None:
    """All others soon commit one result, and name the member that was late."""
    ended.check()
    honest = [one for one in ended.members if one.place != rogue]
    expected = tuple(one.place for one in honest)
    for one in honest:
        assert one.committed is not None, (one.place, one.finished)
        assert one.committed.members == expected
        assert one.finished is not None
        assert set(one.finished.excluded) == {rogue}
        assert one.ended <= OTHERS_END_SECONDS + SOON_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("declared", [False, True], ids=["rates unknown", "rates known"])
@pytest.mark.parametrize(
    "kind",
    [
        KeepsItsValues,
        SendsToSome,
        StopsHalfway,
        WaitsBeforeEachChunk,
        ReturnsNothing,
        ReadsNothing,
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_member_that_is_alive_and_holds_the_round_up_is_left_out_alone(
    kind: type[Butterfly], declared: bool
) -> None:
    setting = of_machines(FAST, 4, declared=declared)
    ended = one_round("rrrr", rogue=Rogue(3, kind, run_round), setting=setting)
    check_only_one_is_left_out(ended, rogue=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cast", "rogue", "kind"),
    [
        pytest.param("rrrrr", 0, SendsToSome, id="it leads"),
        pytest.param("rddrr", 0, ReturnsNothing, id="some can only dial out"),
        pytest.param("rrrdd", 4, KeepsItsValues, id="it can only dial out"),
        pytest.param("rddd", 3, KeepsItsValues, id="one reduces for all"),
    ],
)
def test_it_is_left_out_alone_in_every_cast(cast: str, rogue: int, kind: type[Butterfly]) -> None:
    setting = of_machines(FAST, len(cast), declared=False)
    ended = one_round(cast, rogue=Rogue(rogue, kind, run_round), setting=setting)
    check_only_one_is_left_out(ended, rogue)


# Honest members


Later = Callable[[SimulatedWorld, Sequence[SimulatedNetwork]], Awaitable[None]]
HOME = WorldSettings(link=LinkSettings(latency_seconds=0.3), window_bytes=32 << 10)
NEAR = WorldSettings(window_bytes=32 << 10)
HOME_VALUES = 100_000  # 5 s of a megabit up


def at_home(up: dict[int, float], *, declared: bool, later: Later | None = None) -> Setting:
    down = {place: max(rate, 10.0 * MEGABIT) for place, rate in up.items()}
    told = {place: (int(up[place]), int(down[place])) for place in up} if declared else {}
    return Setting(
        values=HOME_VALUES,
        round_seconds=ROUND_SECONDS,
        chunk_bytes=16 << 10,
        up=up,
        down=down,
        declared=told,
        later=later,
        world=HOME,
    )


def check_all_are_in(ended: RoundEnded) -> None:
    ended.check()
    for one in ended.members:
        assert one.committed is not None, (one.place, one.finished)
        assert one.committed.members == tuple(range(len(ended.members)))
        assert one.finished is not None
        assert one.finished.course.attempts == 1


@pytest.mark.slow
@pytest.mark.parametrize("declared", [False, True], ids=["rates unknown", "rates known"])
@pytest.mark.parametrize("cast", ["rrrr", "drrr", "drd"])
def test_a_slow_link_is_waited_for(cast: str, declared: bool) -> None:
    """One uplink has a megabit, among links that carry a hundred times as much."""
    up = dict.fromkeys(range(1, len(cast)), 100.0 * MEGABIT) | {0: 1.0 * MEGABIT}
    check_all_are_in(one_round(cast, setting=at_home(up, declared=declared)))


@pytest.mark.slow
def test_slow_links_are_waited_for_where_all_are_slow() -> None:
    up = dict.fromkeys(range(5), 1.0 * MEGABIT)
    check_all_are_in(one_round("rrrrr", setting=at_home(up, declared=False)))


@pytest.mark.slow
def test_a_link_that_becomes_slower_meanwhile_is_waited_for() -> None:
    async def slower(world: SimulatedWorld, networks: Sequence[SimulatedNetwork]) -> None:
        await trio.sleep(1.5)
        world.throttle(
            networks[2],
            upload_bytes_per_second=MEGABIT / 2.5,
            download_bytes_per_second=4.0 * MEGABIT,
        )

    up = dict.fromkeys(range(4), 1.0 * MEGABIT)
    check_all_are_in(one_round("rrrr", setting=at_home(up, declared=True, later=slower)))


@pytest.mark.slow
def test_a_link_that_is_a_little_slower_is_waited_for_where_no_rate_is_as_declared() -> None:
    """The reducers take the faster ones' chunks later, as the slower one's come. But their bytes
    arrive meanwhile: in this time they do not only wait."""
    up = {0: MEGABIT / 2, 1: MEGABIT / 2, 2: MEGABIT / 2, 3: MEGABIT / 3}
    told = dict.fromkeys(up, (int(FAST), int(FAST)))
    setting = replace(at_home(up, declared=False), declared=told, world=NEAR)
    check_all_are_in(one_round("rrrr", setting=setting))


# Members that are ruled out

FIRST, SECOND = Ballot(0, 0), Ballot(1, 1)


def test_a_reducer_that_waits_for_a_sender_is_not_taken_for_it() -> None:
    """Two members have no averages from member 1, which has found that 3 sends it nothing."""
    blame = Blame()
    blame.complain(0, FIRST, [Suspicion(1, "no_averages")])
    blame.complain(2, FIRST, [Suspicion(1, "no_averages")])
    assert set(blame.ruled_out(range(4))) == {1}
    blame.complain(1, FIRST, [Suspicion(3, "no_values")])
    assert set(blame.ruled_out(range(4))) == {3}


def test_a_sender_that_such_a_reducer_waits_for_is_left_out() -> None:
    blame = Blame()
    blame.complain(0, FIRST, [Suspicion(1, "no_averages")])
    blame.complain(1, FIRST, [Suspicion(0, "gave_up"), Suspicion(3, "awaited")])
    assert set(blame.ruled_out(range(4))) == {3}


def test_a_reducer_that_blames_one_sender_after_another_is_left_out_itself() -> None:
    blame = Blame()
    for ballot, innocent in ((FIRST, 3), (SECOND, 2)):
        blame.complain(0, ballot, [Suspicion(1, "no_averages")])
        blame.complain(1, ballot, [Suspicion(innocent, "awaited")])
    assert set(blame.ruled_out(range(4))) == {1}


def test_being_waited_for_is_no_accusation_by_itself() -> None:
    blame = Blame()
    blame.complain(1, FIRST, [Suspicion(3, "awaited"), Suspicion(2, "overdue")])
    blame.complain(0, FIRST, [Suspicion(3, "awaited")])
    assert not blame.ruled_out(range(4))


def test_two_that_send_nothing_do_not_cost_the_one_that_finds_it_out_first() -> None:
    """Member 0 is the first to complain, about 3 and then 4; 1 and 2 were about to."""
    blame = Blame()
    for ballot, late in ((FIRST, 3), (SECOND, 4)):
        blame.complain(0, ballot, [Suspicion(late, "no_values")])
        for member in (1, 2):
            blame.complain(member, ballot, [Suspicion(0, "gave_up"), Suspicion(late, "overdue")])
    assert set(blame.ruled_out(range(5))) == {3, 4}


# The rounds after it


async def it_comes_again(world: SimulatedWorld) -> None:
    peers = await averagers(world, 3)
    rogue = peer_in(world, "rogue", peers, kind=KeepsItsValues)
    await rogue.ready.wait()
    everybody = [*peers, rogue]
    seconds = []
    for epoch in range(1, 6):
        events = [one.begin(epoch=epoch, expected=len(everybody)) for one in everybody]
        with trio.fail_after(60.0):
            for event in events[:-1]:
                await event.wait()
        ended = [one.ended[-1] for one in peers]
        check_same_result(ended, peers)
        seconds.append(max(one.seconds for one in ended))
        with trio.fail_after(60.0):
            await events[-1].wait()
    slow = [one for one in seconds if one > LATE_GRACE_SECONDS]
    assert len(slow) <= 3, seconds  # it is not listed after the first, nor twice after the next


@pytest.mark.slow
def test_it_is_not_in_the_next_rounds() -> None:
    run_simulation(it_comes_again, seed=1, settings=WORLD)


def test_a_doubt_grows_and_ends_with_a_result() -> None:
    doubts, peer = Doubts(lambda: 0.0), PeerId("somebody")
    spans = []
    for _ in range(4):
        doubts.round_begins()
        assert not doubts.unwelcome
        spans.append(doubts.held_up(peer))
        for _ in range(spans[-1]):
            doubts.round_begins()
            assert doubts.unwelcome == {peer}
    assert spans == [1, 2, 4, 8]
    doubts.round_begins()
    doubts.was_in([peer])
    assert doubts.held_up(peer) == 1


def test_a_doubt_ends_with_time_where_rounds_are_rare() -> None:
    now = 0.0
    doubts, peer = Doubts(lambda: now), PeerId("somebody")
    for rounds in (1, 2, 4):
        began = now
        assert doubts.held_up(peer) == rounds
        now = began + rounds * ROUND_OF_DOUBT_SECONDS - 0.1
        assert doubts.unwelcome == {peer}
        now = began + rounds * ROUND_OF_DOUBT_SECONDS
        assert not doubts.unwelcome


@pytest.mark.slow
def test_a_peer_whose_link_became_slow_does_not_declare_its_old_rate_again() -> None:
    async def scenario(world: SimulatedWorld) -> None:
        settings = replace(SETTINGS, round_seconds=ROUND_SECONDS)
        peers = await averagers(world, 4, machine=FAST_MACHINE, settings=settings)
        for one in peers:
            one.values = 1 << 20  # 4 MiB: three seconds
        await average_all(peers)
        slow = peers[1]
        before = slow.averager.bandwidth.up(trio.current_time())
        world.throttle(slow.network, upload_bytes_per_second=SLOWER)
        ended = await average_all(peers, epoch=1, within=200.0)
        assert isinstance(ended[0].outcome, Committed)
        assert {one.peer for one in ended[0].outcome.left_out} == {slow.peer}
        declared = slow.averager.bandwidth.up(trio.current_time())
        assert before > 10 * SLOWER
        assert declared < 2 * SLOWER

    run_simulation(scenario, seed=0, settings=WORLD)
