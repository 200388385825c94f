"""Decoding any bytes raises MalformedMessage or returns a value of the type."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocols.errors import MalformedMessage
from protocols.rpc import Empty, Message, decode, encode
from protocols.rpc.frames import HEAD_LIMIT_BYTES
from protocols.rpc.messages import (
    ERROR_BODY_LIMIT_BYTES,
    LONGEST_ERROR_TEXT,
    AcceptHead,
    CancelHead,
    CloseHead,
    ErrorBody,
    ErrorHead,
    OpenHead,
    RequestHead,
    ResponseHead,
)
from protocols.rpc.ping import EchoRequest

EVERY_TYPE: list[type[Any]] = [
    RequestHead,
    ResponseHead,
    ErrorHead,
    CancelHead,
    OpenHead,
    AcceptHead,
    CloseHead,
    ErrorBody,
    Empty,
    EchoRequest,
]


class Loose(Message, frozen=True):
    """The widest types that a careless author could declare."""

    anything: Any = None
    names: frozenset[Any] = frozenset()
    numbers: list[int] = []  # noqa: RUF012 - msgspec copies it
    table: dict[str, Any] = {}  # noqa: RUF012


@pytest.mark.parametrize("type_", [*EVERY_TYPE, Loose])
@given(data=some.binary(max_size=200))
def test_random_bytes_are_a_message_or_malformed(type_: type[Any], data: bytes) -> None:
    try:
        message = decode(type_, data)
    except MalformedMessage:
        return
    assert isinstance(message, type_)


plain_values = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(1 << 63), (1 << 64) - 1)
    | some.floats()
    | some.binary(max_size=20)
    | some.text(max_size=20),
    lambda inner: (
        some.lists(inner, max_size=6) | some.dictionaries(some.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@pytest.mark.parametrize("type_", [*EVERY_TYPE, Loose])
@given(value=plain_values, cut=some.integers(0, 100))
def test_other_values_and_cut_values_are_a_message_or_malformed(
    type_: type[Any], value: Any, cut: int
) -> None:
    data = encode(value)
    for candidate in (data, data[:cut], data + b"\x00"):
        try:
            message = decode(type_, candidate)
        except MalformedMessage:
            continue
        assert isinstance(message, type_)


@pytest.mark.parametrize("type_", [Loose, RequestHead, EchoRequest])
@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\xdb\xff\xff\xff\xff",  # 4 GB of text
        b"\xc9\xff\xff\xff\xff\x01",  # 4 GB of an extension
        b"\x91" * 100_000,  # a hundred thousand arrays in one another
        b"\x91" * 100_000 + b"\x90",
        b"\x81\xa1x" * 50_000 + b"\x90",
        b"\x91" + b"\xdc\xff\xff" * 900,  # nested arrays that all claim to be long
        b"\x93\xc0\xdd\xff\xff\xff\xff",  # inside a set
        b"\x94\xc0\x90\xdd\xff\xff\xff\xff",  # inside a list of numbers
        b"\x95\x01\xa1x\x01\xc4\x00" + b"\x91" * 100_000,  # in a field that is skipped
    ],
)
def test_bombs_are_malformed_and_take_no_memory(type_: type[Any], bomb: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(MalformedMessage):
        decode(type_, bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * len(bomb) + 200_000


@given(value=some.recursive(some.just([]), lambda inner: some.lists(inner, max_size=50)))
def test_objects_take_at_most_some_seventy_bytes_for_each_byte_of_message(value: Any) -> None:
    data = encode([value])
    tracemalloc.start()
    kept = decode(Loose, data)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept is not None
    assert held < 100 * len(data) + 20_000


def test_a_set_with_members_that_cannot_be_in_a_set_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        decode(Loose, msgspec.msgpack.encode([None, [{"a": 1}]]))


@pytest.mark.parametrize(
    "head",
    [
        RequestHead(0xFFFFFFFF, "m" * 64, 0x7FFFFFFF, b"e" * 3072),
        OpenHead("ü" * 64, 0x7FFFFFFF, b"e" * 3072),
        CloseHead(2**63 - 1, 2**63 - 1, b"d" * 32, b"e" * 3072),
    ],
)
def test_the_largest_heads_fit_the_limit_of_heads(head: Message) -> None:
    data = encode(head)
    assert len(data) <= HEAD_LIMIT_BYTES
    assert decode(type(head), data) == head


def test_the_largest_error_fits_its_limit() -> None:
    text = "\U0001f35d" * LONGEST_ERROR_TEXT
    error = ErrorBody("c" * 64, text, text, text)
    assert len(encode(error)) <= ERROR_BODY_LIMIT_BYTES
    assert decode(ErrorBody, encode(error)) == error


@pytest.mark.parametrize(
    ("type_", "fields"),
    [
        (RequestHead, [-1, "m", 1]),
        (RequestHead, [1 << 32, "m", 1]),
        (RequestHead, [1, "", 1]),
        (RequestHead, [1, "m" * 65, 1]),
        (RequestHead, [1, "m", -1]),
        (RequestHead, [1, "m", 1, b"e" * 3073]),
        (RequestHead, [1, "m"]),
        (RequestHead, {"id": 1, "method": "m", "milliseconds": 1}),
        (CloseHead, [1, 1, b"d" * 33]),
        (ErrorBody, ["c", "x" * 501]),
    ],
)
def test_fields_outside_their_limits_are_malformed(type_: type[Any], fields: Any) -> None:
    with pytest.raises(MalformedMessage, match=type_.__name__):
        decode(type_, encode(fields))
