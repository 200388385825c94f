"""`potluck backbone`: its flags, its unit for systemd, and a node that only relays."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from node.app.systemd import HOMES, STATE_FOLDER, BackboneUnit
from node.core.configuration import Configuration, read_configuration
from node.core.settings import Value
from tests.commands.console import LOOPBACK, objects, potluck, running

PROGRAM = "/usr/bin/potluck"
SOMEBODYS = HOMES[0] / "ann"


@pytest.mark.parametrize(
    ("words", "what", "next_step"),
    [
        ([], "There is no run in this folder", "--relay-only"),
        (["poem", "--relay-only"], "poem is not needed with --relay-only", "--relay-for everybody"),
        (["--relay-only", "--no-relay"], "needs the relay, which is switched off", "listen"),
        (["--relay-only", "--from-peers"], "--from-peers cannot be used", ""),
        (["--relay-only", "--quota", "5GB/month"], "--quota cannot be used", "month="),
        (["--relay-only", "--threads", "2", "--offload"], "--threads and --offload", ""),
        (["--relay-only", "--when-idle", "--device", "cpu"], "--device and --when-idle", ""),
        (["--relay-only", "--relay-for", "friends"], "--relay-for cannot be 'friends'", "members"),
        (["--relay-only", "--relay-limits", "a=1"], "--relay-limits cannot be 'a=1'", "circuits="),
        (["--relay-only", "--relay-limits", "reservations=1024"], "cannot hold 1,024", "fewer"),
        (["--relay-only", "--http", "nonsense"], "--http", ""),
    ],
)
def test_wrong_use_is_told_with_what_to_do(
    words: list[str], what: str, next_step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = potluck("backbone", *words, home=tmp_path / "home")
    assert done.returncode == 2
    assert what in done.stderr
    assert next_step in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("really_started")  # what it loads is looked at
def test_a_node_that_only_relays_prints_its_address_and_answers_over_http(tmp_path: Path) -> None:
    words = ("--relay-only", "--json", "--listen", LOOPBACK, "--http", "127.0.0.1:0")
    limits = ("--relay-limits", "circuits=4, month=5GB/month")
    with running("backbone", *words, *limits, home=tmp_path) as node:
        started, serving = node.next_object(), node.next_object()
        (status,) = objects(potluck("status", "--json", home=tmp_path).stdout)
        for_people = potluck("status", home=tmp_path).stdout
        pinged = potluck("ping", "--count", "1", started["addresses"][0], home=tmp_path / "b")
        ready = json.loads(get(f"{serving['url']}/readyz"))
        healthy = json.loads(get(f"{serving['url']}/healthz"))
        figures = get(f"{serving['url']}/metrics").decode()
        modules = Path(f"/proc/{node.pid}/maps").read_text(encoding="utf-8")
        code, _, _ = node.stop()
    assert code == 130
    assert pinged.returncode == 0
    assert ready == {"ready": True, "troubles": {}}
    assert healthy == {"healthy": True, "troubles": {}}
    assert "potluck_backbone_relay_month_left_bytes 5e+09" in figures
    assert "potluck_backbone_relay_circuits_limit 4.0" in figures
    assert status["relay"]["month_limit"] == 5_000_000_000
    assert "for others: 0 reservations, 0 circuits, 0 B, 0 B of 5 GB in" in for_people
    assert "libtorch" not in modules
    assert (tmp_path / "dht.sqlite").exists(), "a node to join through keeps its slots"


@pytest.mark.slow
def test_a_taken_port_ends_it_with_the_reason(tmp_path: Path) -> None:
    words = ("backbone", "--relay-only", "--json", "--listen", LOOPBACK, "--http")
    with running(*words, "127.0.0.1:0", home=tmp_path / "a") as node:
        node.next_object()
        taken = node.next_object()["url"].removeprefix("http://")
        done = potluck(*words, taken, home=tmp_path / "b")
    assert done.returncode == 1
    assert "Address already in use" in done.stdout


def test_the_unit_runs_this_very_command_line(tmp_path: Path) -> None:
    words = (
        "--relay-only",
        "--upload-limit",
        "1MB/s",
        "--relay-limits",
        "circuits=64, month=500GB/month",
    )
    more = ("--listen", "/ip4/0.0.0.0/tcp/443", "--listen", "/ip6/::/tcp/443", "--systemd")
    done = potluck("backbone", *words, *more, home=tmp_path / "my home")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    (start,) = (line for line in lines if line.startswith("ExecStart="))
    assert start.endswith(
        " backbone --relay-only --plain --http 127.0.0.1:8481 "
        '--relay-limits "circuits=64, month=500GB/month" --upload-limit 1MB/s '
        "--listen /ip4/0.0.0.0/tcp/443 --listen /ip6/::/tcp/443"
    )
    assert f'Environment="POTLUCK_HOME={tmp_path}/my home"' in lines
    assert f'ReadWritePaths="{tmp_path}/my home"' in lines
    assert "CapabilityBoundingSet=CAP_NET_BIND_SERVICE" in lines
    assert f"MemoryMax={(256 + 64) * 1024 * 1024}" in lines
    assert not (tmp_path / "my home").exists()


@pytest.mark.parametrize(("port", "is_low"), [(80, True), (8481, False), (0, False)])
def test_the_unit_may_answer_at_a_low_port(port: int, is_low: bool, tmp_path: Path) -> None:
    words = ("--relay-only", "--http", f"0.0.0.0:{port}", "--systemd")
    lines = potluck("backbone", *words, home=tmp_path / "home").stdout.splitlines()
    assert ("AmbientCapabilities=CAP_NET_BIND_SERVICE" in lines) == is_low
    assert ("CapabilityBoundingSet=CAP_NET_BIND_SERVICE" in lines) == is_low


@pytest.mark.parametrize("folder", [None, STATE_FOLDER / "poem", SOMEBODYS / "100 % poem"])
def test_systemd_reads_the_unit_and_finds_it_hardened(folder: Path | None, tmp_path: Path) -> None:
    program = tmp_path / "potluck"
    program.symlink_to("/bin/true")
    unit = unit_of(folder, program=str(program))
    text = unit.text()
    for line in (
        "RestartPreventExitStatus=2 3",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "LimitNOFILE=4096",
    ):
        assert f"\n{line}\n" in text
    if shutil.which("systemd-analyze") is None:
        return
    file = tmp_path / "potluck-backbone.service"
    file.write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_only_the_folders_that_it_needs_can_be_written() -> None:
    inside = unit_of(STATE_FOLDER / "poem").text()
    assert "StateDirectory=potluck\n" in inside
    assert "ReadWritePaths" not in inside
    assert "ProtectHome=yes" in inside
    outside = unit_of(SOMEBODYS / "poem").text()
    assert f"ReadWritePaths={SOMEBODYS}/poem\n" in outside
    assert "ProtectHome=read-only" in outside


def test_the_memory_is_the_owners_limit_with_some_room() -> None:
    unit = unit_of(STATE_FOLDER / "poem", configured({"limits.max_memory": "8GB"}))
    assert "\nMemoryMax=10000000000\n" in unit.text()


def configured(flags: dict[str, Value] | None = None) -> Configuration:
    return read_configuration({"relay.serve": True, **(flags or {})}, environment={})


def unit_of(
    folder: Path | None, configuration: Configuration | None = None, program: str = PROGRAM
) -> BackboneUnit:
    where = ("--relay-only",) if folder is None else (str(folder),)
    return BackboneUnit(
        (program, "backbone", *where), folder, None, None, configuration or configured()
    )


def get(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30.0) as answer:
        body: bytes = answer.read()
        return body
