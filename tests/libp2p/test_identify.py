"""identify: the library understands our messages, and those of others are limited."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.identify import parse_identify_response
from libp2p.identity.identify.pb.identify_pb2 import Identify
from multiaddr import Multiaddr

from node.net.libp2p.identify import (
    LONGEST_MESSAGE_BYTES,
    LONGEST_NAME,
    MOST_ADDRESSES,
    MOST_PROTOCOLS,
    Description,
    decode,
    encode,
    read,
)
from protocols.errors import LimitExceeded, MalformedMessage
from tests.libp2p.test_negotiation import Recorded

PUBLIC_KEY = create_new_key_pair(bytes(range(32))).public_key.serialize()
US = Description(
    agent_version="potluck/0.1.0",
    addresses=("/ip4/192.0.2.7/tcp/4001", "/ip6/2001:db8::1/tcp/4001"),
    protocols=("/potluck/ping/1.0.0", "/ipfs/id/1.0.0"),
    observed_address="/ip4/198.51.100.1/tcp/50000",
)


async def test_a_description_arrives_as_it_was_sent() -> None:
    assert await read(Recorded(encode(US, PUBLIC_KEY))) == US


def test_the_library_understands_what_we_tell() -> None:
    message = parse_identify_response(encode(US, PUBLIC_KEY))
    assert message.agent_version == US.agent_version
    assert message.public_key == PUBLIC_KEY
    assert tuple(message.protocols) == US.protocols
    assert tuple(str(Multiaddr(raw)) for raw in message.listen_addrs) == US.addresses


def test_too_many_of_anything_is_cut_off() -> None:
    address = Multiaddr("/ip4/192.0.2.7/tcp/4001").to_bytes()
    message = Identify(
        agent_version="x" * 10_000,
        listen_addrs=[address] * 1000,
        protocols=["/p" * 1000] * 1000,
    )
    heard = decode(message.SerializeToString())
    assert len(heard.agent_version) == LONGEST_NAME
    assert len(heard.addresses) == MOST_ADDRESSES
    assert len(heard.protocols) == MOST_PROTOCOLS
    assert max(map(len, heard.protocols)) == LONGEST_NAME


def test_addresses_that_are_none_are_left_out() -> None:
    good = Multiaddr("/ip4/192.0.2.7/tcp/4001").to_bytes()
    message = Identify(
        listen_addrs=[b"", b"\xff" * 9, good, b"\xa5\x03\xff"], observed_addr=b"\xff"
    )
    heard = decode(message.SerializeToString())
    assert heard.addresses == ("/ip4/192.0.2.7/tcp/4001",)
    assert heard.observed_address == ""


async def test_a_message_declared_too_long_is_refused_before_it_is_read() -> None:
    for length in (b"\x81\x80\x01", b"\xff\xff\xff\xff\x0f"):
        declared = Recorded(length + b"x" * 100)
        with pytest.raises(LimitExceeded):
            await read(declared)
        assert len(declared.unread) >= 100
    assert LONGEST_MESSAGE_BYTES == 0x4000


async def test_a_truncated_message_is_malformed() -> None:
    whole = encode(US, PUBLIC_KEY)
    for cut in range(len(whole)):
        with pytest.raises(MalformedMessage):
            await read(Recorded(whole[:cut]))


@given(
    st.binary(max_size=300)
    | st.builds(
        lambda at, junk: encode(US, PUBLIC_KEY)[:at] + junk + encode(US, PUBLIC_KEY)[at + 1 :],
        st.integers(0, 150),
        st.binary(max_size=8),
    )
)
def test_any_bytes_are_a_description_or_one_of_the_two_errors(incoming: bytes) -> None:
    async def main() -> None:
        try:
            heard = await read(Recorded(incoming))
        except (MalformedMessage, LimitExceeded):
            return
        assert len(heard.addresses) <= MOST_ADDRESSES

    trio.run(main)
