"""`potluck dht`: through the running node, and as a client for one question."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.console import Completed, objects, potluck_here, running_node

NOBODY = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"


pytestmark = pytest.mark.slow  # each command is a process of its own

Started = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One node, alone in its swarm, for all tests here; each takes keys of its own."""
    home = tmp_path_factory.mktemp("home")
    with running_node(home) as (_, started):
        yield home, started


@pytest.fixture(scope="module")
def home(running: Started) -> Path:
    """Where that node runs."""
    return running[0]


@pytest.fixture(scope="module")
def node(running: Started) -> dict[str, Any]:
    """The output of that node at its start."""
    return running[1]


def answer(completed: Completed) -> dict[str, Any]:
    assert completed.returncode == 0, completed.stderr
    (one,) = objects(completed.stdout)
    return one


def test_a_value_that_was_put_is_found(node: dict[str, Any], home: Path) -> None:
    stored = answer(potluck_here("dht", "put", "note/a", "grüß dich", "--json", home=home))
    assert (stored["key"], stored["publisher"]) == ("note/a", node["peer_id"])
    assert stored["replicas"] == 1
    assert 3590 < stored["expires_in_seconds"] <= 3600
    (slot,) = answer(potluck_here("dht", "get", "note/a", "--json", home=home))["slots"]
    assert (slot["value"], slot["publisher"]) == ("grüß dich", node["peer_id"])
    assert slot["sequence"] == stored["sequence"]


def test_a_person_reads_the_value_and_who_said_it(node: dict[str, Any], home: Path) -> None:
    put = potluck_here("dht", "put", "note/b", "hello", "--ttl", "120", home=home)
    assert re.search(r"at 1 node, for another (2 min|1 min 5\d s), as 12D3KooW", put.stdout)
    value, publisher = potluck_here("dht", "get", "note/b", home=home).stdout.splitlines()
    assert value == "hello"
    assert node["peer_id"] in publisher


def test_text_of_a_peer_cannot_control_the_terminal(home: Path) -> None:
    potluck_here("dht", "put", "note/c", "\x1b[2Jgone", home=home)
    shown = potluck_here("dht", "get", "note/c", home=home).stdout
    assert "\x1b" not in shown
    assert "gone" in shown


def test_a_node_that_knows_no_other_does_not_say_that_nothing_is_stored(home: Path) -> None:
    assert answer(potluck_here("dht", "get", "note/none", "--json", home=home)) == {
        "key": "note/none",
        "slots": [],
        "peers_known": 0,
    }
    told = potluck_here("dht", "get", "note/none", home=home).stdout
    assert "knows no other node to ask" in told
    assert "Nothing is stored" not in told


def test_an_empty_answer_is_not_a_failure(node: dict[str, Any], tmp_path: Path) -> None:
    command = ("dht", "get", "note/none", "--bootstrap", node["addresses"][0])
    told = potluck_here(*command, home=tmp_path)
    assert (told.returncode, told.stdout) == (0, "Nothing is stored under note/none.\n")


def test_a_second_put_replaces_the_first(home: Path) -> None:
    for value in ("one", "two"):
        potluck_here("dht", "put", "note/d", value, home=home)
    slots = answer(potluck_here("dht", "get", "note/d", "--json", home=home))["slots"]
    assert [slot["value"] for slot in slots] == ["two"]


