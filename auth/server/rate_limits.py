"""How often one address, or one account, may ask: a token bucket each, in bounded memory.

A bucket holds at most `burst` requests and refills at a steady rate; an empty one says how long
to wait. An IPv6 user has a whole /64 to speak from, so a /64 is one address here.

A table of buckets could itself be flooded. It keeps at most MOST_BUCKETS, and forgets the one that
was used longest ago. That one has refilled most, so an attacker who wants to be forgotten has to
use that many addresses in the meantime.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from auth.bounded_map import BoundedMap

MOST_BUCKETS = 16_384  # of some 200 bytes: 3 MiB for each kind of limit
IPV6_SITE_BITS = 64

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class AllowedRate:
    """So many at once, and so many a second in the long run."""

    burst: int
    per_second: float

    @staticmethod
    def per_minute(count: int) -> AllowedRate:
        """`count` a minute, of which a quarter may come at once."""
        return AllowedRate(max(1, count // 4), count / 60)

    @staticmethod
    def per_hour(count: int) -> AllowedRate:
        """`count` an hour, of which a quarter may come at once."""
        return AllowedRate(max(1, count // 4), count / 3600)


class RateLimit:
    """Buckets of one kind. Times are seconds of a clock that never goes back."""

    def __init__(self, rate: AllowedRate, most_buckets: int = MOST_BUCKETS) -> None:
        self._rate = rate
        # the content of each bucket, and when; the last one used is at the end
        self._buckets = BoundedMap[Hashable, tuple[float, float]](most_buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_seconds(self, key: Hashable, now: float) -> int:
        """Take one from the bucket: 0 if it had one, else the whole seconds until it has."""
        held, since = self._buckets.pop(key, (float(self._rate.burst), now))
        held = min(self._rate.burst, held + (now - since) * self._rate.per_second)
        allowed = held >= 1
        self._buckets[key] = (held - 1 if allowed else held, now)
        return 0 if allowed else max(1, math.ceil((1 - held) / self._rate.per_second))


def site_of(address: str) -> str:
    """The unit that is limited: an IPv4 address, or the /64 of an IPv6 one."""
    parsed = _address_in(address)
    if parsed is None:
        return "unknown"
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(ipaddress.ip_network((parsed, IPV6_SITE_BITS), strict=False))


def is_within(address: str, networks: Sequence[Network]) -> bool:
    """Whether the address lies in one of the networks."""
    parsed = _address_in(address)
    return parsed is not None and any(
        parsed.version == network.version and parsed in network for network in networks
    )


def asker(peer: str, forwarded_for: str, trusted_proxies: Sequence[Network]) -> str:
    """The address that asks: the connection's, or the one that our own proxies report.

    `forwarded_for` is believed only from a trusted proxy, and from its end backwards: anything
    before the first address that is no proxy of ours may have been written by the asker itself.
    """
    if not trusted_proxies or not is_within(peer, trusted_proxies):
        return peer
    for hop in reversed(forwarded_for.split(",")):
        hop = hop.strip()
        if _address_in(hop) is None:
            return peer
        if not is_within(hop, trusted_proxies):
            return hop
        peer = hop
    return peer


def _address_in(text: str) -> Address | None:
    try:
        parsed = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(parsed, "ipv4_mapped", None)
    return mapped if mapped is not None else parsed
