"""When a router is asked: the lease, with times as plain numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nat.mapping import Mapping, MappingProtocol
from nat.mapping.lease import (
    FIRST_DELAY_SECONDS,
    LONGEST_DELAY_SECONDS,
    MIN_SECONDS_BETWEEN_ASKS,
    Grant,
    Lease,
)

PCP = MappingProtocol.PCP


def grant(life: float = 1200.0, epoch: int | None = 1000) -> Grant:
    return Grant(Mapping(PCP, "9.8.7.6", 4001, 4001, life), epoch)


def mapped(life: float = 1200.0) -> Lease:
    """A lease that was granted at the time 0."""
    lease = Lease(0)
    lease.asked(0)
    lease.granted(grant(life), 0)
    return lease


def test_the_router_is_asked_at_once() -> None:
    assert Lease(5).due == 5


def test_a_mapping_is_renewed_at_half_of_its_life() -> None:
    lease = mapped()
    assert lease.due == 600
    lease.asked(600)
    lease.granted(grant(), 600.5)
    assert lease.due == 1200.5


def test_a_renewal_that_fails_is_tried_again_and_again_until_the_mapping_ends() -> None:
    lease, tries = mapped(), []
    while lease.mapping is not None:
        now = lease.next_deadline
        lease.tick(now)
        if now >= lease.due and lease.mapping is not None:
            tries.append(now)
            lease.asked(now)
            lease.failed(now)
    assert tries == [600, 900, 1050, 1125, 1162.5, 1181.25, 1191.25]
    assert lease.due == 1201.25, "then it is searched anew"


def test_the_delay_after_failures_grows_to_its_limit_and_stays_there() -> None:
    lease, now, delays = Lease(0), 0.0, []
    for _ in range(100):
        lease.asked(now)
        lease.failed(now)
        delays.append(lease.due - now)
        now = lease.due
    assert delays[:7] == [30, 60, 120, 240, 480, 960, 1800]
    assert set(delays[7:]) == {LONGEST_DELAY_SECONDS}


def test_success_and_a_change_of_network_shorten_the_delay_again() -> None:
    lease = Lease(0)
    for now in (0, 100, 200):
        lease.asked(now)
        lease.failed(now)
    lease.network_changed(500)
    assert lease.due == 500
    lease.asked(500)
    lease.failed(500)
    assert lease.due == 500 + FIRST_DELAY_SECONDS


def test_a_change_of_network_loses_the_mapping_and_asks_at_once() -> None:
    lease = mapped()
    lease.network_changed(100)
    assert (lease.mapping, lease.due) == (None, 100)


def test_an_answer_from_before_a_change_of_network_is_not_used() -> None:
    for answer in (Lease.failed, lambda lease, now: lease.granted(grant(), now)):
        lease = Lease(0)
        lease.asked(0)
        lease.network_changed(1)
        answer(lease, 2)
        assert (lease.mapping, lease.due) == (None, MIN_SECONDS_BETWEEN_ASKS)


def test_a_router_that_began_anew_has_lost_the_mapping() -> None:
    lease = mapped()
    lease.epoch_announced(PCP, 3, 100)
    assert (lease.mapping, lease.due) == (None, 100)


def test_a_router_whose_clock_is_slow_or_fast_has_not_begun_anew() -> None:
    for epoch in (1000 + 88, 1000 + 100, 100_000):
        lease = mapped()
        lease.epoch_announced(PCP, epoch, 100)
        assert lease.mapping is not None


def test_the_age_in_another_protocol_says_nothing_of_the_mapping() -> None:
    lease = mapped()
    lease.epoch_announced(MappingProtocol.NAT_PMP, 3, 100)
    assert lease.mapping is not None


def test_without_a_mapping_a_router_that_has_just_started_is_asked() -> None:
    lease = Lease(0)
    for now in range(0, 5000, 500):
        lease.asked(now)
        lease.failed(now)
    lease.epoch_announced(PCP, 10**6, 5000)
    assert lease.due > 5000
    lease.epoch_announced(PCP, 20, 5000)
    assert lease.due == 5000


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["granted", "failed", "changed", "announced", "time passes"]),
        st.floats(0, 3000),
        st.integers(0, 2**32 - 1),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(events=EVENTS)
def test_whatever_happens_the_router_is_asked_in_bounded_time_and_not_too_often(
    events: list[tuple[str, float, int]],
) -> None:
    lease, now, asked_at, is_asking = Lease(0), 0.0, -math.inf, False
    for kind, seconds, number in events:
        now += seconds
        lease.tick(now)
        if not is_asking and now >= lease.due:
            assert now >= asked_at + MIN_SECONDS_BETWEEN_ASKS
            lease.asked(now)
            asked_at, is_asking = now, True
        if kind == "changed":
            lease.network_changed(now)
        elif kind == "announced":
            lease.epoch_announced(PCP, number, now)
        elif kind == "granted" and is_asking:
            lease.granted(grant(60 + number % 7141, number), now)
            is_asking = False
        elif kind == "failed" and is_asking:
            lease.failed(now)
            is_asking = False
        if not is_asking:
            assert lease.next_deadline <= now + 3600
