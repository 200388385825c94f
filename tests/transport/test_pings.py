"""Pings on their way: answered once, bounded, and deaf to numbers that nobody sent."""

from __future__ import annotations

from node.net.transport.connection import LARGEST_PING, Pings


def test_an_answer_gives_the_round_trip_once() -> None:
    pings = Pings()
    ping = pings.begin(10.0)
    assert pings.answered(ping.value, 10.25) == ping.seconds == 0.25
    assert ping.is_over.is_set()
    assert pings.answered(ping.value, 11.0) is None


def test_an_answer_to_a_ping_that_nobody_sent_is_ignored() -> None:
    pings = Pings()
    ping = pings.begin(0.0)
    assert pings.answered(ping.value + 1, 1.0) is None
    assert not ping.is_over.is_set()


def test_measurements_that_are_never_answered_do_not_pile_up() -> None:
    pings = Pings()
    for second in range(1000):
        pings.begin_measurement(float(second))
    assert len(pings) == 1


def test_numbers_begin_again_after_the_largest() -> None:
    pings = Pings()
    pings._next_value = LARGEST_PING
    assert [pings.begin(0.0).value for _ in range(2)] == [LARGEST_PING, 1]


def test_the_end_of_the_connection_ends_every_wait_without_a_result() -> None:
    pings = Pings()
    ping = pings.begin(0.0)
    pings.end_all()
    assert ping.is_over.is_set()
    assert ping.seconds is None
