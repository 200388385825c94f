"""A month's quota for both directions together, by calendar month in local time, kept on disk.

    ledger = Ledger(saved, quota_bytes)
    ledger.count(network.traffic(), month_of(wall), seconds_since_last)
    ledger.standing                # FINE, NEARLY (80 %), USED_UP

`Ledger` has no clock and no disk: the month is an argument. `LedgerFile` replaces its file whole
after another megabyte or after a while, so a kill loses only the last seconds of counting.

If the clock is set back (with an empty battery it is 1970 at the start), nothing is forgotten.
Counting continues in the later month until the clock is right again, or has shown the earlier month
for a whole day. Then that is the month, with everything that was counted. If the clock was wrongly
set ahead and is back in the month before, that month is continued.

The totals that come in are those of a process: they begin anew with it, and only grow while it
lives. The ledger keeps the differences. If the file cannot be written, training must not end, and
the owner must be told: the caller of `save` shows the text that it returns.
"""

from __future__ import annotations

import enum
import os
import re
from datetime import datetime
from pathlib import Path

import msgspec

from node.core.private_file import UnusableFile, read_private_file, replace_private_file
from protocols.network import TrafficFacts

WARNED_SHARE = 0.8
RESERVED_SHARE = 0.01
RESERVED_BYTES = 1_000_000_000
"""The most that is reserved.

It is for the round in progress when training stops, and for the keep-alive traffic of the weeks of
waiting.
"""

BELIEVED_SECONDS = 24 * 3600.0
"""A running clock that shows an earlier month for so long is right.

The network corrects a clock that an empty battery reset within minutes.
"""

MOST_BYTES = 2**62

MONTH = r"[0-9]{4}-(0[1-9]|1[0-2])"


class QuotaStanding(enum.Enum):
    FINE = "fine"
    NEARLY = "nearly used up"
    USED_UP = "used up"


class MonthAccount(msgspec.Struct, frozen=True):
    """The traffic of one month, such as 2026-11."""

    month: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0

    def __post_init__(self) -> None:
        if self.month and re.fullmatch(MONTH, self.month) is None:
            raise ValueError(f"{self.month[:16]!r} is not a month")
        if not (0 <= self.sent_bytes < MOST_BYTES and 0 <= self.received_bytes < MOST_BYTES):
            raise ValueError("a month's bytes are not below zero, nor without bounds")

    @property
    def total_bytes(self) -> int:
        return self.sent_bytes + self.received_bytes

    def plus(self, sent_bytes: int, received_bytes: int) -> MonthAccount:
        return MonthAccount(
            self.month,
            min(self.sent_bytes + sent_bytes, MOST_BYTES - 1),
            min(self.received_bytes + received_bytes, MOST_BYTES - 1),
        )


class Accounts(msgspec.Struct, frozen=True):
    """The content of the file: this month, and the one counted before it. A newer potluck may have
    written more, and the count holds all the same."""

    now: MonthAccount = MonthAccount()
    before: MonthAccount = MonthAccount()


def month_of(wall: datetime) -> str:
    return f"{wall.year:04}-{wall.month:02}"


def month_after(wall: datetime) -> datetime:
    """When the next month begins, in local time."""
    if wall.month == 12:
        return datetime(wall.year + 1, 1, 1)
    return datetime(wall.year, wall.month + 1, 1)


