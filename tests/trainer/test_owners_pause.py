"""The owner's pause: its words, and that a restart does not end it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from models.data.errors import NoDataLeft
from models.data.position import Position
from node.training.gate import Gate
from node.training.happenings import Paused, Resumed
from node.training.loop import MOST_OUTAGES, Loop, Resting, give_back_memory
from node.training.owners_pause import OwnersPause, time_of_day
from node.training.phases import NETWORK
from tests.waiting import PATIENCE_SECONDS

NOON = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))


def test_after_a_pause_the_data_goes_on_where_it_was_although_the_disk_is_full(
    tmp_path: Path,
) -> None:
    loop: Any = SimpleNamespace(
        _position=None, _position_file=tmp_path / "missing" / "position", _position_kept=0.0
    )
    there = Position([], drawn=7)
    Loop._keep_position(loop, SimpleNamespace(position=lambda: there), at_once=True)  # type: ignore[arg-type]
    assert Loop._kept_position(loop) == there


def test_a_source_that_has_given_data_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data server of a run is started anew, and no volunteer's node ends."""
    monkeypatch.setattr("node.training.loop.DATA_AGAIN_SECONDS", 0.01)
    gate, error = Gate(), NoDataLeft("There is no data left to train on: a cannot be read.")
    loop: Any = SimpleNamespace(_has_read=False, _outages=0, _session=SimpleNamespace(gate=gate))
    with pytest.raises(NoDataLeft):
        Loop._pause_for_data(loop, error)  # it has never given any
    Loop._got_batch(loop)
    words = "There is no data left to train on: a cannot be read; it is tried again"
    for _ in range(MOST_OUTAGES):
        Loop._pause_for_data(loop, error)
        assert [one.words for one in gate.reasons()] in ([words], [])
        gate.wait()
    with pytest.raises(NoDataLeft):
        Loop._pause_for_data(loop, error)
    Loop._got_batch(loop)
    Loop._pause_for_data(loop, error)


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
    "content",
    [
        b"",
        b"{",
        b'{"until": "x"}',
        b"[]",
        b'{"until": 1, "more": 2}',
        b" " * 2000,
        b'{"until": "\xff"}',
        b'{"\xff": 1}',
        b"[" * 1024,
        b'{"until": 1e300}',
    ],
)
def test_a_file_that_is_broken_pauses_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "pause.json"
    file.write_bytes(content)
    assert not OwnersPause(file).load(NOON)


def test_a_clock_that_is_far_behind_at_the_start_does_not_end_a_pause(tmp_path: Path) -> None:
    """With an empty battery it is 1970 until the network sets it."""
    file = tmp_path / "pause.json"
    pause = OwnersPause(file)
    pause.begin(NOON, 3600.0)
    pause.save()
    again = OwnersPause(file)
    assert again.load(5.0)
    assert again.until == pause.until
    assert again.words(5.0).startswith("paused by you until 2026-11-22 13:00")
    assert OwnersPause(file).load(NOON)


def test_a_pause_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    pause = OwnersPause(tmp_path / "no-folder" / "pause.json")
    (tmp_path / "no-folder").write_text("a file")
    pause.begin(NOON, None)
    assert pause.save()


def test_memory_is_given_back_without_harm() -> None:
    give_back_memory()


def test_a_pause_that_begins_without_a_network_is_told_and_frees_memory() -> None:
    gate, told, dropped = Gate(), Queue[Any](), threading.Event()
    session: Any = SimpleNamespace(gate=gate, happened=told.put)
    loop: Any = SimpleNamespace(_session=session, _resting=Resting(session))
    optimizer: Any = SimpleNamespace(
        away=contextlib.nullcontext, zero_grad=dropped.set, see_out=lambda _seconds: True
    )

    def train() -> None:
        while not gate.is_open:
            Loop._rest(loop, optimizer)

    gate.close(NETWORK, "the network is gone")
    training = threading.Thread(target=train)
    training.start()
    try:
        assert not dropped.wait(0.02)
        gate.close("pause", "paused by you")
        assert told.get(timeout=PATIENCE_SECONDS) == Paused(("paused by you",))
        assert dropped.wait(PATIENCE_SECONDS)
    finally:
        gate.open("pause")
        gate.open(NETWORK)
        training.join()
    assert isinstance(told.get_nowait(), Resumed)


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
