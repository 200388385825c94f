"""What of a month's quota is used: both directions together, by the months of the wall's clock.

    ledger = Ledger(saved, quota_bytes)
    ledger.count(network.traffic(), month_of(wall), seconds_since_last)
    ledger.standing                # FINE, NEARLY (80 %), USED_UP

No clock and no disk: the month is an argument, the file is ledger_file.py's.

A clock that was set back (an empty battery makes it 1970 at the start) does not forget what was
used: counting goes on in the later month, until the clock is right again, or has shown the earlier
month for a whole day: then that is the month, with all that was counted. A clock that was wrongly
set ahead, and is back in the month before, takes up that month again.

Easy to get wrong: the totals that come in are those of a process. They begin anew with it, and only
ever grow while it lives; what is kept are the differences.
"""

from __future__ import annotations

import enum
import re
from datetime import datetime

import msgspec

from protocols.network import TrafficFacts

WARNED_SHARE = 0.8
RESERVED_SHARE = 0.01
RESERVED_BYTES = 1_000_000_000
"""What is kept back at most: for the round that is under way when training stops, and for the
signs of life of the weeks in which the node stands by."""

BELIEVED_SECONDS = 24 * 3600.0
"""A clock that shows an earlier month for so long, while it runs, is right. One that a battery
left behind is set by the network within minutes."""

MOST_BYTES = 2**62

MONTH = r"[0-9]{4}-(0[1-9]|1[0-2])"


class Standing(enum.Enum):
    FINE = "fine"
    NEARLY = "nearly used up"
    USED_UP = "used up"


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was carried in one month, such as 2026-11."""

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

    def plus(self, sent_bytes: int, received_bytes: int) -> Account:
        return Account(
            self.month,
            min(self.sent_bytes + sent_bytes, MOST_BYTES - 1),
            min(self.received_bytes + received_bytes, MOST_BYTES - 1),
        )


class Accounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept on disk: this month, and the one counted before it."""

    now: Account = Account()
    before: Account = Account()


def month_of(wall: datetime) -> str:
    return f"{wall.year:04}-{wall.month:02}"


def month_after(wall: datetime) -> datetime:
    """When the next month begins, as the wall will show it."""
    if wall.month == 12:
        return datetime(wall.year + 1, 1, 1)
    return datetime(wall.year, wall.month + 1, 1)


class Ledger:
    """Invariant: what was counted is in `accounts.now`, and is not lost by any month shown."""

    def __init__(
        self, accounts: Accounts, quota_bytes: int | None, since: TrafficFacts | None = None
    ) -> None:
        """`since` is what the process had carried when this counting began."""
        self.accounts = accounts
        self.quota_bytes = quota_bytes
        self._seen = since or TrafficFacts()
        self._doubted_seconds = 0.0

    @property
    def used_bytes(self) -> int:
        return self.accounts.now.total_bytes

    @property
    def doubts_clock(self) -> bool:
        """The clock shows a month that is over."""
        return self._doubted_seconds > 0

    def count(self, facts: TrafficFacts, month: str, seconds: float) -> None:
        """The totals of this process, the month on the wall, and the time since the last count."""
        self._turn(month, seconds)
        more_sent = max(0, facts.sent_bytes - self._seen.sent_bytes)
        more_received = max(0, facts.received_bytes - self._seen.received_bytes)
        self._seen = facts
        if more_sent or more_received:
            now = self.accounts.now.plus(more_sent, more_received)
            self.accounts = Accounts(now, self.accounts.before)

    @property
    def standing(self) -> Standing:
        if self.quota_bytes is None:
            return Standing.FINE
        reserved = min(RESERVED_SHARE * self.quota_bytes, RESERVED_BYTES)
        if self.used_bytes >= self.quota_bytes - reserved:
            return Standing.USED_UP
        if self.used_bytes >= WARNED_SHARE * self.quota_bytes:
            return Standing.NEARLY
        return Standing.FINE

    def _turn(self, month: str, seconds: float) -> None:
        now, before = self.accounts.now, self.accounts.before
        if not now.month:
            self.accounts = Accounts(
                Account(month).plus(now.sent_bytes, now.received_bytes), before
            )
        elif month > now.month:
            self.accounts = Accounts(Account(month), now)
        elif month < now.month:
            self._doubted_seconds += seconds
            if before.month == month:
                again = before.plus(now.sent_bytes, now.received_bytes)
                self.accounts = Accounts(again, Account())
            elif self._doubted_seconds >= BELIEVED_SECONDS:
                kept = Account(month, now.sent_bytes, now.received_bytes)
                self.accounts = Accounts(kept, Account())
            else:
                return
        self._doubted_seconds = 0.0
