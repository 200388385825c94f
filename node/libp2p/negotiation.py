"""multistream-select on a stream: agree on a protocol in one round trip.

The asker sends the header and its one proposal together and reads both answers; the library (and
the letter of the specification) sends the header, waits, and only then proposes: two round trips
(libp2p/protocol_muxer/multiselect_client.py:28-118). Answering parties work through what arrives
in order, so both ways look the same to them.

The answering side is where strangers come in. The library decodes a proposal as UTF-8 without a
guard (libp2p/protocol_muxer/multiselect_communicator.py:58): a stranger who names a protocol in
other bytes raises an exception that ends the host. Here messages are bytes, bounded before they
are read, and compared as bytes; nothing that arrives can raise anything but the two documented
error types.

Easy to get wrong: what follows the negotiation belongs to the protocol, and may already have
arrived. So a message is read by its exact length, never "whatever is there".
"""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from protocols.errors import LimitExceeded, MalformedMessage

HEADER = b"/multistream/1.0.0"
NOT_AVAILABLE = b"na"
LIST = b"ls"
# The specification allows 64 KiB; names that anybody uses are under 100 bytes. With one length
# byte of varint 127 would do; two bytes reach 16,383.
LONGEST_MESSAGE = 1024
# A peer that knows us asks for one protocol, a curious one for a handful of versions.
MOST_PROPOSALS = 32


class ByteStream(Protocol):
    """What is needed of a muxed stream."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | memoryview: ...

    async def send_all(self, data: bytes) -> None: ...


def encode(message: bytes) -> bytes:
    """One multistream message: varint length (newline included), bytes, newline."""
    length = len(message) + 1
    if length > LONGEST_MESSAGE:
        raise ValueError("a protocol name has at most 1,023 bytes")
    if length < 0x80:
        return bytes((length,)) + message + b"\n"
    return bytes((length & 0x7F | 0x80, length >> 7)) + message + b"\n"


async def read_message(stream: ByteStream) -> bytes:
    """One message without its newline; MalformedMessage or LimitExceeded if it is none."""
    length = (await read_exactly(stream, 1))[0]
    if length & 0x80:
        length = length & 0x7F | (await read_exactly(stream, 1))[0] << 7
    if length > LONGEST_MESSAGE:
        raise LimitExceeded("A protocol name is longer than 1,023 bytes.")
    if length == 0:
        raise MalformedMessage("A multistream message is empty.")
    message = await read_exactly(stream, length)
    if message[-1:] != b"\n":
        raise MalformedMessage("A multistream message does not end in a newline.")
    return message[:-1]


async def read_exactly(stream: ByteStream, count: int) -> bytes:
    """That many bytes and not one more; MalformedMessage when the stream ends before."""
    collected = b""
    while len(collected) < count:
        chunk = await stream.receive_some(count - len(collected))
        if not chunk:
            raise MalformedMessage("The stream ended within the negotiation.")
        collected += chunk
    return collected


async def propose(stream: ByteStream, protocol: bytes) -> bool:
    """Ask the other side for one protocol; whether it serves it. One round trip.

    Raises what the stream raises when it breaks, and MalformedMessage or LimitExceeded when the
    answer is none.
    """
    await stream.send_all(encode(HEADER) + encode(protocol))
    if await read_message(stream) != HEADER:
        raise MalformedMessage("The other side does not speak multistream-select 1.0.")
    answer = await read_message(stream)
    if answer == protocol:
        return True
    if answer == NOT_AVAILABLE:
        return False
    raise MalformedMessage("The other side agreed to a protocol that was not proposed.")


async def answer(stream: ByteStream, served: Container[bytes]) -> bytes | None:
    """Let the other side choose among `served`; None when it chose nothing that we have.

    `served` is asked at each proposal, so it may change meanwhile. The caller sets the deadline.
    """
    await stream.send_all(encode(HEADER))
    if await read_message(stream) != HEADER:
        raise MalformedMessage("The other side does not speak multistream-select 1.0.")
    for _ in range(MOST_PROPOSALS):
        proposal = await read_message(stream)
        if proposal in served:
            await stream.send_all(encode(proposal))
            return proposal
        # "ls" is optional in the specification, and tells strangers more than they need.
        await stream.send_all(encode(NOT_AVAILABLE))
    raise LimitExceeded("The other side proposed too many protocols on one stream.")
