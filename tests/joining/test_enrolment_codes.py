"""Into a closed run as it is typed: a code that counts no more, and a name that was denied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from auth.invites import Invite
from node.core.access.pass_file import keep_pass, load_pass
from node.run.invite import RunInvite, write_invite
from tests.access.auth_servers import RUN, AuthServerProcess, running_auth_server
from tests.commands.console import objects, potluck_here
from tests.joining.homes import files_below
from tests.runs.definitions import FINGERPRINT

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
