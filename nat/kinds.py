"""The kinds of router that a node can be behind, and which pairs can punch a hole. Pure.

The kind is that of the IPv4 router, if a node has IPv4. Routers translate no IPv6: at most they let
nothing unsolicited in, and such a pair can always punch a hole.

What counts is how the router *maps* ports and what it *filters* (RFC 4787, RFC 5382). A router that
gives a local port the same outside port for every destination can be told about in advance. One
that takes another port for each destination (symmetric) cannot. Most routers let a packet in only
from an address and port that something was sent to; some from any port of such an address.

A hole is punched by both sides connecting at once, each from its known outside port to the other's:
each side's first packet opens its own router for the other's. A symmetric router sends from a port
that the other side does not expect. That is no problem if the other side's router does not look at
the port.
"""

from __future__ import annotations

import enum
from typing import Final

from nat.addresses import port_of
from protocols.network import Sighting


class Nat(enum.IntEnum):
    """How this node's router treats ports. The numbers are on the wire: only append."""

    UNKNOWN = 0
    NONE = 1
    """No router in between, or one that lets everything in."""
    CONE = 2
    """One outside port for all destinations; lets in whatever comes from an address that was sent
    to."""
    PORT_RESTRICTED = 3
    """One outside port for all destinations; lets in what was sent to, address and port."""
    SYMMETRIC = 4
    """Another outside port for each destination."""

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self]


_WORDS: Final = {
    Nat.UNKNOWN: "not known",
    Nat.NONE: "none",
    Nat.CONE: "cone (lets in what comes from an address that was sent to)",
    Nat.PORT_RESTRICTED: "port-restricted (lets in what comes from where something was sent)",
    Nat.SYMMETRIC: "symmetric (another outside port for each destination)",
}


def can_punch(one: Nat, other: Nat) -> bool:
    """Whether two nodes behind such routers can connect directly. Yes if it is not known."""
    hopeless = {Nat.SYMMETRIC, Nat.PORT_RESTRICTED}
    return not (Nat.SYMMETRIC in (one, other) and {one, other} <= hopeless)


def kind_of_mapping(sightings: list[Sighting]) -> Nat:
    """What peers' sightings of one local port tell: SYMMETRIC, PORT_RESTRICTED or UNKNOWN.

    If only one peer was asked, a router that keeps the port is taken to do so for all destinations,
    and one that does not is taken for symmetric. Of the routers with one outside port the stricter
    kind is assumed; whether it filters by the address alone takes another test.
    """
    outside = {sighting.address for sighting in sightings}
    if not outside:
        return Nat.UNKNOWN
    if len(outside) > 1:
        return Nat.SYMMETRIC
    keeps_port = all(port_of(one.address) == one.port for one in sightings)
    return Nat.PORT_RESTRICTED if keeps_port or len(sightings) > 1 else Nat.SYMMETRIC
