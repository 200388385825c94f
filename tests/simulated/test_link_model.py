"""When a byte sent at t arrives: the pure model, exact to the byte and the second."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.testing.link import BUSY_BYTES, MEMORY_SECONDS, SliceMeter
from protocols.testing.link_model import (
    LONGEST_SEGMENT_BYTES,
    LinkSettings,
    Pipe,
    segment_bytes,
)
from protocols.testing.world import Cut, cuts_between

times = st.floats(min_value=0, max_value=1000)
sizes = st.integers(min_value=0, max_value=10_000_000)


def test_a_pipe_without_a_rate_takes_no_time() -> None:
    assert Pipe().pass_through(3.0, 1_000_000) == 3.0


def test_a_pipe_takes_size_over_rate() -> None:
    assert Pipe(1000.0).pass_through(3.0, 500) == 3.5


def test_the_second_message_waits_for_the_first() -> None:
    pipe = Pipe(1000.0)
    pipe.pass_through(0.0, 2000)
    assert pipe.pass_through(1.0, 1000) == 3.0


def test_a_pipe_that_was_idle_does_not_save_up() -> None:
    pipe = Pipe(1000.0)
    pipe.pass_through(0.0, 1000)
    assert pipe.pass_through(100.0, 1000) == 101.0


def test_a_message_without_bytes_keeps_its_place_behind_others() -> None:
    pipe = Pipe(1000.0)
    pipe.pass_through(0.0, 1000)
    assert pipe.pass_through(0.5, 0) == 1.0


def test_a_new_rate_holds_for_what_comes_after() -> None:
    pipe = Pipe(1000.0)
    pipe.pass_through(0.0, 1000)
    pipe.bytes_per_second = 10.0
    assert pipe.pass_through(0.0, 10) == 2.0


@given(st.lists(st.tuples(times, sizes), max_size=50))
def test_a_pipe_never_reorders_and_never_carries_more_than_its_rate(
    offered: list[tuple[float, int]],
) -> None:
    offered.sort(key=lambda item: item[0])
    pipe = Pipe(12_345.0)
    left = [pipe.pass_through(time, size) for time, size in offered]
    assert left == sorted(left)
    if offered:
        duration = left[-1] - offered[0][0]
        assert sum(size for _, size in offered) <= 12_345.0 * duration * 1.000001 + 1


def test_without_jitter_the_delay_is_the_latency() -> None:
    assert LinkSettings(latency_seconds=0.05).delay(random.Random(0)) == 0.05


@given(st.integers())
def test_jitter_only_adds_and_at_most_what_it_says(seed: int) -> None:
    settings = LinkSettings(latency_seconds=0.05, jitter_seconds=0.01)
    assert 0.05 <= settings.delay(random.Random(seed)) <= 0.06


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((None, None), None),
        ((1.0,), 1),
        ((1e9, None), LONGEST_SEGMENT_BYTES),
        ((125_000.0, 1e9), 1250),
    ],
)
def test_a_segment_holds_the_slowest_pipe_for_a_hundredth_of_a_second(
    rates: tuple[float | None, ...], expected: int | None
) -> None:
    assert segment_bytes(*rates) == expected


def test_a_cut_is_one_way() -> None:
    cut = Cut(frozenset({1}), frozenset({2, 3}))
    assert cut.blocks(1, 2)
    assert not cut.blocks(2, 1)
    assert not cut.blocks(2, 3)


@given(st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=20))
def test_a_partition_separates_exactly_those_of_different_groups(group_of: list[int]) -> None:
    groups = [[n for n, g in enumerate(group_of) if g == group] for group in range(5)]
    cuts = cuts_between(groups)
    for one, group in enumerate(group_of):
        for other, other_group in enumerate(group_of):
            cut = any(each.blocks(one, other) for each in cuts)
            assert cut == (group != other_group)


def test_a_quiet_link_has_no_rate() -> None:
    meter = SliceMeter()
    assert meter.bytes_per_second(0.0) is None
    meter.record(0.0, BUSY_BYTES - 1)
    assert meter.bytes_per_second(5.0) is None


def test_the_rate_is_that_of_the_best_second_and_is_forgotten() -> None:
    meter = SliceMeter()
    for second, size in enumerate([100_000, 900_000, 200_000, 10]):
        for _ in range(10):
            meter.record(float(second), size // 10)
    assert meter.bytes_per_second(4.0) == 900_000
    assert meter.bytes_per_second(1.5 + MEMORY_SECONDS) == 200_000
    assert meter.bytes_per_second(10 + MEMORY_SECONDS) is None
