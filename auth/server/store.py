"""The state of an auth server: one folder with its database, its keys and the head of its log.

`Store` is open for writing, in the running server or in a moderator's command when none runs;
`Reader` (store_reading.py) only reads, also beside a running server. What everybody needs all the
time (the signed revocation list, the key records) is kept in memory as an immutable `Published`,
replaced after each commit that changes it. store_paths.py says which files there are.

Easy to get wrong: a database that was put back from a backup has forgotten serial numbers that it
gave out. `backups.py` marks its copies, and a store that finds the mark counts on from further up.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from auth.errors import AuthError
from auth.keys import fingerprint
from auth.revocations import read_list
from auth.server import audit, database, revoked, signing_keys
from auth.server.audit import Act, Entry
from auth.server.audit_head import catch_up, what_is_wrong
from auth.server.refusal_log import RefusalLog
from auth.server.signing_keys import SigningKeys
from auth.server.store_errors import WHAT_SQLITE_RAISES, StoreFailed, told
from auth.server.store_lock import hold_store_lock
from auth.server.store_making import StoreMade, create_store
from auth.server.store_paths import StorePaths, wall_ms
from auth.server.store_reading import Published, Reader, published_in, store_row
from auth.server.tokens_issued import DAY_MS, count_live, forget_over
from auth.server.transaction import Counters, Transaction
from auth.server.writer import Writer
from auth.tokens import LONGEST_LIFE_MS

__all__ = ["Reader", "Store", "StoreMade", "create_store", "open_store", "wall_ms"]

log = logging.getLogger(__name__)

SERIALS_A_SECOND = 10_000  # more than any server gives out; skipped per second since a backup


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the store is, for /readyz and /metrics. `trouble` is empty when it can be written."""

    writable: bool
    trouble: str
    waiting: int
    database_bytes: int
    free_bytes: int
    revocation_number: int
    audit_rows: int
    live_tokens: int


class Store:
    """An open auth server's state. Use `open_store`."""

    def __init__(
        self,
        paths: StorePaths,
        connection: sqlite3.Connection,
        clock_ms: Callable[[], int],
    ) -> None:
        self.paths = paths
        self.clock_ms = clock_ms
        self.refusals = RefusalLog()
        self.run, serial, self.grace_ms = store_row(connection, paths.database)
        self._listeners: list[Callable[[], None]] = []
        self._live_tokens = count_live(connection, clock_ms())
        self._published = published_in(connection, self.run, paths)
        self._latest = self._published  # in the open transaction; only the writing thread looks
        self._published.keys.active(clock_ms())  # says so now if no key's file is there
        counters = Counters(audit.chain_of(connection, self.run), serial)
        self.writer = Writer(
            connection,
            paths.database,
            self.run,
            counters,
            lambda: self._latest.keys.active(clock_ms()),
            clock_ms,
            head_file=paths.head,
            every_minute=(self.refusals.tell, self._forget, self.refresh_list),
            clock_went_back=self._doubt_what_was_forgotten,
        )
        self.found_wrong = what_is_wrong(
            connection, self.run, self._published.keys.all_verifying, paths.head
        )
        if not self.found_wrong:
            catch_up(connection, paths.head)
        for key_id in self._published.keys.withdrawn:  # a crash may have left its file
            signing_keys.remove_key_file(paths.keys / signing_keys.file_name(key_id))
        (latest_ms,) = connection.execute(
            "SELECT coalesce((SELECT at_ms FROM audit ORDER BY number DESC LIMIT 1), 0)"
        ).fetchone()
        self.writer.start(latest_ms)

    @property
    def published(self) -> Published:
        return self._published

    @property
    def keys(self) -> SigningKeys:
        return self._published.keys

    @property
    def fingerprint(self) -> str:
        """Of the key that signs now: what a new invite pins."""
        return fingerprint(self.keys.active(self.clock_ms()).public_key)

    def keyring(self) -> SigningKeys:
        """The keys; `.records` is what peers get."""
        return self._published.keys

    def revocation_list(self) -> revoked.SignedList:
        """The newest: `.number` and `.signed`, the bytes to be passed on."""
        return self._published.revocations

    def live_tokens(self) -> int:
        """About how many tokens are alive: counted each minute, and what was issued since."""
        return self._live_tokens

    def count_token(self) -> None:
        self._live_tokens += 1

    def on_change(self, callback: Callable[[], None]) -> None:
        """Called in the writing thread, after each commit that changed keys or revocations."""
        self._listeners.append(callback)

    def publish(self, transaction: Transaction, *, keys: SigningKeys | None = None) -> None:
        """Issue the next revocation list in this transaction, and show it once it is committed."""
        before = self._latest
        keys = before.keys if keys is None else keys
        after = Published(
            keys, revoked.issue_list(transaction.connection, keys, transaction.now_ms)
        )
        self._latest = after
        transaction.if_undone(lambda: self._go_back_to(before))
        transaction.after_commit(lambda: self._show(after))

    def latest_keys(self) -> SigningKeys:
        """The keys as the open transaction has them. Only for operations."""
        return self._latest.keys

    def latest_list_number(self) -> int:
        """The number of the list as the open transaction has it. Only for operations."""
        return self._latest.revocations.number

    def forget_ms(self, transaction: Transaction, end_ms: int) -> int:
        """Until when a token that ends then may count anywhere; 0 for none (0) that is known of."""
        (unsure_ms,) = transaction.connection.execute(
            "SELECT unsure_until_ms FROM store"
        ).fetchone()
        latest_ms = max(end_ms, int(unsure_ms))
        return latest_ms + self.grace_ms + revoked.MARGIN_MS if latest_ms else 0

    def can_sign(self) -> bool:
        """Whether there is a key that signs now, and is within its time."""
        now_ms = self.clock_ms()
        try:
            record = self.keys.active_row(now_ms).record
        except StoreFailed:
            return False
        return record.from_ms <= now_ms < record.until_ms

    def health(self) -> Health:
        """Cheap enough to be asked in the event loop."""
        try:
            database_bytes = self.paths.database.stat().st_size
            free_bytes = shutil.disk_usage(self.paths.folder).free
        except OSError as error:
            return self._health(0, 0, str(told(error, self.paths.database)))
        return self._health(database_bytes, free_bytes, self.writer.trouble)

    def _health(self, database_bytes: int, free_bytes: int, trouble: str) -> Health:
        return Health(
            writable=not trouble,
            trouble=trouble,
            waiting=self.writer.waiting,
            database_bytes=database_bytes,
            free_bytes=free_bytes,
            revocation_number=self._published.revocations.number,
            audit_rows=self.writer.audit_rows,
            live_tokens=self._live_tokens,
        )

    def _go_back_to(self, published: Published) -> None:
        self._latest = published

    def _show(self, published: Published) -> None:
        self._published = published
        for listener in self._listeners:
            listener()

    def _forget(self, transaction: Transaction) -> None:
        forget_over(transaction.connection, transaction.now_ms - self.grace_ms - DAY_MS)
        self._live_tokens = count_live(transaction.connection, transaction.now_ms)

    def _doubt_what_was_forgotten(self, transaction: Transaction, back_ms: int) -> None:
        """The clock was far ahead: tokens that seemed to be over then may be alive."""
        if back_ms > DAY_MS:
            transaction.connection.execute(
                "UPDATE store SET unsure_until_ms = max(unsure_until_ms, ?)",
                (transaction.now_ms + LONGEST_LIFE_MS,),
            )

    def refresh_list(self, transaction: Transaction) -> None:
        """A new list when an entry is over, or when another key has begun to sign."""
        held = read_list(self._latest.revocations.signed)
        key = self._latest.keys.active(transaction.now_ms)
        wanted = revoked.entries(transaction.connection, transaction.now_ms)
        if held.key_id != key.key_id or set(held.entries) != set(wanted):
            self.publish(transaction)


