"""`potluck status`: for people on any terminal, for programs, once or again and again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from node.app.views import status_view
from node.app.views.status_view import amount, drawing, duration, milliseconds
from node.core.status import (
    AddressStatus,
    ConnectivityStatus,
    DirectoryStatus,
    LinkStatus,
    NodeStatus,
    RelayStatus,
)
from node.core.training_view import TrainerPhase, TrainerView
from tests.commands.console import objects, potluck, running, running_node
from tests.waiting import PATIENCE_SECONDS

PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"


@pytest.mark.slow
def test_without_a_node_it_is_unreachable(tmp_path: Path) -> None:
    result = potluck("status", home=tmp_path)
    assert result.returncode == 4
    assert "No node is running here" in result.stderr
    assert "potluck listen" in result.stderr
    (answer,) = objects(potluck("status", "--json", home=tmp_path).stdout)
    assert answer["error"]["exit_code"] == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_as_json_it_is_one_object_with_every_field(tmp_path: Path) -> None:
    (tmp_path / "potluck.toml").write_text("[network]\ndial_seconds = 5")
    with running_node(tmp_path) as (node, started):
        (status,) = objects(potluck("status", "--json", home=tmp_path).stdout)
    assert set(status) == set(NodeStatus.__struct_fields__)
    assert status["peer_id"] == started["peer_id"]
    assert status["pid"] == node.pid
    assert status["addresses"] == started["addresses"]
    assert status["config_file"] == str(tmp_path / "potluck.toml")
    assert status["key_file"] == str(tmp_path / "identity.key")
    assert status["memory_bytes"] > 10_000_000
    assert status["rpc"]["requests_served"] == 0
    assert status["links"] == []


@pytest.mark.slow
def test_it_shows_a_link_and_counts_what_was_served(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as (_, started):
        words = ("ping", "--json", "--interval", "0.05", "--count", "1000")
        with running(*words, started["addresses"][0], home=tmp_path / "b") as ping:
            for _ in range(3):
                ping.next_object()
            (status,) = objects(potluck("status", "--json", home=tmp_path / "a").stdout)
            person = potluck("status", home=tmp_path / "a")
    (link,) = status["links"]
    assert (link["reach"], link["direction"]) == ("direct", "in")
    assert link["bytes_received"] > 0
    assert link["streams"] >= 1
    assert status["rpc"]["requests_served"] >= 2
    assert link["peer"] in person.stdout
    assert "\x1b" not in person.stdout, "a pipe gets no colours"


@pytest.mark.slow
def test_watching_is_a_status_per_line(tmp_path: Path) -> None:
    with (
        running_node(tmp_path),
        running("status", "--watch", "--json", "--interval", "0.1", home=tmp_path) as watch,
    ):
        first, second, third = (watch.next_object() for _ in range(3))
    assert first["uptime_seconds"] < second["uptime_seconds"] < third["uptime_seconds"]


@pytest.mark.slow
def test_a_watcher_learns_that_the_node_has_ended(tmp_path: Path) -> None:
    with (
        running_node(tmp_path) as (node, _),
        running("status", "--watch", "--json", "--interval", "0.1", home=tmp_path) as watch,
    ):
        watch.next_object()
        node.stop()
        watch.process.communicate(timeout=PATIENCE_SECONDS)  # it may have filled its pipe by now
        assert watch.process.returncode == 4


def status_with(**fields: Any) -> NodeStatus:
    link = LinkStatus(peer=PEER, reach="direct", address="/ip4/192.0.2.7/tcp/4001", **fields)
    return NodeStatus(peer_id=PEER, addresses=(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",), links=(link,))


def drawn(status: NodeStatus, width: int, *, terminal: bool = True) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=terminal, color_system=None)
    console.print(drawing(status, console), soft_wrap=True)
    return screen.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 120, 140, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_peer_id_and_address_are_whole_at_every_width(width: int, terminal: bool) -> None:
    text = drawn(status_with(), width, terminal=terminal)
    assert text.count(PEER) >= 2
    assert "/ip4/192.0.2.7/tcp/4001" in text


def test_text_of_a_peer_cannot_control_the_terminal() -> None:
    hostile = LinkStatus(peer="\x1b]0;owned\x07[bold]x[/bold]", address="\x1b[2J\r\u202e\x9b31m")
    for width in (40, 200):
        text = drawn(NodeStatus(links=(hostile,)), width)
        assert "\x1b]" not in text
        assert "\x1b[2J" not in text
        assert "\x9b" not in text
        assert "\u202e" not in text
        assert "[bold]x[/bold]" in text


def test_the_status_of_an_older_or_newer_node_can_be_shown() -> None:
    assert "peer id" in drawn(msgspec.convert({}, NodeStatus), 80)
    newer = {"peer_id": PEER, "mood": "fine", "links": [{"peer": PEER, "colour": "red"}]}
    assert PEER in drawn(msgspec.convert(newer, NodeStatus), 80)


@pytest.mark.parametrize(
    ("keeps", "said"),
    [(False, "averaging, training for"), (True, "averaging, keeping the run for")],
)
def test_a_round_is_told_apart_from_what_it_is_part_of(keeps: bool, said: str) -> None:
    view = TrainerView(
        run="poem", phase=TrainerPhase.AVERAGING, phase_seconds=3.0, keeps_only=keeps
    )
    assert f"poem, {said} 3.0 s" in drawn(NodeStatus(training=view), 80)


def test_one_peer_is_not_a_plural() -> None:
    one = DirectoryStatus(peers_known=1, slots_stored=1)
    assert "1 node known, 1 slot kept" in drawn(NodeStatus(directory=one), 80)
    assert "0 nodes known, 2 slots kept" in drawn(
        NodeStatus(directory=DirectoryStatus(slots_stored=2)), 80
    )


def test_a_link_that_was_not_measured_says_so() -> None:
    assert "not measured" in drawn(status_with(), 80)
    assert "12.5 ms" in drawn(status_with(round_trip_ms=12.5), 80)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (100_000, "1 d 3 h")],
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")],
)
def test_amounts_are_in_binary_units(count: int | None, text: str) -> None:
    assert amount(count) == text


def test_round_trips_are_in_milliseconds() -> None:
    assert milliseconds(0.25) == "0.2 ms"
    assert status_view.milliseconds(None) == "not measured"


def test_it_says_how_others_reach_this_node_and_what_it_relays() -> None:
    status = NodeStatus(
        connectivity=ConnectivityStatus(
            mode="punched",
            router="port-restricted",
            addresses=(AddressStatus("/ip4/192.0.2.7/tcp/4001", "private"),),
            relays=("12D3KooWone", "12D3KooWtwo"),
        ),
        relay=RelayStatus(
            3,
            2,
            1_200_000_000,
            refusals={"circuits": 2, "busy": 1},
            month="2026-11",
            month_bytes=2 * 10**9,
            month_limit=500 * 10**9,
        ),
    )
    console = Console(file=io.StringIO(), width=200)
    text = shown(status, console)
    assert "reached  punched (router: port-restricted), through 12D3KooWone, 12D3KooWtwo\n" in text
    assert "         /ip4/192.0.2.7/tcp/4001: others cannot dial it\n" in text
    assert (
        "relays   for others: 3 reservations, 2 circuits, 1.2 GB, 2 GB of 500 GB in 2026-11, "
        "3 refused (busy 1, circuits 2)\n"
    ) in text


def shown(status: NodeStatus, console: Console) -> str:
    console.print(drawing(status, console), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_gpus_memory_is_shown_beside_the_machines() -> None:
    def memory(training: TrainerView | None) -> str:
        console = Console(width=100, file=io.StringIO())
        console.print(drawing(NodeStatus(memory_bytes=3 << 29, training=training), console))
        shown = console.file.getvalue()
        return next(line for line in shown.splitlines() if line.startswith("memory")).rstrip()

    assert memory(None) == memory(TrainerView()) == "memory   1.5 GiB"
    assert memory(TrainerView(device_memory_bytes=11 << 30)) == (
        "memory   1.5 GiB, and 11.0 GiB of the GPU's"
    )
