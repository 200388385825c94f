"""Inbound places: counted while connections live, per address and in all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.net.libp2p.listener import InboundLimit, InboundPlace


def test_places_are_given_back_so_any_number_may_come_one_after_the_other() -> None:
    limit = InboundLimit(total=2, per_address=2)
    for _ in range(50):
        place = limit.admit("192.0.2.7")
        assert place is not None
        place.give_back()
    assert limit.open == 0


def test_the_total_is_kept() -> None:
    limit = InboundLimit(total=2, per_address=2)
    first, second = limit.admit("192.0.2.1"), limit.admit("192.0.2.2")
    assert first is not None
    assert second is not None
    assert limit.admit("192.0.2.3") is None
    first.give_back()
    assert limit.admit("192.0.2.3") is not None


def test_giving_back_twice_is_once() -> None:
    limit = InboundLimit(total=1, per_address=1)
    place = limit.admit("192.0.2.1")
    assert place is not None
    place.give_back()
    place.give_back()
    assert limit.open == 0
    assert limit.admit("192.0.2.1") is not None
    assert limit.admit("192.0.2.1") is None


def test_one_address_cannot_take_all_places() -> None:
    limit = InboundLimit(total=10, per_address=2)
    assert limit.admit("192.0.2.1")
    assert limit.admit("::ffff:192.0.2.1")
    assert limit.admit("192.0.2.1") is None
    assert limit.admit("192.0.2.2")


def test_an_ipv6_customer_is_one_address_however_many_of_its_addresses_it_uses() -> None:
    limit = InboundLimit(total=10, per_address=2)
    assert limit.admit("2001:db8::1")
    assert limit.admit("2001:db8::2")
    assert limit.admit("2001:db8::ffff:3") is None
    assert limit.admit("2001:db8:0:1::1")
    assert limit.admit("fe80::1%eth0")


def test_loopback_counts_towards_the_total_only() -> None:
    limit = InboundLimit(total=4, per_address=1)
    assert all(limit.admit(host) for host in ("127.0.0.1", "127.0.0.1", "::1", "::1"))
    assert limit.admit("127.0.0.1") is None


@given(st.lists(st.integers(0, 5) | st.none()))
def test_open_is_always_admitted_less_given_back(steps: list[int | None]) -> None:
    limit = InboundLimit(total=8, per_address=3)
    held: list[InboundPlace] = []
    for step in steps:
        if step is None:
            if held:
                held.pop().give_back()
        elif (place := limit.admit(f"192.0.2.{step}")) is not None:
            held.append(place)
        assert limit.open == len(held) <= 8
    for place in held:
        place.give_back()
    assert limit.open == 0
    assert not limit._by_site  # nothing is remembered of those who have left
