"""What a relay has carried in a month outlives the process, and a wrong clock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from node.core.caps.ledger import BELIEVED_SECONDS
from node.core.relay_month import RelayMonth
from protocols.blocking import do_at_once

MB = 1_000_000
NOVEMBER = datetime(2026, 11, 25, 12)
OCTOBER = datetime(2026, 10, 31, 23)


class Wall:
    shows = NOVEMBER

    def __call__(self) -> datetime:
        return self.shows


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "relayed.json"


def run_for(month: RelayMonth, *pieces: tuple[float, Callable[[], None]]) -> None:
    """Run for these seconds, doing something after each piece, and end."""

    async def run() -> None:
        do_at_once()
        async with trio.open_nursery() as nursery:
            await nursery.start(month.run)
            for seconds, act in pieces:
                await trio.sleep(seconds)
                act()
            nursery.cancel_scope.cancel()

    trio.run(run, clock=MockClock(autojump_threshold=0))


def nothing() -> None:
    """To do after a piece of time."""


def test_a_restart_goes_on_where_it_ended(file: Path, wall: Wall) -> None:
    first = RelayMonth(file, wall)
    first.spend(7)
    assert first.used_bytes == 7
    run_for(first, (1.0, nothing))
    second = RelayMonth(file, wall)
    second.spend(3)
    assert (second.month, second.used_bytes) == ("2026-11", 10)


def test_it_is_written_after_another_megabyte_and_not_for_every_packet(
    file: Path, wall: Wall
) -> None:
    month = RelayMonth(file, wall)
    month.spend(2 * MB)
    on_disk: list[int] = []

    def spend_little() -> None:
        on_disk.append(RelayMonth(file, wall).used_bytes)
        month.spend(1000)

    def look() -> None:
        on_disk.append(RelayMonth(file, wall).used_bytes)

    run_for(month, (6.0, spend_little), (30.0, look), (60.0, look))
    assert on_disk == [2 * MB, 2 * MB, 2 * MB + 1000]


def test_a_new_month_begins_at_zero(file: Path, wall: Wall) -> None:
    wall.shows = OCTOBER
    month = RelayMonth(file, wall)
    month.spend(5 * MB)
    run_for(month, (6.0, nothing))
    wall.shows = NOVEMBER
    again = RelayMonth(file, wall)
    assert (again.month, again.used_bytes) == ("2026-11", 0)


@pytest.mark.slow
def test_a_clock_that_jumps_back_gives_no_new_budget(file: Path, wall: Wall) -> None:
    month = RelayMonth(file, wall)
    month.spend(5 * MB)
    run_for(month, (6.0, nothing))
    wall.shows = OCTOBER
    again = RelayMonth(file, wall)
    assert again.used_bytes == 5 * MB
    run_for(again, (BELIEVED_SECONDS + 60.0, nothing))
    assert (again.month, again.used_bytes) == ("2026-10", 5 * MB)


def test_a_broken_file_is_reported_and_counting_begins_at_zero(
    file: Path, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("{")
    file.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        assert RelayMonth(file, wall).used_bytes == 0
    assert "relay's month could not be read" in caplog.text


def test_a_disk_that_takes_nothing_is_reported_once(
    tmp_path: Path, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").write_text("no folder")
    month = RelayMonth(tmp_path / "folder" / "relayed.json", wall)
    month.spend(5 * MB)
    run_for(month, (600.0, nothing))
    assert month.used_bytes == 5 * MB
    assert caplog.text.count("could not be written") == 1
