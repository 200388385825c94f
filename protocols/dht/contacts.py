"""A contact: a peer that can be asked, with its place and its addresses.

Contacts are passed from node to node. So everything in one is a claim until the peer itself has
answered, at one of these addresses, over a channel that proves its key. Only the place is certain:
it follows from the key.

Addresses from strangers may be invented, even for a peer that exists. So no addresses replace
others: `with_more_addresses` adds them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from protocols.dht.ids import node_id_of
from protocols.identity import PeerId

ADDRESSES_PER_CONTACT = 8  # two families, three interfaces, a relay or two
LONGEST_ADDRESS = 256  # characters; a relayed address with IPv6 and both peer ids has 170

# An internet provider usually gives one customer such a network. Renting addresses in many of them
# is expensive, which protects the tables.
IP4_NETWORK_BITS = 24
IP6_NETWORK_BITS = 48


@dataclass(frozen=True)
class Contact:
    """A peer to ask. `contact_of` makes one within the limits."""

    peer: PeerId
    node_id: int
    addresses: tuple[str, ...]

    @cached_property
    def networks(self) -> frozenset[str]:
        """The networks of the public internet with its addresses; see `network_of`."""
        found = (network_of(address) for address in self.addresses)
        return frozenset(network for network in found if network is not None)

    def with_more_addresses(self, addresses: Iterable[str]) -> Contact:
        """The same peer with more addresses, placed before the known ones, within the limit."""
        merged = _within_limits((*addresses, *self.addresses))
        return self if merged == self.addresses else Contact(self.peer, self.node_id, merged)


def contact_of(peer: str, addresses: Iterable[str]) -> Contact:
    """Make a contact; MalformedMessage if this is not the id of a peer with an Ed25519 key.

    Addresses that are too long, or too many, are left out. Whether they are valid shows when they
    are dialled.
    """
    return Contact(PeerId(peer), node_id_of(peer), _within_limits(addresses))


def _within_limits(addresses: Iterable[str]) -> tuple[str, ...]:
    short = (address for address in addresses if len(address) <= LONGEST_ADDRESS)
    return tuple(dict.fromkeys(short))[:ADDRESSES_PER_CONTACT]


def network_of(address: str) -> str | None:
    """The network of an address: an IPv4 /24, an IPv6 /48, or a DNS domain.

    None if it is not on the public internet (loopback, private ranges, other transports): such
    nodes are near each other for good reasons. For a relayed address it is the relay's network.
    """
    parts = address.split("/", 3)
    if len(parts) < 3 or parts[0]:
        return None
    kind, host = parts[1], parts[2]
    if kind in ("dns", "dns4", "dns6"):
        return ".".join(host.lower().rstrip(".").rsplit(".", 2)[-2:])
    if kind not in ("ip4", "ip6"):
        return None
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    if not ip.is_global:
        return None
    bits = IP4_NETWORK_BITS if ip.version == 4 else IP6_NETWORK_BITS
    return str(ipaddress.ip_network((ip, bits), strict=False))
