"""A response counts for one request of one asker, from the peer that was asked: I.5."""

from __future__ import annotations

import pytest

from auth.envelopes import REQUEST_DOMAIN, Topic
from auth.refusals import Reason
from auth.revocations import NameEntry, RevocationList, sign_list
from auth.tokens import DEFAULT_LIFE_MS
from tests.auth.core.people import (
    ALICE,
    ANSWER,
    ANSWERED,
    AUTH,
    BOB,
    BOBS_TOKEN,
    HOUR,
    MALLORY,
    MALLORYS_TOKEN,
    NOW,
    OTHER_AUTH,
    RUN,
    Side,
    nonce,
    request,
    response,
    token_of,
)
from tests.auth.core.refused import refused


@pytest.fixture
def alice() -> Side:
    return Side(ALICE)


def test_a_response_that_is_as_it_should_be_counts(alice: Side) -> None:
    assert alice.receive_answer(response(), asked=nonce(1)).token.username == "code:bob"


# --- what I.5 lists, one by one -----------------------------------------------------------------


def test_a_token_that_the_auth_key_did_not_sign_is_refused(alice: Side) -> None:
    forged = BOBS_TOKEN[:-1] + bytes([BOBS_TOKEN[-1] ^ 1])
    with refused(Reason.TOKEN_SIGNATURE):
        alice.receive_answer(response(token=forged), asked=nonce(1))
    with refused(Reason.UNKNOWN_AUTH_KEY):
        alice.receive_answer(response(token=token_of(BOB, by=OTHER_AUTH)), asked=nonce(1))


def test_an_expired_token_is_refused(alice: Side) -> None:
    old = token_of(BOB, issued_ms=NOW - DEFAULT_LIFE_MS)
    with refused(Reason.TOKEN_EXPIRED):
        alice.receive_answer(response(token=old), asked=nonce(1))


def test_a_signature_that_is_not_the_token_holders_is_refused(alice: Side) -> None:
    with refused(Reason.SIGNATURE):
        alice.receive_answer(response(key=MALLORY), asked=nonce(1))


def test_an_answer_to_another_request_is_refused(alice: Side) -> None:
    with refused(Reason.WRONG_NONCE):
        alice.receive_answer(response(number=2), asked=nonce(1))


def test_an_answer_of_a_peer_that_was_not_asked_is_refused(alice: Side) -> None:
    his = response(key=MALLORY, token=MALLORYS_TOKEN)
    with refused(Reason.NOT_THE_PEER):
        alice.receive_answer(his, asked=nonce(1))


# --- what stands between the lines --------------------------------------------------------------


def test_an_answer_to_another_asker_with_the_same_nonce_is_refused(alice: Side) -> None:
    # Mallory watched Alice's nonce, asked Bob with it himself, and hands her what he got
    with refused(Reason.SIGNATURE):
        alice.receive_answer(response(recipient=MALLORY), asked=nonce(1))


@pytest.mark.parametrize(
    "topic",
    [
        Topic("error", ANSWER.protocol, ANSWER.method),
        Topic("closed", ANSWER.protocol, ANSWER.method),
        Topic(ANSWER.part, "/potluck/dht/1.0.0", ANSWER.method),
        Topic(ANSWER.part, ANSWER.protocol, "find"),
    ],
    ids=lambda topic: "-".join(topic),
)
def test_a_response_counts_for_its_part_protocol_and_method_only(alice: Side, topic: Topic) -> None:
    with refused(Reason.SIGNATURE):
        alice.receive_answer(response(), asked=nonce(1), topic=topic)


@pytest.mark.parametrize("content", [b"", ANSWERED[:-1], ANSWERED + b"\0"])
def test_a_response_counts_for_its_content_only(alice: Side, content: bytes) -> None:
    with refused(Reason.SIGNATURE):
        alice.receive_answer(response(), asked=nonce(1), content=content)


def test_a_renewed_token_is_not_put_under_an_older_signature(alice: Side) -> None:
    renewed = response(token=token_of(BOB, serial=9))
    with refused(Reason.SIGNATURE):
        alice.receive_answer(renewed[:-64] + response()[-64:], asked=nonce(1))


def test_a_signature_of_a_request_is_none_of_a_response(alice: Side) -> None:
    signed_as_request = BOB.sign(REQUEST_DOMAIN, b"whatever")
    with refused(Reason.SIGNATURE):
        alice.receive_answer(response()[:-64] + signed_as_request, asked=nonce(1))


def test_a_response_without_a_token_is_refused(alice: Side) -> None:
    with refused(Reason.TOKEN_MISSING):
        alice.receive_answer(b"", asked=nonce(1))
    with refused(Reason.TOKEN_MISSING):
        alice.receive_answer(response(token=b""), asked=nonce(1))


def test_a_request_is_no_response(alice: Side) -> None:
    mine = request(key=BOB, token=BOBS_TOKEN, recipient=ALICE)
    with refused(Reason.MALFORMED):
        alice.receive_answer(mine, asked=nonce(1))


@pytest.mark.parametrize(
    "envelope",
    [response() + b"\0", response()[:-1], b"\xdc\x00\x03" + response()[1:], bytes(3000)],
    ids=lambda envelope: f"{len(envelope)}-{envelope[:4].hex()}",
)
def test_other_bytes_are_a_malformed_envelope(alice: Side, envelope: bytes) -> None:
    with refused(Reason.MALFORMED):
        alice.receive_answer(envelope, asked=nonce(1))


def test_a_peer_that_was_revoked_meanwhile_is_not_believed(alice: Side) -> None:
    alice.receive_answer(response(), asked=nonce(1))
    revoked = RevocationList(
        RUN, 1, NOW, (NameEntry("code:bob", NOW, NOW + HOUR),), (), AUTH.key_id
    )
    assert alice.tokens.revocations.accept(sign_list(revoked, AUTH), alice.tokens.keyring)
    with refused(Reason.REVOKED):
        alice.receive_answer(response(), asked=nonce(1))
