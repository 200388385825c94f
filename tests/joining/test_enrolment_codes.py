"""Into a closed run as it is typed: a code that counts no more, a name that was denied, and a pass
that has expired while the auth server is away."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from auth.invites import Invite
from auth.invites import write_invite as write_login_invite
from auth.server.settings import SHORTEST_LIFE_SECONDS
from node.app.commands.join import STILL_ACCEPTED
from node.core.access.membership import open_membership
from node.core.access.pass_file import keep_pass, load_pass
from node.core.access.renewal import TokenStanding
from node.core.configuration import read_configuration
from node.run.invite import RunInvite, write_invite
from node.training.join import own_identity
from tests.access.auth_servers import RUN, AuthServerProcess, running_auth_server
from tests.commands.console import LOOPBACK, objects, potluck_here, running
from tests.joining.homes import files_below
from tests.runs.definitions import FINGERPRINT
from tests.waiting import PATIENCE_SECONDS

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"


def invite_to(server: AuthServerProcess) -> str:
    access = Invite(RUN, (), server.url, server.fingerprint, "", server.certificate.sha256)
    return write_invite(RunInvite(RUN, (NOBODY,), FINGERPRINT, 0, access))


def refused(home: Path, invite: str, code: str) -> dict[str, Any]:
    """What `join` with this code says, which ends by itself and leaves a key and no more."""
    done = potluck_here("join", "--json", home=home, POTLUCK_INVITE=invite, POTLUCK_LOGIN_CODE=code)
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert files_below(home) == {"identity.key"}
    error: dict[str, Any] = objects(done.stdout)[-1]["error"]
    assert all(error[part] for part in ("what", "why", "advice")), error
    assert code not in done.stdout + done.stderr, "a code is a secret"
    return error


@pytest.mark.slow
def test_a_person_who_is_not_let_in_is_told_why_and_by_whom(tmp_path: Path) -> None:
    with running_auth_server(tmp_path / "server") as server:
        invite, used, denied = invite_to(server), server.new_code("bob"), server.new_code("dave")
        server.act("deny", name="code:dave", reason="was rude")
        assert "code" in refused(tmp_path / "wrong", invite, "AAAAA-BBBBB-CCCCC-DDDDD")["what"]
        assert "A moderator" in refused(tmp_path / "dave", invite, denied)["why"]
        potluck_here("login", invite, home=tmp_path / "bob", POTLUCK_LOGIN_CODE=used)
        assert "used" in str(refused(tmp_path / "late", invite, used))
        server.act("revoke", target="code:bob", reason="sent garbage")
        file = tmp_path / "bob" / "access.pass"
        kept = load_pass(file)
        assert kept is not None
        keep_pass(file, msgspec.structs.replace(kept, refused="As it is when a node was told."))
        again = potluck_here("join", invite, "--json", home=tmp_path / "bob")
        assert again.returncode == 3, (again.stdout, again.stderr)
        assert "access was revoked" in objects(again.stdout)[-1]["error"]["what"]


def home_with_an_expired_pass(server: AuthServerProcess, home: Path) -> str:
    """Of a member whose auth server has gone. Its invite."""
    invite = invite_to(server)
    potluck_here("login", invite, home=home, POTLUCK_LOGIN_CODE=server.new_code("bob"))
    server.stop()
    configuration = read_configuration({}, home=str(home))
    member = open_membership(configuration, own_identity(configuration))
    assert member is not None
    deadline = time.monotonic() + PATIENCE_SECONDS
    while member.standing is TokenStanding.VALID:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return invite


@pytest.mark.slow
def test_a_pass_that_is_over_while_the_auth_server_is_away_is_told_as_such(tmp_path: Path) -> None:
    home, lives = tmp_path / "bob", SHORTEST_LIFE_SECONDS
    with running_auth_server(tmp_path / "server", life_seconds=lives, grace_seconds=0) as server:
        home_with_an_expired_pass(server, home)
        for words in (("join", invite_to(server)), ("login",)):
            done = potluck_here(*words, "--json", home=home)
            assert done.returncode == 4, (done.stdout, done.stderr)
            error = objects(done.stdout)[-1]["error"]
            assert re.search(rf"pass for {RUN} expired \d+ s ago", error["what"])
            assert server.url in error["why"]
            assert "type the same command again" in error["advice"]
        moved = Invite(RUN, (), "https://127.0.0.1:9", server.fingerprint)
        done = potluck_here("login", write_login_invite(moved), "--json", home=home)
        assert done.returncode == 4, (done.stdout, done.stderr)
        assert "127.0.0.1:9" in objects(done.stdout)[-1]["error"]["why"], "it was asked, too"


@pytest.mark.slow
def test_a_pass_in_its_grace_will_do_while_the_auth_server_is_away(tmp_path: Path) -> None:
    home, lives = tmp_path / "bob", SHORTEST_LIFE_SECONDS
    with running_auth_server(tmp_path / "server", life_seconds=lives, grace_seconds=600) as server:
        invite = home_with_an_expired_pass(server, home)
        with running("join", invite, "--plain", "--listen", LOOPBACK, home=home) as joining:
            joining.wait_until_it_says(STILL_ACCEPTED)
            while "looking for the others" not in joining.next_line():
                pass
