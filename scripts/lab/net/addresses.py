"""The addresses of the laboratory's internet. Nothing here does I/O.

Every line of the provider has a number. It gives the line one public IPv4 address and one IPv6
prefix. Each public IPv4 address is in a /16 of its own, as those of real homes usually are. All of
11.0.0.0/8 and 2a00:b00::/32 is one segment, so nothing on it needs a route to anything else.

The addresses count as public (`ipaddress` says `is_global`): potluck asks that of an address before
it tells others about it. They belong to somebody, but no packet leaves the laboratory.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface

from protocols.errors import ProtocolMisuse

MOST_NUMBERS = 254  # they fill one byte of an address
GATEWAY = 1  # the router's host number in its own network
FIRST_HOST = 2

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class AddressFamilies(enum.Enum):
    """Which versions of IP a machine has."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"
    BOTH = "IPv4 and IPv6"

    @property
    def ipv4(self) -> bool:
        return self is not AddressFamilies.IPV6

    @property
    def ipv6(self) -> bool:
        return self is not AddressFamilies.IPV4


@dataclass(frozen=True)
class AddressLease:
    """The addresses of one interface, and its routers, if it is not on the internet itself."""

    ipv4: IPv4Interface
    ipv6: IPv6Interface
    gateway_ipv4: str = ""
    gateway_ipv6: str = ""

    def commands(
        self, interface: str, families: AddressFamilies, congestion_control: str = ""
    ) -> list[str]:
        """How `ip` gives these addresses to an interface, in place of those that it has. Its TCP
        connections have this congestion control, if one is named."""
        ends = f"congctl {congestion_control}" if congestion_control else ""
        lines = [f"addr flush dev {interface} scope global"]
        for wanted, address, gateway, found_by in (
            (families.ipv4, self.ipv4, self.gateway_ipv4, f"scope link src {self.ipv4.ip}"),
            (families.ipv6, self.ipv6, self.gateway_ipv6, "metric 256"),
        ):
            if not wanted:
                continue
            lines.append(f"addr add {address} dev {interface}")
            # in place of the route that comes with the address
            direct = f"{address.network} dev {interface} proto kernel {found_by}"
            lines.append(f"route replace {direct} {ends}")
            if gateway:
                lines.append(f"route replace default via {gateway} dev {interface} {ends}")
        return lines


def machine_line(number: int) -> AddressLease:
    """The addresses of a machine that is on the internet itself."""
    return AddressLease(
        IPv4Interface(f"11.{number}.0.2/8"), IPv6Interface(f"2a00:b00:{number:x}::2/32")
    )


def router_line(number: int) -> AddressLease:
    """The addresses of a router's outside. The IPv6 one is not in the network of its home."""
    outside = IPv6Interface(f"2a00:b00:{number:x}:ffff::1/32")
    return AddressLease(machine_line(number).ipv4, outside)


def home_lease(home: int, number: int, host: int) -> AddressLease:
    """The addresses of a machine in a home that has this line. Each home has another private
    network, to tell them apart."""
    return AddressLease(
        IPv4Interface(f"192.168.{home}.{host}/24"),
        IPv6Interface(f"2a00:b00:{number:x}::{host:x}/64"),
        gateway_ipv4=f"192.168.{home}.{GATEWAY}",
        gateway_ipv6=f"2a00:b00:{number:x}::{GATEWAY:x}",
    )


def carrier_lease(carrier: int, host: int) -> AddressLease:
    """The address of a home's router behind a carrier's NAT: RFC 6598 sets 100.64.0.0/10 aside."""
    return AddressLease(
        IPv4Interface(f"100.64.{carrier}.{host}/24"),
        IPv6Interface("::/128"),  # such a home has none
        gateway_ipv4=f"100.64.{carrier}.{GATEWAY}",
    )


def numbers(what: str, first: int = 1) -> Iterator[int]:
    """Each number once. ProtocolMisuse when the laboratory has no more of these."""
    yield from range(first, MOST_NUMBERS + 1)
    raise ProtocolMisuse(f"There cannot be more than {MOST_NUMBERS} {what}.")


def check_name(name: str) -> None:
    """ProtocolMisuse unless it can name a machine."""
    if not _NAME.fullmatch(name):
        raise ProtocolMisuse(
            f"{name!r} cannot name a machine.",
            why="Its namespace is named after it.",
            advice="Take up to 32 small letters, digits and underscores; a letter first.",
        )
