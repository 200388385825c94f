"""The key file: private, whole, one for two that race, refused when it is anything else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.core.key_file import FIRST_LINE, KeyFileError, load_identity, load_or_create_identity
from protocols.identity import Identity

RACING_PROCESSES = 8


def test_a_missing_key_is_made_private_and_loads_again_as_the_same_identity(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "key"
    first = load_or_create_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    assert load_or_create_identity(path).peer_id == first.peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_the_mode_is_0600_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        load_or_create_identity(tmp_path / "open")
        os.umask(0o277)
        load_or_create_identity(tmp_path / "narrow")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "narrow").stat().st_mode) == 0o600


def test_loading_without_creating_leaves_nothing_behind(tmp_path: Path) -> None:
    assert load_identity(tmp_path / "key") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o700, 0o644])
def test_a_looser_mode_is_refused_with_the_command_that_mends_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    load_or_create_identity(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError) as refusal:
        load_or_create_identity(path)
    assert f"{mode:04o}" in refusal.value.what
    assert f"chmod 600 {path}" in refusal.value.advice


def test_a_stricter_mode_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = load_or_create_identity(path)
    path.chmod(0o400)
    assert load_or_create_identity(path).peer_id == made.peer_id


def test_a_symbolic_link_is_refused_even_to_a_good_key(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(KeyFileError, match="symbolic link"):
        load_or_create_identity(tmp_path / "link")


def test_a_dangling_symbolic_link_is_refused_and_nothing_is_made_through_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError, match="symbolic link"):
        load_or_create_identity(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_a_pipe_and_a_device_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "folder", tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(KeyFileError, match="not an ordinary file"):
            load_or_create_identity(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\x00" * 64,
        b"\xff" * 101,
        f"{FIRST_LINE}\n".encode(),
        f"{FIRST_LINE}\n{'ab' * 31}\n".encode(),
        f"{FIRST_LINE}\n{'ab' * 32}".encode(),
        f"{FIRST_LINE}\n{'ab' * 32}\nmore\n".encode(),
        f"{FIRST_LINE}\n{'zz' * 32}\n".encode(),
        b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + b"A" * 400,
    ],
)
def test_garbage_is_refused_and_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="not a potluck key"):
        load_or_create_identity(path)
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KeyFileError, match="cannot be used") as refusal:
        load_or_create_identity(tmp_path / "file" / "key")
    assert refusal.value.advice


def test_the_key_is_nowhere_in_what_the_identity_prints(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "key")
    assert identity.seed.hex() not in repr(identity)


@pytest.mark.slow
def test_two_processes_that_race_end_with_one_key(tmp_path: Path) -> None:
    """Eight processes wait for a common starting gun; all must report the key that is on disk."""
    path = tmp_path / "key"
    gun_read, gun_write = os.pipe()
    program = (
        "import os, sys\n"
        "from node.core.key_file import load_or_create_identity\n"
        "os.write(1, b'r')\n"
        f"os.read({gun_read}, 1)\n"
        "print(load_or_create_identity(sys.argv[1]).peer_id)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            stdout=subprocess.PIPE,
            pass_fds=[gun_read],
        )
        for _ in range(RACING_PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"r"
    os.write(gun_write, b"g" * RACING_PROCESSES)
    answers = {process.communicate()[0].decode().strip() for process in processes}
    os.close(gun_read)
    os.close(gun_write)
    on_disk = load_identity(path)
    assert on_disk is not None
    assert answers == {on_disk.peer_id}
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_a_crash_while_writing_leaves_no_key_and_the_next_start_makes_one(tmp_path: Path) -> None:
    """A draft left beside the key by a crash is never mistaken for it."""
    (tmp_path / ".key.123.abcd").write_bytes(b"half a k")
    identity = load_or_create_identity(tmp_path / "key")
    assert isinstance(identity, Identity)
    assert (tmp_path / ".key.123.abcd").read_bytes() == b"half a k"
