"""One request serves all waiting callers, also if it fails or some callers leave."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from auth.server.providers.errors import ProviderMisconfigured, ProviderUnavailable
from auth.server.providers.oidc import AT_LEAST_APART_SECONDS, KEPT_SECONDS, Remembered


class Source:
    """Counts how often it is asked. `fails` is raised instead of an answer."""

    def __init__(self, clock: MockClock) -> None:
        self._clock = clock
        self.asked = 0
        self.fails: ProviderUnavailable | None = None
        self.seconds = 1.0

    async def __call__(self) -> int:
        self.asked += 1
        number = self.asked
        ready = self._clock.current_time() + self.seconds
        await trio.sleep_until(ready)
        if self.fails is not None:
            raise self.fails
        return number


async def test_it_is_asked_once_for_all_who_wait(autojump_clock: MockClock) -> None:
    source = Source(autojump_clock)
    remembered = Remembered(source)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(remembered.get)
    assert source.asked == 1


async def test_it_is_kept_for_its_time_to_the_second(autojump_clock: MockClock) -> None:
    source = Source(autojump_clock)
    remembered = Remembered(source)
    assert await remembered.get() == 1
    await trio.sleep(KEPT_SECONDS - 1)
    assert await remembered.get() == 1
    await trio.sleep(1)
    assert await remembered.get() == 2


async def test_asking_anew_has_a_least_distance(autojump_clock: MockClock) -> None:
    source = Source(autojump_clock)
    remembered = Remembered(source)
    assert await remembered.get() == 1
    assert await remembered.get(not_older_than=0) == 1
    await trio.sleep(AT_LEAST_APART_SECONDS)
    assert await remembered.get(not_older_than=0) == 2


async def test_a_failure_is_told_to_all_who_wait_and_for_moments_more(
    autojump_clock: MockClock,
) -> None:
    source = Source(autojump_clock)
    remembered = Remembered(source)
    source.fails = ProviderMisconfigured("Down.", why="Why.", advice="Advice.", retry_after=7)
    told = []

    async def ask() -> None:
        try:
            await remembered.get()
        except ProviderMisconfigured as failure:
            told.append((str(failure), failure.retry_after))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
    assert told == [("Down. Why. Advice.", 7)] * 10
    assert source.asked == 1
    await trio.sleep(AT_LEAST_APART_SECONDS)
    source.fails = None
    assert await remembered.get() == 2


async def test_a_caller_that_leaves_does_not_spoil_the_answer_for_the_next(
    autojump_clock: MockClock,
) -> None:
    source = Source(autojump_clock)
    remembered = Remembered(source)
    source.fails = ProviderUnavailable("Down.")
    with pytest.raises(ProviderUnavailable):
        await remembered.get()
    source.fails = None
    await trio.sleep(AT_LEAST_APART_SECONDS)
    with trio.move_on_after(source.seconds / 2):
        await remembered.get()
    assert await remembered.get() == 3
