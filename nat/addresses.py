"""What traversal reads from a multiaddr: its host and port, and whether it lies on the internet."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def without_peer(address: str) -> str:
    """The address without its last /p2p/<peer>."""
    head, found, tail = address.rpartition("/p2p/")
    return head if found and "/" not in tail else address


def host_of(address: str) -> str:
    """The host of an address that begins with one; of a circuit, the relay's."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 else ""


def port_of(address: str) -> int:
    """The TCP port of `/ip4/…/tcp/<port>`, 0 if there is none."""
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdigit() else 0


def tcp_address(host: str, port: int) -> str:
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


@lru_cache(maxsize=1024)
def ip_of(address: str) -> IpAddress | None:
    """The IP address of a direct TCP address; None for a name, a circuit, and other transports."""
    parts = address.split("/")
    if len(parts) != 5 or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp":
        return None
    try:
        return ipaddress.ip_address(parts[2])
    except ValueError:
        return None


def is_global(address: str) -> bool:
    """Whether this is a direct address of one machine on the public internet."""
    ip = ip_of(address)
    return ip is not None and ip.is_global and not ip.is_multicast


def site_of(address: str) -> str:
    """What one household has: its IPv4 address or its IPv6 /64, of a link's remote address."""
    parts = address.split("/")
    if len(parts) < 3:
        return address
    if parts[1] != "ip6":
        return parts[2]
    return str(ipaddress.ip_network((parts[2], 64), strict=False).network_address)


def port_to_map(listened: Iterable[str]) -> int | None:
    """The port that a router should forward: of an IPv4 address that is not only this machine's."""
    for address in listened:
        ip = ip_of(address)
        if ip is not None and ip.version == 4 and not (ip.is_loopback or ip.is_global):
            return port_of(address)
    return None
