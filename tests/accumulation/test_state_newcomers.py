"""Several newcomers at once get in, or are told why not: in virtual time, over links of known
rates."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import trio

from protocols.accumulation import results, state_fetching, state_pace, state_serving
from protocols.accumulation.keeping_up import (
    MOST_OF_LINK,
    MOST_TIMES_LOST,
    FetchFailed,
    KeepingUp,
    TooSlow,
)
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.state_download import (
    STEP_SAID_SECONDS,
    StateSource,
    choose,
    is_needed,
)
from protocols.accumulation.state_fetching import FetchedState, follow_run
from protocols.accumulation.state_messages import ROOM_OF_SMALL_BYTES
from protocols.accumulation.state_serving import StateServingSettings
from protocols.identity import PeerId
from protocols.rpc import Rpc, open_rpc
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)
from tests.accumulation.followed_runs import (
    RESULT_BYTES,
    STATE_BYTES,
    VALUES,
    FollowedRun,
    RunMember,
    start_run,
)

EPOCH_SECONDS = 1.0
RETRY_SECONDS = 0.5
ENOUGH_FOR_ONE = 1.5 * RESULT_BYTES / EPOCH_SECONDS
"""Bytes a second: with it one newcomer is where the run is after STATE_BYTES / (a third of it)."""
LOOPBACK = 400e6  # bytes a second, from one process to another, with encryption
COST = 1e-9  # seconds that a batch takes longer for each byte
STEP_SECONDS = 0.1  # that a newcomer needs to take a state over, or to make a step
WATCHED_SECONDS = 22.0
BAR_SECONDS = 10.0
TOLD_BAR_SECONDS = 20.0
INT8_BYTES = VALUES * (1 + 4 / 1024)
SLOT_SECONDS = 0.5  # how old the slots are that a newcomer reads
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
    """Catch up as the driver does. Returns when this peer is where the run is."""
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


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5])
def test_newcomers_get_in_one_after_the_other_where_the_rate_is_enough_for_one(count: int) -> None:
    """With equal shares, each would always need more than it gets."""

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


class CountingCost(state_pace.ServingCost):
    """The donor's cost. It tells the test how much was sent during a batch."""

    sent_bytes = 0

    def sent(self, count: int, now: float) -> None:
        self.sent_bytes += count
        super().sent(count, now)


