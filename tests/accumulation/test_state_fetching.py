"""A state is fetched from all peers that have it, in verified pieces, however sources behave."""

from __future__ import annotations

import pytest
import trio

from protocols.accumulation.state_fetching import FetchSettings, KeptPieces, StateSource
from protocols.accumulation.state_serving import StateServingSettings
from protocols.testing.world import NodeSettings, SimulatedWorld
from tests.accumulation.states import (
    BYTES_PER_SECOND,
    HOME,
    STATE_BYTES,
    Model,
    Newcomer,
    introduce,
    same,
    start_donors,
    with_newcomer,
)

SECONDS_ALONE = STATE_BYTES / BYTES_PER_SECOND


@pytest.mark.slow
def test_three_sources_bring_a_state_three_times_as_fast_as_one() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> tuple[float, float]:
        donors = await start_donors(world, 3)
        introduce(world, newcomer, donors)
        alone = await newcomer.fetch(donors[:1])
        together = await newcomer.fetch(donors)
        assert same(together.state, donors[0].model.capture())
        assert same(alone.state, together.state)
        assert not together.liars
        assert len(together.bytes_from) == 3
        return alone.seconds, together.seconds

    alone, together = with_newcomer(scenario)
    assert SECONDS_ALONE <= alone < SECONDS_ALONE / 0.95
    assert SECONDS_ALONE / 3 <= together < SECONDS_ALONE / 3 / 0.9


@pytest.mark.slow
def test_sources_of_unequal_speed_share_the_work_by_what_they_carry() -> None:
    fast = NodeSettings(upload_bytes_per_second=4 * BYTES_PER_SECOND)

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> float:
        donors = [
            *await start_donors(world, 2),
            *await start_donors(world, 1, machine=fast, first=2),
        ]
        introduce(world, newcomer, donors)
        fetched = await newcomer.fetch(donors)
        assert fetched.bytes_from[donors[2].peer] > 2 * fetched.bytes_from[donors[0].peer]
        return fetched.seconds

    assert with_newcomer(scenario) < SECONDS_ALONE / 6 / 0.85


def test_a_source_that_dies_in_the_middle_is_done_without() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> float:
        donors = await start_donors(world, 3)
        introduce(world, newcomer, donors)

        def kill_one(here: int, of_all: int) -> None:
            if here > of_all // 2:
                world.crash(donors[1].network)

        fetched = await newcomer.fetch(donors, progress=kill_one)
        assert same(fetched.state, donors[0].model.capture())
        assert donors[1].peer in fetched.given_up
        assert not fetched.liars
        return fetched.seconds

    assert with_newcomer(scenario) < 1.2 * (SECONDS_ALONE / 6 + SECONDS_ALONE / 4)


@pytest.mark.slow
def test_a_source_that_falls_silent_does_not_hold_up_the_end() -> None:
    """Others take over its pieces long before it would be given up."""

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> float:
        donors = await start_donors(world, 3)
        introduce(world, newcomer, donors)

        def silence_one(here: int, of_all: int) -> None:
            if here > of_all // 2:
                world.crash(donors[1].network, silently=True)

        fetched = await newcomer.fetch(donors, progress=silence_one)
        assert same(fetched.state, donors[0].model.capture())
        return fetched.seconds

    assert with_newcomer(scenario) < 1.35 * (SECONDS_ALONE / 6 + SECONDS_ALONE / 4)


@pytest.mark.slow
def test_a_slow_source_is_waited_for_when_there_is_no_other() -> None:
    modem = NodeSettings(upload_bytes_per_second=500.0)

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> float:
        donors = await start_donors(world, 1, machine=modem)
        introduce(world, newcomer, donors)
        return (await newcomer.fetch(donors)).seconds

    assert with_newcomer(scenario) > STATE_BYTES / 500.0


def test_an_interrupted_fetch_goes_on_where_it_was() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 2)
        introduce(world, newcomer, donors)
        kept = KeptPieces()
        with trio.move_on_after(SECONDS_ALONE / 4):
            await newcomer.fetch(donors, kept=kept)
        half = kept.bytes_here
        assert 0.3 * STATE_BYTES < half < 0.6 * STATE_BYTES
        fetched = await newcomer.fetch(donors, kept=kept)
        assert fetched.kept_bytes == half
        assert sum(fetched.bytes_from.values()) < 1.1 * (STATE_BYTES - half)
        assert same(fetched.state, donors[0].model.capture())

    with_newcomer(scenario)


