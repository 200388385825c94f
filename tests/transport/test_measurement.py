"""A link's capacity is measured in busy spells, and at no other time."""

from __future__ import annotations

import pytest

from node.net.transport.measurement import REMEMBERED_ROUND_TRIPS, LinkRateMeter, RoundTrips

MEGABYTE = 1_000_000


def carry(meter: LinkRateMeter, rate: float, seconds: float, start: float = 0.0) -> float:
    """A busy link: pieces of ten milliseconds at `rate`; returns when it ended."""
    for step in range(round(seconds / 0.01)):
        began = start + step * 0.01
        meter.sent(round(rate * 0.01), began, began + 0.01)
    return start + seconds


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert LinkRateMeter().bytes_per_second is None
    assert RoundTrips().shortest_seconds is None
    assert RoundTrips().slowest_seconds is None


def test_a_busy_link_shows_its_rate() -> None:
    meter = LinkRateMeter()
    carry(meter, 12.5 * MEGABYTE, 2.0)
    assert meter.bytes_per_second == pytest.approx(12.5 * MEGABYTE, rel=0.01)
    assert meter.total_bytes == 25 * MEGABYTE


def test_a_burst_into_the_kernels_buffer_is_no_measurement() -> None:
    meter = LinkRateMeter()
    for step in range(100):
        meter.sent(MEGABYTE, step * 0.001, step * 0.001 + 0.0001)
    assert meter.bytes_per_second is None
    assert meter.total_bytes == 100 * MEGABYTE


def test_bytes_that_fill_the_kernels_buffer_do_not_count() -> None:
    meter = LinkRateMeter()
    meter.sent(4 * MEGABYTE, 0.0, 0.0001)
    for step in range(50):
        meter.sent(MEGABYTE, step * 0.1, (step + 1) * 0.1)
    assert meter.bytes_per_second == pytest.approx(10 * MEGABYTE)


def test_chatter_is_no_measurement() -> None:
    meter = LinkRateMeter()
    for step in range(10_000):
        meter.received(100, step * 0.001, 0.01)
    assert meter.bytes_per_second is None
    assert meter.total_bytes == MEGABYTE


def test_the_best_of_late_counts() -> None:
    meter = LinkRateMeter()
    now = carry(meter, 10 * MEGABYTE, 1.0)
    now = carry(meter, 2 * MEGABYTE, 1.0, now)
    assert meter.bytes_per_second == pytest.approx(10 * MEGABYTE, rel=0.01)
    for _ in range(3):
        now = carry(meter, 2 * MEGABYTE, 1.0, now + 40.0)
    assert meter.bytes_per_second == pytest.approx(2 * MEGABYTE, rel=0.01)


def test_a_link_that_rests_keeps_its_last_reading() -> None:
    meter = LinkRateMeter()
    carry(meter, 10 * MEGABYTE, 1.0)
    meter.received(10, 1e6, None)
    assert meter.bytes_per_second == pytest.approx(10 * MEGABYTE, rel=0.01)


def test_a_receiver_guesses_spells_from_the_pauses() -> None:
    meter = LinkRateMeter()
    now = 0.0
    for _ in range(10):
        for _ in range(50):
            now += 0.01
            meter.received(100_000, now, 0.02)
        now += 5.0
    assert meter.bytes_per_second == pytest.approx(10 * MEGABYTE, rel=0.05)


def test_round_trips_are_remembered_for_a_while() -> None:
    round_trips = RoundTrips()
    round_trips.add(0.01)
    round_trips.add(0.05)
    assert (round_trips.shortest_seconds, round_trips.slowest_seconds) == (0.01, 0.05)
    for _ in range(REMEMBERED_ROUND_TRIPS):
        round_trips.add(0.1)
    assert round_trips.shortest_seconds == 0.1
