"""The queue of outgoing frames: its order, its fairness and its bounds."""

from __future__ import annotations

from collections import Counter

import pytest

from node.net.transport.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER_BYTES,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    FrameHeader,
    decode_header,
    encode_header,
)
from node.net.transport.outgoing import (
    FRAME_PAYLOAD_BYTES,
    PINGS_ANSWERED_AT_ONCE,
    REFUSALS_AT_ONCE,
    Outgoing,
    StreamQueue,
)
from node.net.transport.settings import MIB, YamuxSettings
from protocols.errors import LimitExceeded

BATCH = 512 * 1024


def make(settings: YamuxSettings | None = None) -> Outgoing:
    return Outgoing(settings or YamuxSettings(), lambda: None)


def queue_of(stream_id: int) -> StreamQueue:
    return StreamQueue(stream_id, lambda: None)


def data_frame(stream_id: int, size: int = FRAME_PAYLOAD_BYTES) -> bytes:
    return encode_header(DATA, 0, stream_id, size) + bytes(size)


def batch(outgoing: Outgoing, limit: int = BATCH) -> list[FrameHeader]:
    return [decode_header(frame) for frame in outgoing.take_batch(limit)]


def test_one_data_frame_fills_one_noise_packet_to_the_byte() -> None:
    assert FRAME_PAYLOAD_BYTES + HEADER_BYTES == 65535 - 16


def test_streams_take_turns_frame_by_frame() -> None:
    outgoing = make()
    bulk, small, other = queue_of(1), queue_of(3), queue_of(5)
    for _ in range(5):
        outgoing.add_data(bulk, data_frame(1))
    outgoing.add_data(small, data_frame(3, 64))
    for _ in range(3):
        outgoing.add_data(other, data_frame(5))
    ids = [header.stream_id for header in batch(outgoing, 10 * MIB)]
    assert ids == [3, 1, 5, 1, 5, 1, 5, 1, 1]


def test_a_small_stream_waits_for_one_frame_of_each_other_stream_at_most() -> None:
    outgoing = make()
    bulks = [queue_of(stream_id) for stream_id in (1, 3, 5)]
    for queue in bulks:
        for _ in range(10):
            outgoing.add_data(queue, data_frame(queue.stream_id))
    batch(outgoing, FRAME_PAYLOAD_BYTES * 4)
    small = queue_of(7)
    outgoing.add_data(small, data_frame(7, 64))
    ids = [header.stream_id for header in batch(outgoing)]
    assert ids.index(7) <= len(bulks)


def test_a_batch_ends_at_its_limit_and_the_next_goes_on_in_turn() -> None:
    outgoing = make()
    first, second = queue_of(1), queue_of(3)
    for _ in range(10):
        outgoing.add_data(first, data_frame(1))
        outgoing.add_data(second, data_frame(3))
    seen: Counter[int] = Counter()
    while outgoing:
        headers = batch(outgoing, 3 * FRAME_PAYLOAD_BYTES)
        assert 1 <= len(headers) <= 3
        seen.update(header.stream_id for header in headers)
        assert abs(seen[1] - seen[3]) <= 1
    assert seen == {1: 10, 3: 10}
    assert outgoing.queued_bytes == 0


def test_control_goes_before_data_so_a_stream_is_opened_before_it_is_used() -> None:
    outgoing = make()
    queue = queue_of(1)
    outgoing.add_data(queue, data_frame(1, 10))
    outgoing.add_control(queue, flags=SYN)
    assert batch(outgoing) == [(WINDOW_UPDATE, SYN, 1, 0), (DATA, 0, 1, 10)]


def test_control_of_one_stream_is_merged_into_one_frame() -> None:
    outgoing = make()
    queue = queue_of(2)
    outgoing.add_control(queue, flags=ACK)
    for _ in range(1000):
        outgoing.add_control(queue, credit=10)
    assert batch(outgoing) == [(WINDOW_UPDATE, ACK, 2, 10_000)]
    assert not outgoing