@pytest.mark.slow
def test_newcomers_do_not_all_ask_the_same_donor() -> None:
    """Each newcomer fetches from one of four sources."""

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 4)
        introduce(world, newcomer, donors)
        others = [await Newcomer.start(world, f"other-{number}") for number in range(12)]
        asked: set[str] = set()
        for one in others:
            introduce(world, one, donors)
            fetched = await one.fetch(donors, settings=FetchSettings(most_sources=1))
            asked |= set(fetched.bytes_from)
        assert len(asked) == 4

    with_newcomer(scenario)


def test_a_donor_without_memory_for_a_copy_is_left_to_its_training() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        asked: list[int] = []

        def has_memory_for(count: int) -> bool:
            asked.append(count)
            return False

        machine = NodeSettings()
        settings = StateServingSettings(has_memory_for=has_memory_for)
        donors = await start_donors(world, 3, machine=machine, settings=settings)
        tight = list(donors)
        donors += await start_donors(world, 1, machine=machine, first=3)
        introduce(world, newcomer, donors)
        fetched = await newcomer.fetch(donors)
        assert same(fetched.state, donors[3].model.capture())
        assert set(fetched.bytes_from) == {donors[3].peer}
        assert set(asked) == {len(fetched.state.memory)}
        assert not any(one.server.copies for one in tight)

    with_newcomer(scenario)


@pytest.mark.slow
def test_a_busy_donor_says_when_to_ask_again() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        settings = StateServingSettings(most_downloads=1, upload_bytes_per_second=None)
        donors = await start_donors(world, 1, settings=settings)
        introduce(world, newcomer, donors)
        other = await Newcomer.start(world, "other")
        introduce(world, other, donors)
        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            nursery.start_soon(other.fetch, donors)
            await trio.sleep(5)
            fetched = await newcomer.fetch(donors)
        assert same(fetched.state, donors[0].model.capture())
        assert trio.current_time() - began < 2.3 * SECONDS_ALONE

    with_newcomer(scenario)


@pytest.mark.slow
def test_a_download_outlives_the_steps_of_its_donors() -> None:
    """They keep the copy that is being fetched, and name newer states meanwhile."""

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 2)
        introduce(world, newcomer, donors)
        wanted = donors[0].model.capture()

        async def step_now_and_then() -> None:
            for _ in range(4):
                await trio.sleep(SECONDS_ALONE / 8)
                for one in donors:
                    one.model.step()
                    one.server.advanced()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(step_now_and_then)
            fetched = await newcomer.fetch(donors)
        await trio.sleep(1)
        assert same(fetched.state, wanted)
        assert donors[0].server.copies == 1
        assert donors[0].model.epoch > wanted.epoch
        assert donors[0].server.downloads == 0

    with_newcomer(scenario)


def test_when_nobody_has_the_state_any_more_the_newer_one_is_fetched() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 2)
        introduce(world, newcomer, donors)
        sources = [one.source() for one in donors]
        for one in donors:
            one.model.step()
            one.server.advanced()
            await one.server.offered(one.server.offer)
        # the slots that are seen first are those of the old epoch
        looked = 0

        def seen() -> list[StateSource]:
            nonlocal looked
            looked += 1
            return sources if looked == 1 else [one.source() for one in donors]

        fetched = await newcomer.fetch_from(seen)
        assert fetched.state.epoch == donors[0].model.epoch == 2

    with_newcomer(scenario)


def test_where_digests_all_differ_a_state_comes_whole_from_one_peer() -> None:
    """The same history with other bits, as on unlike hardware."""

    def unlike(number: int) -> Model:
        model = Model(seed=number)
        model.step()
        return model

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        donors = await start_donors(world, 3, model=unlike)
        introduce(world, newcomer, donors)
        fetched = await newcomer.fetch(donors)
        (source,) = fetched.bytes_from
        donor = next(one for one in donors if one.peer == source)
        assert same(fetched.state, donor.model.capture())

    with_newcomer(scenario)


@pytest.mark.slow
def test_serving_keeps_to_the_rate_that_the_donor_set() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> float:
        settings = StateServingSettings(upload_bytes_per_second=BYTES_PER_SECOND / 10)
        donors = await start_donors(world, 1, machine=HOME, settings=settings)
        introduce(world, newcomer, donors)
        return (await newcomer.fetch(donors)).seconds

    seconds = with_newcomer(scenario)
    assert 0.95 * 10 * SECONDS_ALONE < seconds < 1.1 * 10 * SECONDS_ALONE
