"""The IP addresses of this machine, to say where we are when we listen on all of them.

Listening on 0.0.0.0 is no address that anybody could dial; what others can dial are the addresses
of the interfaces. Those change while a laptop moves, so they are read when asked for, but not
more often than every second, for reading them costs a third of a millisecond.

Easy to get wrong: reading them takes a descriptor. A node that has none left, because strangers
have them all, is where it was.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress

import ifaddr
import trio

FRESH_SECONDS = 1.0


class InterfaceAddresses:
    """This machine's addresses, the most widely reachable first, loopback last."""

    def __init__(self) -> None:
        self._known: tuple[str, ...] = ()
        self._read_at = float("-inf")

    def of_family(self, version: int) -> tuple[str, ...]:
        """The IPv4 or the IPv6 addresses."""
        now = trio.current_time()
        if now - self._read_at > FRESH_SECONDS:
            self._read_at = now
            with suppress(OSError):
                self._known = _read()
        return tuple(ip for ip in self._known if ipaddress.ip_address(ip).version == version)


def _read() -> tuple[str, ...]:
    found = set()
    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            ip = ipaddress.ip_address(entry.ip if isinstance(entry.ip, str) else entry.ip[0])
            # A link-local IPv6 address means nothing without the name of our interface.
            if not (ip.version == 6 and ip.is_link_local):
                found.add(ip)
    return tuple(str(ip) for ip in sorted(found, key=_width))


def _width(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int, int]:
    rank = 3 if ip.is_loopback else 2 if ip.is_link_local else 1 if ip.is_private else 0
    return (rank, ip.version, int(ip))
