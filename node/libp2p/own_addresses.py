"""Where others can dial us: what we were told to announce, then where we really listen.

Port 0 has become a real port, and "all interfaces" the addresses of this machine. The list is
made when asked for, because a laptop changes networks while its node runs.
"""

from __future__ import annotations

import ipaddress

import trio

from node.libp2p.addresses import of_socket, parse
from node.libp2p.interfaces import InterfaceAddresses
from protocols.errors import MalformedMessage, PotluckError
from protocols.identity import PeerId


class CannotAnnounce(PotluckError):
    """An announce address that nobody could use."""


class OwnAddresses:
    """This node's addresses. Nothing is listened on until `listening_on` says so."""

    def __init__(self, peer: PeerId, announced: tuple[str, ...]) -> None:
        self._peer = peer
        self._announced = tuple(_checked(text, peer) for text in announced)
        self._bound: list[tuple[str, int]] = []
        self._interfaces = InterfaceAddresses()

    def listening_on(self, listeners: list[trio.SocketListener]) -> None:
        self._bound = [listener.socket.getsockname()[:2] for listener in listeners]

    def all(self) -> tuple[str, ...]:
        """Each ending in /p2p/<us>; announced ones first, loopback last."""
        listened = [f"{text}/p2p/{self._peer}" for text in self.listened()]
        return tuple(dict.fromkeys((*self._announced, *listened)))

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
            advice="Leave /p2p/… out: it is added.",
        )
    return address.of_peer(peer)
