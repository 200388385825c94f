"""Which of a stranger's addresses to try, to find out whether it can be dialled.

A stranger who is believed makes us dial wherever it says: third parties, who would take us for
the attacker, or machines of our own network that it could not reach itself. So those addresses
come first that lie where its connection comes from. Of others on the public internet one is
tried, for who is reached by another way than it goes out (a name, IPv4 beside IPv6). And who
comes from the public internet has no address in a private range that means the same to us.

Easy to get wrong: in a network of one's own (at home, in tests) nothing is public; there all are
tried, as they come.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocols.dht.contacts import network_of
from protocols.network import LinkFacts, Reach

ADDRESSES_TRIED = 3
TRIED_ELSEWHERE = 1


def addresses_to_try(claimed: Sequence[str], link: LinkFacts | None) -> list[str]:
    """The few that are worth a dial, likeliest first, for a peer that is linked like this."""
    if link is None or link.reach is not Reach.DIRECT:
        return list(claimed[:TRIED_ELSEWHERE])
    home = network_of(link.remote_address)
    if home is None:
        remote = _host_of(link.remote_address)
        return sorted(claimed, key=lambda one: _host_of(one) != remote)[:ADDRESSES_TRIED]
    there = [one for one in claimed if network_of(one) == home]
    elsewhere = [one for one in claimed if network_of(one) not in (home, None)]
    return [*there, *elsewhere[:TRIED_ELSEWHERE]][:ADDRESSES_TRIED]


def _host_of(address: str) -> str:
    return "/".join(address.split("/", 3)[1:3])
