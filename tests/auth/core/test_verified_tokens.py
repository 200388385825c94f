"""A verified token costs no second signature, and is looked at again in every other respect."""

from __future__ import annotations

import pytest

from auth.keyring import endorse
from auth.keys import VerifyingKey
from auth.refusals import Reason
from auth.revocations import (
    Entry,
    NameEntry,
    PeerEntry,
    RevocationList,
    Revocations,
    SerialEntry,
    sign_list,
)
from auth.tokens import DEFAULT_LIFE_MS, read_token
from auth.verified_tokens import VerifiedTokens
from tests.auth.core.people import (
    ALICE,
    ALICES_TOKEN,
    AUTH,
    BOB,
    HOUR,
    MALLORY,
    NEXT_AUTH,
    NOW,
    RUN,
    YEAR,
    N,
    keyring_of,
    root_record,
    token_of,
    tokens_known_to_nobody,
)
from tests.auth.core.refused import refused


@pytest.fixture
def tokens() -> VerifiedTokens:
    return tokens_known_to_nobody()


def revoke(tokens: VerifiedTokens, *entries: Entry, withdrawn: tuple[bytes, ...] = ()) -> None:
    number = tokens.revocations.number + 1
    signed = sign_list(RevocationList(RUN, number, NOW, entries, withdrawn, AUTH.key_id), AUTH)
    assert tokens.revocations.accept(signed, tokens.keyring)


