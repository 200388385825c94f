"""A run from its beginning: a real auth server, real nodes, and what befalls them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.access.auth_servers import AuthServerProcess, running_auth_server
from tests.commands.console import RunningCommand, objects, potluck, running_node
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow  # every one of them is a process of its own

SHORTEST_LIFE_SECONDS = 10  # of a token, that an auth server allows


def data(*words: str, home: Path) -> dict[str, Any]:
    completed = potluck(*words, "--json", home=home)
    assert completed.returncode == 0, completed.stderr + completed.stdout
    return objects(completed.stdout)[-1]


def log_in(server: AuthServerProcess, home: Path, name: str) -> None:
    data("login", server.invite(server.new_code(name)), home=home)


def membership(home: Path) -> dict[str, Any]:
    known: dict[str, Any] = data("status", home=home)["membership"]
    return known


def eventually(condition: Callable[[], bool], within_seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


@contextmanager
def swarm(
    server: AuthServerProcess, folder: Path, *names: str
) -> Iterator[dict[str, RunningCommand]]:
    """Nodes that have logged in and joined through the first of them."""
    commands: dict[str, RunningCommand] = {}
    first = ""
    with ExitStack() as stack:
        for name in names:
            home = folder / name
            log_in(server, home, name)
            words = ("--bootstrap", first) if first else ()
            command, started = stack.enter_context(running_node(home, *words))
            assert started["open_run"] is False
            assert started["membership"]["username"] == f"code:{name}"
            first = first or started["addresses"][0]
            commands[name] = command
        yield commands


@pytest.mark.parametrize(
    "names",
    [("alice", "bob"), pytest.param(("alice", "bob", "carol"), marks=pytest.mark.soak)],
    ids=["two", "three"],
)
def test_volunteers_share_a_directory_and_a_stranger_does_not(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    with (
        running_auth_server(tmp_path / "server") as server,
        swarm(server, tmp_path, *names),
    ):
        put = data("dht", "put", "note/hello", "good morning", home=tmp_path / names[0])
        assert put["replicas"] >= 1
        found: list[str] = []

        def finds_it() -> bool:
            answer = data("dht", "get", "note/hello", home=tmp_path / names[-1])
            found[:] = [slot["value"] for slot in answer["slots"]]
            return bool(found)

        eventually(finds_it)
        assert found == ["good morning"]
        address = data("status", home=tmp_path / names[0])["addresses"][0]

        stranger = potluck(
            "dht", "get", "note/hello", "--bootstrap", address, "--json",
            home=tmp_path / "mallory",
        )  # fmt: skip
        assert stranger.returncode == 3, stranger.stderr
        assert "potluck login INVITE" in stranger.stderr
        assert "good morning" not in stranger.stdout


def test_a_members_commands_work_while_no_node_runs_in_its_home(tmp_path: Path) -> None:
    with running_auth_server(tmp_path / "server") as server, swarm(server, tmp_path, "alice"):
        address = data("status", home=tmp_path / "alice")["addresses"][0]
        log_in(server, tmp_path / "dave", "dave")
        words = ("dht", "put", "note/hello", "from dave", "--bootstrap", address)
        assert data(*words, home=tmp_path / "dave")["replicas"] >= 1
        # and are asked of the node where one runs
        words = ("dht", "get", "note/hello", "--bootstrap", address)
        assert len(data(*words, home=tmp_path / "alice")["slots"]) == 1


def test_a_members_ping_is_a_call_and_a_strangers_the_links_own(tmp_path: Path) -> None:
    with running_auth_server(tmp_path / "server") as server, swarm(server, tmp_path, "alice"):
        address = data("status", home=tmp_path / "alice")["addresses"][0]
        log_in(server, tmp_path / "dave", "dave")
        assert data("ping", address, "--count", "1", home=tmp_path / "dave")["received"] == 1
        pinged = potluck("ping", address, "--count", "1", "--json", home=tmp_path / "mallory")
        assert objects(pinged.stdout)[0]["measured_by"] == "the link's own ping"


@pytest.mark.soak  # the short form is in test_membership.py
def test_tokens_are_renewed_and_an_outage_is_lived_through(tmp_path: Path) -> None:
    with (
        running_auth_server(
            tmp_path / "server", life_seconds=SHORTEST_LIFE_SECONDS, grace_seconds=300
        ) as server,
        swarm(server, tmp_path, "alice", "bob"),
    ):
        alice, bob = tmp_path / "alice", tmp_path / "bob"
        eventually(lambda: membership(alice)["expires_in_seconds"] < 4)
        eventually(lambda: membership(alice)["expires_in_seconds"] > 5)
        server.stop(signal.SIGKILL)
        eventually(lambda: membership(alice)["standing"] == "grace")
        assert "cannot be asked" in membership(alice)["trouble"]
        assert data("dht", "put", "note/a", "in the grace", home=alice)["replicas"] == 2
        assert data("dht", "get", "note/a", home=bob)["slots"][0]["value"] == "in the grace"
        server.start()
        eventually(lambda: membership(alice)["standing"] == "valid")
        assert membership(alice)["trouble"] == ""
        verdict = server.act("audit-verify")
        assert verdict["sound"], verdict


def test_a_revoked_volunteer_is_out_and_is_told_why(tmp_path: Path) -> None:
    with (
        running_auth_server(tmp_path / "server") as server,
        swarm(server, tmp_path, "alice", "bob") as commands,
    ):
        server.act("revoke", target="code:bob", reason="left the team")
        bob = commands["bob"].process
        assert bob.wait(timeout=PATIENCE_SECONDS) == 3
        assert bob.stdout is not None
        error = objects(bob.stdout.read().decode())[-1]["error"]
        assert "no longer take part in albert" in error["what"]
        assert error["exit_code"] == 3
        assert error["advice"]
        eventually(lambda: membership(tmp_path / "alice")["revocations"] > 0)

        # it is told the same when it tries again, until it is allowed again; then it logs in anew
        again = potluck("login", "--again", "--json", home=tmp_path / "bob",
                        POTLUCK_LOGIN_CODE=server.new_code("bob2"))  # fmt: skip
        assert again.returncode == 3, again.stdout
        server.act("allow", target="code:bob")
        log_in(server, tmp_path / "bob", "bob")
        assert data("whoami", home=tmp_path / "bob")["username"] == "code:bob"
        assert membership(tmp_path / "alice")["standing"] == "valid"


def test_a_revocation_reaches_the_swarm_while_the_server_is_down(tmp_path: Path) -> None:
    with (
        running_auth_server(tmp_path / "server") as server,
        swarm(server, tmp_path, "alice", "bob", "carol") as commands,
    ):
        server.write_settings(endpoints=(data("status", home=tmp_path / "alice")["addresses"][0],))
        server.stop()
        revoked = potluck("auth", "revoke", "code:bob", "--json", home=tmp_path / "server")
        assert revoked.returncode == 0, revoked.stderr + revoked.stdout
        assert commands["bob"].process.wait(timeout=PATIENCE_SECONDS) == 3
        for name in ("alice", "carol"):
            eventually(lambda name=name: membership(tmp_path / name)["revocations"] > 0)
