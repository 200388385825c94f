"""A peer proves its key to the server it means, once, for one purpose, in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from auth.challenges import (
    LOGIN,
    RENEW,
    UsedChallenges,
    check_challenge,
    check_proof,
    make_challenge,
    prove,
)
from auth.keys import fingerprint
from auth.refusals import Reason
from tests.auth.core.people import ALICE, AUTH, BOB, MALLORY, NEXT_AUTH, NOW, OTHER_AUTH, RUN
from tests.auth.core.refused import refused

SECRET = b"the server's secret".ljust(32)
EXPIRES = NOW + 60_000
CHALLENGE = make_challenge(SECRET, ALICE.public_key, bytes(16), EXPIRES)
OURS = (fingerprint(NEXT_AUTH.public_key), fingerprint(AUTH.public_key))
PINNED = fingerprint(AUTH.public_key)


def test_a_challenge_holds_for_its_peer_until_just_before_it_expires() -> None:
    assert check_challenge(SECRET, ALICE.public_key, CHALLENGE, NOW) == EXPIRES
    check_challenge(SECRET, ALICE.public_key, CHALLENGE, EXPIRES - 1)
    with refused(Reason.CHALLENGE):
        check_challenge(SECRET, ALICE.public_key, CHALLENGE, EXPIRES)
    with refused(Reason.CHALLENGE):
        check_challenge(SECRET, BOB.public_key, CHALLENGE, NOW)
    with refused(Reason.CHALLENGE):
        check_challenge(SECRET[::-1], ALICE.public_key, CHALLENGE, NOW)


@given(some.integers(0, len(CHALLENGE) * 8 - 1))
def test_no_bit_of_a_challenge_can_be_changed(bit: int) -> None:
    changed = bytearray(CHALLENGE)
    changed[bit // 8] ^= 1 << bit % 8
    with refused(Reason.CHALLENGE):
        check_challenge(SECRET, ALICE.public_key, bytes(changed), NOW)


@given(some.binary(max_size=100))
def test_other_bytes_are_not_a_challenge(data: bytes) -> None:
    with refused(Reason.CHALLENGE):
        check_challenge(SECRET, ALICE.public_key, data, NOW)


def test_a_challenge_needs_16_random_bytes_and_a_secret_of_32() -> None:
    with pytest.raises(ValueError, match="16 random bytes"):
        make_challenge(SECRET, ALICE.public_key, bytes(15), EXPIRES)
    with pytest.raises(ValueError, match="32 bytes"):
        make_challenge(b"short", ALICE.public_key, bytes(16), EXPIRES)


def test_a_proof_counts_for_any_key_that_an_invite_of_ours_may_pin() -> None:
    for pinned in OURS:
        proof = prove(ALICE, CHALLENGE, RUN, pinned, LOGIN)
        check_proof(ALICE.verifying_key, proof, CHALLENGE, RUN, OURS, LOGIN)


def test_a_proof_counts_for_nothing_else() -> None:
    proof = prove(ALICE, CHALLENGE, RUN, PINNED, LOGIN)
    other = make_challenge(SECRET, ALICE.public_key, bytes(15) + b"\1", EXPIRES)
    with refused(Reason.SIGNATURE):
        check_proof(ALICE.verifying_key, proof, other, RUN, OURS, LOGIN)
    with refused(Reason.SIGNATURE):
        check_proof(ALICE.verifying_key, proof, CHALLENGE, "another", OURS, LOGIN)
    with refused(Reason.SIGNATURE):
        check_proof(ALICE.verifying_key, proof, CHALLENGE, RUN, OURS, RENEW)
    with refused(Reason.SIGNATURE):
        check_proof(ALICE.verifying_key, proof, CHALLENGE, RUN, (), LOGIN)
    with refused(Reason.SIGNATURE):
        check_proof(MALLORY.verifying_key, proof, CHALLENGE, RUN, OURS, LOGIN)
    with refused(Reason.SIGNATURE):
        check_proof(ALICE.verifying_key, b"", CHALLENGE, RUN, OURS, LOGIN)


def test_a_rogue_server_cannot_pass_a_challenge_on() -> None:
    # it fetched Alice's challenge from us, and she answers what she believes to be its own
    proof = prove(ALICE, CHALLENGE, RUN, fingerprint(OTHER_AUTH.public_key), LOGIN)
    with refused(Reason.SIGNATURE):
        check_proof(ALICE.verifying_key, proof, CHALLENGE, RUN, OURS, LOGIN)


def test_a_challenge_is_answered_once() -> None:
    used = UsedChallenges()
    used.use(CHALLENGE, EXPIRES, NOW)
    with refused(Reason.CHALLENGE):
        used.use(CHALLENGE, EXPIRES, NOW)


def test_expired_challenges_are_forgotten_and_memory_is_bounded() -> None:
    used = UsedChallenges(most=3)
    for number in range(10):
        used.use(bytes([number]), EXPIRES + number, NOW)
    assert len(used) == 3
    used.use(b"later", EXPIRES + 100, EXPIRES + 9)
    assert len(used) == 1
