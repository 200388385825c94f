"""Several newcomers at once get in, or are told why not: in virtual time, over links of known
rates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import torch
import trio

from node.simulated_network import (
    LinkSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)
from protocols.accumulation.keeping_up import (
    MOST_OF_LINK,
    MOST_TIMES_LOST,
    FetchFailed,
    KeepingUp,
)
from protocols.accumulation.state_serving import StateServingSettings
from protocols.accumulation.state_sources import StateSource, choose
from protocols.accumulation.state_with_results import follow_run
from protocols.identity import PeerId
from protocols.rpc import Rpc, open_rpc
from tests.accumulation.followed_runs import (
    RESULT_BYTES,
    STATE_BYTES,
    FollowedRun,
    RunMember,
    start_run,
)

EPOCH_SECONDS = 1.0
RETRY_SECONDS = 0.5
ENOUGH_FOR_ONE = 1.5 * RESULT_BYTES / EPOCH_SECONDS
"""Bytes a second: with it one newcomer is where the run is after STATE_BYTES / (a third of it)."""
ALONE_SECONDS = STATE_BYTES / (ENOUGH_FOR_ONE - RESULT_BYTES / EPOCH_SECONDS)

Scenario = Callable[
    [SimulatedWorld, trio.Nursery, list[tuple[SimulatedNetwork, Rpc]]], Awaitable[None]
]


def with_newcomers(count: int, scenario: Scenario, seconds: float) -> None:
    async def main(world: SimulatedWorld) -> None:
        async with trio.open_nursery() as nursery:
            newcomers: list[tuple[SimulatedNetwork, Rpc]] = []

            async def hold(network: SimulatedNetwork, opened: trio.Event) -> None:
                async with open_rpc(network) as rpc:
                    newcomers.append((network, rpc))
                    opened.set()
                    await trio.sleep_forever()

            for number in range(count):
                opened = trio.Event()
                nursery.start_soon(hold, world.add_node(f"newcomer-{number}"), opened)
                await opened.wait()
            with trio.fail_after(seconds):
                await scenario(world, nursery, newcomers)
            nursery.cancel_scope.cancel()

    run_simulation(main, settings=WorldSettings(link=LinkSettings(latency_seconds=0.005)))


async def get_in(run: FollowedRun, rpc: Rpc, member: RunMember) -> float:
    """As the driver does: until it is where the run is; when that was."""
    while True:
        try:
            followed = await follow_run(rpc, run.sources, member.look(), member.layouts)
            if followed is not None:
                member.take(None, followed.results)
            else:
                fetched = await run.fetch(rpc, member)
                member.take(fetched.state, fetched.results)
        except FetchFailed:
            await trio.sleep(RETRY_SECONDS)
        if member.at == run.at:
            return trio.current_time()


@pytest.mark.parametrize("count", [2, 5])
def test_newcomers_get_in_one_after_the_other_where_the_rate_is_enough_for_one(count: int) -> None:
    """With equal shares each would need more than it gets, for ever."""

    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, newcomers: list[tuple[SimulatedNetwork, Rpc]]
    ) -> None:
        capped = StateServingSettings(upload_bytes_per_second=ENOUGH_FOR_ONE)
        run = await start_run(
            world,
            nursery,
            *(network for network, _ in newcomers),
            epoch_seconds=EPOCH_SECONDS,
            donors=1,
            serving=capped,
        )
        await trio.sleep(5 * EPOCH_SECONDS)
        began, members = trio.current_time(), [RunMember(seed=one) for one in range(count)]
        moments = []

        async def come(rpc: Rpc, member: RunMember) -> None:
            moments.append(await get_in(run, rpc, member) - began)

        async with trio.open_nursery() as coming:
            for (_, rpc), member in zip(newcomers, members, strict=True):
                coming.start_soon(come, rpc, member)
        for number, moment in enumerate(moments, 1):
            assert moment < 1.3 * number * ALONE_SECONDS

    with_newcomers(count, scenario, 4 * count * ALONE_SECONDS)


def test_newcomers_that_can_never_make_it_are_told_within_twenty_seconds_what_would_do() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, newcomers: list[tuple[SimulatedNetwork, Rpc]]
    ) -> None:
        networks = [network for network, _ in newcomers]
        capped = StateServingSettings(upload_bytes_per_second=0.5 * RESULT_BYTES / EPOCH_SECONDS)
        run = await start_run(
            world, nursery, *networks, epoch_seconds=EPOCH_SECONDS, donors=1, serving=capped
        )
        await trio.sleep(5 * EPOCH_SECONDS)
        for _, rpc in newcomers:
            nursery.start_soon(get_in, run, rpc, RunMember(seed=1))
        await trio.sleep(20.0)
        assert len(run.told) == len(newcomers)
        for error in run.told:
            needed = RESULT_BYTES / EPOCH_SECONDS / MOST_OF_LINK
            assert error.needed_bytes_per_second == pytest.approx(needed, rel=0.15)
            assert error.bytes_per_second < needed

    with_newcomers(2, scenario, 60.0)


def test_a_peer_that_has_every_result_and_is_never_in_a_step_is_told_so() -> None:
    """Over many short fetches, none of which is too slow."""
    keeping_up = KeepingUp()
    for step in range(40):
        now = 1.0 * step
        keeping_up.saw(step, now)
        keeping_up.wants(now)
        keeping_up.came(1000)
        keeping_up.has(now + 0.1)
        keeping_up.state_is_here(now + 0.1)
        if step < 15:
            assert keeping_up.too_slow(now, 3000, 1000) is None
    error = keeping_up.too_slow(40.0, 3000, 1000)
    assert error is not None
    assert "always too late" in error.what
    keeping_up.is_in()
    assert keeping_up.too_slow(40.0, 3000, 1000) is None


def test_a_peer_that_loses_the_run_again_and_again_is_told_what_would_be_safe() -> None:
    """Though nearly as much comes as is needed, and the figures alone would not say so."""
    keeping_up = KeepingUp()
    for step in range(6):
        keeping_up.saw(step, float(step))
    keeping_up.wants(0.0)
    keeping_up.came(6000)
    assert keeping_up.too_slow(5.0, 3000, 1000) is None
    keeping_up.times_lost = MOST_TIMES_LOST
    error = keeping_up.too_slow(5.0, 3000, 1000)
    assert error is not None
    assert error.needed_bytes_per_second == pytest.approx(2000.0)


def source(name: str, epoch: int, *, follows: bool = False) -> StateSource:
    return StateSource(PeerId(name), epoch, b"h" * 16, bytes([epoch]) * 32, b"", "", follows)


def test_many_newcomers_who_are_a_step_behind_are_not_taken_for_the_run() -> None:
    late = [source(f"late-{number}", 7, follows=True) for number in range(5)]
    run = [source("first", 8), source("second", 8), source("new", 8, follows=True)]
    me = PeerId("me")
    choice = choose([*late, *run], me)
    assert choice is not None
    assert choice.epoch == 8
    assert [one.follows for one in choice.sources] == [False, False, True]
    alone = choose(late, me)
    assert alone is not None, "where nobody else is there, they are"
    assert alone.epoch == 7


def test_a_newcomer_hands_on_the_results_that_it_has_followed_by() -> None:
    donor, newcomer = RunMember(clock=lambda: 0.0), RunMember(clock=lambda: 0.0)
    start = donor.at
    donor.results.follow(STATE_BYTES)
    for _ in range(2):
        values = torch.randn(donor.layouts.exchanged.values)
        donor.step(donor.made(values, "step"), values)
    found = donor.results.following(start)
    assert found is not None
    newcomer.results.take_over(found.results)
    assert newcomer.results.following(start) is None, "nobody follows it"
    newcomer.results.follow(STATE_BYTES)
    newcomer.results.take_over(found.results)
    handed_on = newcomer.results.following(start)
    assert handed_on is not None
    assert [one.after for one in handed_on.results] == [one.after for one in found.results]
    assert handed_on.first.memory is found.first.memory
