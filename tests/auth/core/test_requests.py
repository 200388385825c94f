"""A request counts once, for one recipient, now, as it was signed: DeDLOC, appendix I.5."""

from __future__ import annotations

import pytest

from auth.envelopes import (
    LIMIT_BYTES,
    REQUEST_DOMAIN,
    RESPONSE_DOMAIN,
    Topic,
    claimed_nonce,
    seal_request,
)
from auth.nonces import NonceWindow
from auth.refusals import AccessRefused, Reason
from auth.roles import Role
from auth.tokens import DEFAULT_LIFE_MS
from auth.tokens import LIMIT_BYTES as TOKEN_LIMIT_BYTES
from tests.auth.core.people import (
    ALICE,
    ALICES_TOKEN,
    BOB,
    BOBS_TOKEN,
    CONTENT,
    MALLORY,
    MALLORYS_TOKEN,
    NOW,
    OTHER_AUTH,
    TOPIC,
    N,
    Side,
    nonce,
    request,
    response,
    token_of,
)
from tests.auth.core.refused import refused


@pytest.fixture
def bob() -> Side:
    return Side(BOB)


def test_a_request_that_is_as_it_should_be_counts(bob: Side) -> None:
    opened = bob.receive(request())
    assert opened.sender.token.username == "github:alice"
    assert opened.sender.token.roles == (Role.VOLUNTEER,)
    assert opened.sender.peer_id == opened.sender.token.peer_id
    assert opened.nonce == nonce(1)


# --- what I.5 lists, one by one -----------------------------------------------------------------


def test_a_token_that_the_auth_key_did_not_sign_is_refused(bob: Side) -> None:
    forged = ALICES_TOKEN[:-1] + bytes([ALICES_TOKEN[-1] ^ 1])
    with refused(Reason.TOKEN_SIGNATURE):
        bob.receive(request(token=forged))


def test_a_token_of_another_auth_server_is_refused(bob: Side) -> None:
    with refused(Reason.UNKNOWN_AUTH_KEY):
        bob.receive(request(token=token_of(ALICE, by=OTHER_AUTH)))


def test_an_expired_token_is_refused(bob: Side) -> None:
    old = token_of(ALICE, issued_ms=NOW - DEFAULT_LIFE_MS)
    with refused(Reason.TOKEN_EXPIRED):
        bob.receive(request(token=old))
    bob.receive(request(token=old, time_ms=NOW - 1), now_ms=NOW - 1)


def test_a_signature_that_is_not_the_token_holders_is_refused(bob: Side) -> None:
    with refused(Reason.SIGNATURE):
        bob.receive(request(key=MALLORY))


@pytest.mark.parametrize("off", [-N - 1, N + 1])
def test_a_request_timed_more_than_n_off_is_refused(bob: Side, off: int) -> None:
    with refused(Reason.CLOCK):
        bob.receive(request(time_ms=NOW + off))


@pytest.mark.parametrize("off", [-N, N])
def test_a_request_timed_exactly_n_off_counts(bob: Side, off: int) -> None:
    bob.receive(request(time_ms=NOW + off))


def test_a_nonce_counts_once(bob: Side) -> None:
    bob.receive(request())
    with refused(Reason.REPLAY):
        bob.receive(request())


def test_a_request_meant_for_another_is_refused(bob: Side) -> None:
    with refused(Reason.WRONG_RECIPIENT):
        bob.receive(request(recipient=MALLORY))


# --- what stands between the lines --------------------------------------------------------------


def test_a_used_nonce_is_used_for_other_requests_too(bob: Side) -> None:
    bob.receive(request())
    with refused(Reason.REPLAY):
        bob.receive(request(content=b"else", time_ms=NOW + 1), content=b"else")


def test_two_senders_may_happen_on_the_same_nonce(bob: Side) -> None:
    bob.receive(request())
    bob.receive(request(key=MALLORY, token=MALLORYS_TOKEN), sender=MALLORY)


