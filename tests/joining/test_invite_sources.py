"""Which invite is meant: typed, in a file, in the environment, or that of last time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from auth.invites import Invite
from node.core.disk_trouble import HomeUnusable
from node.core.named_text import text_named
from node.core.places import Places, find_places
from node.core.wrong_use import WrongUse
from node.run.invite import InviteExpired, NotAnInvite, RunInvite, write_invite
from node.training.join.admission import (
    INVITE_VARIABLE,
    check_still_good,
    keep_invite,
    other_run_before,
    read_invited,
    shows_a_code,
)
from protocols.identity import Identity
from tests.runs.definitions import FINGERPRINT

PEER = Identity.generate().peer_id
INVITE = RunInvite(
    run="poem",
    bootstrap=(f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}",),
    organiser=FINGERPRINT,
    expires_ms=2_000_000_000_000,
    access=Invite("poem", (), "https://auth.example", FINGERPRINT, code="secret-code"),
)
TEXT = write_invite(INVITE)


def places_in(home: Path) -> Places:
    return find_places({}, home=str(home))


def test_it_may_be_typed_or_in_a_file_or_in_the_environment(tmp_path: Path) -> None:
    places, file = places_in(tmp_path), tmp_path / "invite"
    file.write_text(f"# for alice\n{TEXT[:80]}\n  {TEXT[80:]}\n")
    assert read_invited(places, TEXT, None, {}) == INVITE
    assert read_invited(places, None, str(file), {}) == INVITE
    assert read_invited(places, str(file), None, {}) == INVITE
    assert read_invited(places, None, None, {INVITE_VARIABLE: TEXT}) == INVITE


def test_the_next_time_none_is_needed_and_what_is_kept_has_no_code(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    with pytest.raises(WrongUse, match="no invite to join with"):
        read_invited(places, None, None, {})
    keep_invite(places, INVITE)
    kept = read_invited(places, None, None, {})
    assert (kept.run, kept.bootstrap, kept.organiser) == ("poem", INVITE.bootstrap, FINGERPRINT)
    assert kept.access is not None
    assert kept.access.code == ""
    assert kept.expires_ms == 0
    for file in tmp_path.iterdir():
        assert b"secret-code" not in file.read_bytes()
        assert file.stat().st_mode & 0o077 == 0


def test_text_that_is_no_invite_is_named(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    with pytest.raises(NotAnInvite, match="cut short"):
        read_invited(places, TEXT[: len(TEXT) // 2], None, {})
    with pytest.raises(NotAnInvite, match="names no run to join"):
        read_invited(places, "potluck:abc", None, {})
    with pytest.raises(WrongUse, match="two invites"):
        read_invited(places, TEXT, "file", {})
    for text in ("", "  \n"):
        with pytest.raises(WrongUse, match="no invite in INVITE: it is empty"):
            read_invited(places, text, None, {})
    with pytest.raises(WrongUse, match="it is empty"):
        read_invited(places, None, None, {INVITE_VARIABLE: " "})


@pytest.mark.parametrize("name", ["", "  \n"])
def test_an_empty_name_is_no_folder(name: str) -> None:
    """A variable of the shell that is not set. It would be read as the folder that we are in."""
    with pytest.raises(WrongUse, match="The invite is empty"):
        text_named(name, "invite", limit=10, advice="")


def test_a_file_that_can_be_no_invite_is_said_by_name(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    for file in (str(tmp_path / "missing"), str(tmp_path), "~nobody-here/invite"):
        with pytest.raises(WrongUse, match="The invite cannot be read from"):
            read_invited(places, file, None, {})
    large, binary = tmp_path / "large", tmp_path / "binary"
    with large.open("wb") as opened:
        opened.truncate(10 << 30)  # of which no more is read than a file with an invite has
    with pytest.raises(WrongUse, match="too long for a file with an invite"):
        read_invited(places, None, str(large), {})
    binary.write_bytes(bytes(range(256)))
    with pytest.raises(NotAnInvite, match="does not begin with potluck-run:"):
        read_invited(places, None, str(binary), {})


def test_a_member_may_type_the_same_invite_after_it_has_expired(tmp_path: Path) -> None:
    places, later = places_in(tmp_path), INVITE.expires_ms + 1
    with pytest.raises(InviteExpired):
        check_still_good(places, INVITE, later)
    keep_invite(places, INVITE)
    check_still_good(places, INVITE, later)
    others = msgspec.structs.replace(INVITE, organiser="a" * len(FINGERPRINT))
    with pytest.raises(InviteExpired):
        check_still_good(places, others, later)


def test_a_code_on_the_command_line_is_in_everybodys_sight(tmp_path: Path) -> None:
    assert shows_a_code(TEXT, INVITE)
    assert not shows_a_code(str(tmp_path / "alice.invite"), INVITE)
    assert not shows_a_code(None, INVITE)
    assert not shows_a_code(TEXT, msgspec.structs.replace(INVITE, access=None))


def test_a_home_that_was_in_another_run_says_so(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    assert other_run_before(places, INVITE) == ""
    keep_invite(places, INVITE)
    assert other_run_before(places, INVITE) == ""
    assert other_run_before(places, msgspec.structs.replace(INVITE, run="prose")) == "poem"
    others = msgspec.structs.replace(INVITE, organiser="a" * len(FINGERPRINT))
    assert other_run_before(places, others) == "poem of another organiser"


def test_a_damaged_invite_of_last_time_is_told_as_that(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    keep_invite(places, INVITE)
    file = tmp_path / "run.invite"
    file.write_text(file.read_text()[:50])
    with pytest.raises(NotAnInvite, match=r"last invite, in .*run\.invite, cannot be used"):
        read_invited(places, None, None, {})
    assert read_invited(places, TEXT, None, {}) == INVITE


def test_a_home_that_cannot_be_written_to_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeUnusable, match="home cannot be written to") as caught:
        keep_invite(places_in(tmp_path / "file"), INVITE)
    assert "--home DIRECTORY, or POTLUCK_HOME" in caught.value.advice
