"""One node per home and per key; a killed one leaves nothing in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.core.key_file import load_or_create_identity
from node.core.places import Places, find_places
from node.core.running_lock import AlreadyRunning, has_let_go, hold_running_lock, holder_of
from protocols.errors import PotluckError
from tests.commands.console import environment

HOLDER = """
import sys
from pathlib import Path
from node.core.places import find_places
from node.core.running_lock import hold_running_lock
with hold_running_lock(find_places({}, home=sys.argv[1]), Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = find_places({}, home=str(tmp_path / "home"))
    load_or_create_identity(key_of(places))
    return places


@pytest.fixture
def holder(places: Places) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock of `places`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(places.data_folder), str(key_of(places))],
        env=environment(places.data_folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def key_of(places: Places) -> Path:
    return places.data_folder / "identity.key"


def test_the_lock_says_who_holds_it_and_leaves_no_file(places: Places) -> None:
    with hold_running_lock(places, key_of(places)):
        assert places.lock_file.read_text() == str(os.getpid())
    assert list(places.run_folder.iterdir()) == []


def test_a_second_holder_is_refused_and_told_the_pid(
    places: Places, holder: subprocess.Popen[bytes]
) -> None:
    with (
        pytest.raises(AlreadyRunning, match=f"pid {holder.pid}") as caught,
        hold_running_lock(places, key_of(places)),
    ):
        pass
    assert caught.value.exit_code == 3
    assert places.lock_file.read_text() == str(holder.pid)


def test_one_can_wait_until_a_holder_has_let_go(
    places: Places, holder: subprocess.Popen[bytes]
) -> None:
    there = holder_of(places.lock_file)
    assert there is not None
    assert not has_let_go(places.lock_file, there, 0.1)
    assert holder.stdin is not None
    holder.stdin.close()
    assert has_let_go(places.lock_file, there, 60.0)
    with hold_running_lock(places, key_of(places)):
        assert has_let_go(places.lock_file, there, 0.0), "this is another one"
    assert holder_of(places.lock_file) is None
    assert has_let_go(places.lock_file, None, 0.0)


def test_a_killed_holder_is_succeeded_at_once(
    places: Places, holder: subprocess.Popen[bytes]
) -> None:
    there = holder_of(places.lock_file)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert has_let_go(places.lock_file, there, 0.0)
    assert places.lock_file.exists()
    with hold_running_lock(places, key_of(places)):
        assert places.lock_file.read_text() == str(os.getpid())
    assert not places.lock_file.exists()


@pytest.mark.usefixtures("holder")
def test_the_same_key_in_another_home_is_refused(places: Places, tmp_path: Path) -> None:
    elsewhere = find_places({}, home=str(tmp_path / "elsewhere"))
    with (
        pytest.raises(AlreadyRunning, match=r"identity\.key"),
        hold_running_lock(elsewhere, key_of(places)),
    ):
        pass
    assert list(elsewhere.run_folder.iterdir()) == []


@pytest.mark.usefixtures("holder")
def test_another_key_in_another_home_is_welcome(tmp_path: Path) -> None:
    elsewhere = find_places({}, home=str(tmp_path / "elsewhere"))
    load_or_create_identity(key_of(elsewhere))
    with hold_running_lock(elsewhere, key_of(elsewhere)):
        pass


def test_a_file_with_nonsense_in_it_is_no_lock(places: Places) -> None:
    places.run_folder.mkdir(mode=0o700)
    places.lock_file.write_bytes(b"\xff 12 of the clock" * 100)
    with hold_running_lock(places, key_of(places)):
        assert places.lock_file.read_text() == str(os.getpid())


def test_a_lock_file_that_is_a_link_is_not_followed(places: Places, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    places.run_folder.mkdir(mode=0o700)
    places.lock_file.symlink_to(victim)
    with pytest.raises(OSError), hold_running_lock(places, key_of(places)):  # noqa: PT011
        pass
    assert victim.read_text() == "precious"


def test_a_folder_that_others_may_read_is_closed(places: Places) -> None:
    places.run_folder.mkdir(mode=0o755)
    with hold_running_lock(places, key_of(places)):
        assert places.run_folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_refused(places: Places) -> None:
    places.run_folder.mkdir()
    places.run_folder.chmod(0o777)
    with (
        pytest.raises(PotluckError, match="Others may write"),
        hold_running_lock(places, key_of(places)),
    ):
        pass