@pytest.mark.parametrize("late", [0, 1, N, 2 * N])
@pytest.mark.parametrize("ahead", [-N, 0, N])
def test_a_replay_is_refused_as_long_as_its_time_would_pass(
    bob: Side, ahead: int, late: int
) -> None:
    envelope = request(time_ms=NOW + ahead)
    bob.receive(envelope)
    with pytest.raises(AccessRefused) as caught:
        bob.receive(envelope, now_ms=NOW + late)
    in_time = abs(ahead - late) <= N
    assert caught.value.reason is (Reason.REPLAY if in_time else Reason.CLOCK)


def test_the_last_moment_of_the_window_is_in_it(bob: Side) -> None:
    envelope = request(time_ms=NOW + N)
    bob.receive(envelope)
    with refused(Reason.REPLAY):
        bob.receive(envelope, now_ms=NOW + 2 * N)
    with refused(Reason.CLOCK):
        bob.receive(envelope, now_ms=NOW + 2 * N + 1)


def test_after_the_window_a_nonce_may_come_again_in_a_new_request(bob: Side) -> None:
    bob.receive(request())
    again = NOW + 2 * N
    with refused(Reason.REPLAY):
        bob.receive(request(time_ms=again), now_ms=again)
    bob.receive(request(time_ms=again + 1), now_ms=again + 1)


def test_a_request_replayed_to_another_peer_is_refused(bob: Side) -> None:
    envelope = request()
    bob.receive(envelope)
    carol = Side(MALLORY)
    with refused(Reason.WRONG_RECIPIENT):
        carol.receive(envelope)


def test_a_request_replayed_after_a_restart_is_refused() -> None:
    envelope = request(time_ms=NOW)
    Side(BOB, nonces=NonceWindow(NOW - 1)).receive(envelope)
    restarted = Side(BOB, nonces=NonceWindow(NOW + 1))
    with refused(Reason.REPLAY):
        restarted.receive(envelope, now_ms=NOW + 2)
    restarted.receive(request(time_ms=NOW + 1), now_ms=NOW + 2)


def test_a_window_that_starts_n_after_the_last_one_leaves_nothing_to_replay() -> None:
    ahead = request(time_ms=NOW + N)
    Side(BOB, nonces=NonceWindow(NOW - 1)).receive(ahead)
    restarted = Side(BOB, nonces=NonceWindow(NOW + N + 1))
    for now_ms in (NOW + 1, NOW + N, NOW + 2 * N):
        with refused(Reason.REPLAY):
            restarted.receive(ahead, now_ms=now_ms)


def test_a_failed_request_does_not_use_up_its_nonce(bob: Side) -> None:
    with refused(Reason.SIGNATURE):
        bob.receive(request(key=MALLORY))
    with refused(Reason.SIGNATURE):
        bob.receive(request(), content=b"changed")
    assert len(bob.nonces) == 0
    bob.receive(request())


def test_a_man_in_the_middle_with_a_token_of_his_own_gets_nowhere(bob: Side) -> None:
    # Mallory receives what Alice sends to Bob, and has channels to both
    envelope = request()
    with refused(Reason.NOT_THE_PEER):
        bob.receive(envelope, sender=MALLORY)
    # with his token in place of hers, her signature is not his
    signature = envelope[-64:]
    his = request(key=MALLORY, token=MALLORYS_TOKEN)
    with refused(Reason.SIGNATURE):
        bob.receive(his[:-64] + signature, sender=MALLORY)
    # with her token and his signature
    with refused(Reason.NOT_THE_PEER):
        bob.receive(request(key=MALLORY), sender=MALLORY)
    # as himself he may ask what he likes, and is taken for himself
    assert bob.receive(his, sender=MALLORY).sender.token.username == "github:mallory"
    # what she sent to him by name he cannot pass on
    with refused(Reason.WRONG_RECIPIENT):
        bob.receive(request(recipient=MALLORY), sender=MALLORY)


