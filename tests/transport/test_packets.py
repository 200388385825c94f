"""Noise packets: sealed by one side, opened by the other, whatever the cuts; forgeries refused."""

from __future__ import annotations

import tracemalloc

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from node.net.transport.packets import (
    CALM_READS,
    LARGE_BUFFER_BYTES,
    LAST_NONCE,
    MOST_EMPTY_PACKETS,
    OPENED_AT_ONCE,
    PACKET_LIMIT_BYTES,
    PLAINTEXT_LIMIT_BYTES,
    SMALL_BUFFER_BYTES,
    TAG_BYTES,
    PacketOpener,
    PacketSealer,
)
from protocols.errors import LimitExceeded, MalformedMessage

KEY = bytes(range(32))


def sealer(next_number: int = 0) -> PacketSealer:
    return PacketSealer(ChaCha20Poly1305(KEY), next_number)


class Purse:
    def __init__(self, left: int = LARGE_BUFFER_BYTES) -> None:
        self.left = left

    def lend_buffer(self, more_bytes: int) -> bool:
        if more_bytes > self.left:
            return False
        self.left -= more_bytes
        return True

    def return_buffer(self, lent_bytes: int) -> None:
        self.left += lent_bytes


def opener(next_number: int = 0, lender: Purse | None = None) -> PacketOpener:
    made = PacketOpener(ChaCha20Poly1305(KEY), next_number)
    made.lender = Purse() if lender is None else lender
    return made


def seal(*plaintexts: bytes, by: PacketSealer | None = None) -> bytes:
    by = by or sealer()
    packet = memoryview(bytearray(PACKET_LIMIT_BYTES))
    return b"".join(bytes(packet[: by.seal_into(each, packet)]) for each in plaintexts)


def feed(receiver: PacketOpener, data: bytes) -> list[bytes]:
    """Read `data` into the opener as a socket would, as much at a time as it has space for."""
    plaintexts: list[bytes] = []
    while data:
        space = receiver.free_space()
        assert len(space) > 0
        part, data = data[: len(space)], data[len(space) :]
        space[: len(part)] = part
        receiver.filled(len(part))
        plaintexts += receiver.open()
    return plaintexts


MESSAGES = [b"a", b"hello", bytes(300), b"z" * 40]


def test_a_sealed_packet_is_opened() -> None:
    assert feed(opener(), seal(*MESSAGES)) == MESSAGES


def test_a_sealed_packet_is_opened_byte_by_byte() -> None:
    receiver = opener()
    opened = [each for byte in seal(*MESSAGES) for each in feed(receiver, bytes([byte]))]
    assert opened == MESSAGES


def test_a_sealed_packet_is_opened_when_cut_anywhere() -> None:
    sealed = seal(*MESSAGES)
    for cut in range(1, len(sealed)):
        receiver = opener()
        assert feed(receiver, sealed[:cut]) + feed(receiver, sealed[cut:]) == MESSAGES, cut


def test_the_largest_packet_is_opened_and_takes_exactly_its_size() -> None:
    largest = bytes(PLAINTEXT_LIMIT_BYTES)
    sealed = seal(largest)
    assert len(sealed) == PACKET_LIMIT_BYTES
    assert feed(opener(), sealed) == [largest]


def test_an_empty_packet_is_genuine_and_says_nothing() -> None:
    assert feed(opener(), seal(b"", b"x", b"")) == [b"x"]


def test_a_flood_of_empty_packets_is_refused() -> None:
    flood = seal(*[b""] * (MOST_EMPTY_PACKETS + 1))
    with pytest.raises(LimitExceeded, match="without content"):
        feed(opener(), flood)


def test_of_many_small_packets_that_came_together_a_few_are_opened_at_once() -> None:
    receiver, sealed = opener(), seal(*[b"x"] * (2 * OPENED_AT_ONCE + 1))
    receiver.free_space()[: len(sealed)] = sealed
    receiver.filled(len(sealed))
    opened = [len(receiver.open()) for _ in range(4)]
    assert opened == [OPENED_AT_ONCE, OPENED_AT_ONCE, 1, 0]


def test_packets_are_numbered_from_where_the_handshake_left_off() -> None:
    assert feed(opener(7), seal(b"x", by=sealer(7))) == [b"x"]
    with pytest.raises(MalformedMessage):
        feed(opener(6), seal(b"x", by=sealer(7)))


def test_a_packet_that_was_changed_anywhere_is_refused() -> None:
    sealed = seal(b"pay alice 10")
    for position in range(2, len(sealed)):
        forged = bytearray(sealed)
        forged[position] ^= 1
        with pytest.raises(MalformedMessage):
            feed(opener(), bytes(forged))


def test_a_packet_that_is_repeated_or_left_out_is_refused() -> None:
    by = sealer()
    first, second, third = seal(b"1", by=by), seal(b"2", by=by), seal(b"3", by=by)
    with pytest.raises(MalformedMessage):
        feed(opener(), first + first)
    with pytest.raises(MalformedMessage):
        feed(opener(), first + third)
    assert feed(opener(), first + second + third) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("length", range(16))
def test_a_packet_too_short_for_its_tag_is_malformed(length: int) -> None:
    with pytest.raises(MalformedMessage):
        feed(opener(), length.to_bytes(2, "big") + bytes(length))


