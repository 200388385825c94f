"""Addresses as people paste them: valid ones pass, and the mistake in others is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.peer_address import check_announce_address, check_listen_address, parse_peer_address
from node.core.wrong_use import WrongUse

PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"
RELAY = "12D3KooWJCxxPqfCW3dNRqt9UFo1Ssd8x2GAqWxfuisnoBdJX45p"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/4001/p2p/{PEER}",
        f"/dns/node.example/tcp/443/p2p/{PEER}",
        f"/dns4/node.example/tcp/443/p2p/{PEER}",
        f"/dns6/node.example./tcp/443/p2p/{PEER}",
    ],
)
def test_a_whole_address_is_taken_as_it_is(text: str) -> None:
    address = parse_peer_address(text)
    assert (address.peer, address.text, address.relayed) == (PEER, text, False)


def test_the_peer_of_a_relayed_address_is_the_last_one() -> None:
    text = f"/ip4/192.0.2.7/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{PEER}"
    address = parse_peer_address(text)
    assert (address.peer, address.text, address.relayed) == (PEER, text, True)


def test_a_slash_at_the_end_does_no_harm() -> None:
    assert parse_peer_address(f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}/").peer == PEER


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not an address"),
        ("   ", "not an address"),
        ("x" * 2000, "not an address"),
        ("/ip4/192.0.2.7/tcp/1/p2p/\x1b[31m", "not an address"),
        ("192.0.2.7:4001", "/ip4/192.0.2.7/tcp/4001/p2p/PEER-ID"),
        ("node.example:4001", "/dns/node.example/tcp/4001/p2p/PEER-ID"),
        ("[2001:db8::1]:4001", "/ip6/2001:db8::1/tcp/4001/p2p/PEER-ID"),
        (PEER, f"/ip4/HOST/tcp/PORT/p2p/{PEER}"),
        ("node.example", "starts with a slash"),
        (f"/p2p/{PEER}", "names the peer, but no place"),
        ("/ipv4/192.0.2.7/tcp/4001", "/ip4"),
        ("/ip4", "ends before it names a host"),
        ("/ip4/192.0.2.7", "has no port"),
        ("/ip4/192.0.2.7/tcp", "has no port"),
        ("/ip4/192.0.2.7/tcp/http", "http is not a TCP port"),
        (f"/ip4/192.0.2.7/tcp/65536/p2p/{PEER}", "65536 is not a TCP port"),
        (f"/ip4/192.0.2.700/tcp/4001/p2p/{PEER}", "not an IPv4 address"),
        (f"/ip4/2001:db8::1/tcp/4001/p2p/{PEER}", "Write /ip6/2001:db8::1"),
        (f"/ip6/192.0.2.7/tcp/4001/p2p/{PEER}", "Write /ip4/192.0.2.7"),
        (f"/ip4/node.example/tcp/4001/p2p/{PEER}", "write /dns/node.example"),
        (f"/dns4/192.0.2.7/tcp/4001/p2p/{PEER}", "Write /ip4/192.0.2.7"),
        (f"/dns/{'a' * 64}.example/tcp/4001/p2p/{PEER}", "not a host name"),
        (f"/dns//tcp/4001/p2p/{PEER}", "names a host"),
        (f"/ip4/192.0.2.7/udp/4001/quic-v1/p2p/{PEER}", "udp, which potluck does not speak"),
        (f"/ip4/192.0.2.7/tcp/4001/ws/p2p/{PEER}", "ws, which potluck does not speak"),
        ("/ip4/192.0.2.7/tcp/4001", "does not name the peer"),
        ("/ip4/192.0.2.7/tcp/4001/p2p", "cut short"),
        ("/ip4/192.0.2.7/tcp/4001/p2p/", "cut short"),
        (f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER[:-1]}", "cut short"),
        (f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}x", "not a potluck peer id"),
        (
            "/ip4/192.0.2.7/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
            "not Ed25519",
        ),
        (f"/ip4/192.0.2.7/tcp/4001/p2p/{RELAY}/p2p-circuit", "not the peer behind it"),
        (f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}/tcp/1", "unknown part after the peer id"),
        (f"/ip4/192.0.2.7/tcp/4001/{PEER}", "after the port comes /p2p/"),
    ],
)
def test_a_mistake_is_named(text: str, told: str) -> None:
    with pytest.raises(WrongUse) as caught:
        parse_peer_address(text)
    assert told in str(caught.value)


_HOSTS = ["ip4", "ip6", "dns", "dns4", "192.0.2.7", "::1", "node.example", ".", "%", "\N{SNOWMAN}"]
_REST = ["tcp", "udp", "ws", "p2p", "p2p-circuit", "", "0", "4001", "99999", PEER, PEER[:-2]]
_WORDS = st.sampled_from([*_HOSTS, *_REST])


@given(
    text=st.text(max_size=80)
    | st.lists(_WORDS, max_size=9).map("/".join)
    | st.lists(_WORDS, max_size=9).map(lambda words: "/" + "/".join(words))
)
def test_whatever_is_pasted_it_is_an_address_or_wrong_use(text: str) -> None:
    for check in (parse_peer_address, check_listen_address, check_announce_address):
        try:
            address = check(text)
        except WrongUse:
            continue
        again = check(address if isinstance(address, str) else address.text)
        assert again == address
