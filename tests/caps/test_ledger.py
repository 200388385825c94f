"""A month's quota: what is counted, what is kept, and what a wrong clock does to it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.caps.ledger import (
    BELIEVED_SECONDS,
    LOOKED_AFTER_SECONDS,
    SAVED_AFTER_SECONDS,
    Accounts,
    Ledger,
    LedgerFile,
    MonthAccount,
    QuotaStanding,
    month_after,
    month_of,
)
from protocols.network import TrafficFacts

GB = 1_000_000_000


def ledger_of(quota: int | None = 100 * GB, **used: int) -> Ledger:
    now = MonthAccount("2026-11", used.get("sent", 0), used.get("received", 0))
    return Ledger(Accounts(now), quota)


def standing(ledger: Ledger) -> QuotaStanding:
    return ledger.standing


def carry(ledger: Ledger, total: int, month: str, seconds: float = 0.5) -> None:
    ledger.count(TrafficFacts(total, 0), month, seconds)


def test_both_directions_count_and_only_what_is_new() -> None:
    ledger = Ledger(Accounts(), None, TrafficFacts(1000, 1000))
    ledger.count(TrafficFacts(1500, 1200), "2026-11", 0.5)
    ledger.count(TrafficFacts(1500, 1300), "2026-11", 0.5)
    assert ledger.accounts.now == MonthAccount("2026-11", 500, 300)


def test_a_new_month_begins_at_zero_and_the_last_one_is_remembered() -> None:
    ledger = ledger_of(sent=99 * GB)
    assert standing(ledger) is QuotaStanding.USED_UP
    carry(ledger, 0, "2026-12")
    assert ledger.used_bytes == 0
    assert standing(ledger) is QuotaStanding.FINE
    assert ledger.accounts.before == MonthAccount("2026-11", 99 * GB)


def test_the_owner_is_warned_at_four_fifths_and_stopped_before_the_end() -> None:
    ledger = ledger_of()
    carry(ledger, 79 * GB, "2026-11")
    assert standing(ledger) is QuotaStanding.FINE
    carry(ledger, 80 * GB, "2026-11")
    assert standing(ledger) is QuotaStanding.NEARLY
    carry(ledger, 99 * GB, "2026-11")
    assert standing(ledger) is QuotaStanding.USED_UP


def test_a_hundredth_is_kept_back_and_never_more_than_a_gigabyte() -> None:
    for quota, least_used_up in ((GB, 990_000_000), (1000 * GB, 999 * GB)):
        assert standing(ledger_of(quota, sent=least_used_up - 1)) is QuotaStanding.NEARLY
        assert standing(ledger_of(quota, sent=least_used_up)) is QuotaStanding.USED_UP


def test_a_clock_that_an_empty_battery_set_back_forgets_nothing() -> None:
    ledger = ledger_of(sent=99 * GB)
    carry(ledger, 5, "1970-01", 600.0)
    assert ledger.doubts_clock is True
    assert standing(ledger) is QuotaStanding.USED_UP
    carry(ledger, 10, "2026-11")
    assert not bool(ledger.doubts_clock)
    assert ledger.accounts.now == MonthAccount("2026-11", 99 * GB + 10)


def test_an_earlier_month_that_stays_is_believed_with_all_that_was_counted() -> None:
    ledger = Ledger(Accounts(MonthAccount("2080-05", 7 * GB)), 100 * GB)
    for _ in range(49):
        carry(ledger, 0, "2026-11", BELIEVED_SECONDS / 48)
    assert ledger.accounts.now == MonthAccount("2026-11", 7 * GB)
    carry(ledger, 1, "2026-12")
    assert ledger.used_bytes == 1


def test_a_clock_that_ran_ahead_for_a_moment_goes_back_to_its_month() -> None:
    ledger = ledger_of(sent=90 * GB)
    carry(ledger, 3, "2026-12")
    carry(ledger, 5, "2026-11")
    assert ledger.accounts.now == MonthAccount("2026-11", 90 * GB + 5)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["1970-01", "2026-11"])), max_size=20)
)
def test_no_clock_loses_a_byte_within_a_day(steps: list[tuple[int, str]]) -> None:
    ledger, total = ledger_of(), 0
    for more, month in steps:
        total += more
        carry(ledger, total, month, 1.0)
    assert ledger.used_bytes == total


@pytest.mark.parametrize(
    ("wall", "month", "after"),
    [
        (datetime(2026, 11, 22, 5), "2026-11", datetime(2026, 12, 1)),
        (datetime(2026, 12, 31, 23, 59), "2026-12", datetime(2027, 1, 1)),
    ],
)
def test_months_begin_by_local_time(wall: datetime, month: str, after: datetime) -> None:
    assert month_of(wall) == month
    assert month_after(wall) == after


def test_the_file_keeps_what_was_counted_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    file, accounts = LedgerFile(tmp_path / "traffic.json"), Accounts(MonthAccount("2026-11", 1, 2))
    assert file.load() == (Accounts(), "")
    assert file.save(accounts, 0.0) == ""
    assert (tmp_path / "traffic.json").stat().st_mode & 0o777 == 0o600
    assert LedgerFile(tmp_path / "traffic.json").load() == (accounts, "")


def test_it_is_written_soon_after_much_and_later_after_little(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "traffic.json")
    file.save(Accounts(MonthAccount("2026-11", 1)), 0.0)
    little, much = (
        Accounts(MonthAccount("2026-11", 2)),
        Accounts(MonthAccount("2026-11", 2_000_000)),
    )
    assert not file.is_due(little, LOOKED_AFTER_SECONDS + 1)
    assert file.is_due(much, 2 * LOOKED_AFTER_SECONDS + 2)
    assert file.is_due(little, SAVED_AFTER_SECONDS + 10)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"now":{"month":"2026-13"}}',
        b'{"now":{"sent_bytes":-1}}',
        b'{"more":' + b"[" * 4000,
        b'{"now":{"month":"\xff"}}',
        b"x" * 5000,
    ],
)
def test_an_unreadable_ledger_is_reported_and_kept_and_counting_begins_at_zero(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "traffic.json"
    path.write_bytes(content)
    path.chmod(0o600)
    file = LedgerFile(path)
    accounts, said = file.load()
    assert accounts == Accounts()
    assert "counted from zero" in said
    assert said.endswith(f"The file is now {path}.damaged.")
    file.save(Accounts(MonthAccount("2026-11", 1)), 0.0)
    assert (tmp_path / "traffic.json.damaged").read_bytes() == content


def test_a_ledger_that_cannot_be_moved_aside_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_paths: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "traffic.json"
    path.write_bytes(b"{")
    path.chmod(0o600)
    monkeypatch.setattr(os, "replace", refuse)
    assert LedgerFile(path).load()[1].endswith("could not be moved aside: Permission denied.")


def test_the_ledger_of_a_newer_potluck_counts(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    path.write_bytes(b'{"now":{"month":"2026-11","sent_bytes":7,"lost_bytes":1},"more":1}')
    path.chmod(0o600)
    assert LedgerFile(path).load() == (Accounts(MonthAccount("2026-11", 7)), "")


def test_a_disk_that_takes_nothing_is_said_and_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no folder")
    said = LedgerFile(tmp_path / "taken" / "traffic.json").save(
        Accounts(MonthAccount("2026-11", 1)), 0.0
    )
    assert "could not be written" in said


WRITER = """
import sys
from pathlib import Path
from node.core.caps.ledger import MonthAccount, Accounts
from node.core.caps.ledger import LedgerFile
file = LedgerFile(Path(sys.argv[1]))
for number in range(1, 1_000_000):
    file.save(Accounts(MonthAccount("2026-11", number)), 0.0)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_writing_leaves_the_last_whole_ledger(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(20)]
        os.kill(child.pid, signal.SIGKILL)
        said += [int(line) for line in child.stdout.read().splitlines() if line]
    accounts, trouble = LedgerFile(path).load()
    assert trouble == ""
    assert accounts.now.sent_bytes in (said[-1], said[-1] + 1)