def test_the_end_of_a_stream_goes_behind_its_data() -> None:
    outgoing = make()
    queue = queue_of(1)
    outgoing.add_data(queue, data_frame(1, 10))
    outgoing.add_end(queue)
    assert batch(outgoing) == [(DATA, 0, 1, 10), (WINDOW_UPDATE, FIN, 1, 0)]


def test_a_reset_drops_what_is_queued_and_what_was_to_be_said() -> None:
    outgoing = make()
    queue = queue_of(2)
    outgoing.add_control(queue, flags=ACK, credit=5)
    outgoing.add_data(queue, data_frame(2))
    outgoing.abandon(queue)
    assert outgoing.queued_bytes == 0
    assert batch(outgoing) == [(WINDOW_UPDATE, RST, 2, 0)]
    assert not outgoing


def test_a_stream_reset_before_the_peer_heard_of_it_is_never_mentioned() -> None:
    outgoing = make()
    queue = queue_of(1)
    outgoing.add_control(queue, flags=SYN)
    outgoing.add_data(queue, data_frame(1))
    outgoing.abandon(queue)
    assert batch(outgoing) == []
    assert not outgoing


def test_go_away_comes_last() -> None:
    outgoing = make()
    queue = queue_of(1)
    for _ in range(3):
        outgoing.add_data(queue, data_frame(1))
    outgoing.go_away(0)
    types = []
    while outgoing:
        types += [header.type for header in batch(outgoing, 1)]
    assert types == [DATA, DATA, DATA, GO_AWAY]


def test_pings_are_answered_but_not_more_than_a_few_at_once() -> None:
    outgoing = make()
    for value in range(10_000):
        outgoing.answer_ping(value)
    answers = batch(outgoing)
    assert len(answers) == PINGS_ANSWERED_AT_ONCE
    assert answers[-1] == (PING, ACK, 0, 9_999)


def test_refusals_are_said_once_and_a_flood_of_them_is_cut_off() -> None:
    outgoing = make()
    for _ in range(5):
        outgoing.refuse(1)
    assert batch(outgoing) == [(WINDOW_UPDATE, RST, 1, 0)]
    for number in range(REFUSALS_AT_ONCE):
        outgoing.refuse(2 * number + 1)
    with pytest.raises(LimitExceeded):
        outgoing.refuse(2 * REFUSALS_AT_ONCE + 1)


def fill(outgoing: Outgoing, queue: StreamQueue) -> None:
    while outgoing.allowance(queue) > 0:
        size = min(FRAME_PAYLOAD_BYTES, outgoing.allowance(queue))
        outgoing.add_data(queue, data_frame(queue.stream_id, size))


def test_one_stream_may_queue_its_share_and_no_more() -> None:
    outgoing = make()
    queue = queue_of(1)
    fill(outgoing, queue)
    assert MIB <= outgoing.queued_bytes <= MIB + 1000


def test_many_streams_share_the_connections_queue_and_none_is_starved() -> None:
    outgoing = make()
    queues = [queue_of(stream_id) for stream_id in range(1, 201, 2)]
    for queue in queues:
        fill(outgoing, queue)
    assert all(queue.queued_bytes >= FRAME_PAYLOAD_BYTES for queue in queues)
    assert outgoing.queued_bytes < 4 * MIB + 101 * FRAME_PAYLOAD_BYTES


def test_a_queue_of_one_byte_frames_is_bounded_in_frames_too() -> None:
    outgoing = make()
    queue = queue_of(1)
    while outgoing.allowance(queue) > 0:
        outgoing.add_data(queue, data_frame(1, 1))
    assert len(queue.frames) < 15_000


def test_a_stream_is_told_when_half_of_its_frames_have_left_and_not_at_each() -> None:
    outgoing = make()
    told: list[int] = []
    queue = StreamQueue(1, lambda: told.append(outgoing.allowance(queue)))
    fill(outgoing, queue)
    full = queue.queued_bytes
    while not told:
        assert queue.queued_bytes > full / 2 - FRAME_PAYLOAD_BYTES
        batch(outgoing, 1)
    assert told[0] > full / 3
    assert queue.queued_bytes <= full / 2
