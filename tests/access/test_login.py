"""`potluck login` and `whoami` against a real auth server, as a volunteer types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from auth.invites import Invite, write_invite
from auth.keys import SigningKey, fingerprint
from node.core.access.pass_file import load_pass
from tests.access.auth_servers import RUN, AuthServerProcess, running_auth_server
from tests.access.https_servers import make_certificate
from tests.commands.console import Completed, objects, potluck_here
from tests.homes import full_disk

pytestmark = pytest.mark.slow  # each command is a process of its own


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuthServerProcess]:
    with running_auth_server(tmp_path_factory.mktemp("server")) as server:
        yield server


def data(completed: Completed) -> dict[str, Any]:
    """The last JSON object of a command that worked."""
    assert completed.returncode == 0, completed.stderr + completed.stdout
    return objects(completed.stdout)[-1]


def failure(completed: Completed, exit_code: int) -> dict[str, Any]:
    assert completed.returncode == exit_code, completed.stderr + completed.stdout
    error: dict[str, Any] = objects(completed.stdout)[-1]["error"]
    assert all(error[part] for part in ("what", "why", "advice")), error
    return error


def test_an_invite_with_a_code_is_all_it_takes(server: AuthServerProcess, tmp_path: Path) -> None:
    (tmp_path / "invite.txt").write_text(f"# Welcome!\n{server.invite(server.new_code('alice'))}\n")
    home = tmp_path / "home"
    done = data(potluck_here("login", str(tmp_path / "invite.txt"), "--json", home=home))
    assert (done["run"], done["username"], done["outcome"]) == (RUN, "code:alice", "new")
    path = home / "access.pass"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(one.name for one in home.iterdir()) == ["access.pass", "identity.key"]

    known = data(potluck_here("whoami", "--json", home=home))
    assert (known["username"], known["roles"], known["run"]) == ("code:alice", ["volunteer"], RUN)
    assert known["fingerprint"] == server.fingerprint
    assert 3_500 < known["expires_in_seconds"] <= 3_600
    assert 2_000 < known["renewed_in_seconds"] < 2_800
    assert not known["node_is_running"]
    assert abs(known["clock_offset_ms"]) < 1_000
    text = potluck_here("whoami", home=home).stdout
    assert "code:alice" in text
    assert server.fingerprint in text


def test_logging_in_twice_changes_nothing(server: AuthServerProcess, tmp_path: Path) -> None:
    invite = server.invite(server.new_code("bob"))
    data(potluck_here("login", invite, "--json", home=tmp_path))
    before = (tmp_path / "access.pass").read_bytes()
    again = data(potluck_here("login", invite, "--json", home=tmp_path))
    assert again["outcome"] == "kept"
    assert (tmp_path / "access.pass").read_bytes() == before
    assert data(potluck_here("login", "--json", home=tmp_path))["outcome"] == "kept"
    forced = data(potluck_here("login", invite, "--again", "--json", home=tmp_path))
    assert forced["outcome"] == "new", "a used code is good for the same node again"


def test_a_pass_that_nobody_accepts_any_more_is_renewed(tmp_path: Path) -> None:
    """Its node was off when the key was withdrawn. It was told that it is logged in already."""
    home = tmp_path / "home"
    with running_auth_server(tmp_path / "server") as server:
        data(potluck_here("login", server.invite(server.new_code()), "--json", home=home))
        (key,) = server.act("keys-list")["keys"]
        server.act("keys-withdraw", key=key["key_id"], reason="the backup was stolen")
        with full_disk():  # it said that it is renewed, and nothing was kept
            told = failure(potluck_here("login", "--json", home=home), 1)
        assert str(home / "access.pass") in told["what"]
        assert data(potluck_here("login", "--json", home=home))["outcome"] == "renewed"
        assert data(potluck_here("login", "--json", home=home))["outcome"] == "kept"
    assert data(potluck_here("login", "--json", home=home))["outcome"] == "kept", "it is away"


def test_a_code_comes_from_a_file_or_the_environment(
    server: AuthServerProcess, tmp_path: Path
) -> None:
    code = server.new_code("carol")
    (tmp_path / "code").write_text(f"{code}\nCode c1, for code:carol, as `auth codes new` says.\n")
    words = ("login", server.invite(), "--code-file", str(tmp_path / "code"), "--json")
    assert data(potluck_here(*words, home=tmp_path / "a"))["username"] == "code:carol"
    done = potluck_here(
        "login", server.invite(), "--json", home=tmp_path / "b",
        POTLUCK_LOGIN_CODE=server.new_code("dave"),
    )  # fmt: skip
    assert data(done)["username"] == "code:dave"


def test_a_refusal_says_why_and_what_to_do(server: AuthServerProcess, tmp_path: Path) -> None:
    wrong = potluck_here("login", server.invite("AAAA-BBBB-CCCC-DDDD"), "--json", home=tmp_path)
    assert "not an enrolment code" in failure(wrong, 3)["what"]
    code = server.new_code("erin")
    data(potluck_here("login", server.invite(code), "--json", home=tmp_path / "first"))
    second = potluck_here("login", server.invite(code), "--json", home=tmp_path / "second")
    assert "used up" in failure(second, 3)["what"]
    assert not (tmp_path / "second" / "access.pass").exists()


def test_a_missing_code_is_wrong_use(server: AuthServerProcess, tmp_path: Path) -> None:
    missing = failure(potluck_here("login", server.invite(), "--json", home=tmp_path), 2)
    assert "--code-file" in missing["advice"]


def test_somebody_else_in_the_servers_place_hears_no_code(
    server: AuthServerProcess, tmp_path: Path
) -> None:
    code = server.new_code("frank")
    elsewhere = server.invite(code, pin=make_certificate().sha256)
    refused = failure(potluck_here("login", elsewhere, "--json", home=tmp_path), 4)
    assert "certificate is not accepted" in refused["why"]
    untrusted = server.invite(code, pin=b"")
    refused = failure(potluck_here("login", untrusted, "--json", home=tmp_path), 4)
    assert "certificate is not accepted" in refused["why"]
    other_key = fingerprint(SigningKey(bytes(32)).public_key)
    refused = failure(
        potluck_here("login", server.invite(code, fingerprint=other_key), "--json", home=tmp_path),
        4,
    )
    assert "is not the auth server of albert" in refused["what"]
    used = server.act("codes-list")
    assert json.dumps(used)
    data(potluck_here("login", server.invite(code), "--json", home=tmp_path))  # it is good still


def test_nobody_there_is_an_outage(tmp_path: Path) -> None:
    nowhere = write_invite(
        Invite(RUN, (), "https://127.0.0.1:1", fingerprint(SigningKey(bytes(32)).public_key), "x")
    )
    outage = failure(potluck_here("login", nowhere, "--json", home=tmp_path), 4)
    assert outage["what"] == "The auth server cannot be asked."
    assert not (tmp_path / "access.pass").exists()


@pytest.mark.parametrize(
    "invite", ["potluck:garbage", "potluck:", "/no/such/file", "invite-without-scheme"]
)
def test_an_invalid_invite_is_reported_at_once(tmp_path: Path, invite: str) -> None:
    assert failure(potluck_here("login", invite, "--json", home=tmp_path), 2)["advice"]


def test_one_home_is_in_one_run(server: AuthServerProcess, tmp_path: Path) -> None:
    data(potluck_here("login", server.invite(server.new_code("gina")), "--json", home=tmp_path))
    other = write_invite(Invite("bert", (), server.url, server.fingerprint, "x"))
    refused = failure(potluck_here("login", other, "--json", home=tmp_path), 2)
    assert "--home" in refused["advice"]
    assert load_pass(tmp_path / "access.pass") is not None


def test_whoami_without_a_pass_says_that_the_run_is_open(tmp_path: Path) -> None:
    assert data(potluck_here("whoami", "--json", home=tmp_path))["open"] is True
    assert "OPEN RUN" in potluck_here("whoami", home=tmp_path).stdout