@dataclass(frozen=True)
class Cell:
    """A cell of the required table. All sizes in bytes are divided by one factor here: the state,
    the links, the cost of a byte and the kept results."""

    newcomers: int
    epoch_seconds: float
    state_megabytes: float
    upload_megabytes: float | None = None  # a second, as the donor's owner allows

    @property
    def smaller(self) -> float:
        return self.state_megabytes * 1e6 / STATE_BYTES

    def shrink(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name, size in (
            (state_pace, "SUPPOSED_RATE", state_pace.SUPPOSED_RATE),
            (state_pace, "SLOWEST_BYTES_PER_SECOND", state_pace.SLOWEST_BYTES_PER_SECOND),
            (state_pace, "LARGEST_TURN_BYTES", state_pace.LARGEST_TURN_BYTES),
            (state_pace, "SMALLEST_TURN_BYTES", state_pace.SMALLEST_TURN_BYTES),
            (state_serving, "LARGEST_BYTES", state_serving.LARGEST_BYTES),
            (results, "ROOM_OF_SMALL_BYTES", ROOM_OF_SMALL_BYTES),
            (state_fetching, "ROOM_OF_SMALL_BYTES", ROOM_OF_SMALL_BYTES),
        ):
            monkeypatch.setattr(module, name, max(1, int(size / self.smaller)))
        monkeypatch.setattr(state_pace, "SUPPOSED_COST", self.smaller * state_pace.SUPPOSED_COST)

    def come(self) -> tuple[list[float], list[tuple[float, TooSlow]]]:
        """When each newcomer was at most a step behind, so that the others wait for it; and when
        which one was told that it is too slow."""
        in_after: list[float] = []
        told: list[tuple[float, TooSlow]] = []

        async def scenario(
            world: SimulatedWorld,
            nursery: trio.Nursery,
            newcomers: list[tuple[SimulatedNetwork, Rpc]],
        ) -> None:
            cost = CountingCost(trio.current_time)
            cap = self.upload_megabytes
            run = await start_run(
                world,
                nursery,
                *(network for network, _ in newcomers),
                epoch_seconds=self.epoch_seconds,
                donors=1,
                machines=[NodeSettings(upload_bytes_per_second=LOOPBACK / self.smaller)],
                member=partial(RunMember, codec="none"),
                serving=StateServingSettings(
                    upload_bytes_per_second=None if cap is None else cap * 1e6 / self.smaller
                ),
                costs=[cost],
            )
            nursery.start_soon(self.compute, cost)
            await trio.sleep(8 * self.epoch_seconds)
            began = trio.current_time()

            async def get_in(rpc: Rpc, member: RunMember) -> None:
                keeping_up = KeepingUp()
                while run.at.epoch - member.at.epoch > 1:
                    try:
                        followed = await follow_run(
                            rpc, run.sources, member.look(), member.layouts, keeping_up=keeping_up
                        )
                        fetched = followed or await run.fetch(rpc, member, None, keeping_up)
                    except FetchFailed:
                        await trio.sleep(RETRY_SECONDS)
                    else:
                        await trio.sleep(STEP_SECONDS * (1 + len(fetched.results)))
                        state = fetched.state if isinstance(fetched, FetchedState) else None
                        member.take(state, fetched.results)
                in_after.append(trio.current_time() - began)

            with trio.move_on_after(WATCHED_SECONDS):
                async with trio.open_nursery() as coming:
                    for number, (_, rpc) in enumerate(newcomers):
                        coming.start_soon(get_in, rpc, RunMember(seed=number, codec="none"))
            moments = [at - began for at in run.told_at]
            told.extend(zip(moments, run.told, strict=True))

        with_newcomers(self.newcomers, scenario, WATCHED_SECONDS + 60.0)
        return in_after, told

    async def compute(self, cost: CountingCost) -> None:
        """Acts as the donor's training thread: batches take longer while bytes are sent."""
        while True:
            cost.computes()
            before = cost.sent_bytes
            await trio.sleep(self.epoch_seconds / 4)
            await trio.sleep((cost.sent_bytes - before) * self.smaller * COST)
            cost.computed()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell(2, 0.28, 130),
        *(
            pytest.param(Cell(newcomers, seconds, size), marks=pytest.mark.soak)
            for newcomers in (1, 2, 5)
            for seconds in (0.28, 0.5, 2.0)
            for size in (3.6, 130)
        ),
    ],
    ids=str,
)
def test_newcomers_at_once_are_in_within_ten_seconds(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has results of a third of the state's size, over loopback."""
    cell.shrink(monkeypatch)
    in_after, told = cell.come()
    assert not told
    assert len(in_after) == cell.newcomers
    assert max(in_after) < BAR_SECONDS


OF_ITS_LINK = 1.2  # times what its link takes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_megabytes", "epoch_seconds", "link_megabytes", "most_seconds"),
    [(130.0, 1.3, 12.5, math.inf), (130.0, 1.3, 100.0, 15.0), (1500.0, 3.0, 100.0, 60.0)],
)
def test_a_newcomer_gets_in_as_fast_as_its_link_allows(
    state_megabytes: float,
    epoch_seconds: float,
    link_megabytes: float,
    most_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From three donors on links of 100 MB/s, which train, and measure what serving costs them."""
    cell = Cell(1, epoch_seconds, state_megabytes)
    cell.shrink(monkeypatch)
    link = link_megabytes * 1e6 / cell.smaller
    needed = STATE_BYTES / (link - INT8_BYTES / cell.epoch_seconds) + 2 * cell.epoch_seconds
    seconds: list[float] = []

    async def main(world: SimulatedWorld) -> None:
        network = world.add_node("newcomer", NodeSettings(download_bytes_per_second=link))
        async with open_rpc(network) as rpc, trio.open_nursery() as nursery:
            member = partial(RunMember, codec="blockwise-int8")
            run = await start_run(
                world,
                nursery,
                network,
                epoch_seconds=cell.epoch_seconds,
                donors=3,
                machines=[NodeSettings(upload_bytes_per_second=100e6 / cell.smaller)] * 3,
                member=member,
                costs=[CountingCost(trio.current_time) for _ in range(3)],
            )
            for donor in run.donors:
                assert isinstance(donor.cost, CountingCost)
                nursery.start_soon(cell.compute, donor.cost)
            nursery.start_soon(run.hand_on_slots, SLOT_SECONDS)
            await trio.sleep(20 * cell.epoch_seconds)
            newcomer, began = member(seed=1), trio.current_time()
            with trio.fail_after(2.0 * needed):
                fetched = await run.fetch(rpc, newcomer, run.old_sources)
            newcomer.take(fetched.state, fetched.results)
            assert run.at.epoch - newcomer.at.epoch <= 1, "the others wait for it"
            assert len(fetched.bytes_from) == 3
            seconds.append(trio.current_time() - began)
            nursery.cancel_scope.cancel()

    run_simulation(main, settings=WorldSettings(link=LinkSettings(latency_seconds=0.005)))
    assert seconds[0] < min(OF_ITS_LINK * needed, most_seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell(5, 2.0, 130, upload_megabytes=12),
        *(
            pytest.param(Cell(newcomers, seconds, 130, rate), marks=pytest.mark.soak)
            for newcomers in (1, 2, 5)
            for seconds, rate in ((0.28, 100), (0.5, 60), (2.0, 12))
        ),
    ],
    ids=str,
)
def test_newcomers_that_cannot_get_in_are_all_told_so_in_time(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor's owner allows two thirds of what the results alone need. Newcomers that wait for
    their turn are told, too."""
    cell.shrink(monkeypatch)
    in_after, told = cell.come()
    assert not in_after
    first = sorted(at for at, _ in told)[: cell.newcomers]
    assert len(first) == cell.newcomers
    assert max(first) < TOLD_BAR_SECONDS
    needed = cell.state_megabytes * 1e6 / 3 / cell.epoch_seconds / MOST_OF_LINK / cell.smaller
    for _, error in told:
        assert error.needed_bytes_per_second == pytest.approx(needed, rel=0.3)


@pytest.mark.slow
def test_newcomers_that_can_never_get_in_are_told_the_needed_rate_within_twenty_seconds() -> None:
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


def test_a_peer_that_loses_the_run_again_and_again_is_told_a_safe_rate() -> None:
    """Nearly enough bytes arrive, and the figures alone would not show it."""
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


@pytest.mark.parametrize(
    ("other", "seconds", "needed"),
    [
        ((8, "h"), 60.0, False),  # where this one is
        ((9, "h"), 60.0, False),  # further: it is this one that is behind
        ((0, "h"), 0.0, True),  # a newcomer
        ((6, "h"), 0.0, True),
        ((7, "h"), 0.0, False),  # it may have made the last step, and nobody has read so yet
        ((7, "h"), STEP_SAID_SECONDS, True),
        ((8, "other"), 0.0, True),  # another side of a fork
    ],
)
def test_a_peer_that_is_behind_or_on_another_fork_may_need_a_state(
    other: tuple[int, str], seconds: float, *, needed: bool
) -> None:
    place = Lineage(other[0], other[1].encode())
    mine = Lineage(8, b"h")
    assert is_needed([mine, place], mine, seconds) == needed


def test_those_that_began_together_need_no_state_after_the_first_step() -> None:
    """Each made a copy of its state after it, three times the parameters, which nobody wanted."""
    begun, mine = Lineage(0, b"begun"), Lineage(1, b"h")
    assert not is_needed([mine, begun], mine, 0.0)
    assert is_needed([mine, begun], mine, STEP_SAID_SECONDS)
    assert is_needed([mine, begun], Lineage(2, b"h"), 0.0)


def test_many_newcomers_that_are_a_step_behind_are_not_taken_for_the_run() -> None:
    late = [source(f"late-{number}", 7, follows=True) for number in range(5)]
    run = [source("first", 8), source("second", 8), source("new", 8, follows=True)]
    me = PeerId("me")
    choice = choose([*late, *run], me)
    assert choice is not None
    assert choice.epoch == 8
    assert [one.follows for one in choice.sources] == [False, False, True]
    silent = replace(source("silent", 8, follows=True), digest=b"")
    choice = choose([*run, silent], me)
    assert choice is not None
    assert PeerId("silent") not in {one.peer for one in choice.sources}, "it serves nobody yet"
    alone = choose(late, me)
    assert alone is not None, "where nobody else is there, they are"
    assert alone.epoch == 7


def test_a_newcomer_serves_the_results_by_which_it_has_caught_up() -> None:
    donor, newcomer = RunMember(clock=lambda: 0.0), RunMember(clock=lambda: 0.0)
    start = donor.at
    donor.results.follow(STATE_BYTES)
    for _ in range(2):
        values = torch.randn(donor.layouts.exchanged[0].values)
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
