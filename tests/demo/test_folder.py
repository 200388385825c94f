"""The demo's folder: gone with the demo, and after a kill with the next one."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from node.app.demo.processes import BEGINNING_SECONDS, PREFIX, demo_folder, remove_abandoned

LATER = 2 * BEGINNING_SECONDS


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_by_a_kill(temporary: Path) -> Path:
    folder = temporary / f"{PREFIX}killed"
    (folder / "ann").mkdir(parents=True)
    (folder / "demo.lock").write_text("4711")
    return folder


def test_it_is_removed_with_all_that_is_in_it(temporary: Path) -> None:
    with demo_folder(keep=False) as folder:
        (folder / "ann").mkdir()
        assert folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_it_is_removed_after_an_error(temporary: Path) -> None:
    with pytest.raises(KeyError), demo_folder(keep=False):
        raise KeyError
    assert list(temporary.iterdir()) == []


def test_a_kept_one_stays_for_good(temporary: Path) -> None:
    with demo_folder(keep=True) as folder:
        pass
    remove_abandoned(temporary, time.time() + LATER)
    assert folder.is_dir()


def test_the_folder_of_a_killed_demo_is_removed_by_the_next_one(temporary: Path) -> None:
    killed = left_by_a_kill(temporary)
    os.utime(killed, (time.time() - LATER, time.time() - LATER))
    with demo_folder(keep=False) as folder:
        assert list(temporary.iterdir()) == [folder]


def test_a_demo_that_runs_keeps_its_folder(temporary: Path) -> None:
    with demo_folder(keep=False) as folder:
        remove_abandoned(temporary, time.time() + LATER)
        assert folder.is_dir()


def test_the_folder_of_a_demo_that_may_be_just_beginning_is_left_alone(temporary: Path) -> None:
    killed = left_by_a_kill(temporary)
    remove_abandoned(temporary, time.time())
    assert killed.is_dir()


def test_a_folder_that_only_has_the_name_is_left_alone(temporary: Path) -> None:
    (temporary / f"{PREFIX}mine").mkdir()
    elsewhere = temporary / "elsewhere"
    left_by_a_kill(elsewhere)
    (temporary / f"{PREFIX}link").symlink_to(elsewhere / f"{PREFIX}killed")
    remove_abandoned(temporary, time.time() + LATER)
    assert (elsewhere / f"{PREFIX}killed" / "ann").is_dir()
    assert (temporary / f"{PREFIX}mine").is_dir()
