"""`potluck join` with wrong arguments, as they are typed: its message, its exit code, and that
nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import msgspec
import pytest

from auth.invites import Invite
from auth.invites import write_invite as write_login_invite
from node.app.main import main
from node.core.disk_trouble import HomeUnusable, kept_in
from node.run.invite import RunInvite, write_invite
from tests.runs.definitions import FINGERPRINT, NAME
from tests.runs.test_invites import BOOTSTRAP

OPEN = RunInvite(NAME, BOOTSTRAP[:1], FINGERPRINT)
TEXT = write_invite(OPEN)
EXPIRED = write_invite(msgspec.structs.replace(OPEN, expires_ms=1_000))
LOGIN = write_login_invite(Invite(NAME, (), "https://auth.example", FINGERPRINT))

TYPED = {
    "cut in half": ([TEXT[: len(TEXT) // 2]], 2, "cut short"),
    "one character changed": (
        [f"{TEXT[:70]}{'A' if TEXT[70] != 'A' else 'B'}{TEXT[71:]}"],
        2,
        "wrong",
    ),
    "expired": ([EXPIRED], 3, "It was valid until 1970-01-01 00:00:01 UTC"),
    "in several words": ([EXPIRED[:40], EXPIRED[40:90], EXPIRED[90:]], 3, "has expired"),
    "one to log in with": ([LOGIN], 2, "names no run to join"),
    "empty": ([""], 2, "it is empty"),
    "two": ([TEXT, "--invite-file", "x"], 2, "two invites"),
    "a folder": (["--invite-file", "/"], 2, "Is a directory"),
    "no such file": (["no-such-file"], 2, "No such file"),
    "no code": ([TEXT, "--code-file", "/no-such-file"], 2, "The code cannot be read"),
    "both from standard input": (["--invite-file", "-", "--code-file", "-"], 2, "cannot both"),
    "none": ([], 2, "no invite to join with"),
    "a flag that there is not": ([TEXT, "--max-memroy", "4GB"], 2, "Did you mean --max-memory?"),
    "too little memory for any run": ([TEXT, "--max-memory", "300MB"], 3, "as every run does"),
    "a module that is no file": ([TEXT, "--trust-module", "os"], 2, "There is no Python file"),
}


@pytest.mark.parametrize(("words", "code", "told"), TYPED.values(), ids=TYPED.keys())
def test_it_says_what_is_wrong_and_leaves_nothing(
    words: list[str],
    code: int,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POTLUCK_INVITE", raising=False)
    home = tmp_path / "home"
    assert main(["join", "--home", str(home), *words]) == code
    out, error = capsys.readouterr()
    assert out == ""
    assert told in error
    assert error.startswith("error: ")
    assert "  next: " in error
    assert not home.exists()


def test_for_a_program_it_is_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "--json", "--home", str(tmp_path / "home"), EXPIRED]) == 3
    out, error = capsys.readouterr()
    assert error == ""
    told = json.loads(out)["error"]
    assert sorted(told) == ["advice", "exit_code", "what", "why"]
    assert told["exit_code"] == 3


def test_a_home_of_an_unknown_user_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "--home", "~nobody-here/potluck", TEXT]) == 2
    error = capsys.readouterr().err
    assert "There is no home directory" in error
    assert "--home DIRECTORY, or POTLUCK_HOME" in error


def test_a_home_that_cannot_be_one_is_told_before_anything_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    assert main(["join", "--home", str(home), TEXT]) == 1
    error = capsys.readouterr().err
    assert f"This node's home cannot be written to: {home}" in error
    assert "in the way" in error
    assert home.read_text() == "a file"


TROUBLE = {
    errno.ENOSPC: ("There is no room", "Free some space"),
    errno.EROFS: ("The disk is read-only", "writable"),
    errno.EACCES: ("This user may not write there", "permissions"),
    errno.ENOLCK: ("has no locks", "on a disk of this machine"),
    errno.ENOTDIR: ("in the way", "move it away"),
    errno.EIO: ("The system says", "its disk"),
}


@pytest.mark.parametrize(("number", "told"), TROUBLE.items(), ids=map(errno.errorcode.get, TROUBLE))
def test_every_trouble_of_a_disk_has_its_own_words(number: int, told: tuple[str, str]) -> None:
    why, advice = told
    with pytest.raises(HomeUnusable) as caught, kept_in(Path("/somewhere")):
        raise OSError(number, os.strerror(number))
    assert why in caught.value.why
    assert advice in caught.value.advice
    assert "POTLUCK_HOME" in caught.value.advice


def test_an_error_about_permissions_names_the_folder_that_matters(tmp_path: Path) -> None:
    with pytest.raises(HomeUnusable) as caught, kept_in(tmp_path / "new" / "home"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert f"permissions of {tmp_path}," in caught.value.advice


def test_a_port_that_is_taken_is_told_before_a_code_is_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The auth server of this invite answers nobody: to ask it would fail with another error."""
    access = Invite(NAME, (), "https://auth.example.invalid", FINGERPRINT, "ABCD-EFGH-JKLM")
    closed = write_invite(msgspec.structs.replace(OPEN, access=access))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        assert main(["join", "--home", str(tmp_path / "home"), "--listen", listen, closed]) == 1
    assert f"Cannot listen on {listen}" in capsys.readouterr().err