@pytest.mark.parametrize(
    "topic",
    [
        Topic("opening", TOPIC.protocol, TOPIC.method),
        Topic(TOPIC.part, "/potluck/dht/1.0.0", TOPIC.method),
        Topic(TOPIC.part, TOPIC.protocol, "store"),
        Topic(TOPIC.part, TOPIC.protocol + "e", "cho"),
        Topic(TOPIC.part + "/", "potluck/ping/1.0.0", TOPIC.method),
    ],
    ids=lambda topic: "-".join(topic),
)
def test_a_request_counts_for_its_part_protocol_and_method_only(bob: Side, topic: Topic) -> None:
    with refused(Reason.SIGNATURE):
        bob.receive(request(), topic=topic)


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"\0", CONTENT.upper()])
def test_a_request_counts_for_its_content_only(bob: Side, content: bytes) -> None:
    with refused(Reason.SIGNATURE):
        bob.receive(request(), content=content)


def test_every_field_is_covered_by_the_signature(bob: Side) -> None:
    signature = request()[-64:]
    for changed in (
        request(time_ms=NOW + 1),
        request(number=2),
        request(token=token_of(ALICE, serial=9)),
    ):
        with refused(Reason.SIGNATURE):
            bob.receive(changed[:-64] + signature)


def test_a_signature_of_a_response_is_none_of_a_request(bob: Side) -> None:
    envelope = request()
    signed_as_response = ALICE.sign(RESPONSE_DOMAIN, b"whatever")
    with refused(Reason.SIGNATURE):
        bob.receive(envelope[:-64] + signed_as_response)
    assert REQUEST_DOMAIN != RESPONSE_DOMAIN


def test_a_request_without_a_token_is_refused(bob: Side) -> None:
    with refused(Reason.TOKEN_MISSING):
        bob.receive(b"")
    with refused(Reason.TOKEN_MISSING):
        bob.receive(request(token=b""))


def test_a_response_is_no_request(bob: Side) -> None:
    with refused(Reason.MALFORMED):
        bob.receive(response())


def test_ones_own_request_thrown_back_is_refused(bob: Side) -> None:
    mine = request(key=BOB, token=BOBS_TOKEN, recipient=ALICE)
    with refused(Reason.WRONG_RECIPIENT):
        bob.receive(mine, sender=BOB)


@pytest.mark.parametrize(
    "envelope",
    [
        request() + b"\0",
        request()[:-1],
        b"\xdc\x00\x05" + request()[1:],
        b"\x95" + b"\xdd\xff\xff\xff\xff",
        b"\x95\xc6\xff\xff\xff\xff",
        b"\x91" * LIMIT_BYTES,
        bytes(LIMIT_BYTES + 1),
        request(token=bytes(TOKEN_LIMIT_BYTES + 1)),
        b"\xc0",
        request().replace(NOW.to_bytes(8, "big"), (2**64 - 1).to_bytes(8, "big")),
    ],
    ids=lambda envelope: f"{len(envelope)}-{envelope[:4].hex()}",
)
def test_other_bytes_are_a_malformed_envelope(bob: Side, envelope: bytes) -> None:
    with refused(Reason.MALFORMED):
        bob.receive(envelope)


def test_a_nonce_has_sixteen_bytes(bob: Side) -> None:
    for wrong in (b"", bytes(15), bytes(17)):
        envelope = seal_request(
            ALICE, ALICES_TOKEN, TOPIC, BOB.public_key, CONTENT, time_ms=NOW, nonce=wrong
        )
        with refused(Reason.MALFORMED):
            bob.receive(envelope)


def test_the_claimed_nonce_can_be_had_for_the_error_that_answers(bob: Side) -> None:
    assert claimed_nonce(request(key=MALLORY, number=7)) == nonce(7)
    assert claimed_nonce(b"garbage") is None
    assert claimed_nonce(b"") is None
    assert len(bob.nonces) == 0


def test_how_far_off_the_clock_is_is_said(bob: Side) -> None:
    with pytest.raises(AccessRefused, match="10 minutes ahead"):
        bob.receive(request(time_ms=NOW + 600_000))
    with pytest.raises(AccessRefused, match="10 minutes behind"):
        bob.receive(request(time_ms=NOW - 600_000))
