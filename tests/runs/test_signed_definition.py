"""A definition counts if its organiser signed exactly it, for this run, and not too long ago."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from auth.keys import SigningKey, fingerprint
from node.net.version import VERSION
from node.run.definition import NewerPotluckNeeded, WrongDefinition
from node.run.mistakes import LARGEST_TEXT_BYTES
from node.run.signed import LIMIT_BYTES, read_signed, sign_definition
from protocols.runs.messages import NotTheDefinition, UnusableDefinition
from tests.runs.definitions import (
    FINGERPRINT,
    MALLORY,
    NAME,
    NOW_MS,
    ORGANISER,
    TEXT,
    changed,
)

DATA = sign_definition(TEXT, ORGANISER, now_ms=NOW_MS)


def read(data: bytes, run: str | None = NAME, not_before_ms: int = 0) -> bytes:
    return read_signed(data, run=run, organiser=FINGERPRINT, not_before_ms=not_before_ms).text


def test_the_signed_text_is_read_back_to_the_byte() -> None:
    signed = read_signed(DATA, run=NAME, organiser=FINGERPRINT)
    assert (signed.text, signed.data, signed.signed_ms) == (TEXT, DATA, NOW_MS)
    assert signed.definition.name == NAME


def test_the_largest_text_can_be_signed() -> None:
    text = TEXT + b"#" * (LARGEST_TEXT_BYTES - len(TEXT))
    data = sign_definition(text, ORGANISER, now_ms=NOW_MS)
    assert len(data) <= LIMIT_BYTES
    assert read(data) == text


REFUSED = {
    "another's": (sign_definition(TEXT, MALLORY, now_ms=NOW_MS), "signed by somebody else"),
    "cut": (DATA[:-1], "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "garbage": (b"\xc1" * 300, "cannot be read"),
    "too large": (bytes(LIMIT_BYTES + 1), "cannot be read"),
    "another run's": (
        sign_definition(changed('"poem"', '"prose"'), ORGANISER, now_ms=NOW_MS),
        "defines prose, but poem was asked for",
    ),
}


@pytest.mark.parametrize(("data", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_an_invalid_definition_is_refused_by_name(data: bytes, told: str) -> None:
    with pytest.raises(NotTheDefinition, match=told) as caught:
        read(data)
    assert caught.value.exit_code == 3


@given(some.integers(0, len(DATA) - 1), some.integers(1, 255))
def test_no_byte_can_be_changed(place: int, difference: int) -> None:
    data = bytearray(DATA)
    data[place] ^= difference
    with pytest.raises(NotTheDefinition):
        read(bytes(data))


def test_an_older_one_than_was_seen_is_refused() -> None:
    with pytest.raises(NotTheDefinition, match="older than an earlier one"):
        read(DATA, not_before_ms=NOW_MS + 1)
    assert read(DATA, not_before_ms=NOW_MS) == TEXT


def test_the_next_one_is_later_whatever_the_clock_says() -> None:
    data = sign_definition(TEXT, ORGANISER, now_ms=NOW_MS - 1000, after_ms=NOW_MS)
    assert read(data, not_before_ms=NOW_MS + 1) == TEXT


def test_an_impossible_definition_is_not_signed() -> None:
    with pytest.raises(WrongDefinition):
        sign_definition(changed("batch = 64", "batch = 0"), ORGANISER, now_ms=NOW_MS)


def signed_by_hand(text: bytes, key: SigningKey = ORGANISER, version: str = VERSION) -> bytes:
    """Without a look at the text: as another potluck does it, or a hostile organiser."""
    from node.run.signed import _DEFINITIONS, _Document

    return _DEFINITIONS.sign(_Document(text, key.public_key, NOW_MS, version), key)


LATER = TEXT + b'[limits]\nleast_version = "99.0"'


def test_a_genuine_one_from_a_later_potluck_says_so() -> None:
    with pytest.raises(NewerPotluckNeeded, match=r"99\.0") as caught:
        read(signed_by_hand(LATER))
    assert caught.value.exit_code == 3
    assert caught.value.signed_ms == NOW_MS


def test_a_definition_for_a_later_potluck_names_the_needed_version() -> None:
    new_key = changed("batch = 64", "batch = 64\nsparkle = 2")
    with pytest.raises(NewerPotluckNeeded, match=r"signed with potluck 99\.1") as caught:
        read(signed_by_hand(new_key, version="99.1"))
    assert "There is no key 'sparkle' below [training]" in caught.value.why
    assert "Update potluck" in caught.value.advice


def test_a_genuine_one_with_a_mistake_says_whose_it_is_to_mend() -> None:
    with pytest.raises(UnusableDefinition, match="batch below") as caught:
        read(signed_by_hand(changed("batch = 64", "batch = 0")))
    assert "Only the run's organiser can correct that" in caught.value.advice
    assert "run.toml" not in str(caught.value)
    assert (caught.value.exit_code, caught.value.signed_ms) == (3, NOW_MS)


def test_another_run_of_the_same_organiser_is_refused_whatever_it_needs() -> None:
    with pytest.raises(NotTheDefinition, match="defines prose"):
        read(signed_by_hand(LATER.replace(b'"poem"', b'"prose"')))


def test_the_text_of_a_forger_is_not_even_parsed() -> None:
    with pytest.raises(NotTheDefinition, match=fingerprint(MALLORY.public_key)):
        read(signed_by_hand(LATER, MALLORY))
