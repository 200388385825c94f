"""A peer may say a lot of nothing, and no more than a lot."""

from __future__ import annotations

import pytest

from node.net.transport.incoming import MOST_EMPTY_FRAMES_PER_SECOND, EmptyFrames
from protocols.errors import LimitExceeded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused_at(empty_frames: EmptyFrames, clock: Clock, per_second: float) -> int:
    """Which frame of a steady flood is refused."""
    began = clock.now
    for number in range(2 * MOST_EMPTY_FRAMES_PER_SECOND):
        clock.now = began + number / per_second
        try:
            empty_frames.another()
        except LimitExceeded:
            return number
    pytest.fail("it was never refused")


def test_a_flood_is_refused_before_it_has_lasted_a_second() -> None:
    clock = Clock()
    number = refused_at(EmptyFrames(clock), clock, 10.0 * MOST_EMPTY_FRAMES_PER_SECOND)
    assert number < MOST_EMPTY_FRAMES_PER_SECOND


def test_a_stream_of_empty_frames_below_the_limit_may_go_on_for_ever() -> None:
    clock = Clock()
    empty_frames = EmptyFrames(clock)
    for number in range(10 * MOST_EMPTY_FRAMES_PER_SECOND):
        clock.now = number / (0.9 * MOST_EMPTY_FRAMES_PER_SECOND)
        empty_frames.another()


def test_a_flood_after_a_long_silence_is_refused_all_the_same() -> None:
    clock = Clock()
    empty_frames = EmptyFrames(clock)
    clock.now = 3600.0
    number = refused_at(empty_frames, clock, 10.0 * MOST_EMPTY_FRAMES_PER_SECOND)
    assert number < 2 * MOST_EMPTY_FRAMES_PER_SECOND
