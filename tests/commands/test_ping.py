"""`potluck ping`: reached or not, which way, how fast; and why not."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.net.libp2p.settings import Libp2pSettings
from tests.commands.console import objects, potluck, running, running_node
from tests.ports import held_port
from tests.waiting import PATIENCE_SECONDS

PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A node that many tests ping: what it said when it had started."""
    home = tmp_path_factory.mktemp("pinged")
    with running_node(home) as (_, started):
        yield {**started, "address": started["addresses"][0], "home": home}


@pytest.mark.slow
def test_it_prints_a_line_for_each_ping_and_a_summary(node: dict[str, Any], tmp_path: Path) -> None:
    words = ("ping", "--count", "3", "--interval", "0.01", node["address"])
    result = potluck(*words, home=tmp_path)
    assert result.returncode == 0
    *pongs, summary = result.stdout.splitlines()
    assert len(pongs) == 3
    assert all(node["peer_id"] in pong and "direct" in pong for pong in pongs)
    assert summary.startswith("3 pings, 3 answers, 0% lost; min ")
    assert "Connected to" in result.stderr


@pytest.mark.slow
def test_with_json_each_line_is_an_event(node: dict[str, Any], tmp_path: Path) -> None:
    words = ("ping", "--json", "--count", "2", "--interval", "0.01", node["address"])
    result = potluck(*words, home=tmp_path)
    connected, first, second, summary = objects(result.stdout)
    assert result.stderr == ""
    assert connected["event"] == "connected"
    assert connected["measured_by"] == "/potluck/ping/1.0.0"
    assert [first["sequence"], second["sequence"]] == [1, 2]
    for pong in (first, second):
        assert (pong["event"], pong["reach"]) == ("pong", "direct")
        assert pong["address"].startswith("/ip4/127.0.0.1/tcp/")
        assert 0 < pong["round_trip_ms"] < 10_000
    times = sorted([first["round_trip_ms"], second["round_trip_ms"]])
    assert [summary["min_ms"], summary["max_ms"]] == times
    assert summary["min_ms"] <= summary["median_ms"] <= summary["max_ms"]
    assert (summary["sent"], summary["received"], summary["loss"]) == (2, 2, 0.0)


@pytest.mark.slow
def test_a_machine_without_a_key_pings_and_still_has_none(
    node: dict[str, Any], tmp_path: Path
) -> None:
    assert potluck("ping", "--count", "1", node["address"], home=tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_it_pings_as_itself_where_no_node_runs(tmp_path: Path) -> None:
    (own,) = objects(potluck("id", "--json", home=tmp_path / "b").stdout)
    with running_node(tmp_path / "a") as (pinged, started):
        potluck("ping", "--count", "1", started["addresses"][0], home=tmp_path / "b")
        assert pinged.next_object()["peer"] == own["peer_id"]


@pytest.mark.slow
def test_while_a_node_runs_its_pings_have_another_identity(tmp_path: Path) -> None:
    """Or the peer would take them for the node come back, and drop the node's own link."""
    with (
        running_node(tmp_path / "a") as (pinged, started),
        running_node(tmp_path / "b") as (_, own),
    ):
        potluck("ping", "--count", "1", started["addresses"][0], home=tmp_path / "b")
        assert pinged.next_object()["peer"] != own["peer_id"]


@pytest.mark.slow
def test_a_node_can_be_pinged_from_its_own_home(node: dict[str, Any]) -> None:
    assert potluck("ping", "--count", "1", node["address"], home=node["home"]).returncode == 0


@pytest.mark.slow
def test_pinging_oneself_while_not_running_says_so(tmp_path: Path) -> None:
    (own,) = objects(potluck("id", "--json", home=tmp_path).stdout)
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{own['peer_id']}"
    result = potluck("ping", address, home=tmp_path)
    assert result.returncode == 4
    assert "no node is running here" in result.stderr


def test_pinging_as_oneself_needs_a_key(tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
    result = potluck("ping", "--identity", "own", address, home=tmp_path)
    assert result.returncode == 2
    assert "potluck id" in result.stderr


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def unreachable(address: str, home: Path, timeout_seconds: float = PATIENCE_SECONDS) -> str:
    words = ("ping", "--timeout", str(timeout_seconds), "--json", address)
    result = potluck(*words, home=home)
    (answer,) = objects(result.stdout)
    assert result.returncode == answer["error"]["exit_code"] == 4
    assert result.stderr == ""
    error = answer["error"]
    return f"{error['what']} {error['why']} {error['advice']}"


@pytest.mark.slow
def test_nothing_there_is_unreachable_with_the_reason(tmp_path: Path) -> None:
    with held_port() as port:
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}"
        told = unreachable(address, tmp_path)
    assert "connection refused" in told
    assert address.partition("/p2p/")[0] in told


@pytest.mark.slow
def test_silence_is_unreachable_within_the_timeout(tmp_path: Path) -> None:
    with silent_port() as port:
        started = time.monotonic()
        told = unreachable(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}", tmp_path, 0.5)
        seconds = time.monotonic() - started
    assert str(port) in told
    assert seconds < Libp2pSettings().dial_seconds, "that is what it takes without --timeout"


@pytest.mark.slow
def test_somebody_else_there_is_unreachable_and_told_apart(
    node: dict[str, Any], tmp_path: Path
) -> None:
    elsewhere = node["address"].replace(node["peer_id"], PEER)
    assert "Another node answers there" in unreachable(elsewhere, tmp_path)


@pytest.mark.slow
def test_a_name_that_does_not_exist_is_unreachable_and_named(tmp_path: Path) -> None:
    told = unreachable(f"/dns4/no-such-name.invalid/tcp/4001/p2p/{PEER}", tmp_path)
    assert "no-such-name.invalid" in told


@pytest.mark.slow
def test_a_name_is_looked_up(node: dict[str, Any], tmp_path: Path) -> None:
    by_name = node["address"].replace("/ip4/127.0.0.1/", "/dns4/localhost/")
    assert potluck("ping", "--count", "1", by_name, home=tmp_path).returncode == 0


@pytest.mark.slow
def test_a_node_that_stops_is_reported_as_loss(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as (node, started):
        # time enough to connect on a busy machine, and to be stopped before the second is sent
        words = ("ping", "--json", "--count", "2", "--interval", "2", "--timeout", "2")
        with running(*words, started["addresses"][0], home=tmp_path / "b") as ping:
            assert ping.next_object()["event"] == "connected"
            assert ping.next_object()["event"] == "pong"
            node.process.send_signal(signal.SIGSTOP)
            assert ping.next_object()["event"] == "lost"
            summary = ping.next_object()
            assert ping.process.wait(timeout=PATIENCE_SECONDS) == 0, "one answer came"
    assert (summary["sent"], summary["received"]) == (2, 1)
