"""The time and a refusal are believed from the auth server only, and only as an answer to us."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from auth.errors import MalformedDocument, UntrustedDocument
from auth.keys import SigningKey
from auth.statements import (
    REFUSAL_LIMIT_BYTES,
    SignedRefusal,
    SignedTime,
    open_refusal,
    open_time,
    sentence,
    sign_refusal,
    sign_time,
)
from tests.auth.core.people import AUTH, NOW, OTHER_AUTH, RUN, YEAR, keyring_of

NONCE = b"what we asked with"
TIME = SignedTime(RUN, NONCE, NOW, AUTH.key_id)
NO = SignedRefusal(
    RUN, NONCE, NOW, "not-allowed", "You may not.", "You are not on the list.", "Ask.", AUTH.key_id
)


def test_the_time_is_believed_from_the_auth_server() -> None:
    assert open_time(sign_time(TIME, AUTH), keyring_of(), NONCE) == TIME


def test_a_refusal_is_believed_from_the_auth_server() -> None:
    assert open_refusal(sign_refusal(NO, AUTH), keyring_of(), NONCE) == NO


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({"run": "another"}, AUTH),
        ({"time_ms": NOW + 2 * YEAR}, AUTH),
        ({}, OTHER_AUTH),
        ({"key_id": OTHER_AUTH.key_id}, OTHER_AUTH),
    ],
    ids=["another run", "after the key's time", "forged", "unknown key"],
)
def test_nobody_else_is_believed(changes: dict[str, object], by: SigningKey) -> None:
    time = sign_time(msgspec.structs.replace(TIME, **changes), by)
    with pytest.raises(UntrustedDocument):
        open_time(time, keyring_of(), NONCE)
    refusal = sign_refusal(msgspec.structs.replace(NO, **changes), by)
    with pytest.raises(UntrustedDocument):
        open_refusal(refusal, keyring_of(), NONCE)


def test_an_answer_to_something_else_is_not_believed() -> None:
    with pytest.raises(UntrustedDocument):
        open_time(sign_time(TIME, AUTH), keyring_of(), b"something else")
    with pytest.raises(UntrustedDocument):
        open_refusal(sign_refusal(NO, AUTH), keyring_of(), b"something else")


def test_neither_stands_for_the_other() -> None:
    with pytest.raises(MalformedDocument):
        open_time(sign_refusal(NO, AUTH), keyring_of(), NONCE)
    with pytest.raises(MalformedDocument):
        open_refusal(sign_time(TIME, AUTH), keyring_of(), NONCE)


@given(some.text(max_size=600), some.text(max_size=600), some.text(max_size=600))
def test_any_text_is_made_such_as_may_be_shown(what: str, why: str, advice: str) -> None:
    no = msgspec.structs.replace(NO, what=what, why=why, advice=advice)
    shown = open_refusal(sign_refusal(no, AUTH), keyring_of(), NONCE)
    assert shown.what == sentence(what)
    assert (shown.what + shown.why + shown.advice).isprintable()


def test_the_longest_refusal_fits() -> None:
    no = msgspec.structs.replace(NO, what="🥘" * 500, why="🥘" * 500, advice="🥘" * 501)
    assert len(sign_refusal(no, AUTH)) <= REFUSAL_LIMIT_BYTES


@given(some.binary(max_size=200))
def test_any_other_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedDocument):
        open_time(data, keyring_of(), NONCE)
    with pytest.raises(MalformedDocument):
        open_refusal(data, keyring_of(), NONCE)
