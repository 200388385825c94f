# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock
"""One clock for many connections: everybody's turn once a beat, and no wake-up for nobody."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import trio

from node.net.transport.keep_alive import PARTS, REMEMBERED_BEATS, Beats


class Calls:
    """When each member was called."""

    def __init__(self) -> None:
        self.at: dict[int, list[float]] = defaultdict(list)

    def member(self, number: int) -> Callable[[], None]:
        return lambda: self.at[number].append(round(trio.current_time(), 6))


async def test_each_member_is_called_once_a_beat_and_no_part_has_them_all(
    autojump_clock: trio.testing.MockClock,
) -> None:
    beats, calls = Beats(1.0), Calls()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beats.run)
        for number in range(40):
            beats.join(calls.member(number))
        await trio.sleep(60.1)
        nursery.cancel_scope.cancel()
    together: dict[float, int] = defaultdict(int)
    for times in calls.at.values():
        assert len(times) == 60
        assert {later - time for time, later in pairwise(times)} == {1.0}
        for time in times:
            together[time] += 1
    assert set(together.values()) == {40 // PARTS}


async def test_members_that_come_and_go_do_not_change_the_others_beat(
    autojump_clock: trio.testing.MockClock,
) -> None:
    beats, calls = Beats(1.0), Calls()
    stays, passes = calls.member(0), calls.member(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beats.run)
        await trio.sleep(5)
        beats.join(stays)
        for _ in range(50):
            await trio.sleep(0.3)
            beats.join(passes)
            await trio.sleep(1.7)
            beats.leave(passes)
            beats.leave(passes)
        nursery.cancel_scope.cancel()
    times = calls.at[0]
    assert times[0] == 6.0
    assert {later - time for time, later in pairwise(times)} == {1.0}
    assert len(calls.at[1]) in range(50, 101)


async def test_a_member_may_leave_while_it_is_called(
    autojump_clock: trio.testing.MockClock,
) -> None:
    beats, called = Beats(1.0), 0

    def once() -> None:
        nonlocal called
        called += 1
        beats.leave(once)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(beats.run)
        beats.join(once)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert called == 1


async def test_late_wake_ups_do_not_make_beats_come_faster(
    autojump_clock: trio.testing.MockClock,
) -> None:
    beats, calls = Beats(1.0), Calls()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beats.run)
        beats.join(calls.member(0))
        await trio.sleep(2.5)
        autojump_clock.jump(30.0)  # this process was stopped
        await trio.sleep(3.4)
        nursery.cancel_scope.cancel()
    assert calls.at[0] == [1.0, 2.0, 32.5, 33.5, 34.5, 35.5]


async def test_the_slowest_round_trip_of_any_member_is_remembered_for_some_beats(
    autojump_clock: trio.testing.MockClock,
) -> None:
    beats = Beats(1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beats.run)
        beats.join(lambda: None)
        await trio.sleep(1.5)
        beats.saw_round_trip(3.0)
        beats.saw_round_trip(0.1)
        assert beats.slowest_round_trip == 3.0
        await trio.sleep(REMEMBERED_BEATS - 1.0)
        beats.saw_round_trip(0.2)
        assert beats.slowest_round_trip == 3.0
        await trio.sleep(1.0)
        assert beats.slowest_round_trip == 0.2
        nursery.cancel_scope.cancel()
