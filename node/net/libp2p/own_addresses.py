"""This node's own addresses: its owner's, those of its router and relays, and those it listens on.
Port 0 is replaced by the real port, and "all interfaces" by this machine's addresses. The list is
made at each call, because a laptop changes networks while its node runs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress

import ifaddr
import trio

from node.net.libp2p.addresses import of_socket, parse
from protocols.errors import MalformedMessage, PotluckError
from protocols.identity import PeerId


class CannotAnnounce(PotluckError):
    """An announce address that nobody could use."""


class OwnAddresses:
    """This node's addresses. It listens nowhere until `listening_on` is called."""

    def __init__(self, peer: PeerId, announced: tuple[str, ...]) -> None:
        self._peer = peer
        self._announced = tuple(_checked(text, peer) for text in announced)
        self._found: tuple[str, ...] = ()
        self._bound: list[tuple[str, int]] = []
        self._interfaces = InterfaceAddresses()

    def listening_on(self, listeners: list[trio.SocketListener]) -> None:
        self._bound = [listener.socket.getsockname()[:2] for listener in listeners]

    @property
    def ports(self) -> dict[int, int]:
        """The port that we listen on with IPv4 (4) and with IPv6 (6), as far as we do."""
        return {ipaddress.ip_address(host).version: port for host, port in reversed(self._bound)}

    def found(self, addresses: Iterable[str]) -> None:
        """Replace what was found out about routers and relays."""
        self._found = tuple(_checked(text, self._peer) for text in addresses)

    def all(self) -> tuple[str, ...]:
        """All addresses, each ending in /p2p/<us>: the owner's, those found, loopback last."""
        listened = [f"{text}/p2p/{self._peer}" for text in self.listened()]
        return tuple(dict.fromkeys((*self._announced, *self._found, *listened)))

    def listened(self) -> list[str]:
        """The addresses of this machine that we listen on, without /p2p/."""
        found: list[tuple[str, int]] = []
        for host, port in self._bound:
            ip = ipaddress.ip_address(host)
            if ip.is_unspecified:
                found.extend((each, port) for each in self._interfaces.of_family(ip.version))
            else:
                found.append((host, port))
        found.sort(key=lambda each: ipaddress.ip_address(each[0]).is_loopback)
        return [of_socket(host, port) for host, port in found]


def _checked(text: str, peer: PeerId) -> str:
    try:
        address = parse(text)
    except MalformedMessage as error:
        raise CannotAnnounce(error.what, why=error.why, advice=error.advice) from None
    if address.peer not in (None, peer):
        raise CannotAnnounce(
            f"The announce address {text} names another node.",
            why=f"This node is {peer}.",
            advice="Leave /p2p/… out: potluck adds it.",
        )
    return address.of_peer(peer)


# The IP addresses of this machine, for a node that listens on all of them.
#
# Others cannot dial 0.0.0.0; they can dial the addresses of the interfaces. These change while a
# laptop moves, so they are read at each call, but at most once a second, because reading them costs
# a third of a millisecond.
#
# Reading them takes a file descriptor. If a node has none left, because strangers have them all, it
# keeps the last result.


FRESH_SECONDS = 1.0


class InterfaceAddresses:
    """This machine's addresses, those with the widest reach first, loopback last."""

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
