"""Addresses as people type and paste them: parsed once, with an error that names the mistake.

A peer's address is a multiaddr that ends in its peer id: `/ip4/192.0.2.7/tcp/4001/p2p/ID`,
`/dns4/NAME/tcp/PORT/p2p/ID`, or through a relay `/ip4/…/tcp/…/p2p/RELAY/p2p-circuit/p2p/ID`. A
listen address is the part before `/p2p`.

This module accepts only addresses that potluck can dial or listen on (TCP; relays for dialling). It
is pure: it looks up no names and imports nothing slow. A peer id that lost its end when copied is
still base58; `public_key_of` counts its bytes.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.core.wrong_use import WrongUse
from protocols.errors import MalformedMessage

if TYPE_CHECKING:
    from protocols.identity import PeerId

LONGEST_ADDRESS = 1_000  # characters; a relayed one with two DNS names has under 600
EXAMPLE = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"

_NAMES = ("dns", "dns4", "dns6")
_HOSTS = ("ip4", "ip6", *_NAMES)
_OTHER_TRANSPORTS = ("udp", "quic", "quic-v1", "ws", "wss", "webtransport", "webrtc-direct", "tls")
_WHERE_FROM = "`potluck listen` and `potluck status` print it there, ready to paste."


@dataclass(frozen=True)
class PeerAddress:
    """Where a peer can be dialled, and the peer id that must answer there."""

    peer: PeerId
    text: str
    relayed: bool


def parse_peer_address(text: str) -> PeerAddress:
    """Parse the address of a peer; WrongUse says what is wrong with it."""
    parts = _parts(text)
    host_and_port, rest = _take_host_and_port(text, parts)
    if not rest:
        raise WrongUse(
            f"The address {text} does not name the peer.",
            why="It ends before /p2p/ and the peer id, so this node could not verify who answers.",
            advice=f"Copy it whole, as in {EXAMPLE}: {_WHERE_FROM}",
        )
    peers = _take_peers(text, rest)
    relayed = len(peers) == 2
    return PeerAddress(peers[-1], "/".join(["", *host_and_port, *rest]), relayed)


def check_listen_address(text: str) -> str:
    """Check a listen address and return it; WrongUse says what is wrong with it."""
    host_and_port, rest = _take_host_and_port(text, _parts(text))
    if rest:
        raise WrongUse(
            f"{text} cannot be listened on: there is more after the port.",
            why="A node adds its own /p2p/ and peer id." if rest[0] == "p2p" else "",
            advice=f"Leave the end out: {'/'.join(['', *host_and_port])}",
        )
    if host_and_port[0] in _NAMES:
        raise WrongUse(
            f"{text} cannot be listened on: a name is not an interface of this machine.",
            advice="Listen on /ip4/0.0.0.0/tcp/PORT and announce the name (--announce).",
        )
    return "/".join(["", *host_and_port])


def check_announce_address(text: str) -> str:
    """Check an address under which others shall dial us; drop a `/p2p/ID` at its end."""
    host_and_port, rest = _take_host_and_port(text, _parts(text))
    if rest and (rest[0] != "p2p" or len(rest) > 2):
        raise WrongUse(
            f"{text} cannot be announced: there is more after the port.",
            advice=f"Leave the end out: {'/'.join(['', *host_and_port])}",
        )
    if host_and_port[3] == "0":
        raise WrongUse(
            f"{text} cannot be announced: nobody can dial port 0.",
            advice="Announce the port that the router forwards to this machine.",
        )
    return "/".join(["", *host_and_port])


def _parts(text: str) -> list[str]:
    if not text or not text.isprintable() or " " in text or len(text) > LONGEST_ADDRESS:
        shown = text[:60] + ("…" if len(text) > 60 else "")
        raise WrongUse(
            f"{shown!r} is not an address.",
            why="It is empty, too long, or contains a space or another impossible character.",
            advice=f"An address looks like {EXAMPLE}",
        )
    if not text.startswith("/"):
        raise WrongUse(f"{text} is not an address.", advice=_advice_without_slash(text))
    return text.rstrip("/").split("/")[1:]


def _advice_without_slash(text: str) -> str:
    if _is_peer_id(text):
        return (
            "That is only a peer id; add where the peer can be dialled: "
            f"/ip4/HOST/tcp/PORT/p2p/{text}"
        )
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and host:
        kind = _kind_of_host(host.strip("[]"))
        return (
            "Addresses are written the libp2p way, and name the peer: "
            f"/{kind}/{host.strip('[]')}/tcp/{port}/p2p/PEER-ID"
        )
    return f"An address starts with a slash, as in {EXAMPLE}"


def _kind_of_host(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"


def _take_host_and_port(text: str, parts: list[str]) -> tuple[list[str], list[str]]:
    """The checked parts up to the port, and the rest."""
    kind, host, transport, port = (*parts, "", "", "", "")[:4]
    if kind == "p2p":
        raise WrongUse(
            f"{text} names the peer, but no place to dial.",
            advice=f"Put the host and port before it: /ip4/HOST/tcp/PORT{text}",
        )
    if kind not in _HOSTS:
        raise WrongUse(
            f"{text} starts with /{kind}, which is not a kind of host.",
            why=f"Known are {', '.join('/' + known for known in _HOSTS)}.",
            advice=f"An address looks like {EXAMPLE}",
        )
    _check_host(text, kind, host)
    if transport in _OTHER_TRANSPORTS:
        raise _not_tcp(text, transport)
    if transport != "tcp" or not port:
        raise WrongUse(
            f"{text} has no port.",
            why=f"After /{kind}/{host} comes /tcp/ and a number.",
            advice=f"An address looks like {EXAMPLE}",
        )
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
        raise WrongUse(f"{text}: {port} is not a TCP port.", advice="Ports go from 1 to 65535.")
    rest = parts[4:]
    if rest and rest[0] in _OTHER_TRANSPORTS:
        raise _not_tcp(text, rest[0])
    return parts[:4], rest


def _not_tcp(text: str, transport: str) -> WrongUse:
    return WrongUse(
        f"{text} is an address for {transport}, which potluck does not speak.",
        why="potluck's links are plain TCP, encrypted by Noise.",
        advice="Use the address of that node with /tcp/PORT and then /p2p/.",
    )


def _check_host(text: str, kind: str, host: str) -> None:
    if not host:
        raise WrongUse(f"{text} ends before it names a host.", advice=f"It looks like {EXAMPLE}")
    if kind in _NAMES:
        labels = host.rstrip(".").split(".")
        if len(host) > 253 or not all(0 < len(label) <= 63 for label in labels):
            raise WrongUse(f"{text}: {host} is not a host name.")
        if _kind_of_host(host) != "dns":
            raise WrongUse(
                f"{text}: {host} is a number, not a name.",
                advice=f"Write /{_kind_of_host(host)}/{host} instead of /{kind}/{host}.",
            )
        return
    version = 4 if kind == "ip4" else 6
    try:
        found = ipaddress.ip_address(host).version
    except ValueError:
        found = None
    if found == version:
        return
    if found is None:
        advice = f"If it is a name, write /dns/{host}; an IP address has numbers alone."
    else:
        advice = f"Write /ip{found}/{host} instead."
    raise WrongUse(f"{text}: {host} is not an IPv{version} address.", advice=advice)


def _take_peers(text: str, rest: list[str]) -> list[PeerId]:
    """The peer ids in the rest of an address: the peer, or the relay and the peer."""
    words = ["p2p" if word == "ipfs" else word for word in rest]
    if words[0] != "p2p":
        raise WrongUse(
            f"{text}: after the port comes /p2p/ and the peer id, not /{words[0]}.",
            advice=f"An address looks like {EXAMPLE}",
        )
    if len(words) == 2:
        return [_peer(text, words[1])]
    if len(words) == 5 and words[2] == "p2p-circuit" and words[3] == "p2p":
        return [_peer(text, words[1]), _peer(text, words[4])]
    if len(words) == 3 and words[2] == "p2p-circuit":
        raise WrongUse(
            f"{text} names a relay, but not the peer behind it.",
            advice=f"It ends in /p2p-circuit/p2p/PEER-ID. {_WHERE_FROM}",
        )
    if len(words) == 1:
        raise WrongUse(
            f"{text} ends before the peer id.",
            why="It was probably cut short while copying.",
            advice=_WHERE_FROM,
        )
    raise WrongUse(
        f"{text} has an unknown part after the peer id.",
        advice=f"An address looks like {EXAMPLE}",
    )


def _peer(text: str, word: str) -> PeerId:
    if not _is_peer_id(word):
        cut = "It was probably cut short while copying." if len(word) < 52 else ""
        kind = "It names a node whose key is not Ed25519." if word.startswith("Qm") else cut
        raise WrongUse(
            f"{word or 'Nothing'} is not a potluck peer id (in {text}).",
            why=kind or "It is mistyped, or names a node with another kind of key.",
            advice=f"Peer ids start with 12D3KooW and have 52 characters. {_WHERE_FROM}",
        )
    from protocols.identity import PeerId

    return PeerId(word)


def _is_peer_id(word: str) -> bool:
    # Imported here: it imports `cryptography`, which the help of a command does not need.
    from protocols.identity import public_key_of

    try:
        public_key_of(word)
    except MalformedMessage:
        return False
    return True