def test_a_key_is_never_used_beyond_its_last_number() -> None:
    last = seal(b"last", by=sealer(LAST_NONCE))
    receiver = opener(LAST_NONCE)
    assert feed(receiver, last) == [b"last"]
    with pytest.raises(LimitExceeded):
        feed(receiver, last)
    exhausted = sealer(LAST_NONCE + 1)
    with pytest.raises(LimitExceeded):
        seal(b"x", by=exhausted)


def test_the_buffer_grows_under_load_and_shrinks_in_peace() -> None:
    by, receiver = sealer(), opener()
    assert receiver.buffer_bytes == SMALL_BUFFER_BYTES
    feed(receiver, seal(*[bytes(PLAINTEXT_LIMIT_BYTES)] * 40, by=by))
    assert receiver.buffer_bytes == LARGE_BUFFER_BYTES
    for _ in range(CALM_READS + 1):
        assert feed(receiver, seal(b"tick", by=by)) == [b"tick"]
    assert receiver.buffer_bytes == SMALL_BUFFER_BYTES
    largest = bytes(PLAINTEXT_LIMIT_BYTES)
    assert feed(receiver, seal(largest, by=by)) == [largest]


def test_the_buffer_grows_as_far_as_that_is_lent_and_gives_it_back() -> None:
    purse = Purse(4 * SMALL_BUFFER_BYTES)
    by, receiver = sealer(), opener(lender=purse)
    largest = [bytes(PLAINTEXT_LIMIT_BYTES)] * 40
    assert feed(receiver, seal(*largest, by=by)) == largest
    assert receiver.buffer_bytes == 4 * SMALL_BUFFER_BYTES
    sealed = seal(b"cut", by=by)
    feed(receiver, sealed[:5])
    receiver.shrink()
    assert (receiver.buffer_bytes, purse.left) == (SMALL_BUFFER_BYTES, 4 * SMALL_BUFFER_BYTES)
    assert feed(receiver, sealed[5:]) == [b"cut"]
    purse.left = 0
    assert feed(receiver, seal(*largest, by=by)) == largest
    assert receiver.buffer_bytes == SMALL_BUFFER_BYTES


def test_at_the_end_all_is_given_back_whatever_is_still_in_the_buffer() -> None:
    purse = Purse(4 * SMALL_BUFFER_BYTES)
    by, receiver = sealer(), opener(lender=purse)
    feed(receiver, seal(*[bytes(PLAINTEXT_LIMIT_BYTES)] * 40, by=by))
    space = receiver.free_space()
    forged = bytes((0, TAG_BYTES)) + bytes(TAG_BYTES)
    poured = (forged * (len(space) // len(forged)))[: 2 * SMALL_BUFFER_BYTES]
    space[: len(poured)] = poured
    receiver.filled(len(poured))
    with pytest.raises(MalformedMessage):
        receiver.open()
    receiver.end()
    assert (receiver.buffer_bytes, purse.left) == (SMALL_BUFFER_BYTES, 4 * SMALL_BUFFER_BYTES)


def test_an_opened_packet_does_not_change_when_more_is_read() -> None:
    by, receiver = sealer(), opener()
    kept = feed(receiver, seal(b"kept" * 1000, by=by))
    feed(receiver, seal(*[b"\xff" * 60_000] * 40, by=by))
    assert kept == [b"kept" * 1000]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, PLAINTEXT_LIMIT_BYTES), max_size=12),
    st.lists(st.integers(1, 200_000), min_size=1, max_size=12),
)
def test_any_sizes_survive_any_reads(sizes: list[int], reads: list[int]) -> None:
    messages = [bytes([index]) * size for index, size in enumerate(sizes)]
    sealed = seal(*messages)
    receiver, opened = opener(), []
    turn = 0
    while sealed:
        size = reads[turn % len(reads)]
        turn += 1
        opened += feed(receiver, sealed[:size])
        sealed = sealed[size:]
    assert opened == [message for message in messages if message]


def feed_hostile(data: bytes) -> None:
    receiver = opener()
    try:
        opened = feed(receiver, data)
    except (MalformedMessage, LimitExceeded):
        return
    assert sum(map(len, opened)) <= len(data)
    assert receiver.buffer_bytes <= LARGE_BUFFER_BYTES


@given(st.binary(max_size=300))
def test_random_bytes_raise_only_the_documented_errors(data: bytes) -> None:
    feed_hostile(data)


SEALED = seal(*MESSAGES)


@given(
    st.lists(st.tuples(st.integers(0, len(SEALED) - 1), st.integers(0, 255)), max_size=5),
    st.integers(0, len(SEALED)),
)
def test_mutated_packets_raise_only_the_documented_errors(
    mutations: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(SEALED)
    for position, value in mutations:
        data[position] = value
    feed_hostile(bytes(data[:length]))


def test_a_promised_packet_that_never_comes_costs_one_small_buffer() -> None:
    tracemalloc.start()
    try:
        receiver = opener()
        feed(receiver, b"\xff\xff" + bytes(PLAINTEXT_LIMIT_BYTES - 100))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert receiver.buffer_bytes == SMALL_BUFFER_BYTES
    assert held < 4 * SMALL_BUFFER_BYTES
