"""An invite to a run survives being copied; cut, mistyped, old or of another kind, it says so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from auth.invites import Invite
from auth.invites import write_invite as write_login_invite
from auth.keys import peer_id_of
from node.app.commands.run_invite import wants_qr
from node.app.login_inputs import ask_for_code
from node.app.login_inputs import read_invite as read_login_invite
from node.core.wrong_use import WrongUse
from node.run.invite import (
    SCHEME,
    InviteExpired,
    NotAnInvite,
    RunInvite,
    check_expiry,
    read_invite,
    write_invite,
)
from protocols.errors import PotluckError
from tests.runs.definitions import FINGERPRINT, MALLORY, NAME, NOW_MS, ORGANISER

PEER, RELAY = peer_id_of(ORGANISER.public_key), peer_id_of(MALLORY.public_key)
ACCESS = Invite(NAME, (), "https://auth.example.org", FINGERPRINT, "orange-apple", bytes(range(32)))
BOOTSTRAP = (
    f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}",
    f"/ip6/2001:db8::7/tcp/4001/p2p/{PEER}",
    f"/dns4/node.example.org/tcp/4001/p2p/{PEER}",
    f"/ip4/192.0.2.8/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    f"/dns/other.example.org/tcp/1/p2p/{RELAY}",
)
OPEN = RunInvite(NAME, BOOTSTRAP[:1], FINGERPRINT)
TEXT = write_invite(OPEN)


@pytest.mark.parametrize("access", [None, ACCESS], ids=["open", "closed"])
@pytest.mark.parametrize("expires_ms", [0, NOW_MS])
@pytest.mark.parametrize("count", range(len(BOOTSTRAP) + 1))
def test_it_is_read_as_it_was_written(count: int, expires_ms: int, access: Invite | None) -> None:
    invite = RunInvite(NAME, BOOTSTRAP[:count], FINGERPRINT, expires_ms, access)
    assert read_invite(write_invite(invite)) == invite


def test_it_is_short_enough_to_be_sent_anywhere() -> None:
    assert TEXT.startswith(SCHEME)
    assert len(TEXT) < 160


def test_it_may_come_as_a_file() -> None:
    lines = [TEXT[i : i + 60] for i in range(0, len(TEXT), 60)]
    assert read_invite("# An invite.\r\n\r\n  " + "\r\n  ".join(lines) + "\n") == OPEN


@given(some.integers(0, len(TEXT) - 1))
def test_a_truncated_invite_says_so(length: int) -> None:
    with pytest.raises(NotAnInvite) as caught:
        read_invite(TEXT[:length])
    assert caught.value.why
    assert "ask for a new one" in caught.value.advice
    assert caught.value.exit_code == 2


@given(some.integers(0, len(TEXT) - 1), some.characters(codec="utf-8"))
def test_a_wrong_character_never_makes_another_invite_of_it(place: int, character: str) -> None:
    try:
        read = read_invite(TEXT[:place] + character + TEXT[place + 1 :])
    except NotAnInvite:
        return
    assert read == OPEN, "as with a capital at its beginning"


def test_a_wrong_character_within_it_is_noticed() -> None:
    other = "A" if TEXT[60] != "A" else "B"
    with pytest.raises(NotAnInvite, match="a character of it is wrong"):
        read_invite(TEXT[:60] + other + TEXT[61:])


ON_THE_WAY = {
    "quotes": f'"{TEXT}"',
    "quotes of a word processor": f"\u201c{TEXT}\u201d",
    "brackets": f"<{TEXT}>",
    "code in a chat": f"```\n{TEXT}\n```",
    "the end of a sentence": f"{TEXT}.",
    "a sentence before it": f"Join us with {TEXT}!",
    "the whole command": f"potluck join {TEXT}",
    "several words": f"{TEXT[:40]} {TEXT[40:90]}\t{TEXT[90:]}",
    "a quoted mail": f"> {TEXT[:60]}\n> {TEXT[60:]}\n",
    "a capital": f"P{TEXT[1:]}",
    "a byte order mark": f"\ufeff{TEXT}\r\n",
    "invisible characters": f"{TEXT[:30]}\u200b{TEXT[30:60]}\xad{TEXT[60:]}",
    "another blank": f"\xa0{TEXT}\u3000",
    "a typographic dash": TEXT.replace("-", "\u2011"),
}


@pytest.mark.parametrize("text", ON_THE_WAY.values(), ids=ON_THE_WAY.keys())
def test_changes_made_by_mail_and_chat_programs_do_not_matter(text: str) -> None:
    assert read_invite(text) == OPEN


@pytest.mark.parametrize("changed", [TEXT.upper(), TEXT.lower()], ids=["capital", "small"])
def test_an_invite_in_all_upper_or_lower_case_is_named_as_such(changed: str) -> None:
    with pytest.raises(NotAnInvite, match="All its letters were made capital, or small"):
        read_invite(changed)


@given(some.text(max_size=300))
def test_whatever_the_text_only_our_own_errors_come_out(text: str) -> None:
    for candidate in (text, SCHEME + text):
        with pytest.raises(PotluckError):
            read_invite(candidate)


def test_one_for_logging_in_is_told_from_one_to_a_run() -> None:
    with pytest.raises(NotAnInvite, match="potluck run invite"):
        read_invite(write_login_invite(ACCESS))


@pytest.mark.parametrize(
    "packed",
    [
        [0, b"\x00" * 5, 1, None],
        [3, b"bad host/tcp", 1, None],
        [2, b"\xff.example", 1, None],
        [0, bytes(4), 0, None],
        [9, b"name", 1, None],
    ],
    ids=["five bytes of IPv4", "a name with a slash", "not ASCII", "port 0", "another kind"],
)
def test_an_address_that_cannot_be_is_no_invite(packed: list[object]) -> None:
    from auth.pasting import to_text

    peers = [[ORGANISER.public_key, [packed]]]
    payload = msgspec.msgpack.encode([NAME, peers, bytes(16), 0, None])
    with pytest.raises(NotAnInvite):
        read_invite(to_text(SCHEME, payload))


def test_it_logs_in_to_a_closed_run_as_well(tmp_path: Path) -> None:
    closed = RunInvite(NAME, BOOTSTRAP[:1], FINGERPRINT, 0, ACCESS)
    expected = msgspec.structs.replace(ACCESS, bootstrap=BOOTSTRAP[:1])
    assert read_login_invite(write_invite(closed)) == expected
    file = tmp_path / "alice.invite"
    file.write_text(f"# An invite.\n{write_invite(closed)}\n")
    assert read_login_invite(str(file)) == expected
    with pytest.raises(WrongUse, match="open run"):
        read_login_invite(TEXT)


def test_an_unreadable_invite_is_not_written() -> None:
    with pytest.raises(ValueError, match="not a invite"):
        write_invite(msgspec.structs.replace(OPEN, run="two words"))
    with pytest.raises(WrongUse):
        write_invite(msgspec.structs.replace(OPEN, bootstrap=("192.0.2.7:4001",)))


def test_it_is_good_until_it_expires() -> None:
    invite = msgspec.structs.replace(OPEN, expires_ms=NOW_MS)
    check_expiry(invite, NOW_MS - 1)
    check_expiry(OPEN, NOW_MS)
    with pytest.raises(InviteExpired, match="2023-11-14 22:13:20 UTC") as caught:
        check_expiry(invite, NOW_MS)
    assert caught.value.exit_code == 3


def test_a_code_is_not_shown_by_accident() -> None:
    assert "orange" not in repr(RunInvite(NAME, (), FINGERPRINT, 0, ACCESS))


def test_a_code_is_drawn_where_another_machine_can_use_it() -> None:
    """Of an invite to this machine alone it would only push the text out of sight."""
    here, elsewhere = ("/ip4/127.0.0.1/tcp/4001",), ("/ip4/192.168.1.7/tcp/4001",)
    assert wants_qr(None, here) is False
    assert wants_qr(True, here) is True
    assert wants_qr(None, elsewhere) is None
    assert wants_qr(False, elsewhere) is False


@pytest.mark.parametrize("typed", [None, "", " \t"], ids=["Ctrl-D", "nothing", "spaces"])
def test_a_code_that_was_not_typed_is_wrong_use(
    typed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_prompt: str) -> str:
        if typed is None:
            raise EOFError
        return typed

    monkeypatch.setattr("getpass.getpass", ask)
    with pytest.raises(WrongUse, match="No enrolment code"):
        ask_for_code()
    monkeypatch.setattr("getpass.getpass", lambda _prompt: " orange-apple ")
    assert ask_for_code() == "orange-apple"
