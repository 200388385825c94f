"""Averaging from end to end, where nothing goes wrong."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence

import pytest
import torch
import trio

from protocols.errors import ProtocolMisuse
from protocols.moshpit.grid import Grid
from protocols.moshpit.layout import Vector
from protocols.moshpit.outcome import RECENT_ROUNDS, Alone, Committed, Discarded, Verdict
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.switchboard import ROUNDS_REMEMBERED
from protocols.tensors import NotFinite
from protocols.testing.world import NodeSettings, SimulatedWorld, run_simulation
from tests.dht.members import SETTINGS as WORLD
from tests.dht.members import simulated
from tests.moshpit.averagers import (
    HOME,
    SETTINGS,
    VALUES,
    AveragingPeer,
    Ended,
    average_all,
    averagers,
    check_same_result,
    mean_of,
    peer_in,
)


async def all_ended(peers: Sequence[AveragingPeer], events: Sequence[trio.Event]) -> list[Ended]:
    with trio.fail_after(60.0):
        for event in events:
            await event.wait()
    return [one.ended[-1] for one in peers]


def result_of(ended: Ended) -> torch.Tensor:
    assert isinstance(ended.outcome, Committed)
    assert ended.result is not None
    return ended.result


@simulated
async def test_four_peers_hold_the_same_average(world: SimulatedWorld) -> None:
    peers = await averagers(world, 4)
    ended = await average_all(peers)
    check_same_result(ended, peers)
    for one in ended:
        assert isinstance(one.outcome, Committed)
        assert one.outcome.left_out == ()
        assert one.outcome.weight == 4.0
        this = one.outcome.rounds[0]
        assert (this.verdict, this.attempts, this.failures) == (Verdict.COMMITTED, 1, ())
        assert this.leader in this.members
        assert this.began <= (this.exchange_began or 0.0) <= (this.exchange_ended or 0.0)
        assert (this.exchange_ended or 0.0) <= this.ended
        # three quarters of 64 KiB to the others, and of the own quarter three copies
        assert this.bytes_sent == this.bytes_received == 2 * 48 * 1024
        phases = this.matchmaking_seconds + this.exchange_seconds + this.agreement_seconds
        assert phases == pytest.approx(this.ended - this.began)


@simulated
async def test_an_exchange_is_told_of_when_the_group_is_there(world: SimulatedWorld) -> None:
    peers = await averagers(world, 2)
    told: list[float] = []
    peers[0].averager.when_exchanging(lambda: told.append(trio.current_time()))
    first = peers[0].begin(expected=2)
    await trio.sleep(0.5)
    assert not told, "it gathers"
    (ended, _) = await all_ended(peers, [first, peers[1].begin(expected=2)])
    assert told == [ended.outcome.rounds[0].exchange_began]


@simulated
async def test_float64_values_are_averaged_in_float64(world: SimulatedWorld) -> None:
    peers = await averagers(world, 2)
    own = [torch.linspace(1.0, 2.0, 100, dtype=torch.float64) / 3.0 ** (n + 1) for n in range(2)]
    events = [
        one.begin(Vector.of({"w": values}, codec="float64"), weight=3.0, expected=2)
        for one, values in zip(peers, own, strict=True)
    ]
    for one in await all_ended(peers, events):
        torch.testing.assert_close(result_of(one), (own[0] + own[1]) / 2, rtol=1e-15, atol=0.0)
    check_same_result(await average_all(peers, epoch=1), peers)  # float32, in the same averagers


@simulated
async def test_members_count_by_their_weight(world: SimulatedWorld) -> None:
    peers = await averagers(world, 3)
    weights = [1.0, 10.0, 5.0]
    events = [
        one.begin(weight=weight, expected=3) for one, weight in zip(peers, weights, strict=True)
    ]
    ended = await all_ended(peers, events)
    vectors = torch.stack([one.vector().values.double() for one in peers])
    mean = (torch.tensor(weights).double() / 16.0) @ vectors
    for one in ended:
        torch.testing.assert_close(result_of(one).double(), mean, rtol=1e-5, atol=1e-6)


@simulated
async def test_an_auxiliary_peer_reduces_and_gets_the_result_and_counts_for_nothing(
    world: SimulatedWorld,
) -> None:
    peers = await averagers(world, 3)
    events = [one.begin(weight=float(one is not peers[0]), expected=3) for one in peers]
    ended = await all_ended(peers, events)
    for one in ended:
        mean = mean_of(peers[1:])
        torch.testing.assert_close(result_of(one).double(), mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(result_of(one), result_of(ended[0]))
        assert len(one.outcome.rounds[0].members) == 3
    assert ended[0].outcome.rounds[0].bytes_sent > 0


@simulated
async def test_where_nobody_brings_data_there_is_no_average(world: SimulatedWorld) -> None:
    peers = await averagers(world, 3)
    ended = await all_ended(peers, [one.begin(weight=0.0, expected=3) for one in peers])
    assert [one.outcome.rounds[0].verdict for one in ended] == [Verdict.DISCARDED] * 3
    assert all(one.seconds < 2.0 for one in ended)


@pytest.mark.slow
@simulated
async def test_a_peer_that_can_only_dial_out_takes_part(world: SimulatedWorld) -> None:
    peers = await averagers(world, 3)
    settings = dataclasses.replace(SETTINGS, reduces=lambda: False)
    behind = peer_in(
        world, "behind a NAT", peers, machine=NodeSettings(dialable=False), settings=settings
    )
    await behind.ready.wait()
    everybody = [*peers, behind]
    for epoch in range(3):
        check_same_result(await average_all(everybody, epoch=epoch), everybody)


@simulated
async def test_peers_that_cut_other_chunks_are_in_no_group_of_ours(world: SimulatedWorld) -> None:
    peers = await averagers(world, 2)
    other = dataclasses.replace(SETTINGS, chunk_bytes=2 * SETTINGS.chunk_bytes)
    peers.append(peer_in(world, "other", peers, settings=other))
    await peers[-1].ready.wait()
    ended = await all_ended(peers, [one.begin(expected=2) for one in peers])
    check_same_result(ended[:2], peers[:2])
    for one in ended[:2]:
        assert isinstance(one.outcome, Committed)
        assert one.outcome.rounds[0].attempts == 1
    assert isinstance(ended[2].outcome, Discarded)
    assert "another layout or chunk size" in ended[2].outcome.reason


@pytest.mark.slow
@simulated
async def test_peers_with_different_topics_never_meet(world: SimulatedWorld) -> None:
    peers = await averagers(world, 4)
    here, there = peers[::2], peers[1::2]

    async def average(epoch: int, topics: tuple[str, str]) -> None:
        events = [
            one.begin(epoch=epoch, expected=2, topic=topics[number % 2])
            for number, one in enumerate(peers)
        ]
        await all_ended(peers, events)
        check_same_result([one.ended[-1] for one in here], here)
        check_same_result([one.ended[-1] for one in there], there)

    await average(0, ("", "parameters"))
    check_same_result(await average_all(peers, epoch=1), peers)
    await average(2, ("a1.gradients", "b2.gradients"))  # though they have met


@simulated
async def test_a_peer_that_finds_nobody_is_alone(world: SimulatedWorld) -> None:
    (peer,) = await averagers(world, 1)
    (ended,) = await all_ended([peer], [peer.begin()])
    assert isinstance(ended.outcome, Alone)
    assert ended.outcome.rounds[0].verdict is Verdict.ALONE
    assert ended.seconds <= SETTINGS.matchmaking_seconds + 1.0


@simulated
async def test_a_peer_invited_to_a_round_that_it_does_not_look_for_learns_its_epoch(
    world: SimulatedWorld,
) -> None:
    first, other = await averagers(world, 2)
    await average_all([first, other])
    asked: list[int] = []
    other.averager.when_asked(lambda epoch, _begins: asked.append(epoch))
    done = first.begin(epoch=1, expected=2)
    with trio.fail_after(60.0):
        await done.wait()
    assert set(asked) == {1}


@simulated
async def test_values_that_are_not_finite_are_named_before_anything_is_sent(
    world: SimulatedWorld,
) -> None:
    async def average() -> None:
        vector = Vector.of({"good": torch.zeros(8), "bad": torch.tensor([1.0, float("nan")])})
        with pytest.raises(NotFinite, match="bad"):
            await peer.averager.average(RoundRequest(vector, weight=1.0, epoch=0))

    (peer,) = await averagers(world, 1)
    with trio.fail_after(1.0):
        await average()
    assert peer.averager.statistics().rounds == 0
    assert world.now() < 1.0


@simulated
async def test_the_class_of_a_link_is_of_what_the_last_averaging_measured(
    world: SimulatedWorld,
) -> None:
    """Others know it from the list of a round, so it stays as it is meanwhile."""
    home = NodeSettings(upload_bytes_per_second=125e3, download_bytes_per_second=1e6)
    peers = await averagers(world, 2, machine=home)
    for one in peers:
        one.values = 1 << 18  # a mebibyte
    assert [one.averager.uplink for one in peers] == [0, 0]
    done = [one.begin(expected=2) for one in peers]
    await trio.sleep(2.0)
    assert [one.averager.uplink for one in peers] == [0, 0]
    with trio.fail_after(60.0):
        for event in done:
            await event.wait()
    assert [one.averager.uplink for one in peers] == [2, 2]


def broken() -> Vector:
    return Vector.of({"w": torch.full((VALUES,), float("nan"))})


@simulated
async def test_values_of_a_peer_that_expects_nobody_are_not_checked_as_long_as_it_is_alone(
    world: SimulatedWorld,
) -> None:
    (peer,) = await averagers(world, 1)
    request = RoundRequest(broken(), weight=1.0, epoch=0, expected=1)
    assert isinstance(await peer.averager.average(request), Alone)


@simulated
async def test_values_of_a_peer_that_expects_nobody_are_checked_if_somebody_comes(
    world: SimulatedWorld,
) -> None:
    peers = sorted(await averagers(world, 2), key=lambda one: one.peer)
    for epoch, (one, other) in enumerate((peers, peers[::-1])):
        done = other.begin(epoch=epoch, expected=2)
        await trio.sleep(1.0)
        request = RoundRequest(broken(), weight=1.0, epoch=epoch, expected=1)
        with pytest.raises(NotFinite, match="w has"):
            await one.averager.average(request)
        with trio.fail_after(60.0):
            await done.wait()
        assert not isinstance(other.ended[-1].outcome, Committed)


@simulated
async def test_one_averaging_at_a_time(world: SimulatedWorld) -> None:
    (peer,) = await averagers(world, 1)
    event = peer.begin()
    await trio.sleep(0.1)
    with pytest.raises(ProtocolMisuse):
        await peer.averager.average(RoundRequest(peer.vector(), weight=1.0, epoch=0))
    await event.wait()
    assert isinstance(peer.ended[0].outcome, Alone)
    with trio.move_on_after(0.1) as cancelled:
        await peer.averager.average(RoundRequest(peer.vector(), weight=1.0, epoch=1))
    assert cancelled.cancelled_caught
    assert isinstance(
        await peer.averager.average(RoundRequest(peer.vector(), weight=1.0, epoch=2)), Alone
    )


@pytest.mark.slow
@simulated
async def test_one_that_is_cancelled_leaves_the_others_to_average(world: SimulatedWorld) -> None:
    peers = await averagers(world, 4, machine=HOME)
    events = [one.begin(expected=4) for one in peers[1:]]
    with trio.move_on_after(0.7) as cancelled:  # in the exchange
        await peers[0].averager.average(
            RoundRequest(peers[0].vector(), weight=1.0, epoch=0, expected=4)
        )
    assert cancelled.cancelled_caught
    check_same_result(await all_ended(peers[1:], events), peers[1:])
    check_same_result(await average_all(peers, epoch=1), peers)


# the grid


async def on_a_grid(world: SimulatedWorld, grid: Grid) -> None:
    peers = await averagers(world, grid.cells)
    ended = await average_all(peers, grid=grid)
    mean = mean_of(peers)
    for one in ended:
        torch.testing.assert_close(result_of(one).double(), mean, rtol=1e-5, atol=1e-6)
        verdicts = [each.verdict for each in one.outcome.rounds]
        assert verdicts == [Verdict.COMMITTED] * grid.rounds
        assert all(len(each.members) == grid.width for each in one.outcome.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(2, 3), Grid(3, 2), Grid(4, 2)], ids=str)
def test_a_full_grid_averages_exactly(grid: Grid) -> None:
    run_simulation(on_a_grid, grid, seed=0, settings=WORLD)


async def a_death_on_the_grid(world: SimulatedWorld) -> None:
    """The rest of the grid goes on. A peer that met the dead one is late for its next group, and
    keeps the average of its first."""
    grid = Grid(3, 2)
    peers = await averagers(world, grid.cells, machine=HOME)
    events = [
        one.begin(expected=len(peers), grid=grid, number=number) for number, one in enumerate(peers)
    ]
    await trio.sleep(1.0)
    peers[4].kill()
    survivors = [one for one in peers if one is not peers[4]]
    ended = await all_ended(survivors, [events[peers.index(one)] for one in survivors])
    mean = mean_of(survivors)
    for one in ended:
        # not exact, for the cell of the dead stays empty; each value had a variance of 1, and the
        # mean of two has one of 1/2
        assert (result_of(one).double() - mean).square().mean() < 0.5
    again = await average_all(survivors, epoch=1)
    check_same_result(again, survivors)


@pytest.mark.slow
def test_a_death_on_the_grid_costs_the_others_nothing() -> None:
    run_simulation(a_death_on_the_grid, seed=0, settings=WORLD)


@simulated
async def test_the_grid_follows_from_the_failures_that_were_met(world: SimulatedWorld) -> None:
    (peer,) = await averagers(world, 1)
    assert peer.averager.grid_for(4) == Grid(4, 1)
    assert peer.averager.grid_for(4096).width < 4096


# nothing grows


def objects_and_tensors() -> tuple[int, int]:
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(1 for each in objects if type(each) is torch.Tensor)


async def many_rounds(world: SimulatedWorld, rounds: int) -> None:
    peers = await averagers(world, 2)
    for one in peers:
        one.values = 1 << 10
    sizes: list[tuple[int, int]] = []
    for epoch in range(rounds):
        check_same_result(await average_all(peers, epoch=epoch), peers)
        for one in peers:
            one.ended.clear()
        if epoch in (rounds - 30, rounds - 1):
            await trio.sleep(100.0)  # slots have expired
            sizes.append(objects_and_tensors())
    (objects_before, tensors_before), (objects_after, tensors_after) = sizes
    assert tensors_after <= tensors_before
    assert objects_after < objects_before + rounds // 4
    for one in peers:
        statistics = one.averager.statistics()
        assert statistics.rounds == statistics.verdicts[Verdict.COMMITTED] == rounds
        assert len(statistics.recent) == min(rounds, RECENT_ROUNDS)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rounds() -> None:
    rounds = 30 + max(ROUNDS_REMEMBERED, RECENT_ROUNDS)  # by then all that is bounded is full
    run_simulation(many_rounds, rounds, seed=0, settings=WORLD)


@pytest.mark.soak
def test_memory_does_not_grow_with_hundreds_of_rounds() -> None:
    run_simulation(many_rounds, 500, seed=0, settings=WORLD)


@simulated
async def test_a_search_ends_at_once_when_the_run_has_gone_on(world: SimulatedWorld) -> None:
    peers = await averagers(world, 2)
    one = peers[0]
    done = one.begin(epoch=7, expected=2)
    await trio.sleep(0.5)
    one.averager.overtaken(6)  # another epoch
    await trio.sleep(0.5)
    assert not done.is_set()
    one.averager.overtaken(7)
    (ended,) = await all_ended([one], [done])
    assert isinstance(ended.outcome, Discarded)
    assert "The others have gone on" in ended.outcome.rounds[0].reason
    assert ended.outcome.rounds[0].matchmaking_seconds == pytest.approx(1.0, abs=0.1)
    found = await all_ended(peers, [each.begin(epoch=8, expected=2) for each in peers])
    check_same_result(found, peers)


@simulated
async def test_a_round_whose_group_was_found_goes_on_when_the_run_has(
    world: SimulatedWorld,
) -> None:
    peers = await averagers(world, 2)
    one = peers[0]
    one.averager.when_exchanging(lambda: one.averager.overtaken(7))
    ended = await all_ended(peers, [each.begin(epoch=7, expected=2) for each in peers])
    check_same_result(ended, peers)
