"""How refusals get into the audit log without letting anybody fill the disk with them.

The first few of an address in a minute are written one by one, with all that is known. Those after
them, and those above a limit for all addresses together, are counted, and each minute one row per
address says how many there were and for which reasons. So nothing is left out; it is told more
shortly.

Easy to get wrong: being honest about the counts. They are in memory until their minute is over:
when the process is killed, up to a minute of *counted* refusals is missing from the log (the first
few of each address are not), and the row that says so is the next start.
"""

from __future__ import annotations

import threading
from collections import Counter

from auth.server.audit import Act, Entry
from auth.server.transaction import Transaction

MINUTE_MS = 60_000
WRITTEN_EACH = 5  # of one address in a minute; a person who tries again needs fewer
WRITTEN_IN_ALL = 300  # in a minute; at 250 bytes a row that is 110 MB in a day at the very most
MOST_ADDRESSES = 64  # that are counted apart; the rest are together, as OTHERS
MOST_REASONS = 24  # told apart for one address
OTHERS = "other addresses"


class RefusalLog:
    """Counts the refusals of the current minute. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._minute = 0
        self._written_in_all = 0
        self._written: Counter[str] = Counter()
        self._counted: dict[str, Counter[str]] = {}
        self._over: list[tuple[str, Counter[str]]] = []

    def is_written(self, address: str, reason: str, now_ms: int) -> bool:
        """Whether this one gets a row of its own; if not, it has been counted."""
        with self._lock:
            self._turn_to(now_ms)
            if self._written[address] < WRITTEN_EACH and self._written_in_all < WRITTEN_IN_ALL:
                self._written[address] += 1
                self._written_in_all += 1
                return True
            if address not in self._counted and len(self._counted) >= MOST_ADDRESSES:
                address = OTHERS
            reasons = self._counted.setdefault(address, Counter())
            if reason not in reasons and len(reasons) >= MOST_REASONS:
                reason = "other reasons"
            reasons[reason] += 1
            return False

    def tell(self, transaction: Transaction, *, all_of_it: bool = False) -> None:
        """Write the counts of the minutes that are over (or of this one too)."""
        with self._lock:
            self._turn_to(transaction.now_ms)
            if all_of_it:
                self._end_minute()
            over = self._over
            self._over = []
        transaction.if_undone(lambda: self._put_back(over))
        for address, reasons in over:
            transaction.log(
                Entry(
                    act=Act.REFUSALS,
                    actor="peer",
                    reason=f"{reasons.total()} more refusals in a minute, only counted.",
                    detail=f"{address}: "
                    + ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common()),
                )
            )

    def _put_back(self, over: list[tuple[str, Counter[str]]]) -> None:
        with self._lock:
            self._over = over + self._over
            self._merge_oldest()

    def _turn_to(self, now_ms: int) -> None:
        minute = now_ms // MINUTE_MS
        if minute != self._minute:
            self._minute = minute
            self._end_minute()
            self._written.clear()
            self._written_in_all = 0

    def _end_minute(self) -> None:
        self._over.extend(self._counted.items())
        self._merge_oldest()
        self._counted = {}

    def _merge_oldest(self) -> None:
        """While nothing can be written the counts wait, the older ones all addresses together."""
        while len(self._over) > 2 * MOST_ADDRESSES:
            (_, first), (_, second), *rest = self._over
            self._over = [(OTHERS, first + second), *rest]