class Ledger:
    """Invariant: all counted bytes are in `accounts.now`, and no month on the clock loses them."""

    def __init__(
        self, accounts: Accounts, quota_bytes: int | None, since: TrafficFacts | None = None
    ) -> None:
        """`since` is the process's total when this counting began."""
        self.accounts = accounts
        self.quota_bytes = quota_bytes
        self._seen = since or TrafficFacts()
        self._doubted_seconds = 0.0

    @property
    def used_bytes(self) -> int:
        return self.accounts.now.total_bytes

    @property
    def doubts_clock(self) -> bool:
        """Whether the clock shows a month that is over."""
        return self._doubted_seconds > 0

    def count(self, facts: TrafficFacts, month: str, seconds: float) -> None:
        """Takes the process's totals, the month on the clock, and the time since the last count."""
        self._turn(month, seconds)
        more_sent = max(0, facts.sent_bytes - self._seen.sent_bytes)
        more_received = max(0, facts.received_bytes - self._seen.received_bytes)
        self._seen = facts
        if more_sent or more_received:
            now = self.accounts.now.plus(more_sent, more_received)
            self.accounts = Accounts(now, self.accounts.before)

    @property
    def standing(self) -> QuotaStanding:
        if self.quota_bytes is None:
            return QuotaStanding.FINE
        reserved = min(RESERVED_SHARE * self.quota_bytes, RESERVED_BYTES)
        if self.used_bytes >= self.quota_bytes - reserved:
            return QuotaStanding.USED_UP
        if self.used_bytes >= WARNED_SHARE * self.quota_bytes:
            return QuotaStanding.NEARLY
        return QuotaStanding.FINE

    def _turn(self, month: str, seconds: float) -> None:
        now, before = self.accounts.now, self.accounts.before
        if not now.month:
            self.accounts = Accounts(
                MonthAccount(month).plus(now.sent_bytes, now.received_bytes), before
            )
        elif month > now.month:
            self.accounts = Accounts(MonthAccount(month), now)
        elif month < now.month:
            self._doubted_seconds += seconds
            if before.month == month:
                again = before.plus(now.sent_bytes, now.received_bytes)
                self.accounts = Accounts(again, MonthAccount())
            elif self._doubted_seconds >= BELIEVED_SECONDS:
                kept = MonthAccount(month, now.sent_bytes, now.received_bytes)
                self.accounts = Accounts(kept, MonthAccount())
            else:
                return
        self._doubted_seconds = 0.0


LARGEST_LEDGER_BYTES = 4096
ASIDE = ".damaged"

SAVED_AFTER_BYTES = 1_000_000
LOOKED_AFTER_SECONDS = 5.0
SAVED_AFTER_SECONDS = 60.0


class LedgerFile:
    """The file of one node. Only the process with the node's lock writes it."""

    def __init__(self, path: Path, counts: str = "quota") -> None:
        """`counts`: the name of what is used up, for messages."""
        self.path = path
        self._counts = counts
        self._saved = Accounts()
        self._saved_at = float("-inf")
        self._looked_at = float("-inf")

    def load(self) -> tuple[Accounts, str]:
        """The content of the file, and a message to the owner, if any. A file that cannot be read
        is moved aside, or the first save would take its place."""
        try:
            content = read_private_file(self.path, LARGEST_LEDGER_BYTES)
            if content is not None:
                self._saved = msgspec.json.decode(content, type=Accounts)
        except (UnusableFile, msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Accounts(), (
                f"The use of the {self._counts} could not be read, so it is counted from zero: "
                f"{str(error).rstrip('.')}. {self._moved_aside()}"
            )
        return self._saved, ""

    def _moved_aside(self) -> str:
        """Move the file to where nothing overwrites it, and say where."""
        aside = self.path.with_name(f"{self.path.name}{ASIDE}")
        try:
            os.replace(self.path, aside)
        except OSError as error:
            return f"The file {self.path} could not be moved aside: {error.strerror}."
        return f"The file is now {aside}."

    def is_due(self, accounts: Accounts, now: float) -> bool:
        """Whether enough has changed to write the file."""
        if accounts == self._saved or now - self._looked_at < LOOKED_AFTER_SECONDS:
            return False
        self._looked_at = now
        changed = abs(accounts.now.total_bytes - self._saved.now.total_bytes)
        return (
            changed >= SAVED_AFTER_BYTES
            or accounts.now.month != self._saved.now.month
            or now - self._saved_at >= SAVED_AFTER_SECONDS
        )

    def save(self, accounts: Accounts, now: float) -> str:
        """Write the file, which waits for the disk; return a message to the owner on failure.

        There is no file before there is anything to count.
        """
        try:
            if accounts.now.total_bytes or accounts.before.total_bytes:
                replace_private_file(self.path, msgspec.json.encode(accounts))
        except OSError as error:
            return (
                f"The use of the {self._counts} could not be written to {self.path}: "
                f"{error.strerror}."
            )
        self._saved, self._saved_at = accounts, now
        return ""
