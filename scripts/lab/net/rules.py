"""What a home router does with packets, as text for nft. Nothing here does I/O.

The inside of a router is its interface `lan`, the outside `wan`. All kinds share this: the inside
may begin connections, everything unsolicited from outside is dropped without an answer, and a
packet from inside to the router's own public address is dropped too (no hairpin).

Masquerading keeps the source port if no other connection uses it. So it maps a port of a machine to
the same public port whatever the destination, which is what hole punching needs. With
`fully-random` each destination sees another port.

The kernel's connection tracking lets a packet in if it comes from the very address and port that
something was sent to. A cone is wider. It remembers the addresses that something was sent to, and
hands packets from them, of any port, to the machine that had sent.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

TABLE = "router"
ASKED_FOR = "prerouting_miniupnpd"  # the chain in which miniupnpd keeps what it was asked for
CONTACTED = "contacted"
CONTACTED_SECONDS = 120  # RFC 4787 asks routers to keep a UDP mapping for two minutes or longer
MOST_CONTACTED = 65536  # as many as a connection table of a small router


class RouterKind(enum.Enum):
    """How a home is connected to the internet."""

    NONE = "none"
    """Straight: the machine itself has the public address."""
    MAPPED = "mapped"
    """PORT_RESTRICTED, and its machines may ask the router for port mappings (UPnP, NAT-PMP)."""
    FORWARDED = "forwarded"
    """PORT_RESTRICTED, and its owner has forwarded ports to the machine."""
    CONE = "cone"
    """Lets an address in at a port, from any port of its own, once that port has sent to it."""
    PORT_RESTRICTED = "port-restricted"
    """Lets in only the address and port that something was sent to."""
    SYMMETRIC = "symmetric"
    """PORT_RESTRICTED, and each destination sees another public port."""
    DOUBLE = "double"
    """PORT_RESTRICTED twice: the home's router is behind a NAT of its provider."""


def router_rules(
    nat: RouterKind,
    *,
    udp_blocked: bool = False,
    ipv6_open: bool = False,
    forwards: Mapping[int, str] | None = None,
) -> str:
    """A router's whole table. Loading it replaces the one that is there, and what it has learnt.

    `forwards` says which inside address gets a public port, over TCP and UDP; `ipv6_open` lets in
    all IPv6.
    """
    return "\n".join(
        [
            f"table inet {TABLE}",  # so that it can be deleted, whether it is there or not
            f"delete table inet {TABLE}",
            f"table inet {TABLE} {{",
            *_sets(nat, forwards or {}),
            *_filters(nat, udp_blocked, ipv6_open),
            *_translations(nat),
            "}",
            "",
        ]
    )


def forwarding_rule(port: int, address: str) -> str:
    """What makes a router forward one more port."""
    return f"add element inet {TABLE} forwards {{ {_forwarded(port, address)} }}\n"


def mapped_places(chain: str) -> list[str]:
    """To where a router forwards ports because it was asked, from what nft says of ASKED_FOR."""
    return re.findall(r"dnat ip to (\S+)", chain)


def forgetting_rule() -> str:
    """What makes a cone forget whom its machines have sent something."""
    return f"flush map inet {TABLE} {CONTACTED}\n"


def _forwarded(port: int, address: str) -> str:
    return f"tcp . {port} : {address}, udp . {port} : {address}"


def _sets(nat: RouterKind, forwards: Mapping[int, str]) -> list[str]:
    elements = ", ".join(_forwarded(port, address) for port, address in forwards.items())
    lines = [
        "map forwards {",
        "  type inet_proto . inet_service : ipv4_addr",
        f"  elements = {{ {elements} }}" if elements else "",
        "}",
    ]
    if nat is RouterKind.CONE:
        # our port and the far address, and the machine whose port it is: outside it is the same
        lines += [
            f"map {CONTACTED} {{",
            "  type inet_proto . inet_service . ipv4_addr : ipv4_addr",
            f"  size {MOST_CONTACTED}",
            "  flags dynamic, timeout",
            f"  timeout {CONTACTED_SECONDS}s",
            "}",
        ]
    return lines


