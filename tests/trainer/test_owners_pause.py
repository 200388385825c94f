"""The owner's pause: its words, and that a restart does not end it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from node.training.loop import give_back_memory
from node.training.owners_pause import LONGEST_SECONDS, OwnersPause, time_of_day

NOON = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("ahead", "shown"),
    [
        (30.0, "12:00:30"),
        (599.0, "12:09:59"),
        (600.0, "12:10"),
        (7200.0, "14:00"),
        (86_400.0, "2026-11-23 12:00"),
    ],
)
def test_a_moment_is_shown_as_exactly_as_it_matters(ahead: float, shown: str) -> None:
    assert time_of_day(NOON + ahead, NOON) == shown


@pytest.mark.parametrize("seconds", [None, 3600.0])
def test_a_restart_does_not_end_a_pause(tmp_path: Path, seconds: float | None) -> None:
    pause = OwnersPause(tmp_path / "pause.json")
    pause.begin(NOON, seconds)
    assert pause.save() == ""
    again = OwnersPause(tmp_path / "pause.json")
    assert again.load(NOON + 60.0)
    assert again.until == pause.until
    until = "" if seconds is None else " until 13:00"
    assert pause.words(NOON) == f"paused by you{until}"
    assert again.words(NOON) == f"paused by you{until}; a restart does not end it"


def test_a_pause_that_is_over_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "pause.json"
    pause = OwnersPause(file)
    pause.begin(NOON, 30.0)
    pause.save()
    assert not OwnersPause(file).load(NOON + 30.0)
    assert not file.exists()
    pause.begin(NOON, None)
    pause.save()
    pause.end()
    pause.save()
    assert not file.exists()
    assert not OwnersPause(file).load(NOON)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"until": "x"}', b"[]", b'{"until": 1, "more": 2}', b" " * 2000]
)
def test_a_file_that_is_broken_pauses_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "pause.json"
    file.write_bytes(content)
    assert not OwnersPause(file).load(NOON)


def test_a_clock_that_was_years_ahead_does_not_pause_for_years(tmp_path: Path) -> None:
    pause = OwnersPause(tmp_path / "pause.json")
    pause.begin(NOON + 2 * LONGEST_SECONDS, 60.0)
    pause.save()
    assert not OwnersPause(tmp_path / "pause.json").load(NOON)


def test_a_pause_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    pause = OwnersPause(tmp_path / "no-folder" / "pause.json")
    (tmp_path / "no-folder").write_text("a file")
    pause.begin(NOON, None)
    assert pause.save()


def test_memory_is_given_back_without_harm() -> None:
    give_back_memory()


def test_resuming_while_the_pause_is_being_written_ends_it_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause, replace = OwnersPause(tmp_path / "pause"), os.replace
    resuming = threading.Thread(target=pause.save)

    def slow(*arguments: Any) -> None:
        pause.end()
        resuming.start()
        resuming.join(0.05)  # it waits for us, and would else have found nothing to remove
        replace(*arguments)

    monkeypatch.setattr(os, "replace", slow)
    pause.begin(NOON, None)
    assert pause.save() == ""
    resuming.join()
    assert not OwnersPause(tmp_path / "pause").load(NOON)