def test_a_client_reads_and_writes_through_any_node(
    node: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    address = node["addresses"][0]
    potluck_here("dht", "put", "note/e", "by the node", home=home)
    stored = answer(
        potluck_here("dht", "put", "note/e", "by a client", "--bootstrap", address, "--json",
                home=tmp_path)
    )  # fmt: skip
    assert stored["replicas"] == 1
    seen = answer(
        potluck_here(
            "dht", "get", "note/e", "--first", "--bootstrap", address, "--json", home=tmp_path
        )
    )
    assert {slot["publisher"]: slot["value"] for slot in seen["slots"]} == {
        node["peer_id"]: "by the node",
        stored["publisher"]: "by a client",
    }
    stats = answer(potluck_here("dht", "stats", "--bootstrap", address, "--json", home=tmp_path))
    assert (stats["joined"], stats["peers_in_table"]) == ("joined", 1)
    assert list(tmp_path.iterdir()) == [], "a client leaves nothing behind"


def test_a_client_beside_the_running_node_has_another_name(
    node: dict[str, Any], home: Path
) -> None:
    address = node["addresses"][0]
    command = ("dht", "put", "note/f", "x", "--bootstrap", address, "--json")
    assert answer(potluck_here(*command, home=home))["publisher"] != node["peer_id"]


def test_a_client_goes_under_the_own_name_where_no_node_runs(
    node: dict[str, Any], tmp_path: Path
) -> None:
    own = answer(potluck_here("id", "--json", home=tmp_path))["peer_id"]
    command = ("dht", "put", "note/g", "x", "--bootstrap", node["addresses"][0], "--json")
    assert answer(potluck_here(*command, home=tmp_path))["publisher"] == own


def test_the_statistics_count_what_was_done(home: Path) -> None:
    before = answer(potluck_here("dht", "stats", "--json", home=home))
    potluck_here("dht", "put", "note/h", "x", home=home)
    after = answer(potluck_here("dht", "stats", "--json", home=home))
    assert after["slots_stored"] == before["slots_stored"] + 1
    assert after["bytes_stored"] > before["bytes_stored"]
    assert "slots stored" in potluck_here("dht", "stats", home=home).stdout


def test_the_status_shows_the_directory(home: Path) -> None:
    potluck_here("dht", "put", "note/i", "x", home=home)
    directory = answer(potluck_here("status", "--json", home=home))["directory"]
    assert directory["slots_stored"] >= 1
    assert re.search(r"\d slots? kept", potluck_here("status", home=home).stdout)


@pytest.mark.parametrize("key", ["hello", "/x", "note/", "note/" + "x" * 300])
def test_an_invalid_key_is_wrong_use(key: str, tmp_path: Path) -> None:
    done = potluck_here("dht", "get", key, home=tmp_path)
    assert done.returncode == 2
    assert "note/hello" in done.stderr


def test_an_unknown_family_is_refused_with_those_that_are_known(home: Path) -> None:
    done = potluck_here("dht", "put", "nothing/x", "y", home=home)
    assert done.returncode == 3
    assert "note" in done.stderr


def test_a_value_that_is_too_large_is_refused_with_the_limit(home: Path) -> None:
    done = potluck_here("dht", "put", "note/j", "x" * 5000, home=home)
    assert done.returncode == 3
    assert "4,096" in done.stderr


def test_a_life_that_is_too_long_is_refused(home: Path) -> None:
    done = potluck_here("dht", "put", "note/k", "x", "--ttl", "31536000", home=home)
    assert done.returncode == 3
    assert "86,400" in done.stderr


def test_without_a_running_node_it_says_what_else_to_do(tmp_path: Path) -> None:
    done = potluck_here("dht", "get", "note/a", home=tmp_path)
    assert done.returncode == 4
    assert "--bootstrap" in done.stderr


def test_a_dead_address_is_named_at_once_with_what_happened_there(tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
    done = potluck_here("dht", "get", "note/a", "--bootstrap", address, "--json", home=tmp_path)
    (failure,) = objects(done.stdout)
    assert done.returncode == failure["error"]["exit_code"] == 4
    assert "connection refused" in failure["error"]["why"]


def test_an_invalid_address_is_wrong_use(tmp_path: Path) -> None:
    done = potluck_here("dht", "get", "note/a", "--bootstrap", "192.0.2.7:4001", home=tmp_path)
    assert done.returncode == 2
    assert "/ip4/192.0.2.7/tcp/4001/p2p/" in done.stderr
