"""Frames are found wherever the bytes are cut. Any bytes cause only two errors, and take little
memory."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocols.errors import LimitExceeded, MalformedMessage, RemoteMisbehaviour
from protocols.rpc import chunk_header, encode
from protocols.rpc.frames import (
    CANCEL,
    CHUNK,
    FRAME_HEADER_BYTES,
    HEAD_LIMIT_BYTES,
    KIND_NAMES,
    MOST_AT_ONCE,
    REQUEST,
    RESPONSE,
    FrameParser,
    message_frame,
    message_limit,
    read_frame_header,
    split_payload,
)
from protocols.rpc.messages import CancelHead, RequestHead, ResponseHead, message_type

BODY_LIMIT = 2000
METHOD_LIMITS = {"small": 10, "large": BODY_LIMIT}
LIMITS = {REQUEST: message_limit(BODY_LIMIT), CANCEL: message_limit(0)}

_REQUEST_HEAD = message_type(RequestHead)
_CANCEL_HEAD = message_type(CancelHead)

Head = RequestHead | CancelHead


def read_head(kind: int, head: bytes, body_length: int) -> Head:
    if kind == CANCEL:
        return _CANCEL_HEAD.decode(head)
    request = _REQUEST_HEAD.decode(head)
    if body_length > METHOD_LIMITS.get(request.method, BODY_LIMIT):
        raise LimitExceeded(f"{request.method} is not that long")
    return request


def parser() -> FrameParser[Head]:
    return FrameParser(LIMITS, read_head)


def request(call_id: int = 1, method: str = "large", body: bytes = b"") -> bytes:
    return message_frame(REQUEST, encode(RequestHead(call_id, method, 1000)), body)


def cancel(call_id: int) -> bytes:
    return message_frame(CANCEL, encode(CancelHead(call_id)), b"")


valid_frames = some.one_of(
    some.builds(request, some.integers(0, 0xFFFFFFFF), body=some.binary(max_size=300)),
    some.builds(cancel, some.integers(0, 0xFFFFFFFF)),
)


@given(frames=some.lists(valid_frames, min_size=1, max_size=6), cuts=some.data())
def test_messages_come_out_the_same_wherever_the_stream_is_cut(
    frames: list[bytes], cuts: some.DataObject
) -> None:
    stream = b"".join(frames)
    at_once = parser().feed(stream)
    assert len(at_once) == len(frames)
    places = cuts.draw(some.lists(some.integers(0, len(stream)), max_size=20).map(sorted))
    in_parts = parser()
    messages = []
    for start, end in zip([0, *places], [*places, len(stream)], strict=True):
        messages += in_parts.feed(stream[start:end])
    assert messages == at_once
    assert in_parts.held_bytes == 0


def test_every_single_cut_and_byte_by_byte_give_the_same_messages() -> None:
    stream = request(1, body=b"x" * 40) + cancel(1) + request(2)
    at_once = parser().feed(stream)
    assert [kind for kind, _, _ in at_once] == [REQUEST, CANCEL, REQUEST]
    for cut in range(len(stream) + 1):
        two = parser()
        assert two.feed(stream[:cut]) + two.feed(stream[cut:]) == at_once
    single = parser()
    assert [m for byte in stream for m in single.feed(bytes([byte]))] == at_once


def test_of_many_messages_that_came_together_a_few_are_parsed_at_once() -> None:
    one, rest = parser(), cancel(9)[:-1]
    stream = b"".join(cancel(number) for number in range(2 * MOST_AT_ONCE)) + rest
    messages = one.feed(stream)
    assert len(messages) == MOST_AT_ONCE
    messages += one.feed(b"")
    messages += one.feed(b"")
    assert [head.id for _, head, _ in messages] == list(range(2 * MOST_AT_ONCE))
    assert not one.holds_messages
    assert one.held_bytes == len(rest)


def test_feeding_nothing_yields_nothing() -> None:
    assert parser().feed(b"") == []


@given(data=some.binary(max_size=4000), cut=some.integers(0, 4000))
def test_random_bytes_raise_one_of_two_errors_or_wait_for_more(data: bytes, cut: int) -> None:
    one = parser()
    try:
        one.feed(data[:cut])
        one.feed(data[cut:])
    except RemoteMisbehaviour:
        return
    assert one.held_bytes <= FRAME_HEADER_BYTES + message_limit(BODY_LIMIT)


@given(
    frames=some.lists(valid_frames, min_size=1, max_size=3),
    changes=some.lists(
        some.tuples(some.integers(0, 10_000), some.integers(0, 255)), min_size=1, max_size=4
    ),
    cut_to=some.integers(0, 10_000),
)
def test_valid_messages_with_changed_bytes_raise_one_of_two_errors_or_parse(
    frames: list[bytes], changes: list[tuple[int, int]], cut_to: int
) -> None:
    stream = bytearray(b"".join(frames))
    for place, value in changes:
        stream[place % len(stream)] = value
    del stream[max(1, cut_to % (2 * len(stream))) :]
    try:
        parser().feed(stream)
    except (MalformedMessage, LimitExceeded):
        return


def test_a_frame_that_declares_4_gigabytes_is_refused_from_its_first_five_bytes() -> None:
    tracemalloc.start()
    with pytest.raises(LimitExceeded, match="4,294,967,295"):
        parser().feed(b"\xff\xff\xff\xff" + bytes([REQUEST]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000


def test_a_method_with_a_smaller_limit_is_refused_before_its_body_arrives() -> None:
    frame = request(method="small", body=b"x" * 1000)
    one = parser()
    with pytest.raises(LimitExceeded, match="small"):
        one.feed(frame[: len(frame) - 1000])


def test_memory_grows_with_what_arrived_and_not_with_what_was_declared() -> None:
    limit = 64 << 20
    one: FrameParser[Head] = FrameParser({REQUEST: message_limit(limit)}, lambda *_: _cancel())
    frame = request(body=b"")
    head = frame[FRAME_HEADER_BYTES + 2 :]
    start = (limit).to_bytes(4, "big") + bytes([REQUEST]) + len(head).to_bytes(2, "big") + head
    tracemalloc.start()
    one.feed(start)
    one.feed(b"x" * 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert one.held_bytes == len(start) + 1000
    assert peak < 50_000


def _cancel() -> Head:
    return CancelHead(1)


def test_a_kind_that_may_not_come_here_is_refused() -> None:
    for kind in (RESPONSE, CHUNK, 0, 200):
        with pytest.raises(MalformedMessage, match="where only REQUEST, CANCEL may come"):
            parser().feed((10).to_bytes(4, "big") + bytes([kind]))


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\x00\x05abc"])
def test_a_payload_too_short_for_its_head_is_refused(payload: bytes) -> None:
    frame = len(payload).to_bytes(4, "big") + bytes([REQUEST]) + payload
    with pytest.raises(MalformedMessage):
        parser().feed(frame + b"following")
    with pytest.raises(MalformedMessage):
        split_payload(REQUEST, payload)


def test_a_head_larger_than_any_head_may_be_is_refused() -> None:
    length = HEAD_LIMIT_BYTES + 1
    frame = (length + 2).to_bytes(4, "big") + bytes([REQUEST]) + length.to_bytes(2, "big")
    with pytest.raises(LimitExceeded, match="head"):
        parser().feed(frame)


def test_a_chunk_header_is_read_with_the_limit_of_its_kind() -> None:
    assert read_frame_header(chunk_header(77), {CHUNK: 77}) == (CHUNK, 77)
    with pytest.raises(LimitExceeded, match="CHUNK"):
        read_frame_header(chunk_header(78), {CHUNK: 77})


def test_every_kind_has_its_own_number_and_name() -> None:
    assert sorted(KIND_NAMES) == list(range(1, 10))
    assert len(set(KIND_NAMES.values())) == 9


def test_a_head_from_a_newer_peer_with_more_fields_is_understood() -> None:
    newer = msgspec.msgpack.encode([7, b"envelope", "what a later version adds"])
    assert message_type(ResponseHead).decode(newer) == ResponseHead(7, b"envelope")


def test_a_head_from_an_older_peer_with_fewer_fields_takes_defaults() -> None:
    assert message_type(ResponseHead).decode(msgspec.msgpack.encode([7])) == ResponseHead(7, b"")