@contextlib.contextmanager
def open_store(
    folder: Path,
    *,
    clock_ms: Callable[[], int] = wall_ms,
    grace_ms: int | None = None,
    actor: str = "",
) -> Iterator[Store]:
    """The state in this folder, for writing. `actor` (of a server) is put into the audit log.

    `grace_ms` is how long peers take tokens that are over; it is remembered. AuthError if another
    process writes there, or the files are not sound.
    """
    paths = StorePaths(folder)
    if not paths.database.exists():
        with database.reading(paths.database):  # says what is missing
            pass
    with hold_store_lock(paths.lock):
        connection = database.open_for_writing(paths.database)
        try:
            store = Store(paths, connection, clock_ms)
        except BaseException as error:
            connection.close()
            if isinstance(error, WHAT_SQLITE_RAISES):
                raise told(error, paths.database) from error
            raise
        try:
            store.writer.run(lambda transaction: _begin(store, transaction, grace_ms, actor))
            yield store
        finally:
            with contextlib.suppress(AuthError):  # a full disk: the counts of a minute are lost
                store.writer.run(
                    lambda transaction: store.refusals.tell(transaction, all_of_it=True),
                    urgent=True,
                )
            store.writer.close()


def _begin(store: Store, transaction: Transaction, grace_ms: int | None, actor: str) -> None:
    connection = transaction.connection
    if grace_ms is not None and grace_ms != store.grace_ms:
        connection.execute("UPDATE store SET grace_ms = ?", (grace_ms,))
        store.grace_ms = grace_ms
    if store.found_wrong:
        log.error("The audit log was tampered with: %s", store.found_wrong)
        transaction.log(Entry(act=Act.TAMPERED, actor="server", reason=store.found_wrong))
    (backup_ms,) = connection.execute("SELECT backup_ms FROM store").fetchone()
    if backup_ms is not None:
        _go_on_from_backup(store, transaction, int(backup_ms))
    if actor:
        transaction.log(Entry(act=Act.STARTED, actor=actor, reason="The server was started."))


def _go_on_from_backup(store: Store, transaction: Transaction, backup_ms: int) -> None:
    """The run went on after this copy was made: what was given out since is not known here."""
    seconds = max(0, transaction.now_ms - backup_ms) // 1000 + 1
    transaction.counters.serial += seconds * SERIALS_A_SECOND
    transaction.connection.execute(
        "UPDATE store SET backup_ms = NULL, last_serial = ?, unsure_until_ms = ?",
        (transaction.counters.serial, transaction.now_ms + LONGEST_LIFE_MS),
    )
    transaction.log(
        Entry(
            act=Act.RESTORED,
            actor="server",
            reason="Put back from a backup: what happened after it was made is not known here.",
            detail=f"The backup was made {seconds} s ago; revoke again whom was revoked since.",
        )
    )
    store.publish(transaction)
