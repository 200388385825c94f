"""An invite survives being copied, and is not an invite any more when a character is wrong."""

from __future__ import annotations

import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from auth.errors import MalformedDocument
from auth.invites import SCHEME, Invite, read_invite, write_invite
from auth.keys import fingerprint, peer_id_of
from tests.auth.core.people import ALICE, AUTH, RUN

INVITE = Invite(
    run=RUN,
    bootstrap=(f"/dns4/node.example.org/tcp/4001/p2p/{peer_id_of(ALICE.public_key)}",),
    auth_url="https://auth.example.org",
    fingerprint=fingerprint(AUTH.public_key),
    code="orange-apple-pear",
)
TEXT = write_invite(INVITE)
ALPHABET = string.ascii_letters + string.digits + "-_"

addresses = some.lists(
    some.text(some.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=256),
    max_size=16,
).map(tuple)


@given(
    addresses,
    some.text("abcdefgh-0123456789", max_size=64),
    some.sampled_from([b"", bytes(range(32))]),
)
def test_an_invite_is_read_as_it_was_written(
    bootstrap: tuple[str, ...], code: str, pin: bytes
) -> None:
    invite = Invite(RUN, bootstrap, "https://auth.example.org", INVITE.fingerprint, code, pin)
    assert read_invite(write_invite(invite)) == invite


def test_an_invite_is_short_enough_to_be_sent_anywhere() -> None:
    assert TEXT.startswith("potluck:")
    assert len(TEXT) < 300
    assert TEXT[len(SCHEME) :].replace("-", "").replace("_", "").isalnum()


def test_an_invite_may_come_as_a_file() -> None:
    lines = [TEXT[i : i + 60] for i in range(0, len(TEXT), 60)]
    file = (
        "# An invite to sahajbert.\r\n# Keep it to yourself.\r\n\r\n" + "\r\n  ".join(lines) + "\n"
    )
    assert read_invite(file) == INVITE


@given(some.integers(0, len(TEXT) - 1), some.characters(codec="utf-8"))
def test_a_wrong_character_is_noticed(place: int, character: str) -> None:
    changed = TEXT[:place] + character + TEXT[place + 1 :]
    if changed.split() == [TEXT]:
        return
    with pytest.raises(MalformedDocument, match="not an invite"):
        read_invite(changed)


@pytest.mark.parametrize("code", ["", "a", "ab"])
def test_the_last_character_has_one_spelling(code: str) -> None:
    # depending on the length, two or four bits of it mean nothing, and must be zero
    text = write_invite(msgspec.structs.replace(INVITE, code=code))
    others = [text[:-1] + last for last in ALPHABET if text[:-1] + last != text]
    for other in others:
        with pytest.raises(MalformedDocument):
            read_invite(other)


@given(some.integers(0, len(TEXT) - 1))
def test_a_cut_off_invite_is_noticed(length: int) -> None:
    with pytest.raises(MalformedDocument):
        read_invite(TEXT[:length])


@given(some.text(max_size=200))
def test_any_other_text_is_no_invite(text: str) -> None:
    for candidate in (text, SCHEME + text):
        with pytest.raises(MalformedDocument):
            read_invite(candidate)


def test_a_huge_text_is_not_looked_through() -> None:
    with pytest.raises(MalformedDocument, match="far too long"):
        read_invite(SCHEME + "A" * 10_000_000)


@pytest.mark.parametrize(
    "wrong",
    [
        Invite("two words", (), "https://x.org", INVITE.fingerprint),
        Invite(RUN, ("two words",), "https://x.org", INVITE.fingerprint),
        Invite(RUN, ("/ip4/192.0.2.1/tcp/1",) * 17, "https://x.org", INVITE.fingerprint),
        Invite(RUN, (), "ftp://example.org", INVITE.fingerprint),
        Invite(RUN, (), "https://x.org", ""),
        Invite(RUN, (), "https://x.org", INVITE.fingerprint[:-1]),
        Invite(RUN, (), "https://x.org", "!" * 26),
        Invite(RUN, (), "https://x.org", INVITE.fingerprint, "two words"),
        Invite(RUN, (), "https://x.org", INVITE.fingerprint, "", bytes(31)),
    ],
    ids=lambda invite: f"{invite.run}-{invite.auth_url}",
)
def test_an_unreadable_invite_is_not_written(wrong: Invite) -> None:
    with pytest.raises(ValueError, match=r"."):
        write_invite(wrong)


def test_the_code_is_not_shown_in_logs() -> None:
    assert "orange" not in repr(INVITE)
