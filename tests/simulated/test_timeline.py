"""The timeline drives a virtual clock, and always on."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import MockClock

from protocols.testing.timeline import Timeline
from protocols.testing.world import SimulatedWorld, run_simulation

TICK_SECONDS = 0.1
JUMPS = 1_000  # of the clock, after which it stands still; four are enough


def hair_past_a_tick() -> float:
    """A time of which the quotient by the tick is a whole number, though it is past that tick."""
    for ticks in range(1, 1_000):
        time = math.nextafter(ticks * TICK_SECONDS, math.inf)
        if time / TICK_SECONDS == ticks:
            return time
    raise AssertionError("there is no such time")


@pytest.mark.parametrize("by_a_call", [False, True], ids=["deadline", "call"])
def test_a_clock_of_whole_ticks_gets_past_a_time_that_is_a_hair_past_one(by_a_call: bool) -> None:
    time, jumps = hair_past_a_tick(), 0
    clock, timeline, reached = MockClock(), Timeline(), trio.Event()
    timeline.drive(clock, TICK_SECONDS)
    jump = clock._autojump  # type: ignore[attr-defined]

    def counted() -> None:
        nonlocal jumps
        jumps += 1
        if jumps > JUMPS:
            raise AssertionError("the clock stands still")
        jump()

    clock._autojump = counted  # type: ignore[attr-defined]
    clock.autojump_threshold = 0

    async def main() -> None:
        if by_a_call:
            timeline.at(time, reached.set)
            await reached.wait()
        else:
            await trio.sleep_until(time)
        assert time <= trio.current_time() < time + TICK_SECONDS

    trio.run(main, clock=clock)
    assert jumps <= 4


def test_a_test_may_let_the_time_of_a_driven_clock_jump() -> None:
    async def scenario(world: SimulatedWorld) -> None:
        clock, called = trio.lowlevel.current_clock(), trio.Event()
        assert isinstance(clock, MockClock)
        began = trio.current_time()
        clock.jump(60.0)
        assert trio.current_time() == world.timeline.now() == began + 60.0
        world.timeline.at(began + 30.0, called.set)
        await called.wait()
        assert trio.current_time() == began + 60.0, "it is called late, and at once"

    run_simulation(scenario)


def test_a_simulation_in_ticks_ends_whatever_its_deadlines_are() -> None:
    async def scenario(_world: SimulatedWorld) -> float:
        await trio.sleep_until(hair_past_a_tick())
        return trio.current_time()

    assert run_simulation(scenario, tick_seconds=TICK_SECONDS) >= hair_past_a_tick()
