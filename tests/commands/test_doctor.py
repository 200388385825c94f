"""`potluck doctor`, as it is typed: for a person, for programs, and for a bug report."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from rich.console import Console

from auth.invites import Invite
from node.app.doctor import Finding, FindingLevel
from node.app.doctor.view import drawing
from node.core.places import find_places
from node.net import VERSION
from node.run.invite import RunInvite
from node.training.join import keep_invite
from tests.commands.console import COMMAND, environment, objects, potluck, running_node
from tests.ports import LOOPBACK, held_port

PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"
FINGERPRINT = "a" * 26
TOPICS = {
    "reach",
    "node", "settings", "files", "disk", "memory", "gpu", "torch", "dns", "ipv6", "mtu", "ports",
    "peers", "pass", "auth server", "clock",
}  # fmt: skip
# Loading torch is the slowest part, and has nothing to do with the network.
DEAD_NETWORK_SECONDS = 10.0


@pytest.mark.slow
def test_with_json_it_is_one_object_and_a_healthy_machine_is_ok(tmp_path: Path) -> None:
    with running_node(tmp_path) as (node, _):
        result = potluck("doctor", "--json", home=tmp_path)
    assert result.returncode == 0, result.stdout
    (answer,) = objects(result.stdout)
    assert set(answer) == {"ok", "version", "findings"}
    assert (answer["ok"], answer["version"]) == (True, VERSION)
    assert {one["topic"] for one in answer["findings"]} == TOPICS
    for one in answer["findings"]:
        assert set(one) == {"topic", "level", "says", "advice"}
        assert one["level"] in {"ok", "note", "warning"}
    (of_node,) = [one for one in answer["findings"] if one["topic"] == "node"]
    assert f"pid {node.pid}" in of_node["says"]


@pytest.mark.slow
def test_what_is_wrong_is_exit_code_1_with_what_to_do(tmp_path: Path) -> None:
    potluck("id", home=tmp_path)
    key = tmp_path / "identity.key"
    key.chmod(0o644)
    result = potluck("doctor", home=tmp_path)
    assert result.returncode == 1
    assert f"Other users may read {key}" in result.stdout
    assert f"next:  Run `chmod 600 {key}`." in result.stdout
    assert "Found: 1 error" in result.stdout
    assert "\x1b" not in result.stdout, "a pipe gets no colours"
    assert "Traceback" not in result.stderr


@contextmanager
def silent_port() -> Iterator[int]:
    """A port of loopback at which no handshake ends: the queue of its listener is full."""
    with socket.socket() as server, ExitStack() as clients:
        server.bind((LOOPBACK, 0))
        server.listen(0)
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(server.getsockname())
        yield server.getsockname()[1]


def leave_auth_server(home: Path, url: str) -> None:
    """The invite of a closed run, as the last `potluck join` has left it."""
    places = find_places({}, home=str(home))
    access = Invite("poem", (), url, FINGERPRINT, "", bytes(32))
    keep_invite(places, RunInvite("poem", (), FINGERPRINT, access=access))


@pytest.mark.slow
def test_on_a_dead_network_it_takes_less_than_ten_seconds(tmp_path: Path) -> None:
    with held_port() as closed, silent_port() as silent:
        addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}" for port in (closed, silent)]
        flags = [word for address in addresses for word in ("--bootstrap", address)]
        leave_auth_server(tmp_path, f"https://127.0.0.1:{silent}")
        began = time.monotonic()
        result = potluck("doctor", "--json", *flags, home=tmp_path)
        seconds = time.monotonic() - began
    (answer,) = objects(result.stdout)
    assert result.returncode == 1
    assert not answer["ok"]
    levels = [(one["topic"], one["level"]) for one in answer["findings"]]
    assert levels.count(("peers", "error")) == 2
    assert ("reach", "note") in levels
    assert ("auth server", "error") in levels
    assert seconds < DEAD_NETWORK_SECONDS


def has_own_networks() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    veth = ["unshare", "-n", "ip", "link", "add", "d0", "type", "veth", "peer", "name", "d1"]
    return subprocess.run(veth, capture_output=True, check=False).returncode == 0


# A network in which every packet vanishes: its gateway is nobody.
BLACK_HOLE = """\
ip link add d0 type veth peer name d1 && ip link set d0 up mtu 1200 && ip link set d1 up
ip addr add 10.9.9.2/24 dev d0 && ip route add default via 10.9.9.1
ip neigh add 10.9.9.1 lladdr 02:00:00:00:00:01 dev d0
"""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(not has_own_networks(), reason="needs root, Linux and iproute2")
def test_where_every_packet_vanishes_it_says_so_in_less_than_ten_seconds(tmp_path: Path) -> None:
    addresses = ("/dns4/backbone.example/tcp/4001", "/ip4/198.51.100.7/tcp/4001")
    flags = [word for one in addresses for word in ("--bootstrap", f"{one}/p2p/{PEER}")]
    command = shlex.join([*COMMAND, "doctor", "--json", *flags])
    began = time.monotonic()
    result = subprocess.run(
        ["unshare", "-n", "sh", "-ec", f"{BLACK_HOLE}\n{command}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    (answer,) = objects(result.stdout)
    says = {(one["topic"], one["level"]): one["says"] for one in answer["findings"]}
    assert "backbone.example" in says["dns", "error"]
    assert ("peers", "error") in says
    assert "1,200 bytes" in says["mtu", "warning"]
    assert seconds < DEAD_NETWORK_SECONDS


@pytest.mark.slow
def test_a_bundle_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "report.zip"
    result = potluck("doctor", "--bundle", str(file), "--json", home=tmp_path / "home")
    (answer,) = objects(result.stdout)
    assert answer["bundle"] == str(file)
    assert file.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(file) as archive:
        assert "findings.json" in archive.namelist()
    again = potluck("doctor", "--bundle", str(file), home=tmp_path / "home")
    assert again.returncode == 2
    assert "exists already" in again.stderr


FOUND = [
    Finding("disk", FindingLevel.OK, "Room is there."),
    Finding("files", FindingLevel.ERROR, "Others may read it.", "Run `chmod 600 x`."),
    Finding("files", FindingLevel.WARNING, "\x1b[2J[bold]x[/bold]", "Look at it."),
]


def drawn(findings: list[Finding], width: int) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    console.print(drawing(findings, width), soft_wrap=True)
    return screen.getvalue()


def test_a_topic_stands_once_and_each_finding_has_its_line() -> None:
    lines = drawn(FOUND, 80).splitlines()
    assert lines[0] == "disk         ok       Room is there."
    assert lines[1] == "files        error    Others may read it."
    assert lines[2] == "               next:  Run `chmod 600 x`."
    assert lines[3].startswith("             warning  ")
    assert lines[-1] == "Found: 1 error and 1 warning."


def test_text_of_others_cannot_control_the_terminal() -> None:
    text = drawn(FOUND, 80)
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text


def test_a_narrow_terminal_breaks_lines_below_their_beginning() -> None:
    says = "One thing after the other, and a few more words than fit."
    lines = drawn([Finding("disk", FindingLevel.NOTE, says)], 50).splitlines()
    assert all(line.startswith(" " * 22) for line in lines[1:-2])
    assert (
        drawn([Finding("disk", FindingLevel.NOTE, says)], 50).splitlines()[-1]
        == "Nothing is wrong."
    )
