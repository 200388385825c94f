"""What a relay gives at most. Apart from the relay, because the settings of every node read it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class RelayLimits:
    """The most that a relay gives. 0 is no limit where the comment says so.

    The defaults suit a server for five dollars a month: 1,000 GB of traffic, of which everything
    that is relayed counts twice.
    """

    reservations: int = 256
    """Peers that may be reached through this relay at once."""
    reservations_per_site: int = 32
    """Of those, from one IPv4 address or IPv6 /64: a household, a lab."""
    reservation_seconds: int = 1800
    """Until it has to be renewed; its owner does it after half of this."""
    circuits: int = 256
    """Pairs of peers that talk through this relay at once."""
    circuits_per_peer: int = 32
    """Of those, with one peer at either end."""
    circuit_seconds: int = 0
    """After this a circuit ends; 0: no limit."""
    circuit_bytes: int = 0
    """After this many in one direction a circuit ends; 0: no limit."""
    circuit_bytes_per_second: int = MIB
    """For each direction of each circuit; 0: no limit."""
    bytes_per_second: int = 0
    """For all circuits together; 0: no limit."""
    month_bytes: int = 0
    """For all circuits in a calendar month; 0: no limit."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} is below zero")
