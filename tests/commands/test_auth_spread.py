"""Throwing somebody out while no auth server runs: the nodes hear of it through the directory.

Real processes: the server, two nodes of a run, and the moderator's command.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.commands.console import RunningCommand, potluck_here, running_node
from tests.commands.moderated import answer, auth, done, made, serving
from tests.ports import held_port

pytestmark = pytest.mark.slow

SPREAD_SECONDS = 60.0  # what is promised; here it takes some five


def stopped_server(home: Path, **volunteers: Path) -> Path:
    """A stopped server's home. The volunteers, in their own homes, got in while it ran."""
    with held_port() as port, serving(made(home, port=port), "--listen", f"127.0.0.1:{port}"):
        for name, theirs in volunteers.items():
            invite = done(home, "invite", "--new-code", "--name", name).strip()
            joined = potluck_here("login", invite, home=theirs)
            assert joined.returncode == 0, joined.stderr
    return home


def test_a_node_that_is_revoked_is_out_within_a_minute_though_no_server_runs(
    tmp_path: Path,
) -> None:
    home = stopped_server(tmp_path / "s", alice=tmp_path / "a", bob=tmp_path / "b")
    with running_node(tmp_path / "a") as (alice, started):
        address = started["addresses"][0]
        with running_node(tmp_path / "b", "--bootstrap", address) as (bob, bobs):
            assert _event_about(alice, bobs["peer_id"])["event"] == "connected"
            began = time.monotonic()
            revoked = answer(home, "revoke", "code:bob", "--bootstrap", address)
            assert revoked["live_tokens"] == 1
            assert revoked["spread"]["way"] == "directory"
            assert revoked["spread"]["replicas"] >= 1
            bob.process.wait(SPREAD_SECONDS)
            assert bob.process.returncode == 3, "it says that it is out, and ends"
            assert time.monotonic() - began < SPREAD_SECONDS
            while _event_about(alice, bobs["peer_id"])["event"] != "disconnected":
                pass
        assert auth(home, "revoke", "code:bob").returncode == 1, "revoked already"
        again = answer(home, "spread", "--bootstrap", address)
        assert again["list_number"] == revoked["list_number"]
        assert again["entries"] == 1


def test_nodes_that_could_not_be_told_are_named_and_can_be_told_later(tmp_path: Path) -> None:
    home = stopped_server(tmp_path / "s", bob=tmp_path / "b", here=tmp_path / "s")
    completed = auth(home, "revoke", "code:bob", "--reason", "sends garbage")
    assert completed.returncode == 4
    assert "code:bob is revoked." in completed.stdout
    assert "NOT SPREAD" in completed.stdout
    assert "potluck auth spread" in completed.stdout
    assert answer(home, "list", "code:bob")["account"]["state"] == "revoked"
    with running_node(home):  # on the server's own machine: no address is needed
        assert answer(home, "spread")["spread"] == {"way": "node", "number": _number(home)}


def test_a_name_that_is_given_to_another_is_told_as_well(tmp_path: Path) -> None:
    home = stopped_server(tmp_path / "s", bob=tmp_path / "b", here=tmp_path / "s")
    with running_node(home):
        rebound = answer(home, "allow", "code:bob", "--rebind")
        assert rebound["spread"] == {"way": "node", "number": rebound["list_number"]}
        again = done(home, "allow", "code:nobody", "--rebind")
        assert "There is nothing to spread" in again
    completed = auth(home, "allow", "code:here", "--rebind")
    assert completed.returncode == 4
    assert "NOT SPREAD" in completed.stdout


def test_a_withdrawn_key_is_told_by_a_courier_whom_the_nodes_still_know(tmp_path: Path) -> None:
    """The key that comes after it is unknown to them, and no server runs that they could ask."""
    home = stopped_server(tmp_path / "s", alice=tmp_path / "a")
    (key,) = answer(home, "keys", "list")["keys"]
    with running_node(tmp_path / "a") as (_, started):
        address = started["addresses"][0]
        told = done(home, "keys", "withdraw", key["key_id"], "--bootstrap", address)
    assert "the list is in the swarm's directory, at 1 node;" in told
    assert "START THE SERVER NOW" in told


def test_a_withdrawn_key_is_told_through_the_node_here(tmp_path: Path) -> None:
    home = stopped_server(tmp_path / "s", here=tmp_path / "s")
    (key,) = answer(home, "keys", "list")["keys"]
    with running_node(home):
        withdrawn = answer(home, "keys", "withdraw", key["key_id"])
    assert withdrawn["spread"] == {"way": "node", "number": withdrawn["list_number"]}


def _number(home: Path) -> int:
    number: int = answer(home, "list", "--revocations")["list_number"]
    return number


def _event_about(node: RunningCommand, peer: str) -> dict[str, object]:
    while True:
        event: dict[str, object] = json.loads(node.next_line())
        if event.get("peer") == peer:
            return event
