"""multistream-select on a stream: agree on a protocol in one round trip.

The asking side sends the header and its one proposal together and reads both answers. The library
(and the letter of the specification) sends the header, waits, and only then proposes, which takes
two round trips (libp2p/protocol_muxer/multiselect_client.py:28-118). The answering side reads
messages in order, so it sees no difference.

Strangers can reach the answering side. The library decodes a proposal as UTF-8 without a guard
(libp2p/protocol_muxer/multiselect_communicator.py:58), so a stranger that names a protocol in other
bytes raises an exception that ends the host. Here messages are bytes, bounded before they are read,
and compared as bytes. Invalid data raises only the two documented error types.

The bytes after the negotiation belong to the protocol, and may already have arrived. So a message
is read by its exact length.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from protocols.errors import LimitExceeded, MalformedMessage

HEADER = b"/multistream/1.0.0"
NOT_AVAILABLE = b"na"
LIST = b"ls"
# The specification allows 64 KiB, but real names are under 100 bytes. One length byte of varint
# reaches 127; two bytes reach 16,383.
LONGEST_MESSAGE = 1024
# A potluck peer asks for one protocol, another one for a handful of versions.
MOST_PROPOSALS = 32


class ByteStream(Protocol):
    """The parts of a muxed stream that this module uses."""

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
    """One message without its newline; MalformedMessage or LimitExceeded if invalid."""
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
    """Exactly that many bytes; MalformedMessage if the stream ends before."""
    collected = b""
    while len(collected) < count:
        chunk = await stream.receive_some(count - len(collected))
        if not chunk:
            raise MalformedMessage("The stream ended within the negotiation.")
        collected += chunk
    return collected


async def propose(stream: ByteStream, protocol: bytes) -> bool:
    """Ask the other side for one protocol; return whether it serves it. One round trip.

    Raises the stream's errors if it breaks, and MalformedMessage or LimitExceeded for an invalid
    answer.
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
    """Let the other side choose among `served`; None if it chose nothing that we serve.

    `served` is checked at each proposal, so it may change meanwhile. The caller sets the deadline.
    """
    await stream.send_all(encode(HEADER))
    if await read_message(stream) != HEADER:
        raise MalformedMessage("The other side does not speak multistream-select 1.0.")
    for _ in range(MOST_PROPOSALS):
        proposal = await read_message(stream)
        if proposal in served:
            await stream.send_all(encode(proposal))
            return proposal
        # "ls" is optional in the specification, and would tell strangers more than they need.
        await stream.send_all(encode(NOT_AVAILABLE))
    raise LimitExceeded("The other side proposed too many protocols on one stream.")
