"""The bytes that may leave in ten seconds, for all callers, sizes and times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.caps.units import LEAST_RATE
from node.net.transport.traffic import (
    BATCH_SECONDS,
    BURST_SECONDS,
    LEAST_BATCH_BYTES,
    SMALL_BYTES,
    TokenBucket,
)

WINDOW_SECONDS = 10.0
ALLOWED = 1.05

rates = st.floats(LEAST_RATE, 1e9)
asks = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.001, 0.02, 0.3, 2.0, 7.0]) | st.floats(0.0, 12.0),
        st.booleans(),
        st.floats(0.0, 1.0),
    ),
    max_size=40,
)


def granted(rate: float, asks: list[tuple[float, bool, float]]) -> list[tuple[float, float]]:
    """When each ask is let go that comes so long after the last one, and how many bytes it is."""
    bucket, now, left = TokenBucket(rate, 0.0), 0.0, []
    largest = max(LEAST_BATCH_BYTES, BATCH_SECONDS * rate)
    for pause, is_small, share in asks:
        now += pause
        size = share * (SMALL_BYTES if is_small else largest)
        now += bucket.small_waits(now) if is_small else bucket.bulk_waits(size, now)
        bucket.take(size, now)
        left.append((now, size))
    return left


def worst_window(left: list[tuple[float, float]]) -> float:
    worst = window = 0.0
    first = 0
    for now, size in left:
        window += size
        while now - left[first][0] > WINDOW_SECONDS:
            window -= left[first][1]
            first += 1
        worst = max(worst, window)
    return worst


@given(rates, asks)
def test_no_ten_seconds_carry_more_than_five_percent_above_the_limit(
    rate: float, asks: list[tuple[float, bool, float]]
) -> None:
    assert worst_window(granted(rate, asks)) <= ALLOWED * rate * WINDOW_SECONDS


@pytest.mark.parametrize("small_every", [0, 1, 3])
def test_a_connection_that_always_has_bytes_gets_the_whole_limit(small_every: int) -> None:
    asks = [(0.0, bool(small_every and n % small_every == 0), 1.0) for n in range(1000)]
    left = granted(2e6, asks)
    seconds = left[-1][0]
    carried = sum(size for _, size in left)
    assert 0.99 <= carried / (2e6 * (seconds + BURST_SECONDS)) <= 1.06
    assert worst_window(left) <= 1.026 * 2e6 * WINDOW_SECONDS


def test_something_small_goes_while_bulk_waits() -> None:
    bucket = TokenBucket(1000.0, 0.0)
    bucket.take(bucket.burst_bytes, 0.0)
    assert bucket.bulk_waits(100, 0.0) == pytest.approx(0.1)
    assert bucket.small_waits(0.0) == 0.0


def test_small_things_without_end_wait_as_well() -> None:
    left = granted(LEAST_RATE, [(0.0, True, 1.0)] * 500)
    assert worst_window(left) <= ALLOWED * LEAST_RATE * WINDOW_SECONDS
    assert all(later >= earlier for (earlier, _), (later, _) in pairwise(left))


def test_charged_bytes_are_paid_before_anything_else_is_sent() -> None:
    bucket = TokenBucket(1000.0, 0.0)
    bucket.take(10_000, 0.0)
    assert bucket.small_waits(0.0) == pytest.approx(10.0 - BURST_SECONDS - 0.05)
    assert bucket.bulk_waits(50, 0.0) == pytest.approx(10.0 - BURST_SECONDS + 0.05)


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1000.0, 5.0)
    bucket.take(bucket.burst_bytes, 5.0)
    assert bucket.level(4.0) == bucket.level(5.0) == 0.0
    assert bucket.level(5.1) == pytest.approx(100.0)


def test_more_than_a_burst_is_let_go_with_a_full_one() -> None:
    bucket = TokenBucket(1000.0, 0.0)
    assert bucket.bulk_waits(1e9, 0.0) == 0.0
