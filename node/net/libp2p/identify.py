"""identify: tell a peer who and where we are, and learn the same of it, within limits.

This is libp2p's `/ipfs/id/1.0.0` (and `/push/`), in place of the library's own version. That one
starts a *system task* per connection (libp2p/host/basic_host.py:1210), which outlives the host, and
whose exception would end the process. It announces itself as py-libp2p and falls back to an
unbounded read. It lets a stranger put a thousand addresses and any number of protocol names into
our peerstore (libp2p/identity/update.py:66-112), where they stay after it has left.

A message is a varint length and a protobuf of strings and bytes. Nothing in it is believed; it only
tells where the peer might be dialled. Identify runs in its own task after a connection is up, and
no caller waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError
from libp2p.identity.identify.pb.identify_pb2 import Identify
from multiaddr import Multiaddr

from node.net.libp2p.addresses import parse
from node.net.libp2p.negotiation import ByteStream, read_exactly
from protocols.errors import LimitExceeded, MalformedMessage

IDENTIFY = "/ipfs/id/1.0.0"
IDENTIFY_PUSH = "/ipfs/id/push/1.0.0"
PROTOCOL_VERSION = "ipfs/0.1.0"

# go-libp2p sends at most 8 KiB; a peer with a hundred protocols and certified addresses comes near
# that.
LONGEST_MESSAGE_BYTES = 16 * 1024
MOST_ADDRESSES = 16
MOST_PROTOCOLS = 128
LONGEST_NAME = 256
# From opening the stream to the last byte. No caller waits for it, so it may be long.
IDENTIFY_SECONDS = 10.0


@dataclass(frozen=True)
class Description:
    """A peer's description of itself, and of the address at which it sees us. Bounded, not
    verified.
    """

    agent_version: str
    addresses: tuple[str, ...]
    protocols: tuple[str, ...]
    observed_address: str = ""


def encode(description: Description, public_key: bytes) -> bytes:
    """Encode the message with its length; `public_key` as libp2p serialises keys."""
    message = Identify(
        protocol_version=PROTOCOL_VERSION,
        agent_version=description.agent_version,
        public_key=public_key,
        listen_addrs=[Multiaddr(text).to_bytes() for text in description.addresses],
        protocols=description.protocols[:MOST_PROTOCOLS],
    )
    if description.observed_address:
        message.observed_addr = Multiaddr(description.observed_address).to_bytes()
    body: bytes = message.SerializeToString()
    return _varint(len(body)) + body


def decode(body: bytes) -> Description:
    """Decode a message without its length; MalformedMessage if it is invalid.

    Excess entries are cut off, not refused: another implementation may have more addresses than we
    want. Invalid addresses are left out.
    """
    message = Identify()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage("An identify message is not its protobuf.", why=str(error)) from None
    addresses = (_address(raw) for raw in message.listen_addrs[:MOST_ADDRESSES])
    return Description(
        agent_version=message.agent_version[:LONGEST_NAME],
        addresses=tuple(text for text in addresses if text),
        protocols=tuple(name[:LONGEST_NAME] for name in message.protocols[:MOST_PROTOCOLS]),
        observed_address=_address(message.observed_addr),
    )


async def read(stream: ByteStream) -> Description:
    """Read one description from a stream. The caller sets the deadline."""
    length = 0
    for shift in (0, 7, 14):
        byte = (await read_exactly(stream, 1))[0]
        length |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
    else:
        raise LimitExceeded("An identify message declares two megabytes or more.")
    if length > LONGEST_MESSAGE_BYTES:
        raise LimitExceeded(
            f"An identify message declares {length} bytes; {LONGEST_MESSAGE_BYTES} are allowed."
        )
    return decode(await read_exactly(stream, length))


def _address(raw: bytes) -> str:
    if not raw or len(raw) > LONGEST_NAME:
        return ""
    try:
        return parse(str(Multiaddr(raw))).text
    except Exception:  # noqa: BLE001  the library raises many kinds for bytes that are no address
        return ""


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
