"""Multiaddrs taken apart: what can be dialled, to whom, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.net.libp2p.addresses import AddressKind, likelihood, of_socket, parse
from node.net.libp2p.dialler import in_order
from protocols.errors import MalformedMessage
from protocols.identity import Identity

PEER = Identity.from_seed(bytes(32)).peer_id
RELAY = Identity.from_seed(bytes([1]) * 32).peer_id


@pytest.mark.parametrize(
    ("text", "kind", "host", "port", "family"),
    [
        ("/ip4/192.0.2.7/tcp/4001", AddressKind.IP, "192.0.2.7", 4001, 4),
        ("/ip6/2001:db8::1/tcp/65535", AddressKind.IP, "2001:db8::1", 65535, 6),
        ("/dns/example.org/tcp/80", AddressKind.NAME, "example.org", 80, 0),
        ("/dns4/example.org/tcp/80", AddressKind.NAME, "example.org", 80, 4),
        ("/dns6/example.org/tcp/80", AddressKind.NAME, "example.org", 80, 6),
        ("/ip4/192.0.2.7/udp/4001/quic-v1", AddressKind.OTHER, "", 0, 0),
        ("/ip4/192.0.2.7/tcp/4001/ws", AddressKind.OTHER, "", 0, 0),
    ],
)
def test_an_address_is_taken_apart_with_and_without_its_peer(
    text: str, kind: AddressKind, host: str, port: int, family: int
) -> None:
    for spelling, peer in ((text, None), (f"{text}/p2p/{PEER}", PEER)):
        address = parse(spelling)
        assert address.kind is kind
        assert address.peer == peer
        assert address.text == text
        if host:
            assert (address.host, address.port, address.family) == (host, port, family)
        assert address.of_peer(PEER) == f"{text}/p2p/{PEER}"


def test_the_peer_of_a_circuit_is_the_last_one_and_the_relay_is_not_dialled_for_it() -> None:
    text = f"/ip4/192.0.2.7/tcp/4001/p2p/{RELAY}/p2p-circuit"
    address = parse(f"{text}/p2p/{PEER}")
    assert address.kind is AddressKind.CIRCUIT
    assert address.peer == PEER
    assert address.text == text


@pytest.mark.parametrize(
    "text", ["", "/", "garbage", "/ip4/300.1.1.1/tcp/1", "/ip4/1.2.3.4/tcp/65536", "x" * 1000]
)
def test_an_invalid_multiaddr_is_malformed(text: str) -> None:
    with pytest.raises(MalformedMessage):
        parse(text)


@given(st.text(max_size=64) | st.text("/ip46tcpdns.:0123456789", max_size=64))
def test_any_text_is_an_address_or_malformed(text: str) -> None:
    try:
        address = parse(text)
    except MalformedMessage:
        return
    assert parse(address.of_peer(PEER)).peer == PEER


def test_a_socket_address_becomes_a_multiaddr() -> None:
    assert of_socket("127.0.0.1", 80) == "/ip4/127.0.0.1/tcp/80"
    assert of_socket("::1", 80) == "/ip6/::1/tcp/80"
    assert of_socket("fe80::1%eth0", 80) == "/ip6/fe80::1/tcp/80"
    assert of_socket("::ffff:192.0.2.7", 80) == "/ip4/192.0.2.7/tcp/80"


def test_likelier_addresses_come_first_and_equals_keep_their_order() -> None:
    texts = [
        "/dns4/example.org/tcp/1",
        "/ip4/192.168.1.2/tcp/2",
        "/ip6/2001:4860::1/tcp/3",
        "/ip4/8.8.8.8/tcp/3",
        "/ip4/8.8.4.4/tcp/3",
        "/ip4/127.0.0.1/tcp/4",
        f"/ip4/8.8.8.8/tcp/1/p2p/{RELAY}/p2p-circuit",
    ]
    addresses = [parse(text) for text in texts]
    assert [address.text for address in in_order(addresses)] == [
        texts[5],
        texts[1],
        texts[3],
        texts[4],
        texts[2],
        texts[0],
        texts[6],
    ]
    assert likelihood(parse("/ip6/fe80::1/tcp/1")) > likelihood(parse("/ip4/8.8.8.8/tcp/1"))
