"""No room on the disk: it is said plainly, nothing answered is lost, and it goes on with room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from auth.server.store import create_store, open_store
from auth.server.store_errors import DiskFull, StoreFailed
from tests.auth.store.stores import ROOT, RUN, Node, Person, Server, running

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL_DISK_BYTES = 2 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root, to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Ballast:
    """Takes all the room that is left, and gives it back."""

    def __init__(self, disk: Path) -> None:
        self.path = disk / "ballast"

    def fill(self) -> None:
        with self.path.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def remove(self) -> None:
        self.path.unlink()


def check_says_so(error: StoreFailed) -> None:
    assert error.what.startswith("There is no room to write to ")
    assert "nothing that was answered before is lost" in error.why
    assert "Free some space there" in error.advice


async def fill_until_told(server: Server, node: Node) -> int:
    """Renew until the store says that it is full; how many were answered."""
    answered = 0
    error = None
    while error is None:
        node.next_challenge = None
        try:
            await node.renew()
        except DiskFull as full:
            error = full
        else:
            answered += 1
    check_says_so(error)
    assert not server.store.health().writable
    assert server.store.health().trouble.startswith("There is no room")
    return answered


async def test_a_full_disk_is_said_and_the_server_goes_on_when_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = Ballast(small_disk)
    folder = small_disk / "auth"
    with running(folder) as server:
        server.allow("alice")
        node = Node(1, server)
        await node.join(Person("alice"))
        ballast.fill()
        answered = await fill_until_told(server, node)
        with pytest.raises(DiskFull):
            server.moderation.deny("alice", actor=ROOT)
        assert server.moderation.account("alice").state == "allowed"
        assert server.acts().count("renewed") == answered
        assert server.is_sound()
        server.pass_a_minute()
        assert not server.store.health().writable
        assert caplog.text.count("cannot write") == 1  # said once, however often it is tried
        ballast.remove()
        server.pass_a_minute()
        assert server.store.health().writable
        node.next_challenge = None
        await node.renew()
        assert server.store.health().writable
        assert server.acts().count("renewed") == answered + 1
        assert server.is_sound()
        assert "writes again" in caplog.text
    with running(folder) as server:
        assert server.acts().count("renewed") == answered + 1
        assert server.is_sound()


async def test_a_server_that_is_stopped_while_the_disk_is_full_loses_nothing(
    small_disk: Path,
) -> None:
    ballast = Ballast(small_disk)
    folder = small_disk / "auth"
    with running(folder) as server:
        server.allow("alice")
        node = Node(1, server)
        await node.join(Person("alice"))
        ballast.fill()
        answered = await fill_until_told(server, node)
    ballast.fill()  # closing made some room: the journal is in the file now
    with pytest.raises(StoreFailed) as caught, open_store(folder, actor="server"):
        pass
    assert caught.value.advice
    ballast.remove()
    with running(folder) as server:
        assert server.acts().count("renewed") == answered
        assert server.is_sound()


def test_a_backup_without_room_leaves_nothing_behind(small_disk: Path, tmp_path: Path) -> None:
    Ballast(small_disk).fill()
    with running(tmp_path / "auth") as server:
        with pytest.raises(DiskFull):
            server.moderation.backup(small_disk / "backup", actor=ROOT)
        assert [path.name for path in small_disk.iterdir()] == ["ballast"]
        assert server.acts()[-1] == "backup failed"


def test_a_run_is_not_half_made_without_room(small_disk: Path) -> None:
    ballast = Ballast(small_disk)
    ballast.fill()
    with pytest.raises(StoreFailed):
        create_store(small_disk / "auth", RUN, actor=ROOT)
    ballast.remove()
    create_store(small_disk / "auth", RUN, actor=ROOT)


# As a quota would: no file of this process may grow further.
CHILD = """
import resource, sys
from pathlib import Path

from auth.server.store_errors import DiskFull
from tests.auth.store.stores import ROOT, running

with running(Path(sys.argv[1])) as server:
    server.moderation.allow("alice", actor=ROOT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    done = 0
    try:
        while True:
            server.moderation.allow(f"friend{done}", actor=ROOT)
            done += 1
    except DiskFull as error:
        told = error
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    server.moderation.allow("zoe", actor=ROOT)
    assert server.is_sound()
    assert server.moderation.accounts().total == done + 2, (server.moderation.accounts(), done)
    print(done, told)
"""


@pytest.mark.slow
def test_a_quota_is_told_like_a_full_disk(folder: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], cwd=REPOSITORY, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    done, _, told = child.stdout.partition(" ")
    assert int(done) > 5
    assert told.startswith("There is no room to write to ")
