"""`potluck listen`: a node that says where it is, that is alone in its home, and that tidies up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from pathlib import Path

import pytest

from tests.commands.console import (
    LOOPBACK,
    files_of_a_running_node,
    objects,
    potluck,
    running,
    running_node,
)
from tests.leaving import LEAVE_SECONDS
from tests.waiting import PATIENCE_SECONDS


@pytest.mark.slow
def test_it_prints_addresses_that_can_be_pinged(tmp_path: Path) -> None:
    with running("listen", "--listen", LOOPBACK, home=tmp_path / "a") as node:
        address = node.next_line()
        assert re.fullmatch(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/12D3KooW\w{44}", address)
        pinged = potluck("ping", "--count", "1", address, home=tmp_path / "b")
    assert pinged.returncode == 0


@pytest.mark.slow
def test_it_announces_what_it_is_told_to_before_what_it_found(tmp_path: Path) -> None:
    announced = "/dns4/node.example/tcp/4001"
    with running_node(tmp_path, "--announce", announced) as (_, started):
        assert started["addresses"][0] == f"{announced}/p2p/{started['peer_id']}"


@pytest.mark.slow
def test_it_tells_of_links_as_they_come_and_go(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as (node, started):
        potluck("ping", "--count", "1", started["addresses"][0], home=tmp_path / "b")
        came, went = node.next_object(), node.next_object()
    assert (came["event"], came["reach"], came["direction"]) == ("connected", "direct", "in")
    assert came["address"].startswith("/ip4/127.0.0.1/tcp/")
    assert (went["event"], went["peer"]) == ("disconnected", came["peer"])


@pytest.mark.slow
def test_it_uses_the_identity_of_its_home(tmp_path: Path) -> None:
    (own,) = objects(potluck("id", "--json", home=tmp_path).stdout)
    with running_node(tmp_path) as (_, started):
        assert started["peer_id"] == own["peer_id"]


@pytest.mark.slow
def test_only_its_owner_can_open_its_socket(tmp_path: Path) -> None:
    with running_node(tmp_path) as (_, started):
        control_socket = Path(started["control_socket"])
        assert stat.S_IMODE(control_socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(control_socket.parent.stat().st_mode) == 0o700


@pytest.mark.slow
def test_a_second_start_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    with running_node(tmp_path) as (node, _):
        second = potluck("listen", "--json", "--listen", LOOPBACK, home=tmp_path)
        (answer,) = objects(second.stdout)
        assert second.returncode == answer["error"]["exit_code"] == 3
        assert f"pid {node.pid}" in answer["error"]["what"]
        assert potluck("status", home=tmp_path).returncode == 0, "the first one is unharmed"


@pytest.mark.slow
def test_the_same_key_in_another_home_is_refused(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as (_, _started):
        key_file = str(tmp_path / "a" / "identity.key")
        second = potluck("listen", "--key-file", key_file, home=tmp_path / "b")
    assert second.returncode == 3
    assert key_file in second.stderr
    assert files_of_a_running_node(tmp_path / "b") == []


@pytest.mark.slow
def test_after_kill_9_it_starts_again_at_once(tmp_path: Path) -> None:
    with running_node(tmp_path) as (node, first):
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        assert files_of_a_running_node(tmp_path) == ["run/control.sock", "run/node.lock"]
        assert potluck("status", home=tmp_path).returncode == 4
        with running_node(tmp_path) as (again, second):
            assert second["peer_id"] == first["peer_id"]
            assert potluck("status", home=tmp_path).returncode == 0
            again.stop()
    assert files_of_a_running_node(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_it_cleanly(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with running_node(tmp_path) as (node, _):
        returned, seconds, errors = node.stop(number)
    assert returned == code
    # stopped at once, it may not have come to say that the run is open; nothing else is said
    assert errors == "" or (errors.startswith("OPEN RUN") and errors.count("\n") == 1)
    assert seconds < LEAVE_SECONDS
    assert files_of_a_running_node(tmp_path) == []


@pytest.mark.slow
def test_a_port_that_is_taken_is_explained(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as (_, started):
        taken = started["addresses"][0].partition("/p2p/")[0]
        result = potluck("listen", "--listen", taken, home=tmp_path / "b")
    assert result.returncode == 1
    assert taken in result.stderr
    assert "Traceback" not in result.stderr
    assert files_of_a_running_node(tmp_path / "b") == []


@pytest.mark.slow
def test_an_address_of_another_machine_is_explained(tmp_path: Path) -> None:
    result = potluck("listen", "--listen", "/ip4/198.51.100.1/tcp/0", home=tmp_path)
    assert result.returncode == 1
    assert "198.51.100.1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may bind any port")
def test_a_port_that_needs_root_is_explained(tmp_path: Path) -> None:
    result = potluck("listen", "--listen", "/ip4/127.0.0.1/tcp/80", home=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_reader_that_never_reads_does_not_stop_the_node(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 1024)
    os.set_blocking(writing, True)
    try:
        with running("listen", "--listen", LOOPBACK, home=tmp_path / "a", stdout=writing) as node:
            address = address_by_status(tmp_path / "a")
            pinged = potluck("ping", "--count", "1", address, home=tmp_path / "b")
            assert pinged.returncode == 0
            code, seconds, _ = node.stop()
    finally:
        os.close(reading)
        os.close(writing)
    assert (code, seconds < LEAVE_SECONDS) == (130, True)
    assert files_of_a_running_node(tmp_path / "a") == []


def address_by_status(home: Path) -> str:
    """The address of the node that is starting in `home`, as soon as it answers."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        status = potluck("status", "--json", home=home)
        if status.returncode == 0:
            (value,) = objects(status.stdout)
            return str(value["addresses"][0])
        assert time.monotonic() < deadline, status.stdout


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_cleanly(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as (node, started):
        assert node.process.stdout is not None
        node.process.stdout.close()
        potluck("ping", "--count", "1", started["addresses"][0], home=tmp_path / "b")
        assert node.process.wait(timeout=PATIENCE_SECONDS) == 141
        assert node.process.stderr is not None
        said = node.process.stderr.read().decode()
        assert said == "" or (said.startswith("OPEN RUN") and said.count("\n") == 1)
    assert files_of_a_running_node(tmp_path / "a") == []


@pytest.mark.slow
def test_that_the_run_is_open_is_said_to_programs_and_people(tmp_path: Path) -> None:
    with running_node(tmp_path) as (node, started):
        assert started["open_run"] is True
        assert started["membership"]["open"] is True
        assert node.process.stderr is not None
        assert node.process.stderr.readline().startswith(b"OPEN RUN: there is no auth server")
