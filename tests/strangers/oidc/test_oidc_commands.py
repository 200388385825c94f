"""The commands as people type them: a moderator's server, a volunteer's login, a real provider."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from auth.invites import Invite, write_invite
from tests.commands.console import potluck, running
from tests.strangers.oidc.browser import Browser
from tests.strangers.oidc.process import OpenIdStranger

NOWHERE = "https://nowhere.invalid/"  # an address that no redirect leads to


@dataclass(frozen=True)
class Served:
    home: Path
    invite: str


@pytest.fixture(scope="module")
def served(provider: OpenIdStranger, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`auth init`, a provider in auth.toml, `auth allow`, `auth serve`: one for all tests here."""
    home = tmp_path_factory.mktemp("server")
    made = potluck("auth", "init", "--run", "demo", "--json", home=home)
    assert made.returncode == 0, made.stderr
    with (home / "auth.toml").open("a") as file:
        file.write(
            '\n[[provider]]\nid = "corp"\nkind = "oidc"\nclient_id = "potluck-loopback"\n'
            f'issuer = "{provider.issuer}"\n'
        )
    allowed = potluck("auth", "allow", "corp:alice-online", home=home)
    assert allowed.returncode == 0, allowed.stderr
    serve = ("auth", "serve", "--insecure-http", "--listen", "127.0.0.1:0", "--json")
    with running(*serve, home=home) as server:
        said = server.next_object()
        yield Served(home, write_invite(Invite("demo", (), said["url"], said["fingerprint"])))


def confirm(told: dict[str, Any], name: str) -> None:
    """Do what the terminal asks a person to do, in a browser."""

    async def in_a_browser() -> None:
        async with Browser(NOWHERE) as browser:
            if told["kind"] == "device":
                page = await browser.open(told["verification_uri"])
                page = await browser.send(page, page.forms[0], {"user_code": told["user_code"]})
            else:
                page = await browser.open(told["url"])
                assert told["confirmation"] in page.text
                page = await browser.send(page, page.forms[0], {})
            page = await browser.log_in(page, name)
            assert page.status == 200

    trio.run(in_a_browser)


@pytest.mark.parametrize("kind", ["device", "browser"])
def test_a_volunteer_logs_in_with_one_command_and_a_browser(
    tmp_path: Path, served: Served, kind: str
) -> None:
    login = ("login", served.invite, "--provider", "corp", "--with", kind, "--json")
    with running(*login, home=tmp_path) as command:
        confirm(command.next_object(), "alice")
        done = command.next_object()
        assert command.process.wait() == 0
    assert done["username"] == "corp:alice-online"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["access.pass", "identity.key"]


def test_somebody_who_is_not_on_the_list_is_told_so_and_the_moderator_sees_it(
    tmp_path: Path, served: Served
) -> None:
    login = ("login", served.invite, "--provider", "corp", "--with", "browser", "--json")
    with running(*login, home=tmp_path) as command:
        confirm(command.next_object(), "mallory")
        refused = command.next_object()
        assert command.process.wait() == 3
    assert "corp:mallory-online" in str(refused["error"])
    audit = potluck("auth", "audit", "--json", home=served.home)
    assert "corp:mallory-online" in audit.stdout
