"""Which invite is meant: typed, in a file, in the environment, or that of last time."""

from __future__ import annotations

from pathlib import Path

import pytest

from auth.invites import Invite
from node.joining.invited import INVITE_VARIABLE, keep_invite, read_invited
from node.places import Places, find_places
from node.run.invite import NotAnInvite, RunInvite, write_invite
from node.wrong_use import WrongUse
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


def test_what_is_none_is_said_by_name(tmp_path: Path) -> None:
    places = places_in(tmp_path)
    with pytest.raises(NotAnInvite, match="cut short"):
        read_invited(places, TEXT[: len(TEXT) // 2], None, {})
    with pytest.raises(NotAnInvite, match="names no run to join"):
        read_invited(places, "potluck:abc", None, {})
    with pytest.raises(WrongUse, match="There is no invite in"):
        read_invited(places, str(tmp_path / "missing"), None, {})
    with pytest.raises(WrongUse, match="two invites"):
        read_invited(places, TEXT, "file", {})
