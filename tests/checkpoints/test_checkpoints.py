"""Checkpoints: whole or not there, kept by a policy, and refused by name when they are broken."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from node.core.wrong_use import WrongUse
from node.run.checkpoint_file import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointBroken,
    CheckpointFailed,
    read_checkpoint,
)
from node.run.checkpoints import Checkpoints, KeepPolicy
from node.run.folder import RunFolder
from node.run.safetensors_file import BrokenFile, read_header
from tests.checkpoints.states import state_of


def test_a_checkpoint_gives_back_the_same_state(tmp_path: Path) -> None:
    state = state_of(epoch=42)
    path = Checkpoints(tmp_path).save(state, model={"name": "gpt"})
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    assert found.path == path
    assert path.name == f"epoch-0000000042-{state.digest.hex()[:8]}"
    assert found.state.digest == state.digest
    assert (found.state.run, found.state.epoch, found.state.history) == ("test", 42, b"\x2a" * 16)
    assert found.state.extra["scale"] == 65536.0
    assert found.model == {"name": "gpt"}


def test_its_tensors_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    state = state_of()
    path = Checkpoints(tmp_path).save(state)
    with safe_open(path / STATE_FILE, framework="pt") as file:
        assert set(file.keys()) == {spec.name for spec in state.specs}
        for spec in state.specs:
            assert torch.equal(file.get_tensor(spec.name), state.tensor(spec.name))


def test_files_that_the_safetensors_library_writes_are_read_here(tmp_path: Path) -> None:
    tensors = {
        "b": torch.ones(3, dtype=torch.float16),
        "a": torch.arange(5),
        "c": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "file", {"format": "pt"})
    with open(tmp_path / "file", "rb") as file:
        header = read_header(file)
    assert [(one.name, one.dtype, one.shape) for one in header.tensors] == [
        ("a", "int64", (5,)),
        ("b", "float16", (3,)),
        ("c", "float32", ()),
    ]
    assert header.metadata == {"format": "pt"}


def test_saving_the_same_state_twice_writes_it_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(state_of())
    before = (path / STATE_FILE).stat().st_mtime_ns
    assert checkpoints.save(state_of()) == path
    assert (path / STATE_FILE).stat().st_mtime_ns == before


def epochs_in(folder: Path) -> list[int]:
    return [int(one.name[6:16]) for one in Checkpoints(folder).paths()]


def test_the_newest_and_every_so_manieth_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, KeepPolicy(keep_last=2, keep_every=4))
    for epoch in range(1, 11):
        checkpoints.save(state_of(epoch))
    assert epochs_in(tmp_path) == [10, 9, 8, 4]
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


@given(st.lists(st.integers(0, 50), unique=True, min_size=1), st.integers(1, 5), st.integers(0, 10))
def test_a_policy_never_lets_the_newest_go(epochs: list[int], last: int, every: int) -> None:
    surplus = KeepPolicy(last, every).surplus(epochs)
    kept = set(epochs) - surplus
    assert max(epochs) in kept
    assert len(kept) >= min(last, len(epochs))
    assert all(not every or one % every for one in surplus)


def test_a_policy_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(WrongUse, match="are impossible"):
        KeepPolicy(keep_last=0)


def test_a_broken_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1))
    broken = checkpoints.save(state_of(2))
    with open(broken / STATE_FILE, "r+b") as file:
        file.truncate(1000)
    said: list[str] = []
    found = checkpoints.newest(said.append)
    assert found is not None
    assert found.state.epoch == 1
    assert len(said) == 1
    assert str(broken) in said[0]
    assert broken.exists()  # for a person to look at


def flip_a_byte(path: Path) -> None:
    with open(path / STATE_FILE, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def put_huge_header(path: Path) -> None:
    (path / STATE_FILE).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def put_large_header(path: Path) -> None:
    with open(path / STATE_FILE, "wb") as file:
        file.write((100 << 20).to_bytes(8, "little"))
        file.truncate(200 << 20)


def change_header(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = (path / STATE_FILE).read_bytes()
        assert old in content
        (path / STATE_FILE).write_bytes(content.replace(old, new, 1))

    return change


def change_manifest(**fields: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        manifest = json.loads((path / MANIFEST_FILE).read_text())
        (path / MANIFEST_FILE).write_text(json.dumps({**manifest, **fields}))

    return change


def put_link(path: Path) -> None:
    (path / STATE_FILE).unlink()
    (path / STATE_FILE).symlink_to("/etc/passwd")


def put_pipe(path: Path) -> None:
    (path / MANIFEST_FILE).unlink()
    os.mkfifo(path / MANIFEST_FILE)


def put_folder(path: Path) -> None:
    (path / STATE_FILE).unlink()
    (path / STATE_FILE).mkdir()


def put_endless_nesting(path: Path) -> None:
    (path / MANIFEST_FILE).write_text('{"model":' + "[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: (path / STATE_FILE).unlink(), "has no state.safetensors"),
        (lambda path: (path / MANIFEST_FILE).unlink(), "has no manifest.json"),
        (flip_a_byte, "do not match the digest"),
        (put_huge_header, "ends within its header"),
        (put_large_header, "header says that it has 104,857,600 bytes"),
        (change_header(b'"BF16"', b'"WAT!"'), "unknown type 'WAT!'"),
        (change_header(b'"shape":[16,8]', b'"shape":[99,9]'), "is not where its header says"),
        (change_header(b'"data_offsets":[0,', b'"data_offsets":[8,'), "is not where its header"),
        (change_header(b'{"__metadata__"', b'["__metadata__"'), "header cannot be read"),
        (change_manifest(epoch=7), "do not match the digest"),
        (change_manifest(digest="00" * 32), "do not match the digest"),
        (change_manifest(digest="../../etc"), "non-hexadecimal"),
        (change_manifest(epoch=-1), "manifest.json has"),
        (change_manifest(metadata="!!!"), "manifest.json has"),
        (change_manifest(format="zip"), "has the format 'zip'"),
        (change_manifest(surprise=1), "cannot be read"),
        (put_link, "cannot be read"),
        (put_pipe, "not an ordinary file"),
        (put_folder, "cannot be read"),
        (put_endless_nesting, "cannot be read"),
    ],
)
def test_a_damaged_or_hostile_checkpoint_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    path = Checkpoints(tmp_path).save(state_of())
    damage(path)
    with pytest.raises(CheckpointBroken) as refused:
        read_checkpoint(path)
    assert told in str(refused.value)
    assert str(path) in refused.value.what


@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_bytes_make_the_reader_fail_otherwise(junk: bytes, length: int) -> None:
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(length.to_bytes(8, "little") + junk)
        file.seek(0)
        try:
            read_header(file)
        except BrokenFile:
            return
        assert length == len(junk)


def test_files_that_a_crash_left_half_written_are_not_checkpoints_and_are_removed(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(state_of(1))
    shutil.copytree(path, tmp_path / ".writing-0123")
    shutil.copytree(path, tmp_path / ".removing-4567")
    assert epochs_in(tmp_path) == [1]
    checkpoints.save(state_of(2))
    assert sorted(one.name[:5] for one in tmp_path.iterdir()) == ["epoch", "epoch"]


_KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from node.run.checkpoints import Checkpoints
from tests.checkpoints.states import state_of

really = os.fsync
for syncs, folder in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        left = [syncs]
        def sync(descriptor):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            really(descriptor)
        os.fsync = sync
        Checkpoints(Path(folder)).save(state_of(2))
    assert os.WTERMSIG(os.wait()[1]) == signal.SIGKILL
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_sync_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """Two files, the folder they are in, and the folder that is in."""
    folders = [tmp_path / str(syncs) for syncs in range(4)]
    for folder in folders:
        Checkpoints(folder).save(state_of(1))
    script = tmp_path / "killed.py"
    script.write_text(_KILLED_WHILE_WRITING)
    subprocess.run([sys.executable, script, *folders], timeout=60, check=True)
    for syncs, folder in enumerate(folders):
        said: list[str] = []
        found = Checkpoints(folder).newest(said.append)
        assert found is not None
        assert found.state.epoch == (2 if syncs == 3 else 1)
        assert not said


def test_a_disk_that_fills_leaves_the_old_ones_and_says_what_to_do(tmp_path: Path) -> None:
    """The limit on the size of a file stops the writing in its middle, as a full disk does."""
    checkpoints = Checkpoints(tmp_path, KeepPolicy(keep_last=1))
    old = checkpoints.save(state_of(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointFailed) as failed:
            checkpoints.save(state_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "no room" in failed.value.why
    assert "Free some space" in failed.value.advice
    assert "Older checkpoints are unchanged" in failed.value.advice
    assert [one.name for one in tmp_path.iterdir()] == [old.name]
    assert read_checkpoint(old).state.epoch == 1


def test_too_little_room_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(1, 1, 10))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointFailed, match="10 are free"):
        Checkpoints(tmp_path).save(state_of())
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_ours_to_write_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointFailed, match="may not write"):
        Checkpoints(tmp_path).save(state_of())


def test_a_folder_that_is_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed) as failed:
        Checkpoints(tmp_path / "file").save(state_of())
    assert os.strerror(errno.EEXIST) in failed.value.why or "Not a dir" in failed.value.why
    assert Checkpoints(tmp_path / "file").newest() is None
    assert Checkpoints(tmp_path / "nothing").newest() is None


def test_a_disk_that_fails_in_any_way_costs_a_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "kept")
    checkpoints.save(state_of(1))

    def fails(*_arguments: object, **_named: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    for broken in ("exists", "mkdir"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, broken, fails)
            with pytest.raises(CheckpointFailed, match="was not written"):
                checkpoints.save(state_of(2))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "paths", fails)
        assert checkpoints.save(state_of(2)).is_dir()
    assert [one.name[:16] for one in checkpoints.paths()] == [
        "epoch-0000000002",
        "epoch-0000000001",
    ]


def test_a_disk_that_does_not_answer_is_a_trouble_of_the_folder_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "is_file", fails)
    assert RunFolder(tmp_path).trouble() == f"{tmp_path} cannot be read: Input/output error"
