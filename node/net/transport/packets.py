"""Noise transport packets: a length, then ciphertext with its tag. No I/O, no handshake.

    length u16 big-endian | ciphertext (length bytes, the last 16 are the tag)

ChaCha20-Poly1305 with the packet's number as nonce, as in the Noise specification (revision 34,
sections 5.1 and 12.3). A packet holds at most 65,519 bytes of plaintext.

The threat: an attacker on the path may change, drop, repeat or reorder bytes. Each of those makes
the tag of some packet wrong, and the first wrong tag ends the connection (MalformedMessage). A
nonce is never used twice: a connection that runs out of numbers ends.

The opener's buffer is reused for the next read, so it never returns a view of it. Plaintexts are
new bytes objects.
"""

from __future__ import annotations

from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from protocols.errors import LimitExceeded, MalformedMessage

LENGTH_BYTES: Final = 2
TAG_BYTES: Final = 16
CIPHERTEXT_LIMIT_BYTES: Final = 65535
PLAINTEXT_LIMIT_BYTES: Final = CIPHERTEXT_LIMIT_BYTES - TAG_BYTES
PACKET_LIMIT_BYTES: Final = LENGTH_BYTES + CIPHERTEXT_LIMIT_BYTES
PACKET_OVERHEAD_BYTES: Final = LENGTH_BYTES + TAG_BYTES

# 2^64-1 is reserved by the Noise specification for rekeying.
LAST_NONCE: Final = 2**64 - 2

# An idle connection keeps the small buffer (one packet and a little). A busy one reads up to a
# mebibyte per wake-up, sixteen packets, if the node lends it so much (window.py), and frees the
# large buffer when it is idle again. With the small one a byte costs a third more.
SMALL_BUFFER_BYTES: Final = 72 * 1024
LARGE_BUFFER_BYTES: Final = 1024 * 1024
BUFFER_GROWTH: Final = 4
CALM_READ_BYTES: Final = 8 * 1024
CALM_READS: Final = 64

MOST_EMPTY_PACKETS: Final = 1000  # of a connection; no implementation is known that sends any

# Small ones: two milliseconds of this node's time. A mebibyte has 50,000 of them.
OPENED_AT_ONCE: Final = 500


def _nonce(number: int) -> bytes:
    if number > LAST_NONCE:
        raise LimitExceeded("This connection has used up every packet number of its key.")
    return b"\0\0\0\0" + number.to_bytes(8, "little")


class PacketSealer:
    """Encrypts one direction. Each call uses a packet number, even if the packet is never sent."""

    def __init__(self, cipher: ChaCha20Poly1305, next_number: int) -> None:
        self._cipher = cipher
        self._next_number = next_number

    def seal_into(self, plaintext: bytes | memoryview, packet: memoryview) -> int:
        """Write the packet for `plaintext` to the start of `packet`; return its size."""
        length = len(plaintext) + TAG_BYTES
        size = LENGTH_BYTES + length
        packet[0] = length >> 8
        packet[1] = length & 0xFF
        self._cipher.encrypt_into(
            _nonce(self._next_number), plaintext, None, packet[LENGTH_BYTES:size]
        )
        self._next_number += 1
        return size


class Lender(Protocol):
    """The memory for large buffers, of all connections of a node together."""

    def lend_buffer(self, more_bytes: int) -> bool: ...

    def return_buffer(self, lent_bytes: int) -> None: ...


class PacketOpener:
    """Decrypts the other direction, from a buffer that the caller reads into.

    Read the next bytes into `free_space()` and report their number with `filled(count)`. `open()`
    returns the plaintexts of whole packets, and none only if there is no whole packet left.

    The buffer grows once there is a `lender`. Call `end` at the end.
    """

    lender: Lender | None = None

    def __init__(self, cipher: ChaCha20Poly1305, next_number: int) -> None:
        self._cipher = cipher
        self._next_number = next_number
        self._buffer = memoryview(bytearray(SMALL_BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self._was_filled_up = False
        self._calm_reads = 0
        self._empty_packets = 0

    @property
    def buffer_bytes(self) -> int:
        return len(self._buffer)

    def free_space(self) -> memoryview:
        self._make_space()
        return self._buffer[self._end :]

    def filled(self, count: int) -> None:
        self._end += count
        self._was_filled_up = self._end == len(self._buffer)
        self._calm_reads = self._calm_reads + 1 if count <= CALM_READ_BYTES else 0

    def shrink(self) -> None:
        """Free a large buffer. Not while `open` has something to return."""
        lent = len(self._buffer) - SMALL_BUFFER_BYTES
        if lent and self.lender is not None:
            self._move_to(memoryview(bytearray(SMALL_BUFFER_BYTES)))
            self.lender.return_buffer(lent)

    def end(self) -> None:
        """Free a large buffer, whatever is in it: nothing is opened any more."""
        self._start = self._end = 0
        self.shrink()

    @property
    def held_bytes(self) -> int:
        """Bytes of the unfinished packet that are here."""
        return self._end - self._start

    @property
    def missing_bytes(self) -> int:
        """How many more bytes `open` needs, at least, to return something."""
        held = self.held_bytes
        if held < LENGTH_BYTES:
            return LENGTH_BYTES - held
        start = self._start
        return LENGTH_BYTES + ((self._buffer[start] << 8) | self._buffer[start + 1]) - held

    def open(self) -> list[bytes]:
        plaintexts: list[bytes] = []
        buffer, start, end = self._buffer, self._start, self._end
        decrypt = self._cipher.decrypt
        try:
            while end - start >= LENGTH_BYTES and len(plaintexts) < OPENED_AT_ONCE:
                length = (buffer[start] << 8) | buffer[start + 1]
                if length < TAG_BYTES:
                    raise MalformedMessage("A Noise packet is too short to hold its tag.")
                body = start + LENGTH_BYTES
                if end - body < length:
                    break
                start = body + length
                plaintext = decrypt(_nonce(self._next_number), buffer[body:start], None)
                self._next_number += 1
                if plaintext:
                    plaintexts.append(plaintext)
                    continue
                self._empty_packets += 1
                if self._empty_packets > MOST_EMPTY_PACKETS:
                    raise LimitExceeded("A peer sends packets without content.")
        except InvalidTag:
            raise MalformedMessage(
                "A Noise packet does not carry the right tag.",
                why="Something on the way changed it, or the other side lost count.",
            ) from None
        self._start = start
        return plaintexts

    def _make_space(self) -> None:
        unread = self._end - self._start
        capacity = len(self._buffer)
        larger = min(capacity * BUFFER_GROWTH, LARGE_BUFFER_BYTES)
        if (
            self._was_filled_up
            and capacity < larger
            and self.lender is not None
            and self.lender.lend_buffer(larger - capacity)
        ):
            self._move_to(memoryview(bytearray(larger)))
        elif self._calm_reads >= CALM_READS and capacity > SMALL_BUFFER_BYTES and unread == 0:
            self.shrink()
        elif unread == 0:
            self._start = self._end = 0
        elif self._start and capacity - self._end < capacity // 2:
            # Move the rest of a packet to the front: under 64 KiB, once per half a buffer. The free
            # part then always has room for the rest of the packet.
            self._move_to(self._buffer)
        self._was_filled_up = False

    def _move_to(self, buffer: memoryview) -> None:
        unread = self._end - self._start
        buffer[:unread] = bytes(self._buffer[self._start : self._end])
        self._buffer = buffer
        self._start, self._end = 0, unread
