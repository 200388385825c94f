"""Multiaddrs as a node needs them: where to connect, to which peer, and which to try first.

Pure. `parse` accepts every multiaddr that the library knows, and says whether *we* can dial it: TCP
over IPv4, IPv6 or a DNS name. Others (QUIC, WebSocket, circuit) are parsed, kept and passed on.
Only dialling one fails, with a readable reason.

`/p2p/X` may stand in the middle (`…/p2p/RELAY/p2p-circuit/p2p/X`): the peer is the *last* one, and
an address with a circuit must never be dialled as if it were direct.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass

from multiaddr import Multiaddr

from protocols.errors import MalformedMessage
from protocols.identity import PeerId

# Enough for a circuit address with two peer ids and a DNS name of 253 characters.
LONGEST_ADDRESS = 512


class AddressKind(enum.Enum):
    """How an address is dialled."""

    IP = "ip"
    NAME = "name"
    CIRCUIT = "circuit"
    OTHER = "other"


@dataclass(frozen=True)
class Address:
    """One multiaddr, parsed. `host` and `port` are for kinds IP and NAME only."""

    text: str
    """The whole address without a final /p2p/<peer>."""
    kind: AddressKind
    peer: PeerId | None = None
    host: str = ""
    port: int = 0
    family: int = 0
    """4 or 6 if only that family may be used, 0 for both."""

    def of_peer(self, peer: PeerId) -> str:
        """The address to give to others, ending in /p2p/<peer>."""
        return f"{self.text}/p2p/{peer}"


def parse(text: str) -> Address:
    """Parse a multiaddr; MalformedMessage if it is not valid."""
    if len(text) > LONGEST_ADDRESS:
        raise MalformedMessage(
            f"An address of {len(text)} characters is too long to be a multiaddr.",
            advice=f"The longest has {LONGEST_ADDRESS}.",
        )
    try:
        canonical = str(Multiaddr(text))
        parts = _parts(canonical)
    except Exception as error:  # noqa: BLE001  the library raises many kinds, and says no more
        raise MalformedMessage(
            f"{text!r} is not a multiaddr.",
            why=str(error),
            advice="One looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
        ) from None
    peer = None
    if not parts:
        raise MalformedMessage("An empty address leads nowhere.")
    if parts and parts[-1][0] == "p2p":
        peer = PeerId(parts.pop()[1])
    body = "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in parts)
    names = [name for name, _ in parts]
    if "p2p-circuit" in names:
        return Address(body, AddressKind.CIRCUIT, peer)
    if len(parts) == 2 and names[1] == "tcp":
        name, host = parts[0]
        port = int(parts[1][1])
        if name in ("ip4", "ip6"):
            return Address(body, AddressKind.IP, peer, host, port, 4 if name == "ip4" else 6)
        if name in ("dns", "dns4", "dns6"):
            family = {"dns": 0, "dns4": 4, "dns6": 6}[name]
            return Address(body, AddressKind.NAME, peer, host, port, family)
    return Address(body, AddressKind.OTHER, peer)


def _parts(canonical: str) -> list[tuple[str, str]]:
    """[("ip4", "192.0.2.7"), ("tcp", "4001"), …] of a multiaddr in its canonical spelling."""
    multiaddr = Multiaddr(canonical)
    return [
        (protocol.name, "" if value is None else str(value))
        for protocol, value in multiaddr.items()
    ]


def relay_of(address: str) -> str:
    """The peer id of the relay in the address of a circuit; empty if there is none."""
    head, found, _ = address.partition("/p2p-circuit")
    return head.rpartition("/p2p/")[2] if found else ""


def of_socket(host: str, port: int) -> str:
    """The multiaddr of a TCP end point, from the values of the socket calls."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return f"/ip{ip.version}/{ip}/tcp/{port}"


def likelihood(address: Address) -> int:
    """The order of the head starts: an address with a smaller number is likelier to work at once.

    A literal address needs no look-up. Loopback and link-local addresses of another machine cannot
    work. They are still not last, because they fail at once, and because two nodes on one machine
    should meet over loopback: most people first try potluck in that way.

    IPv4 is first because a peer only tells where our link to it comes from, and dials only that
    address back. What a node has to find out is how its router treats IPv4: that is the version
    that routers translate, and that every peer has.
    """
    if address.kind is AddressKind.NAME:
        return 4
    if address.kind is not AddressKind.IP:
        return 9
    ip = ipaddress.ip_address(address.host)
    if ip.is_loopback:
        return 0
    if ip.is_link_local:
        return 5
    if ip.is_private:
        return 1
    return 2 if ip.version == 4 else 3
