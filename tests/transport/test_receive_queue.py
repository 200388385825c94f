"""Unread bytes: the same bytes out as in, at a cost in memory that a peer cannot inflate."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.net.transport.channel import ReceiveQueue

PACKET_BYTES = 65_519


def test_a_large_piece_is_kept_as_a_view_of_its_packet() -> None:
    packet = bytes(PACKET_BYTES)
    queue = ReceiveQueue()
    queue.append(memoryview(packet)[12:])
    taken = queue.take()
    assert isinstance(taken, memoryview)
    assert taken.obj is packet


def test_a_small_piece_does_not_keep_its_packet_alive() -> None:
    queue = ReceiveQueue()
    queue.append(memoryview(bytes(PACKET_BYTES))[12:16])
    assert isinstance(queue.take(), bytes)


def test_taken_bytes_do_not_change_when_more_arrives() -> None:
    queue = ReceiveQueue()
    for part in (b"ab", b"cd", b"ef"):
        queue.append(memoryview(part))
    assert len(queue._pieces) == 1
    taken = queue.take(3)
    queue.append(memoryview(b"gh"))
    assert taken == b"abc"
    assert queue.take_joined() == b"defgh"


def test_clearing_says_how_much_was_dropped() -> None:
    queue = ReceiveQueue()
    queue.append(memoryview(b"abc"))
    assert queue.clear() == 3
    assert not queue
    assert queue.take() == b""


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 5000)),
            st.tuples(st.sampled_from(["take", "joined", "into"]), st.integers(1, 5000)),
        ),
        max_size=60,
    )
)
def test_bytes_come_out_in_the_order_in_which_they_came(steps: list[tuple[str, int]]) -> None:
    queue, expected, counter = ReceiveQueue(), b"", 0
    for action, size in steps:
        if action == "append":
            counter += 1
            piece = counter.to_bytes(2, "big") * size
            packet = piece + bytes(size * (counter % 4))
            queue.append(memoryview(packet)[: len(piece)])
            expected += piece
            continue
        if action == "take":
            got = bytes(queue.take(size))
        elif action == "joined":
            got = queue.take_joined(size)
            assert len(got) == min(size, len(expected))
        else:
            buffer = bytearray(size)
            got = bytes(buffer[: queue.take_into(memoryview(buffer))])
            assert len(got) == min(size, len(expected))
        assert len(got) <= size
        assert got == expected[: len(got)]
        assert got or not expected
        expected = expected[len(got) :]
        assert queue.size_bytes == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("in_large_packets", [True, False])
def test_unread_bytes_cost_at_most_three_times_their_number_however_they_are_cut(
    in_large_packets: bool,
) -> None:
    total = 128 * 1024
    for piece_bytes in (1, 2, 7, 100, 2047, 2048, 16_000, 32_000, 65_507):
        tracemalloc.start()
        try:
            queue = ReceiveQueue()
            for _ in range(0, total, piece_bytes):
                packet = bytes(PACKET_BYTES if in_large_packets else 12 + piece_bytes)
                queue.append(memoryview(packet)[12 : 12 + piece_bytes])
                del packet
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held <= 3 * total, piece_bytes
