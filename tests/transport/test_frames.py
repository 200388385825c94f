"""Yamux frames: the same out of any cut of the same bytes, and two errors for everything else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    YamuxFrameParser,
    decode_header,
    encode_header,
)
from protocols.errors import LimitExceeded, MalformedMessage

PAYLOAD_LIMIT = 1000

CONVERSATION = [
    (FrameHeader(WINDOW_UPDATE, SYN, 1, 0), b""),
    (FrameHeader(DATA, 0, 1, 5), b"hello"),
    (FrameHeader(DATA, 0, 1, 0), b""),
    (FrameHeader(PING, SYN, 0, 77), b""),
    (FrameHeader(WINDOW_UPDATE, ACK, 3, 70_000), b""),
    (FrameHeader(DATA, FIN, 3, 300), bytes(range(250)) + b"x" * 50),
    (FrameHeader(WINDOW_UPDATE, RST, 1, 0), b""),
    (FrameHeader(GO_AWAY, 0, 0, 0), b""),
]
CONVERSATION_BYTES = b"".join(encode_header(*header) + payload for header, payload in CONVERSATION)


def parse(*chunks: bytes) -> list[tuple[FrameHeader, bytes]]:
    parser = YamuxFrameParser(PAYLOAD_LIMIT)
    frames: list[tuple[FrameHeader, bytes]] = []
    for chunk in chunks:
        for event in parser.feed(chunk):
            if isinstance(event, FrameHeader):
                frames.append((event, b""))
            else:
                assert len(event) > 0
                header, payload = frames[-1]
                frames[-1] = (header, payload + bytes(event))
    return frames


def test_a_header_is_what_the_specification_says() -> None:
    assert encode_header(DATA, SYN | FIN, 0x01020304, 0x0A0B0C0D) == bytes.fromhex(
        "00 00 0005 01020304 0a0b0c0d"
    )
    assert decode_header(bytes.fromhex("00 02 0002 00000000 00000007")) == (PING, ACK, 0, 7)


def test_a_conversation_comes_out_whole_when_it_comes_in_at_once() -> None:
    assert parse(CONVERSATION_BYTES) == CONVERSATION


def test_a_conversation_comes_out_whole_when_it_comes_byte_by_byte() -> None:
    assert parse(*(bytes([byte]) for byte in CONVERSATION_BYTES)) == CONVERSATION


def test_a_conversation_comes_out_whole_when_cut_anywhere() -> None:
    for cut in range(1, len(CONVERSATION_BYTES)):
        assert parse(CONVERSATION_BYTES[:cut], CONVERSATION_BYTES[cut:]) == CONVERSATION, cut


def test_flags_that_are_not_in_the_specification_are_left_to_the_future() -> None:
    assert decode_header(encode_header(DATA, 0x8001, 1, 0)).flags & SYN


@pytest.mark.parametrize(
    "header",
    [
        bytes.fromhex("01 00 0000 00000001 00000000"),
        bytes.fromhex("00 04 0000 00000001 00000000"),
        bytes.fromhex("00 ff 0000 00000001 00000000"),
        encode_header(DATA, 0, 0, 0),
        encode_header(WINDOW_UPDATE, SYN, 0, 0),
    ],
    ids=["version 1", "type 4", "type 255", "data for stream 0", "stream 0 opened"],
)
def test_a_header_that_no_yamux_sends_is_malformed(header: bytes) -> None:
    with pytest.raises(MalformedMessage):
        list(YamuxFrameParser(PAYLOAD_LIMIT).feed(header))


@pytest.mark.parametrize("length", [PAYLOAD_LIMIT + 1, 2**31, 2**32 - 1])
def test_a_payload_above_the_limit_is_refused_at_its_header(length: int) -> None:
    parser = YamuxFrameParser(PAYLOAD_LIMIT)
    with pytest.raises(LimitExceeded):
        list(parser.feed(encode_header(DATA, 0, 1, length)))


def test_a_payload_is_not_gathered() -> None:
    parser = YamuxFrameParser(2**32 - 1)
    list(parser.feed(encode_header(DATA, 0, 1, 2**32 - 1)))
    chunk = bytes(1000)
    for _ in range(100):
        (piece,) = parser.feed(chunk)
        assert isinstance(piece, memoryview)
        assert piece.obj is chunk
    assert len(parser._partial_header) == 0


def test_a_caller_handles_a_header_before_the_payload_is_taken() -> None:
    parser = YamuxFrameParser(PAYLOAD_LIMIT)
    events = parser.feed(encode_header(DATA, 0, 1, 3) + b"abc")
    assert next(events) == FrameHeader(DATA, 0, 1, 3)
    assert next(events) == b"abc"


frames = st.tuples(
    st.sampled_from([DATA, WINDOW_UPDATE, PING, GO_AWAY]),
    st.integers(0, 15),
    st.integers(1, 2**32 - 1),
    st.binary(max_size=60),
)


def encode(type: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    header = encode_header(type, flags, stream_id, len(payload))
    return header + payload if type == DATA else header


@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 600), max_size=10))
def test_any_frames_survive_any_cuts(
    sent: list[tuple[int, int, int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(encode(*frame) for frame in sent)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:end] for start, end in itertools.pairwise(edges)]
    assert parse(*chunks) == [
        (FrameHeader(type, flags, stream_id, len(payload)), payload if type == DATA else b"")
        for type, flags, stream_id, payload in sent
    ]


def feed_and_measure(data: bytes, step: int) -> None:
    """Only the two documented errors may come out, and no more may be held than a header."""
    parser = YamuxFrameParser(PAYLOAD_LIMIT)
    for start in range(0, len(data), step):
        try:
            for event in parser.feed(data[start : start + step]):
                assert isinstance(event, FrameHeader | memoryview)
        except (MalformedMessage, LimitExceeded):
            return
        assert len(parser._partial_header) < HEADER_BYTES
        assert 0 <= parser._payload_left <= PAYLOAD_LIMIT


@given(st.binary(max_size=400), st.integers(1, 50))
def test_random_bytes_raise_only_the_two_documented_errors(data: bytes, step: int) -> None:
    feed_and_measure(data, step)


@given(
    st.lists(st.tuples(st.integers(0, len(CONVERSATION_BYTES) - 1), st.integers(0, 255))),
    st.integers(0, len(CONVERSATION_BYTES)),
    st.integers(1, 50),
)
def test_a_mutated_conversation_raises_only_the_two_documented_errors(
    mutations: list[tuple[int, int]], length: int, step: int
) -> None:
    data = bytearray(CONVERSATION_BYTES)
    for position, value in mutations:
        data[position] = value
    feed_and_measure(bytes(data[:length]), step)
