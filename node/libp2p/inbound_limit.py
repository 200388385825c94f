"""How many connections others may have open to us: counted while they live, and no longer.

The library counts the dead. Its handler takes a token for every inbound connection and then waits
for the *swarm* to end instead of the connection (libp2p/network/swarm.py:2042-2060, the "barrier"
after the upgrade), so after as many inbound connections *in all* as the limit allows it refuses
everyone for ever, with none open. Here a place is given back when its connection ends, whatever
the reason.

Pure: no sockets. The threat is one machine, or one botnet, that takes all our places: hence a
limit per address beside the total. An IPv6 address counts as its /64, which is what one customer
gets; loopback counts towards the total only.
"""

from __future__ import annotations

import ipaddress
from collections import Counter

IPV6_PREFIX_OF_ONE_SITE = 64


class InboundLimit:
    """Places for inbound connections. Invariant: `open` is the number of places not given back."""

    def __init__(self, *, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._by_site: Counter[str] = Counter()
        self.open = 0

    def admit(self, host: str) -> Place | None:
        """A place for a connection from this IP address, or None when there is none."""
        site = _site_of(host)
        if self.open >= self._total:
            return None
        if site is not None and self._by_site[site] >= self._per_address:
            return None
        self.open += 1
        if site is not None:
            self._by_site[site] += 1
        return Place(self, site)

    def _give_back(self, site: str | None) -> None:
        self.open -= 1
        if site is not None:
            self._by_site[site] -= 1
            if not self._by_site[site]:
                del self._by_site[site]


class Place:
    """One inbound connection's place; giving it back twice is once."""

    def __init__(self, limit: InboundLimit, site: str | None) -> None:
        self._limit: InboundLimit | None = limit
        self._site = site

    def give_back(self) -> None:
        limit, self._limit = self._limit, None
        if limit is not None:
            limit._give_back(self._site)


def _site_of(host: str) -> str | None:
    """What counts as one site: an IPv4 address or an IPv6 /64; None for this machine itself."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        network = ipaddress.ip_network((ip, IPV6_PREFIX_OF_ONE_SITE), strict=False)
        return str(network.network_address)
    return str(ip)
