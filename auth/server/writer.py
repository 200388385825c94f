"""The one thread that writes: all waiting operations share one transaction, and are answered after
it.

A commit that is safe against a power loss costs a wait for the disk, however small it is. So while
one is under way, the next operations queue up and share the commit after it. A server that could
commit 300 times a second answers thousands of callers a second, each only when its own data is on
the disk. An operation that fails is undone alone. A commit that fails (disk full) undoes all its
operations, which fail too, and the next commit is tried normally.

The thread also does regular work: `every_second` and `every_minute` are operations of the store.

Easy to get wrong: a caller must not be answered before COMMIT has returned. Results wait in
`_Waiting` until the transaction is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import trio

from auth.errors import AuthError
from auth.keys import SigningKey
from auth.server.audit import (
    Act,
    AuditEntry,
    AuditHash,
    Chain,
    Head,
    one_line,
    sign_head,
    write_head,
    write_head_file,
)
from auth.server.store_errors import (
    WHAT_SQLITE_RAISES,
    DiskFull,
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreFailed,
    told,
)

MOST_WAITING = 1024
"""Operations that may wait. At 1,500 a second the last of them waits for less than a second."""

URGENT_WAITING = 64  # a moderator's acts come first, and have a queue of their own
MOST_IN_TRANSACTION = 256  # so that the first in one does not wait long for the last
HEAD_FILE_SECONDS = 1.0  # how old the head beside the database may be
MINUTE_SECONDS = 60.0
ROOM_BYTES = 1 << 18  # as much as some hundred renewals write
CLOCK_STEP_MS = 1000  # a clock that goes back by more than this is reported; NTP slews less

Settled = tuple[trio.lowlevel.TrioToken, trio.Event]
T = TypeVar("T")
log = logging.getLogger(__name__)


class _Waiting(Generic[T]):
    """One operation and, later, its result."""

    __slots__ = ("abandoned", "answer", "error", "operation", "settled")

    def __init__(
        self, operation: Callable[[Transaction], T], settled: Settled | threading.Event
    ) -> None:
        self.operation = operation
        self.settled = settled
        self.answer: T | None = None
        self.error: BaseException | None = None
        self.abandoned = False

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.answer  # type: ignore[return-value]  # None is an answer where T allows it


class StoreWriter:
    """Owns the connection that writes, from `start` to `close`.

    Invariant: `counters` are those of the database, except while a transaction is open; only the
    thread uses them then.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        run: str,
        counters: Counters,
        signing_key: Callable[[], SigningKey],
        clock_ms: Callable[[], int],
        *,
        head_file: Path,
        every_minute: Sequence[Callable[[Transaction], None]] = (),
        clock_went_back: Callable[[Transaction, int], None] = lambda _transaction, _ms: None,
    ) -> None:
        self._connection = connection
        self._path = path
        self._run = run
        self._counters = counters
        self._signing_key = signing_key
        self._clock_ms = clock_ms
        self._head_file = head_file
        self._every_minute = every_minute
        self._clock_went_back = clock_went_back
        self._latest_ms = 0
        self._head: Head | None = None
        self._head_file_due: float | None = None
        self._head_file_key = b""
        self._minute_due = time.monotonic() + MINUTE_SECONDS
        self._queue: deque[_Waiting[Any]] = deque()
        self._urgent: deque[_Waiting[Any]] = deque()
        self._wakes = threading.Condition()
        self._closing = False
        self._trouble = ""
        self._failed: AuthError | None = None  # of an operation in the last transaction
        self._thread = threading.Thread(target=self._write, name="auth-store-writer", daemon=True)

    def start(self, latest_ms: int) -> None:
        """`latest_ms` is the time of the last row in the log, to notice a clock that went back."""
        self._latest_ms = latest_ms
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, refuse later operations, and end the thread."""
        with self._wakes:
            self._closing = True
            self._wakes.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._connection.close()

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._urgent)

    @property
    def trouble(self) -> str:
        """The error of the last commit; empty since one has worked again."""
        return self._trouble

    def run(self, operation: Callable[[Transaction], T], *, urgent: bool = False) -> T:
        """Perform the operation and wait, blocking, until it is on the disk."""
        settled = threading.Event()
        waiting = _Waiting(operation, settled)
        self._enqueue(waiting, urgent=urgent)
        settled.wait()
        return waiting.result()

    async def perform(self, operation: Callable[[Transaction], T], *, urgent: bool = False) -> T:
        """As `run`, for a trio task. If it is cancelled, the operation may have happened or not."""
        event = trio.Event()
        waiting = _Waiting(operation, (trio.lowlevel.current_trio_token(), event))
        self._enqueue(waiting, urgent=urgent)
        try:
            await event.wait()
        finally:
            waiting.abandoned = True  # if it has not begun, it will not
        return waiting.result()

    def _enqueue(self, waiting: _Waiting[T], *, urgent: bool) -> None:
        queue, most = (self._urgent, URGENT_WAITING) if urgent else (self._queue, MOST_WAITING)
        with self._wakes:
            if self._closing:
                raise StoreClosed(
                    "The auth server is stopping.",
                    why="Your request was not performed.",
                    advice="Ask again when it runs.",
                )
            if len(queue) >= most:
                raise StoreBusy(
                    "The auth server has more to write than it can take on.",
                    why=f"{most:,} are waiting already, or its disk is slow.",
                    advice="Ask again in a few seconds.",
                )
            queue.append(waiting)
            self._wakes.notify()

    # -- everything below runs in the thread ------------------------------------------------------

    def _write(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                break
            if batch:
                self._transact(batch)
            self._do_what_is_due()
        self._write_head_file()

    def _next_batch(self) -> list[_Waiting[Any]] | None:
        """Some of the queue; empty if other work is due; None when all is done."""
        with self._wakes:
            while not self._queue and not self._urgent:
                if self._closing:
                    return None
                due = self._minute_due
                if self._head_file_due is not None:
                    due = min(due, self._head_file_due)
                seconds = due - time.monotonic()
                if seconds <= 0:
                    return []
                self._wakes.wait(seconds)
            batch: list[_Waiting[Any]] = []
            while len(batch) < MOST_IN_TRANSACTION and (self._urgent or self._queue):
                waiting = (self._urgent or self._queue).popleft()
                if not waiting.abandoned:
                    batch.append(waiting)
            return batch

    def _transact(self, batch: Sequence[_Waiting[Any]], *, writes: bool = False) -> None:
        """One transaction, and what follows from it. With `writes` it shows whether the disk has
        room, even if it adds no row to the log."""
        start = self._counters.mark()
        self._failed = None
        transaction = Transaction(self._connection, self._clock_ms(), self._counters)
        try:
            self._commit(batch, transaction)
        except Exception as error:  # noqa: BLE001  # this thread has to outlive everything
            self._roll_back()
            self._counters.return_to(start)
            failure = self._failure_of(error)
            self._note_trouble(failure)
            for waiting in batch:
                waiting.answer, waiting.error = None, failure
            _call(reversed(transaction.undone))
        else:
            if writes or self._failed is not None or self._counters.mark() != start:
                self._note_trouble(self._failed)
            if self._head is not None and self._head.key_id != self._head_file_key:
                # before the old key goes: a head that it signed counts no more after that
                self._write_head_file()
            _call(transaction.committed)
        finally:
            _settle(batch)

    def _commit(self, batch: Sequence[_Waiting[Any]], transaction: Transaction) -> None:
        """One transaction. If this raises, all of it has to be undone."""
        start = self._counters.mark()
        self._connection.execute("BEGIN IMMEDIATE")
        self._tell_of_clock(transaction)
        for waiting in batch:
            self._do(waiting, transaction)
        (number, last_hash), serial = self._counters.mark()
        head = None
        if (number, last_hash) != start[0]:
            head = sign_head(self._run, number, last_hash, self._signing_key())
            write_head(self._connection, head)
        if serial != start[1]:
            self._connection.execute("UPDATE store SET last_serial = ?", (serial,))
        self._connection.execute("COMMIT")
        self._latest_ms = transaction.now_ms
        if head is not None:
            self._head = head
            if self._head_file_due is None:
                self._head_file_due = time.monotonic() + HEAD_FILE_SECONDS

    def _do(self, waiting: _Waiting[Any], transaction: Transaction) -> None:
        """One operation, undone alone if it fails. sqlite3.Error if the whole is lost."""
        mark = self._counters.mark()
        committed, undone = len(transaction.committed), len(transaction.undone)
        self._connection.execute("SAVEPOINT operation")
        try:
            waiting.answer = waiting.operation(transaction)
        except Exception as error:  # it belongs to the caller, who gets it
            if not self._connection.in_transaction:  # SQLite has undone everything, as when full
                raise
            self._connection.execute("ROLLBACK TO operation")
            self._counters.return_to(mark)
            del transaction.committed[committed:]
            _call(reversed(transaction.undone[undone:]))
            del transaction.undone[undone:]
            waiting.error = error
            if isinstance(error, WHAT_SQLITE_RAISES):
                waiting.error = failure = told(error, self._path)
                if isinstance(failure, (DiskFull, StoreDamaged)):
                    self._failed = failure
        self._connection.execute("RELEASE operation")

    def _failure_of(self, error: Exception) -> AuthError:
        if isinstance(error, AuthError):
            return error
        if isinstance(error, (*WHAT_SQLITE_RAISES, OSError)):
            return told(error, self._path)
        log.error("A transaction of the auth server failed", exc_info=error)
        return StoreFailed(
            "The auth server could not write: something unforeseen happened.",
            why=f"{type(error).__name__}: {error}",
            advice="Report it with what the server's log says: this is a bug in potluck.",
        )

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # if it fails, nothing was committed either
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _tell_of_clock(self, transaction: Transaction) -> None:
        back_ms = self._latest_ms - transaction.now_ms
        if back_ms > CLOCK_STEP_MS:
            back = f"The clock went back by {back_ms / 1000:.1f} s."
            transaction.log(Act.CLOCK, "server", back)
            self._clock_went_back(transaction, back_ms)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._head_file_due is not None and now >= self._head_file_due:
            self._write_head_file()
        if now >= self._minute_due:
            self._minute_due = now + MINUTE_SECONDS
            for operation in self._every_minute:
                waiting = _Waiting(operation, threading.Event())
                self._transact([waiting])
                if waiting.error is not None:
                    log.warning("The auth server's housekeeping failed: %s", waiting.error)
            # nobody else may write: a server that is not ready may get no requests
            if self._trouble and self._has_room():
                self._transact([_Waiting(_write_something, threading.Event())], writes=True)

    def _has_room(self) -> bool:
        """Whether the disk takes more than a small write: that may find a place in SQLite's files
        when there is no room left."""
        try:
            with tempfile.TemporaryFile(dir=self._path.parent) as file:
                file.write(os.urandom(ROOM_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return False
        return True

    def _write_head_file(self) -> None:
        self._head_file_due = None
        if self._head is None:
            return
        self._head_file_key = self._head.key_id
        try:
            write_head_file(self._head_file, self._head)
        except OSError as error:
            log.warning(
                "The head of the audit log cannot be kept: %s", told(error, self._head_file)
            )
            self._head_file_due = time.monotonic() + MINUTE_SECONDS

    def _note_trouble(self, failure: AuthError | None) -> None:
        trouble = "" if failure is None else one_line(failure.what, 500)
        if trouble != self._trouble:
            if failure is not None:
                log.error("The auth server cannot write: %s", failure)
            else:
                log.warning("The auth server writes again.")
            self._trouble = trouble


def _write_something(transaction: Transaction) -> None:
    """A write that changes nothing: it needs the disk all the same."""
    transaction.connection.execute("UPDATE store SET last_serial = last_serial")


def _call(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            log.exception("A callback after a transaction of the auth server failed")


def _settle(batch: Sequence[_Waiting[Any]]) -> None:
    """Wake all callers whose operation is over, with one call into each event loop."""
    loops: dict[trio.lowlevel.TrioToken, list[trio.Event]] = {}
    for waiting in batch:
        if isinstance(waiting.settled, threading.Event):
            waiting.settled.set()
        else:
            loop, event = waiting.settled
            loops.setdefault(loop, []).append(event)
    for loop, events in loops.items():
        with contextlib.suppress(trio.RunFinishedError):
            loop.run_sync_soon(_set_all, events)


def _set_all(events: Sequence[trio.Event]) -> None:
    for event in events:
        event.set()


# The interface of an operation inside the writer's transaction.
#
# An operation is a function of a `Transaction`. It reads and writes through `connection`, adds to
# the audit log with `log`, and takes serial numbers; it neither commits nor rolls back. If it
# raises, everything it did is undone, the others in the same transaction are not touched, and the
# caller gets the error. So a refusal that belongs into the audit log is *returned*, never raised.
#
# If an operation is undone, its serial number must be given to the next one, and so must its row's
# place in the log. Both are counted in memory, and are undone with it.


@dataclass
class Counters:
    """The writing thread's counts in memory; the database has the same after a commit."""

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

    def log(
        self,
        act: Act,
        actor: str,
        reason: str = "",
        *,
        name: str | None = None,
        peer: bytes | None = None,
        serial: int | None = None,
        detail: str = "",
    ) -> int:
        """Add a row to the audit log; returns its number."""
        entry = AuditEntry(
            act=act, actor=actor, reason=reason, name=name, peer=peer, serial=serial, detail=detail
        )
        return self.counters.chain.append(self.connection, self.now_ms, entry)

    def next_serial(self) -> int:
        self.counters.serial += 1
        return self.counters.serial

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call this in the writing thread once this is on the disk; never if it is undone."""
        self.committed.append(callback)

    def if_undone(self, callback: Callable[[], None]) -> None:
        """Call this in the writing thread if this, or all of the transaction, is undone."""
        self.undone.append(callback)
