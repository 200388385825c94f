"""A pass counts when the pinned key reaches its signature, it is ours, and it is fresh."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from auth.errors import MalformedDocument, UntrustedDocument
from auth.keyring import endorse
from auth.keys import SigningKey, fingerprint
from auth.passes import DOMAIN, LIMIT_BYTES, AccessPass, OpenedPass, open_pass, sign_pass
from tests.auth.core.people import (
    ALICE,
    ALICES_TOKEN,
    AUTH,
    BOBS_TOKEN,
    HOUR,
    NEXT_AUTH,
    NOW,
    OTHER_AUTH,
    RUN,
    YEAR,
    keyring_of,
    root_record,
    token_of,
)

PINNED = fingerprint(AUTH.public_key)
SECOND = endorse(RUN, NEXT_AUTH.public_key, NOW - HOUR, NOW + YEAR, AUTH)
PASS = AccessPass(
    run=RUN,
    token=ALICES_TOKEN,
    endpoints=("/ip4/192.0.2.1/tcp/4001",),
    keys=(root_record(),),
    server_time_ms=NOW,
    challenge=b"the challenge",
    next_challenge=b"the next one",
    auth_url="https://auth.example.org",
    token_grace_ms=600_000,
    key_id=AUTH.key_id,
)


def signed(by: SigningKey = AUTH, **changes: Any) -> bytes:
    return sign_pass(msgspec.structs.replace(PASS, key_id=by.key_id, **changes), by)


def opened(data: bytes, *, challenge: bytes | None = PASS.challenge, **given: Any) -> OpenedPass:
    return open_pass(
        data, run=RUN, fingerprint=PINNED, peer=ALICE.public_key, challenge=challenge, **given
    )


def test_a_pass_that_is_as_it_should_be_counts() -> None:
    result = opened(signed())
    assert result.access_pass == PASS
    assert result.token.username == "github:alice"
    assert result.keyring.find(AUTH.key_id) is not None


def test_a_pass_of_the_next_key_counts_for_an_old_invite() -> None:
    data = signed(NEXT_AUTH, token=token_of(ALICE, by=NEXT_AUTH), keys=(root_record(), SECOND))
    assert opened(data).keyring.find(NEXT_AUTH.key_id) is not None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (signed(OTHER_AUTH), "vouches for has signed"),
        (signed(NEXT_AUTH), "vouches for has signed"),
        (signed(keys=(endorse(RUN, OTHER_AUTH.public_key, 0, 1, OTHER_AUTH),)), "fingerprint"),
        (signed(run="another"), "for the run another"),
        (signed(challenge=b"an older one"), "an older one"),
        (signed(token=BOBS_TOKEN), "not for this node"),
        (signed(token=token_of(ALICE, run="another")), "not for this node"),
        (signed(token=token_of(ALICE, by=OTHER_AUTH)), "token in it is not signed"),
        (signed(token=ALICES_TOKEN[:-64] + bytes(64)), "token in it is not signed"),
        (signed(token=b"garbage"), "not a signed token"),
        (signed(server_time_ms=NOW + 2 * YEAR), "vouches for has signed"),
        (signed()[:-1] + b"\0", "vouches for has signed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pass_with_something_wrong_in_it_does_not_count(data: bytes, why: str) -> None:
    with pytest.raises(UntrustedDocument, match=why):
        opened(data)


def test_a_pass_from_ones_own_disk_need_not_be_fresh() -> None:
    opened(signed(challenge=b"an older one"), challenge=None)


def test_at_a_renewal_withdrawn_keys_stay_withdrawn() -> None:
    known = keyring_of(root_record(), SECOND)
    known.withdraw([AUTH.key_id], by=NEXT_AUTH.key_id)
    thiefs = signed()
    opened(thiefs)  # somebody who has nothing but the old invite cannot know
    with pytest.raises(UntrustedDocument):
        opened(thiefs, keyring=known)
    renewed = signed(NEXT_AUTH, token=token_of(ALICE, by=NEXT_AUTH), keys=(root_record(), SECOND))
    assert opened(renewed, keyring=known).keyring is known


def test_at_a_renewal_newer_keys_are_taken_in() -> None:
    known = keyring_of()
    renewed = signed(NEXT_AUTH, token=token_of(ALICE, by=NEXT_AUTH), keys=(root_record(), SECOND))
    opened(renewed, keyring=known)
    assert known.find(NEXT_AUTH.key_id) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoints": ("/ip4/192.0.2.1/tcp/4001",) * 17},
        {"endpoints": ("x" * 257,)},
        {"endpoints": ("two words",)},
        {"endpoints": ("",)},
        {"keys": (root_record(),) * 33},
        {"token": b""},
        {"token": bytes(513)},
        {"challenge": bytes(129)},
        {"auth_url": "ftp://example.org"},
        {"auth_url": "https://a b"},
        {"token_grace_ms": -1},
        {"token_grace_ms": 8 * 24 * HOUR},
    ],
    ids=str,
)
def test_a_pass_that_nobody_would_accept_is_not_signed(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        signed(**changes)


def test_the_largest_pass_fits_the_body_of_an_answer() -> None:
    endpoints = tuple("/ip4/192.0.2.1/tcp/4001".ljust(256, "x") for _ in range(16))
    data = signed(endpoints=endpoints, keys=(root_record(),) * 32, challenge=bytes(128))
    assert len(data) < LIMIT_BYTES
    assert LIMIT_BYTES * 4 // 3 <= 16 << 10


@given(some.binary(max_size=300))
def test_any_other_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedDocument):
        opened(data)


def test_a_token_is_no_pass() -> None:
    assert DOMAIN != b"potluck token 1"
    with pytest.raises(MalformedDocument):
        opened(ALICES_TOKEN)
