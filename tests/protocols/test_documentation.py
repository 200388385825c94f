"""docs/protocols.md says what the code does, byte for byte and number for number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocols.messages import (
    ERROR_BODY_LIMIT_BYTES,
    CancelHead,
    ErrorBody,
    ErrorHead,
    RequestHead,
    ResponseHead,
    encode,
)
from protocols.method import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_MESSAGE_BYTES,
    LARGEST_CHUNK_BYTES,
    LARGEST_UNARY_BYTES,
)
from protocols.ping import EchoRequest, EchoResponse
from protocols.remote_errors import CODES
from protocols.rpc_state import RpcLimits
from protocols.wire import (
    CANCEL,
    ERROR,
    HEAD_LIMIT_BYTES,
    KIND_NAMES,
    REQUEST,
    RESPONSE,
    message_frame,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text(encoding="utf-8")

FRAMES = {
    "request": message_frame(
        REQUEST, encode(RequestHead(1, "echo", 5000)), encode(EchoRequest(b"hi"))
    ),
    "response": message_frame(RESPONSE, encode(ResponseHead(1)), encode(EchoResponse(b"hi"))),
    "cancel": message_frame(CANCEL, encode(CancelHead(1)), b""),
    "error": message_frame(ERROR, encode(ErrorHead(1)), encode(ErrorBody("busy", "Not now!!"))),
}


def documented(example: str) -> bytes:
    """The bytes of an example: the hexadecimal pairs at the start of each line."""
    found = re.search(rf"<!-- example: {example} -->\n```\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found, f"docs/protocols.md has no example {example}"
    pairs = [re.match(r"\s*((?:[0-9a-f]{2} ?)+)(?:\s|$)", line) for line in found[1].splitlines()]
    return b"".join(bytes.fromhex(pair[1]) for pair in pairs if pair)


@pytest.mark.parametrize("example", FRAMES)
def test_the_bytes_of_the_examples_are_what_the_code_sends(example: str) -> None:
    assert documented(example).hex(" ") == FRAMES[example].hex(" ")


def test_every_kind_of_frame_and_every_error_code_is_described() -> None:
    for kind, name in KIND_NAMES.items():
        assert f"| {kind} | {name} |" in DOCUMENT
    for code in CODES:
        assert f"`{code}`" in DOCUMENT


def test_the_limits_are_those_of_the_code() -> None:
    limits = RpcLimits()
    message, largest_message = DEFAULT_MESSAGE_BYTES >> 10, LARGEST_UNARY_BYTES >> 20
    chunk, largest_chunk = DEFAULT_CHUNK_BYTES >> 20, LARGEST_CHUNK_BYTES >> 20
    for statement in (
        f"| head | {HEAD_LIMIT_BYTES:,} bytes |",
        f"{message} KiB unless said, never above {largest_message} MiB",
        f"{chunk} MiB unless said, never above {largest_chunk} MiB",
        f"| ERROR body | {ERROR_BODY_LIMIT_BYTES:,} bytes |",
        f"| {limits.served_per_peer}, {limits.served_in_total:,}; beyond: `busy` |",
        f"| {limits.transfers_per_peer}, {limits.transfers_in_total}; beyond: `busy` |",
        f"| {limits.streams_per_peer}; beyond: reset |",
        f"| time for the first frame of a stream | {limits.first_frame_seconds:g} s |",
    ):
        assert statement in DOCUMENT
