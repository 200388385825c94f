"""A token has one spelling, says who may take part until when, and says nothing absurd."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from auth.documents import encode
from auth.fields import LARGEST_COUNT, LARGEST_TIME_MS
from auth.keys import SIGNATURE_BYTES
from auth.refusals import AccessRefused, Reason
from auth.roles import Role, in_order, may_train
from auth.tokens import (
    DOMAIN,
    LIMIT_BYTES,
    LONGEST_LIFE_MS,
    Token,
    check_times,
    in_words,
    is_genuine,
    read_token,
    sign_token,
)
from tests.auth.core.people import (
    ALICE,
    ALICES_TOKEN,
    AUTH,
    BOBS_TOKEN,
    HOUR,
    NOW,
    OTHER_AUTH,
    RUN,
    N,
    token_of,
)
from tests.auth.core.refused import refused

TOKEN = read_token(ALICES_TOKEN)

names = some.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@+:~-]{0,99}", fullmatch=True)
runs = some.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)


@some.composite
def tokens(draw: some.DrawFn) -> Token:
    issued_ms = draw(some.integers(0, LARGEST_TIME_MS - LONGEST_LIFE_MS))
    return Token(
        run=draw(runs),
        username=draw(names),
        peer=ALICE.public_key,
        roles=in_order(draw(some.sets(some.sampled_from(Role), min_size=1))),
        serial=draw(some.integers(1, LARGEST_COUNT)),
        key_id=AUTH.key_id,
        issued_ms=issued_ms,
        expires_ms=issued_ms + draw(some.integers(1, LONGEST_LIFE_MS)),
    )


def signed(*fields: Any) -> bytes:
    """Any fields, as if the auth server itself were broken and had signed them."""
    body = encode(fields)
    return body + AUTH.sign(DOMAIN, body)


@given(tokens())
def test_a_token_is_read_as_it_was_signed(token: Token) -> None:
    data = sign_token(token, AUTH)
    assert len(data) <= LIMIT_BYTES
    assert read_token(data) == token
    assert is_genuine(data, AUTH.verifying_key)
    assert not is_genuine(data, OTHER_AUTH.verifying_key)


def test_the_bytes_are_those_of_the_documentation() -> None:
    body = ALICES_TOKEN[:-SIGNATURE_BYTES]
    assert msgspec.msgpack.decode(body) == [
        RUN,
        "github:alice",
        ALICE.public_key,
        ["volunteer"],
        1,
        AUTH.key_id,
        TOKEN.issued_ms,
        TOKEN.expires_ms,
    ]
    signature = ALICES_TOKEN[-SIGNATURE_BYTES:]
    assert AUTH.verifying_key.verify(b"potluck token 1", signature, body)


def test_roles_in_any_order_become_the_one_that_counts() -> None:
    backwards = msgspec.structs.replace(TOKEN, roles=(Role.VOLUNTEER, Role.BACKBONE))
    assert read_token(sign_token(backwards, AUTH)).roles == (Role.BACKBONE, Role.VOLUNTEER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", ""),
        ("run", "r" * 65),
        ("run", "two words"),
        ("run", "new\nline"),
        ("run", "run\n"),
        ("run", "рun"),  # the first letter is Cyrillic
        ("username", ""),
        ("username", "a" * 101),
        ("username", "alice\x00"),
        ("username", "alice\n"),
        ("username", "\x1b[31malice"),
        ("username", "ali\u200bce"),  # a space of no width
        ("username", "\u202eecila"),  # written from right to left
        ("username", "аlice"),  # the first letter is Cyrillic
        ("username", "alice bob"),
        ("username", "-rf"),
        ("username", "$(reboot)"),
        ("username", "<b>alice"),
        ("username", "../alice"),
        ("peer", bytes(31)),
        ("peer", bytes(33)),
        ("peer", bytes(32)),  # a point of small order
        ("peer", "a" * 32),
        ("roles", ()),
        ("roles", ("king",)),
        ("roles", ("volunteer", "volunteer")),
        ("roles", ("volunteer", "backbone")),
        ("roles", ("volunteer",) * 5),
        ("roles", "volunteer"),
        ("serial", 0),
        ("serial", -1),
        ("serial", LARGEST_COUNT + 1),
        ("serial", 1.0),
        ("serial", True),
        ("serial", None),
        ("key_id", bytes(7)),
        ("key_id", bytes(9)),
        ("issued_ms", -1),
        ("issued_ms", LARGEST_TIME_MS + 1),
        ("issued_ms", TOKEN.expires_ms),
        ("issued_ms", TOKEN.expires_ms + 1),
        ("expires_ms", TOKEN.issued_ms + LONGEST_LIFE_MS + 1),
        ("expires_ms", 2**64 - 1),
        ("expires_ms", float("nan")),
    ],
    ids=str,
)
def test_a_field_out_of_range_is_malformed_even_if_signed(field: str, value: Any) -> None:
    fields = msgspec.structs.asdict(TOKEN) | {"roles": ("volunteer",), field: value}
    with refused(Reason.MALFORMED):
        read_token(signed(*fields.values()))


def test_more_or_fewer_fields_are_malformed() -> None:
    fields = msgspec.structs.astuple(TOKEN)
    read_token(signed(*fields))
    with refused(Reason.MALFORMED):
        read_token(signed(*fields, 0))
    with refused(Reason.MALFORMED):
        read_token(signed(*fields[:-1]))


def respelled() -> list[Any]:
    """The same token with one thing in it spelled longer than needed, and properly signed."""
    body = ALICES_TOKEN[:-SIGNATURE_BYTES]
    name = TOKEN.username.encode()
    short_name = bytes([0xA0 | len(name)]) + name
    issued = b"\xcf" + TOKEN.issued_ms.to_bytes(8, "big")
    assert body[0] == 0x98
    assert short_name in body
    assert issued in body
    spellings = {
        "array of 16 bit length": b"\xdc\x00\x08" + body[1:],
        "array of 32 bit length": b"\xdd\x00\x00\x00\x08" + body[1:],
        "string of 8 bit length": body.replace(short_name, b"\xd9" + bytes([len(name)]) + name),
        "string of 32 bit length": body.replace(
            short_name, b"\xdb" + len(name).to_bytes(4, "big") + name
        ),
        "name as bytes": body.replace(short_name, b"\xc4" + bytes([len(name)]) + name),
        "signed integer": body.replace(issued, b"\xd3" + issued[1:]),
        "a map": b"\x88" + body[1:],
        "a second value behind": body + b"\xc0",
        "serial in two bytes": body.replace(b"\xa9volunteer\x01", b"\xa9volunteer\xcc\x01"),
        "key as an extension": body.replace(b"\xc4\x20" + TOKEN.peer, b"\xc7\x20\x01" + TOKEN.peer),
    }
    for name_of, spelling in spellings.items():
        assert spelling != body, name_of
    return [pytest.param(spelling, id=name_of) for name_of, spelling in spellings.items()]


@pytest.mark.parametrize("body", respelled())
def test_no_other_spelling_of_a_token_is_taken(body: bytes) -> None:
    with refused(Reason.MALFORMED):
        read_token(body + AUTH.sign(DOMAIN, body))


@given(some.binary(max_size=600))
def test_any_other_bytes_are_malformed(data: bytes) -> None:
    with refused(Reason.MALFORMED):
        read_token(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(64),
        b"\xdd\xff\xff\xff\xff" + bytes(64),
        b"\x98\xdb\xff\xff\xff\xff" + bytes(64),
        b"\x98\xa1r\xa1u\xc4\x20" + bytes(32) + b"\xdd\xff\xff\xff\xff" + bytes(64),
        b"\x91" * 400 + bytes(64),
        bytes(LIMIT_BYTES + 1),
        bytes(10_000_000),
    ],
    ids=lambda data: f"{len(data)}-{data[:2].hex()}",
)
def test_a_token_that_declares_a_huge_size_is_refused_before_memory_is_taken(data: bytes) -> None:
    with refused(Reason.MALFORMED):
        read_token(data)


def test_a_token_that_nobody_would_take_is_not_signed() -> None:
    for wrong in (
        {"username": "two words"},
        {"expires_ms": TOKEN.issued_ms},
        {"expires_ms": TOKEN.issued_ms + LONGEST_LIFE_MS + 1},
        {"serial": 0},
        {"key_id": OTHER_AUTH.key_id},
        {"roles": ()},
        {"peer": bytes(32)},
    ):
        with pytest.raises(ValueError, match=r"."):
            sign_token(msgspec.structs.replace(TOKEN, **wrong), AUTH)


def test_a_token_counts_from_its_issue_until_just_before_its_expiry() -> None:
    check_times(TOKEN, TOKEN.issued_ms)
    check_times(TOKEN, TOKEN.expires_ms - 1)
    with refused(Reason.TOKEN_EXPIRED):
        check_times(TOKEN, TOKEN.expires_ms)


def test_grace_makes_it_live_just_so_much_longer() -> None:
    check_times(TOKEN, TOKEN.expires_ms + HOUR - 1, grace_ms=HOUR)
    with refused(Reason.TOKEN_EXPIRED):
        check_times(TOKEN, TOKEN.expires_ms + HOUR, grace_ms=HOUR)


def test_a_token_from_the_future_counts_as_far_as_clocks_may_differ() -> None:
    check_times(TOKEN, TOKEN.issued_ms - N)
    with refused(Reason.TOKEN_NOT_YET_VALID):
        check_times(TOKEN, TOKEN.issued_ms - N - 1)


def test_the_refusal_says_since_when_it_is_expired() -> None:
    with pytest.raises(AccessRefused, match="expired 3 hours ago"):
        check_times(TOKEN, TOKEN.expires_ms + 3 * HOUR)


def test_the_signature_of_one_token_is_not_that_of_another() -> None:
    swapped = ALICES_TOKEN[:-SIGNATURE_BYTES] + BOBS_TOKEN[-SIGNATURE_BYTES:]
    assert not is_genuine(swapped, AUTH.verifying_key)


def test_an_hour_of_life_is_what_the_helpers_of_these_tests_give() -> None:
    assert TOKEN.expires_ms - TOKEN.issued_ms == HOUR
    assert NOW - TOKEN.issued_ms == 60_000
    assert token_of(ALICE) == ALICES_TOKEN


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (0, "0.0 seconds"),
        (1500, "1.5 seconds"),
        (119_000, "119.0 seconds"),
        (120_000, "2 minutes"),
        (600_000, "10 minutes"),
        (7_200_000, "2 hours"),
        (48 * HOUR, "2 days"),
    ],
)
def test_times_are_said_in_the_unit_that_fits(milliseconds: int, words: str) -> None:
    assert in_words(milliseconds) == words


def test_a_monitor_does_not_train_and_the_others_may() -> None:
    assert not may_train([Role.MONITOR])
    assert not may_train([Role.MODERATOR, Role.MONITOR])
    assert may_train([Role.VOLUNTEER])
    assert may_train([Role.BACKBONE, Role.MONITOR])
