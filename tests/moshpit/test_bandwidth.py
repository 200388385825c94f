"""A peer's estimate of its connection's speed, from the measurements of exchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocols.moshpit.bandwidth import (
    HALF_LIFE_SECONDS,
    LARGEST_ESTIMATE,
    RECENT_MEASUREMENTS,
    SMALLEST_BYTES,
    Bandwidth,
)
from protocols.moshpit.exchange import ExchangeReport
from protocols.moshpit.plan import fractions_for

MEGABYTE = 1_000_000


def report(sent: int, sending: float) -> ExchangeReport:
    """An exchange that received half of what it sent, in the same time."""
    return ExchangeReport(
        statements=(),
        result_digest=bytes(32),
        bytes_sent=sent,
        bytes_received=sent // 2,
        opened_seconds=0.0,
        reduced_seconds=0.0,
        received_seconds=0.0,
        seconds=sending,
        sending_bytes=sent,
        sending_seconds=sending,
        receiving_seconds=sending,
    )


def test_nothing_is_known_before_the_first_exchange() -> None:
    bandwidth = Bandwidth()
    assert (bandwidth.up(0.0), bandwidth.down(0.0)) == (0, 0)


def test_the_best_of_recent_exchanges_counts() -> None:
    bandwidth = Bandwidth()
    bandwidth.add(0.0, report(8 * MEGABYTE, 2.0))
    bandwidth.add(0.0, report(8 * MEGABYTE, 8.0))  # the others were slow
    assert bandwidth.up(0.0) == 4 * MEGABYTE
    assert bandwidth.down(0.0) == 2 * MEGABYTE


def test_a_connection_that_became_slow_is_believed_to_be_slow_after_some_half_lives() -> None:
    bandwidth = Bandwidth()
    bandwidth.add(0.0, report(8 * MEGABYTE, 1.0))
    assert bandwidth.up(HALF_LIFE_SECONDS) == 4 * MEGABYTE
    later = 5 * HALF_LIFE_SECONDS
    bandwidth.add(later, report(8 * MEGABYTE, 8.0))
    assert bandwidth.up(later) == MEGABYTE


def test_a_member_left_out_as_late_believes_the_measurement_of_that_exchange() -> None:
    bandwidth = Bandwidth()
    bandwidth.add(0.0, report(8 * MEGABYTE, 1.0))
    bandwidth.add(60.0, report(MEGABYTE, 10.0))
    assert bandwidth.up(60.0) > 7 * MEGABYTE  # perhaps the others were slow
    bandwidth.was_late()
    assert bandwidth.up(60.0) == MEGABYTE / 10


def test_a_member_that_could_send_almost_nothing_no_longer_knows_its_rate() -> None:
    bandwidth = Bandwidth()
    bandwidth.add(0.0, report(8 * MEGABYTE, 1.0))
    bandwidth.add(60.0, report(1000, 10.0))
    bandwidth.was_late()
    assert bandwidth.up(60.0) == bandwidth.down(60.0) == 0.0


def test_after_many_exchanges_the_oldest_are_forgotten() -> None:
    bandwidth = Bandwidth()
    bandwidth.add(0.0, report(40 * MEGABYTE, 1.0))
    for _ in range(RECENT_MEASUREMENTS):
        bandwidth.add(0.0, report(8 * MEGABYTE, 1.0))
    assert bandwidth.up(0.0) == 8 * MEGABYTE


@pytest.mark.parametrize(("size", "seconds"), [(SMALLEST_BYTES - 1, 1.0), (MEGABYTE, 0.0)])
def test_an_exchange_without_a_measurement_does_not_count(size: int, seconds: float) -> None:
    bandwidth = Bandwidth()
    bandwidth.add(0.0, report(size, seconds))
    assert bandwidth.up(0.0) == 0.0


def test_rates_above_any_home_connection_count_as_equal() -> None:
    one, other = Bandwidth(), Bandwidth()
    one.add(0.0, report(400 * MEGABYTE, 1.0))
    other.add(0.0, report(200 * MEGABYTE, 1.0))
    assert one.up(0.0) == other.up(0.0) == one.down(0.0) == LARGEST_ESTIMATE
    assert one.up(HALF_LIFE_SECONDS) == LARGEST_ESTIMATE / 2
    assert one.possible_down(0.0) == LARGEST_ESTIMATE


def test_a_peer_that_received_less_than_it_sent_reduces_as_much_as_others() -> None:
    links = [Bandwidth() for _ in range(4)]
    for link, received in zip(links, (0.75, 0.9, 1.0, 1.2), strict=True):
        link.add(0.0, replace(report(MEGABYTE, 8.0), bytes_received=int(received * MEGABYTE)))
    up, down = [one.up(0.0) for one in links], [one.possible_down(0.0) for one in links]
    assert fractions_for(up, down, [True] * 4, [True] * 4) == (0.25,) * 4


def test_a_peer_with_a_slow_downlink_reduces_less() -> None:
    one, other = Bandwidth(), Bandwidth()
    one.add(0.0, replace(report(8 * MEGABYTE, 8.0), bytes_received=2 * MEGABYTE))
    other.add(0.0, replace(report(8 * MEGABYTE, 8.0), bytes_received=8 * MEGABYTE))
    links = [one, other, other, other]
    up, down = [each.up(0.0) for each in links], [each.possible_down(0.0) for each in links]
    shares = fractions_for(up, down, [True] * 4, [True] * 4)
    assert shares[0] < 0.5 * shares[1]
