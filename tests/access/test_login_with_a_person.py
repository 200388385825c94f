"""`potluck login` where a person has to do something: what they are shown, and every way it ends.

The auth server is one of a few lines, so that it can be made to say each thing at the right
moment; the flows against real providers are in tests/strangers/oidc.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from auth.invites import Invite, write_invite
from tests.access.https_servers import response
from tests.access.impostor import RUN, Impostor, decoded, running_impostor, said
from tests.commands.console import Completed, objects, potluck, running
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow  # each command is a process of its own

DEVICE = {
    "session": "s1",
    "user_code": "WDJB-MJHT",
    "verification_uri": "https://id.example/device",
    "verification_uri_complete": "https://id.example/device?user_code=WDJB-MJHT",
    "interval": 1,
    "expires_in": 600,
}
BROWSER = {
    "session": "s1",
    "url": "/login/p1",
    "confirmation": "amber otter",
    "interval": 1,
    "expires_in": 600,
}


class Flow:
    """A login that ends with the answer `end` after some polls."""

    def __init__(self, begun: dict[str, Any], *polls: Any) -> None:
        self.begun = begun
        self.polls = list(polls)
        self.question: dict[str, Any] = {}
        self.proven: dict[str, Any] = {}

    def start(self, impostor: Impostor, question: dict[str, Any]) -> bytes:
        self.proven = question
        begun = dict(self.begun)
        if begun.get("url", "").startswith("/"):
            begun["url"] = impostor.auth_url + begun["url"]
        return said(begun, "202 Accepted")

    def poll(self, impostor: Impostor, question: dict[str, Any]) -> bytes:
        assert question == {"session": "s1"}
        answer = self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        if callable(answer):
            told: bytes = answer(impostor, self.proven)
            return told
        assert isinstance(answer, bytes)
        return answer


PENDING = said({"interval": 1}, "202 Accepted")


@asynccontextmanager
async def server_with(folder: Path, flow: Flow) -> AsyncIterator[str]:
    """An invite to a server that offers all three ways, and answers with this flow."""

    def about(impostor: Impostor, _question: dict[str, Any]) -> bytes:
        providers = [
            {"id": "hub", "kind": "device", "title": "Hub"},
            {"id": "hub", "kind": "browser", "title": "Hub"},
            {"id": "code", "kind": "code", "title": "a code"},
        ]
        return said({"run": RUN, "fingerprint": impostor.fingerprint, "providers": providers})

    impostor = Impostor(
        answers={"/v1/about": about, "/v1/login": flow.start, "/v1/login/poll": flow.poll}
    )
    async with running_impostor(folder, impostor) as server:
        assert server.certificate is not None
        pin = server.certificate.sha256
        yield write_invite(Invite(RUN, (), server.url, impostor.fingerprint, pin=pin))


async def login(home: Path, *words: str) -> Completed:
    return await trio.to_thread.run_sync(partial(potluck, "login", *words, home=home))


async def test_a_short_code_and_an_address_are_shown_and_it_waits(tmp_path: Path) -> None:
    flow = Flow(DEVICE, PENDING, PENDING, Impostor.grant)
    async with server_with(tmp_path, flow) as invite:
        done = await login(tmp_path / "home", invite)
    assert done.returncode == 0, done.stderr
    assert "WDJB-MJHT" in done.stderr
    assert "https://id.example/device" in done.stderr
    assert "code:alice (volunteer) in albert" in done.stdout
    assert flow.proven["provider"] == "hub"
    assert flow.proven["kind"] == "device"
    assert len(decoded(flow.proven["proof"])) == 64
    assert sorted(one.name for one in (tmp_path / "home").iterdir()) == [
        "access.pass",
        "identity.key",
    ]


async def test_the_browser_shows_the_same_word_as_the_terminal(tmp_path: Path) -> None:
    flow = Flow(BROWSER, PENDING, Impostor.grant)
    async with server_with(tmp_path, flow) as invite:
        done = await login(tmp_path / "home", invite, "--with", "browser")
    assert done.returncode == 0, done.stderr
    assert "/login/p1" in done.stderr
    assert "amber otter" in done.stderr
    assert "12D3KooW" in done.stderr, "the page shows the computer's key, to be compared"


async def test_a_program_gets_the_same_as_json(tmp_path: Path) -> None:
    async with server_with(tmp_path, Flow(DEVICE, Impostor.grant)) as invite:
        done = await login(tmp_path / "home", invite, "--json")
    shown, ended = objects(done.stdout)
    assert (shown["event"], shown["user_code"]) == ("login", "WDJB-MJHT")
    assert (ended["event"], ended["outcome"]) == ("logged_in", "new")


async def test_an_outage_while_it_waits_is_waited_out(tmp_path: Path) -> None:
    flow = Flow(
        DEVICE,
        response("503 Service Unavailable", b"", "Retry-After: 1"),
        response("403 Forbidden", b"<html>portal", "Content-Type: text/html"),
        b"",
        Impostor.grant,
    )
    async with server_with(tmp_path, flow) as invite:
        done = await login(tmp_path / "home", invite, "--json")
    assert done.returncode == 0, done.stderr + done.stdout


async def test_a_person_who_denies_the_login_is_refused_with_a_reason(tmp_path: Path) -> None:
    async with server_with(tmp_path, Flow(DEVICE, PENDING, Impostor.refuse)) as invite:
        done = await login(tmp_path / "home", invite, "--json")
    assert done.returncode == 3
    assert objects(done.stdout)[-1]["error"]["what"] == "You may not take part in this run."
    assert not (tmp_path / "home" / "access.pass").exists()


@pytest.mark.soak
async def test_a_code_that_expires_is_said(tmp_path: Path) -> None:
    expired = said({"error": "login_expired"}, "410 Gone")
    async with server_with(tmp_path, Flow(DEVICE, PENDING, expired)) as invite:
        done = await login(tmp_path / "home", invite, "--json")
    assert done.returncode == 4
    assert "not finished in time" in objects(done.stdout)[-1]["error"]["what"]


@pytest.mark.soak
async def test_it_does_not_wait_longer_than_it_is_told(tmp_path: Path) -> None:
    async with server_with(tmp_path, Flow(DEVICE, PENDING)) as invite:
        done = await login(tmp_path / "home", invite, "--json", "--timeout", "1.5")
    assert done.returncode == 4
    assert "--timeout" in objects(done.stdout)[-1]["error"]["advice"]


async def test_ctrl_c_leaves_nothing_but_the_key(tmp_path: Path) -> None:
    flow = Flow(DEVICE, PENDING)
    home = tmp_path / "home"
    async with server_with(tmp_path, flow) as invite:
        with running("login", invite, home=home) as command:
            await until(lambda: bool(flow.proven), PATIENCE_SECONDS)
            code, seconds, said_last = await trio.to_thread.run_sync(command.stop, signal.SIGINT)
    assert code == 130
    assert seconds < 2.0
    assert "Traceback" not in said_last
    assert [one.name for one in home.iterdir()] == ["identity.key"]


async def test_a_way_that_the_server_has_not_is_wrong_use(tmp_path: Path) -> None:
    async with server_with(tmp_path, Flow(DEVICE, PENDING)) as invite:
        done = await login(tmp_path / "home", invite, "--json", "--provider", "hob")
    assert done.returncode == 2
    assert "Did you mean hub?" in objects(done.stdout)[-1]["error"]["advice"]
