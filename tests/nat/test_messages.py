"""The messages of relays, hole punches and dial backs: golden bytes, garbage, and limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import trio
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as some
from multiaddr import Multiaddr

from nat import messages
from nat.messages import (
    LONGEST_ADDRESS_BYTES,
    LONGEST_MESSAGE_BYTES,
    MOST_ADDRESSES,
    AutoNat,
    DialBack,
    DialBackResponse,
    HolePunch,
    Hop,
    HopType,
    PunchType,
    Status,
    Stop,
    StopType,
)
from protocols.errors import LimitExceeded, MalformedMessage
from tests.waiting import PATIENCE_SECONDS

KINDS = (Hop, Stop, HolePunch, AutoNat, DialBack, DialBackResponse)
ADDRESS = "/ip4/192.0.2.7/tcp/4001"
PEER = bytes(range(38))

kinds = some.sampled_from(KINDS)


class Wire:
    """A stream that has these bytes and then ends, and gives at most `piece` of them at once."""

    def __init__(self, data: bytes, piece: int | None = None) -> None:
        self.left = data
        self._piece = piece
        self.sent = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        size = min(one for one in (max_bytes, self._piece, len(self.left)) if one is not None)
        part, self.left = self.left[:size], self.left[size:]
        return part

    async def send_all(self, data: bytes) -> None:
        self.sent += data


def read(wire: Wire, kind: Callable[..., Message], **limits: int) -> Message:
    async def main() -> Message:
        return await messages.read(wire, kind, **limits)

    return trio.run(main)


def outcome(data: bytes, kind: Callable[..., Message], piece: int | None) -> tuple[Any, bytes]:
    """What reading gives (the message's bytes, or the kind of error), and what is left."""
    wire = Wire(data, piece)
    try:
        return read(wire, kind).SerializeToString(deterministic=True), wire.left
    except (MalformedMessage, LimitExceeded) as error:
        return type(error), b""


# A reservation's address and voucher, a target's id: bytes of any length.
def filled(draw: some.DrawFn) -> Message:
    hop = Hop(type=draw(some.integers(0, 2)), status=draw(some.integers(0, 2**31 - 1)))
    hop.peer.id = draw(some.binary(max_size=64))
    hop.reservation.expire = draw(some.integers(0, 2**64 - 1))
    hop.reservation.addrs.extend(draw(some.lists(some.binary(max_size=20), max_size=4)))
    hop.reservation.voucher = draw(some.binary(max_size=200))
    hop.limit.data = draw(some.integers(0, 2**64 - 1))
    message: Message = hop
    return message


hops = some.composite(filled)()


@given(some.binary(max_size=80), kinds)
def test_garbage_raises_only_the_two_errors_of_parsers(
    data: bytes, kind: Callable[..., Message]
) -> None:
    outcome(data, kind, None)


@given(some.binary(max_size=60), kinds)
def test_garbage_of_a_right_length_raises_only_the_two_errors(
    body: bytes, kind: Callable[..., Message]
) -> None:
    outcome(bytes([len(body)]) + body, kind, None)


@given(some.one_of(some.binary(max_size=40), hops.map(messages.encode)), kinds)
def test_byte_by_byte_and_all_at_once_are_the_same(
    data: bytes, kind: Callable[..., Message]
) -> None:
    assert outcome(data, kind, 1) == outcome(data, kind, None)


@given(hops, some.binary(max_size=10))
def test_a_message_comes_back_and_what_follows_it_is_not_read(
    hop: Message, following: bytes
) -> None:
    wire = Wire(messages.encode(hop) + following)
    assert read(wire, Hop) == hop
    assert wire.left == following


@given(hops)
def test_a_message_that_ends_early_is_malformed(hop: Message) -> None:
    data = messages.encode(hop)
    for size in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(MalformedMessage):
            read(Wire(data[:size]), Hop)


def test_a_message_of_the_greatest_length_is_read() -> None:
    hop = Hop(type=HopType.RESERVE)
    hop.reservation.voucher = bytes(LONGEST_MESSAGE_BYTES - hop.ByteSize() - 6)
    assert hop.ByteSize() == LONGEST_MESSAGE_BYTES
    assert read(Wire(messages.encode(hop)), Hop) == hop


@pytest.mark.parametrize(
    "declared",
    [
        pytest.param(b"\x81\x20", id="one byte more"),
        pytest.param(b"\xff\xff\x7f", id="two megabytes"),
        pytest.param(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="all that a number can say"),
    ],
)
def test_a_longer_message_is_refused_before_it_is_read(declared: bytes) -> None:
    wire = Wire(declared + bytes(100))
    with pytest.raises(LimitExceeded):
        read(wire, Hop)
    assert len(wire.left) >= 100


def test_fields_of_newer_versions_are_skipped() -> None:
    unknown = bytes([0x92, 0x7D, 3]) + b"new"  # field 2002
    body = Hop(type=HopType.CONNECT).SerializeToString() + unknown
    found: Any = read(Wire(bytes([len(body)]) + body), Hop)
    assert found.type == HopType.CONNECT


def test_a_status_of_a_newer_version_is_seen_and_not_dropped() -> None:
    found: Any = read(Wire(messages.encode(Hop(type=HopType.STATUS, status=299))), Hop)
    assert found.status == 299


# ---- addresses in messages


@given(some.lists(some.binary(max_size=300), max_size=30))
def test_bytes_that_are_no_addresses_are_left_out(raw: list[bytes]) -> None:
    for text in messages.unpacked(raw):
        assert Multiaddr(text).to_bytes() in raw
    assert len(messages.unpacked_in_place(raw)) == min(len(raw), MOST_ADDRESSES)


def test_addresses_keep_their_places_beside_invalid_ones() -> None:
    raw = [b"\xff", Multiaddr(ADDRESS).to_bytes()]
    assert messages.unpacked_in_place(raw) == ("", ADDRESS)
    assert messages.unpacked(raw) == (ADDRESS,)


def test_only_so_many_addresses_are_said_and_heard() -> None:
    many = [f"/ip4/192.0.2.7/tcp/{port}" for port in range(1, 100)]
    assert len(messages.packed(many)) == MOST_ADDRESSES
    assert len(messages.unpacked([Multiaddr(one).to_bytes() for one in many])) == MOST_ADDRESSES


def test_a_very_long_address_is_none() -> None:
    long = ADDRESS + "/p2p-circuit" * LONGEST_ADDRESS_BYTES
    assert messages.unpacked([Multiaddr(long).to_bytes()]) == ()


# ---- golden bytes, which are those of libp2p's own classes


def _hop() -> Message:
    hop = Hop(type=HopType.STATUS, status=Status.OK)
    hop.peer.id = PEER
    hop.peer.addrs.append(b"peer")
    hop.reservation.expire = 1_767_225_600
    hop.reservation.addrs.append(b"relay")
    hop.reservation.voucher = b"signed"
    hop.limit.duration, hop.limit.data = 120, 1 << 40
    message: Message = hop
    return message


def _stop() -> Message:
    stop = Stop(type=StopType.CONNECT, status=Status.RESOURCE_LIMIT_EXCEEDED)
    stop.peer.id = PEER
    stop.limit.duration, stop.limit.data = 120, 1 << 40
    message: Message = stop
    return message


def _punch() -> Message:
    message: Message = HolePunch(type=PunchType.SYNC, addrs=[b"one", b"two"])
    return message


MADE_HERE = {"hop": _hop, "stop": _stop, "punch": _punch}

GOLDEN = {
    "hop": (
        "0802122e0a26000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021"
        "222324251204706565721a150880f2d6ca06120572656c61791a067369676e656422090878108080"
        "808080202864"
    ),
    "stop": (
        "080012280a26000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021"
        "222324251a0908781080808080802020c901"
    ),
    "punch": "08ac0212036f6e65120374776f",
}

# In a process of its own: importing those classes loads the library's whole relay.
MADE_BY_THE_LIBRARY = """
import json, warnings
warnings.simplefilter("ignore")
from libp2p.relay.circuit_v2.pb import circuit_pb2 as circuit, dcutr_pb2 as dcutr
peer, limit = circuit.PeerId(id=bytes(range(38))), circuit.Limit(duration=120, data=1 << 40)
stop = circuit.StopMessage(type="CONNECT", peer=peer, limit=limit,
                           status="RESOURCE_LIMIT_EXCEEDED")
peer.addrs.append(b"peer")
reservation = circuit.Reservation(expire=1767225600, addrs=[b"relay"], voucher=b"signed")
hop = circuit.HopMessage(type="STATUS", peer=peer, reservation=reservation, limit=limit,
                         status="OK")
punch = dcutr.HolePunch(type="SYNC", ObsAddrs=[b"one", b"two"])
made = {"hop": hop, "stop": stop, "punch": punch}
print(json.dumps({name: one.SerializeToString().hex() for name, one in made.items()}))
"""


@pytest.mark.parametrize("name", MADE_HERE)
def test_our_bytes_are_the_golden_ones(name: str) -> None:
    assert messages.encode(MADE_HERE[name]())[1:].hex() == GOLDEN[name]


@pytest.mark.slow
def test_the_golden_bytes_are_those_of_the_library() -> None:
    said = subprocess.run(
        [sys.executable, "-c", MADE_BY_THE_LIBRARY],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert json.loads(said.stdout) == GOLDEN
