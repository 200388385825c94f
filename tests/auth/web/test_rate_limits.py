from __future__ import annotations

import ipaddress

import pytest

from auth.server.rate_limits import AllowedRate, Network, RateLimit, asker, site_of

PROXIES: tuple[Network, ...] = (
    ipaddress.ip_network("10.0.0.0/8"),
    ipaddress.ip_network("fd00::/8"),
)


def test_a_burst_is_allowed_and_then_the_steady_rate() -> None:
    limit = RateLimit(AllowedRate(burst=3, per_second=0.5))
    assert [limit.wait_seconds("a", 0.0) for _ in range(4)] == [0, 0, 0, 2]
    assert limit.wait_seconds("a", 1.9) == 1
    assert limit.wait_seconds("a", 2.0) == 0
    assert limit.wait_seconds("a", 2.0) == 2


def test_a_client_that_waits_as_told_is_let_in() -> None:
    limit = RateLimit(AllowedRate.per_hour(7))
    now = 0.0
    for _ in range(50):
        now += limit.wait_seconds("a", now)
        assert limit.wait_seconds("a", now + 1e-6) == 0 or now == 0.0
        now += 1e-6


def test_asking_while_it_is_empty_does_not_keep_it_empty() -> None:
    limit = RateLimit(AllowedRate(burst=1, per_second=1.0))
    assert limit.wait_seconds("a", 0.0) == 0
    assert [limit.wait_seconds("a", tenth / 10) for tenth in range(1, 10)] == [1] * 9
    assert limit.wait_seconds("a", 1.0) == 0


def test_one_does_not_pay_for_another() -> None:
    limit = RateLimit(AllowedRate(burst=1, per_second=0.1))
    assert limit.wait_seconds("a", 0.0) == 0
    assert limit.wait_seconds("b", 0.0) == 0
    assert limit.wait_seconds("a", 0.0) == 10


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    limit = RateLimit(AllowedRate(burst=2, per_second=100.0))
    limit.wait_seconds("a", 0.0)
    assert [limit.wait_seconds("a", 1e6) for _ in range(3)] == [0, 0, 1]


def test_a_flood_from_many_addresses_takes_bounded_memory() -> None:
    limit = RateLimit(AllowedRate(burst=1, per_second=0.001), most_buckets=100)
    for number in range(10_000):
        limit.wait_seconds(number, 0.0)
    assert len(limit) == 100
    assert limit.wait_seconds(9_999, 0.0) > 0, "the latest are remembered"


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("not an address", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_site_is_an_address_or_the_network_behind_it(address: str, site: str) -> None:
    assert site_of(address) == site


@pytest.mark.parametrize(
    ("peer", "forwarded", "who"),
    [
        ("192.0.2.7", "203.0.113.9", "192.0.2.7"),  # nobody believes a stranger
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1, 203.0.113.9", "203.0.113.9"),  # the first he wrote himself
        ("10.0.0.1", "203.0.113.9, 10.0.0.2", "203.0.113.9"),  # two proxies of ours
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "203.0.113.9, rubbish", "10.0.0.1"),
        ("10.0.0.1", "rubbish, 203.0.113.9", "203.0.113.9"),
        ("fd00::1", "2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", "," * 5000, "10.0.0.1"),
    ],
)
def test_a_proxy_is_believed_if_it_is_ours(peer: str, forwarded: str, who: str) -> None:
    assert asker(peer, forwarded, PROXIES) == who


def test_without_proxies_of_ours_none_is_believed() -> None:
    assert asker("127.0.0.1", "203.0.113.9", ()) == "127.0.0.1"