def count_verifications(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    verified: list[bytes] = []
    verify = VerifyingKey.verify

    def counted(self: VerifyingKey, domain: bytes, signature: bytes, message: bytes) -> bool:
        verified.append(domain)
        return verify(self, domain, signature, message)

    monkeypatch.setattr(VerifyingKey, "verify", counted)
    return verified


def test_a_signature_is_looked_at_once(
    tokens: VerifiedTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = count_verifications(monkeypatch)
    first = tokens.verify(ALICES_TOKEN, NOW)
    assert tokens.verify(ALICES_TOKEN, NOW + 1) is first
    assert verified == [b"potluck token 1"]


def test_a_stranger_costs_no_signature_at_all(
    tokens: VerifiedTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = count_verifications(monkeypatch)
    with refused(Reason.NOT_THE_PEER):
        tokens.verify(ALICES_TOKEN, NOW, shown_by=MALLORY.public_key)
    with refused(Reason.TOKEN_EXPIRED):
        tokens.verify(ALICES_TOKEN, NOW + YEAR)
    with refused(Reason.MALFORMED):
        tokens.verify(bytes(100), NOW)
    assert verified == []


def test_a_forged_token_is_not_remembered(tokens: VerifiedTokens) -> None:
    forged = ALICES_TOKEN[:-1] + bytes([ALICES_TOKEN[-1] ^ 1])
    for _ in range(2):
        with refused(Reason.TOKEN_SIGNATURE):
            tokens.verify(forged, NOW)
    assert len(tokens) == 0


def test_a_remembered_token_expires(tokens: VerifiedTokens) -> None:
    tokens.verify(ALICES_TOKEN, NOW)
    expires_ms = read_token(ALICES_TOKEN).expires_ms
    tokens.verify(ALICES_TOKEN, expires_ms - 1)
    with refused(Reason.TOKEN_EXPIRED):
        tokens.verify(ALICES_TOKEN, expires_ms)
    tokens.grace_ms = HOUR
    tokens.verify(ALICES_TOKEN, expires_ms + HOUR - 1)
    with refused(Reason.TOKEN_EXPIRED):
        tokens.verify(ALICES_TOKEN, expires_ms + HOUR)


def test_a_remembered_token_is_from_the_future_when_the_clock_is_set_back(
    tokens: VerifiedTokens,
) -> None:
    tokens.verify(ALICES_TOKEN, NOW)
    issued_ms = read_token(ALICES_TOKEN).issued_ms
    tokens.verify(ALICES_TOKEN, issued_ms - N)
    with refused(Reason.TOKEN_NOT_YET_VALID):
        tokens.verify(ALICES_TOKEN, issued_ms - N - 1)


def test_a_remembered_token_is_still_only_its_peers(tokens: VerifiedTokens) -> None:
    tokens.verify(ALICES_TOKEN, NOW, shown_by=ALICE.public_key)
    with refused(Reason.NOT_THE_PEER):
        tokens.verify(ALICES_TOKEN, NOW, shown_by=MALLORY.public_key)


@pytest.mark.parametrize(
    "entry",
    [
        NameEntry("github:alice", NOW, NOW + HOUR),
        PeerEntry(ALICE.public_key, NOW, NOW + HOUR),
        SerialEntry(1, NOW, NOW + HOUR),
    ],
    ids=["name", "peer", "serial"],
)
def test_a_remembered_token_is_refused_once_it_is_revoked(
    tokens: VerifiedTokens, entry: Entry
) -> None:
    tokens.verify(ALICES_TOKEN, NOW)
    revoke(tokens, entry)
    with refused(Reason.REVOKED):
        tokens.verify(ALICES_TOKEN, NOW)
    with refused(Reason.REVOKED):
        tokens_with(tokens.revocations).verify(ALICES_TOKEN, NOW)
    tokens.verify(token_of(BOB, serial=2), NOW)


def tokens_with(revocations: Revocations) -> VerifiedTokens:
    return VerifiedTokens(RUN, keyring_of(), revocations)


def test_a_token_for_another_run_is_refused() -> None:
    # the same auth server, the same key, two runs
    tokens = VerifiedTokens(RUN, keyring_of(), Revocations(RUN))
    with refused(Reason.WRONG_RUN):
        tokens.verify(token_of(ALICE, run="another"), NOW)


def test_a_remembered_token_falls_with_its_auth_key() -> None:
    record = endorse(RUN, NEXT_AUTH.public_key, NOW - HOUR, NOW + YEAR, AUTH)
    tokens = VerifiedTokens(RUN, keyring_of(root_record(), record), Revocations(RUN))
    old, new = token_of(ALICE), token_of(ALICE, by=NEXT_AUTH)
    tokens.verify(old, NOW)
    tokens.verify(new, NOW)
    signed = sign_list(RevocationList(RUN, 1, NOW, (), (AUTH.key_id,), NEXT_AUTH.key_id), NEXT_AUTH)
    assert tokens.revocations.accept(signed, tokens.keyring)
    with refused(Reason.UNKNOWN_AUTH_KEY):
        tokens.verify(old, NOW)
    assert len(tokens) == 1
    tokens.verify(new, NOW)


def test_an_exchanged_keyring_counts_at_once(tokens: VerifiedTokens) -> None:
    new = token_of(ALICE, by=NEXT_AUTH)
    with refused(Reason.UNKNOWN_AUTH_KEY):
        tokens.verify(new, NOW)
    tokens.keyring = keyring_of(
        root_record(), endorse(RUN, NEXT_AUTH.public_key, NOW - HOUR, NOW + YEAR, AUTH)
    )
    tokens.verify(new, NOW)


def test_a_key_signs_tokens_only_in_its_time() -> None:
    record = endorse(RUN, NEXT_AUTH.public_key, NOW - HOUR, NOW, AUTH)
    tokens = VerifiedTokens(RUN, keyring_of(root_record(), record), Revocations(RUN))

    def issued(at_ms: int) -> bytes:
        return token_of(ALICE, by=NEXT_AUTH, issued_ms=at_ms, life_ms=2 * DEFAULT_LIFE_MS)

    tokens.verify(issued(NOW - HOUR - N), NOW)
    with refused(Reason.UNKNOWN_AUTH_KEY):
        tokens.verify(issued(NOW - HOUR - N - 1), NOW)
    tokens.verify(issued(NOW), NOW + HOUR)
    with refused(Reason.UNKNOWN_AUTH_KEY):
        tokens.verify(issued(NOW + 1), NOW + HOUR)


def test_only_so_many_are_remembered_and_the_longest_unused_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = VerifiedTokens(RUN, keyring_of(), Revocations(RUN), capacity=2)
    first, second, third = (token_of(ALICE, serial=number) for number in (1, 2, 3))
    tokens.verify(first, NOW)
    tokens.verify(second, NOW)
    tokens.verify(first, NOW)
    tokens.verify(third, NOW)
    assert len(tokens) == 2
    verified = count_verifications(monkeypatch)
    tokens.verify(first, NOW)
    tokens.verify(third, NOW)
    assert verified == []
    tokens.verify(second, NOW)
    assert len(verified) == 1


def test_no_token_and_too_long_a_token_are_told_apart(tokens: VerifiedTokens) -> None:
    with refused(Reason.TOKEN_MISSING):
        tokens.verify(b"", NOW)
    with refused(Reason.MALFORMED):
        tokens.verify(ALICES_TOKEN + bytes(1000), NOW)