def _filters(nat: RouterKind, udp_blocked: bool, ipv6_open: bool) -> list[str]:
    lines = [
        "chain to_the_router {",
        "  type filter hook input priority filter; policy drop",
        '  iifname "lo" accept',
        "  ct state established,related accept",
        "  icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept",
        # an address of the other side is not local on this interface: no hairpin
        '  iifname "lan" fib daddr . iif type { local, broadcast, multicast } accept',
        "}",
        "chain through_the_router {",
        "  type filter hook forward priority filter; policy drop",
        "  meta l4proto udp drop" if udp_blocked else "",
        *(_remembering() if nat is RouterKind.CONE else ()),
        "  ct state established,related accept",
        "  ct state invalid drop",
        '  iifname "lan" oifname "wan" accept',
        '  iifname "wan" ct status dnat accept',
        '  iifname "wan" meta nfproto ipv6 accept' if ipv6_open else "",
        "}",
    ]
    if nat is RouterKind.MAPPED:
        lines += ["chain miniupnpd {", "}"]
    return lines


def _remembering() -> list[str]:
    sent = "meta l4proto . th sport . ip daddr : ip saddr"
    ours = 'iifname "lan" oifname "wan" meta nfproto ipv4 meta l4proto { tcp, udp }'
    return [f"  {ours} update @{CONTACTED} {{ {sent} }}"]


def _translations(nat: RouterKind) -> list[str]:
    arriving = 'iifname "wan" meta nfproto ipv4 meta l4proto { tcp, udp } fib daddr type local'
    how = " random,fully-random" if nat is RouterKind.SYMMETRIC else ""
    lines = []
    if nat is RouterKind.MAPPED:
        lines += [f"chain {ASKED_FOR} {{", "}", "chain postrouting_miniupnpd {", "}"]
    lines += [
        "chain inwards {",
        "  type nat hook prerouting priority dstnat; policy accept",
        f"  {arriving} dnat ip to meta l4proto . th dport map @forwards",
    ]
    if nat is RouterKind.CONE:
        arrived = "meta l4proto . th dport . ip saddr"
        lines.append(f"  {arriving} dnat ip to {arrived} map @{CONTACTED}")
    if nat is RouterKind.MAPPED:
        lines.append(f'  iifname "wan" jump {ASKED_FOR}')
    lines += ["}", "chain outwards {", "  type nat hook postrouting priority srcnat; policy accept"]
    if nat is RouterKind.MAPPED:
        lines.append('  oifname "wan" jump postrouting_miniupnpd')
    lines += [f'  oifname "wan" meta nfproto ipv4 masquerade{how}', "}"]
    return lines


def mapping_daemon_settings(inside_address: str, port: int) -> str:
    """The configuration file of miniupnpd for a router with the rules of MAPPED."""
    settings = {
        "ext_ifname": "wan",
        "listening_ip": "lan",
        "http_port": port,  # machines find it by SSDP
        "enable_upnp": "yes",
        "enable_natpmp": "yes",
        "secure_mode": "yes",  # a machine may map ports to itself only, as in most routers
        "upnp_table_name": TABLE,
        "upnp_nat_table_name": TABLE,
        "upnp_forward_chain": "miniupnpd",
        "upnp_nat_chain": ASKED_FOR,
        "upnp_nat_postrouting_chain": "postrouting_miniupnpd",
        "uuid": "7c0e4f0a-7b6a-4b43-9a53-0d6b5a1f0c11",
        "friendly_name": f"router {inside_address}",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    # without a rule for it, it maps nothing
    return "\n".join([*lines, "allow 1024-65535 0.0.0.0/0 1024-65535", ""])
