"""docs/protocols.md says what the code does, byte for byte and number for number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from blake3 import blake3

from auth.envelopes import LIMIT_BYTES as ENVELOPE_LIMIT_BYTES
from auth.envelopes import Topic, seal_request, seal_response
from auth.keys import SigningKey
from auth.nonces import MEMORY_MS, POOL_NONCES, SHARE_NONCES
from auth.refusals import Reason
from auth.roles import Role, in_order
from auth.tokens import CLOCK_TOLERANCE_MS, Token, sign_token
from auth.tokens import LIMIT_BYTES as TOKEN_LIMIT_BYTES
from protocols.access.access import MOST_STRANGERS, STRANGER_SECONDS
from protocols.guard import Part
from protocols.rpc import encode
from protocols.rpc.frames import (
    CANCEL,
    ERROR,
    HEAD_LIMIT_BYTES,
    KIND_NAMES,
    REQUEST,
    RESPONSE,
    message_frame,
)
from protocols.rpc.messages import (
    ERROR_BODY_LIMIT_BYTES,
    CancelHead,
    ErrorBody,
    ErrorHead,
    RequestHead,
    ResponseHead,
)
from protocols.rpc.method import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_MESSAGE_BYTES,
    LARGEST_CHUNK_BYTES,
    LARGEST_UNARY_BYTES,
)
from protocols.rpc.peers import LET_IN_EVERY_SECONDS, REFUSED_AT_ONCE, REFUSED_PER_SECOND
from protocols.rpc.ping import EchoRequest, EchoResponse
from protocols.rpc.remote_errors import CODES
from protocols.rpc.state import RpcLimits

AUTH, ALICE, BOB = (SigningKey(bytes([number]) * 32) for number in (1, 2, 3))
ISSUED_MS = 1_700_000_000_000
TIME_MS, NONCE, BODY = ISSUED_MS + 1000, bytes(range(16)), encode(EchoRequest(b"hi"))


def token_of(key: SigningKey, name: str, serial: int) -> bytes:
    roles, expires_ms = (Role.VOLUNTEER,), ISSUED_MS + 3_600_000
    token = Token("tiny", name, key.public_key, roles, serial, AUTH.key_id, ISSUED_MS, expires_ms)
    return sign_token(token, AUTH)


ALICES_TOKEN, BOBS_TOKEN = token_of(ALICE, "alice", 1), token_of(BOB, "bob", 2)
ALICES_ENVELOPE = seal_request(
    ALICE,
    ALICES_TOKEN,
    Topic("request", "/potluck/ping/1.0.0", "echo"),
    BOB.public_key,
    BODY,
    time_ms=TIME_MS,
    nonce=NONCE,
)
BOBS_ENVELOPE = seal_response(
    BOB,
    BOBS_TOKEN,
    Topic("response", "/potluck/ping/1.0.0", "echo"),
    ALICE.public_key,
    BODY,
    nonce=NONCE,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text(encoding="utf-8")

FRAMES = {
    "request": message_frame(
        REQUEST, encode(RequestHead(1, "echo", 5000)), encode(EchoRequest(b"hi"))
    ),
    "response": message_frame(RESPONSE, encode(ResponseHead(1)), encode(EchoResponse(b"hi"))),
    "cancel": message_frame(CANCEL, encode(CancelHead(1)), b""),
    "error": message_frame(ERROR, encode(ErrorHead(1)), encode(ErrorBody("busy", "Not now!!"))),
    "token": ALICES_TOKEN,
    "request envelope": ALICES_ENVELOPE,
    "response envelope": BOBS_ENVELOPE,
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


def test_the_signature_covers_the_bytes_that_the_example_names() -> None:
    signature = documented("request envelope")[-64:]
    covered = documented("signed request")
    assert ALICE.verifying_key.verify(b"potluck request 1", signature, covered)
    assert covered.endswith(blake3(BODY).digest())
    token = documented("token")
    assert AUTH.verifying_key.verify(b"potluck token 1", token[-64:], token[:-64])


def test_every_reason_to_refuse_is_described_with_its_limits() -> None:
    for reason in Reason:
        if reason is not Reason.CHALLENGE:  # between a node and the auth server alone
            assert f"| `{reason.value}` |" in DOCUMENT
    for statement in (
        f"differs from ours by more than {CLOCK_TOLERANCE_MS // 1000} s",
        f"came in the last {MEMORY_MS // 1000} s",
        f"the sender has {SHARE_NONCES:,} requests in these 60 s, or all have {POOL_NONCES:,}",
        f"one every {LET_IN_EVERY_SECONDS:g} seconds",
        f"then 64 bytes of signature | up to {TOKEN_LIMIT_BYTES} bytes |",
        f"[token, nonce, signature] | up to {ENVELOPE_LIMIT_BYTES} bytes |",
        "Roles are " + ", ".join(f"`{role.value}`" for role in in_order(Role)),
    ):
        assert statement in re.sub(r"\s+", " ", DOCUMENT), statement
    for part in Part:
        assert f"| `{part.value}` |" in DOCUMENT


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
        f"| {limits.transfers_per_peer}, {limits.transfers_in_total:,}; beyond: `busy` |",
        f"| {limits.streams_per_peer}; {limits.streams_per_stranger} while it has shown no token",
        f"| {REFUSED_AT_ONCE} at once and {REFUSED_PER_SECOND:g} a second; beyond",
        f"| closed after {STRANGER_SECONDS:g} s; of more than {MOST_STRANGERS} the oldest",
        f"| time for the first frame of a stream | {limits.first_frame_seconds:g} s |",
    ):
        assert statement in DOCUMENT
