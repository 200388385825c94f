"""What one operation may do inside the writer's transaction.

An operation is a function of a `Transaction`. It reads and writes through `connection`, tells the
audit log with `log`, and takes serial numbers; it neither commits nor rolls back. If it raises,
everything it did is undone, the others in the same transaction are not touched, and the caller
gets the error. A refusal that belongs into the audit log is therefore *returned*, never raised.

Easy to get wrong: a serial number taken by an operation that is then undone must be given to
somebody else, and so must its row's place in the log: both are counted in memory, and follow.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field

from auth.server.audit import AuditHash, Chain, Entry


@dataclass
class Counters:
    """What the writing thread counts in memory; the database has the same when it commits."""

    chain: Chain
    serial: int

    def mark(self) -> tuple[tuple[int, AuditHash], int]:
        return self.chain.mark(), self.serial

    def return_to(self, mark: tuple[tuple[int, AuditHash], int]) -> None:
        chain, self.serial = mark
        self.chain.return_to(chain)


@dataclass
class Transaction:
    connection: sqlite3.Connection
    now_ms: int
    counters: Counters
    committed: list[Callable[[], None]] = field(default_factory=list)
    undone: list[Callable[[], None]] = field(default_factory=list)

    def log(self, entry: Entry) -> int:
        """Add a row to the audit log; its number."""
        return self.counters.chain.append(self.connection, self.now_ms, entry)

    def next_serial(self) -> int:
        self.counters.serial += 1
        return self.counters.serial

    def after_commit(self, callback: Callable[[], None]) -> None:
        """To be called in the writing thread once this is on the disk; never if it is undone."""
        self.committed.append(callback)

    def if_undone(self, callback: Callable[[], None]) -> None:
        """To be called in the writing thread if this, or all of the transaction, is undone."""
        self.undone.append(callback)
