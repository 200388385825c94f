"""The state of an auth server: one folder with its database, its keys and the head of its log.

    FOLDER/auth.sqlite         the database (and -wal, -shm beside it)
    FOLDER/auth.sqlite.lock    held by the one process that writes
    FOLDER/audit.head          the signed head of the audit log, at most a second old
    FOLDER/keys/KEYID.key      the secret half of each auth key

`Store` is open for writing, in the running server or in a moderator's command when none runs;
`Reader` only reads, also beside a running server. What everybody needs all the time (the signed
revocation list, the key records) is kept in memory as an immutable `Published`, replaced after
each commit that changes it.

Easy to get wrong: a database that was put back from a backup has forgotten serial numbers that it
gave out. `backups.py` marks its copies, and a store that finds the mark counts on from further up.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from auth.errors import AuthError
from auth.fields import LONGEST_RUN, RUN_PATTERN
from auth.keys import SEED_BYTES, SigningKey, VerifyingKey, fingerprint
from auth.revocations import read_list
from auth.server import audit, database, revoked, signing_keys
from auth.server.audit import Act, Entry
from auth.server.audit_head import catch_up, sign_head, what_is_wrong, write_head, write_head_file
from auth.server.refusal_log import RefusalLog
from auth.server.signing_keys import SigningKeys
from auth.server.store_errors import WHAT_SQLITE_RAISES, StoreFailed, damaged, told
from auth.server.store_lock import hold_store_lock
from auth.server.tokens_issued import DAY_MS, count_live, forget_over
from auth.server.transaction import Counters, Transaction
from auth.server.writer import Writer
from auth.tokens import LONGEST_LIFE_MS

DATABASE_NAME = "auth.sqlite"
LOCK_NAME = "auth.sqlite.lock"
HEAD_NAME = "audit.head"
KEYS_NAME = "keys"

DEFAULT_GRACE_MS = 3600 * 1000
"""How long peers take tokens that are over, where the settings say nothing (for forgetting)."""

log = logging.getLogger(__name__)

SERIALS_A_SECOND = 10_000  # more than any server gives out; skipped per second since a backup


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class StorePaths(msgspec.Struct, frozen=True):
    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / DATABASE_NAME

    @property
    def lock(self) -> Path:
        return self.folder / LOCK_NAME

    @property
    def head(self) -> Path:
        return self.folder / HEAD_NAME

    @property
    def keys(self) -> Path:
        return self.folder / KEYS_NAME


class Published(msgspec.Struct, frozen=True):
    """What the database says at the last commit, for those who only look."""

    keys: SigningKeys
    revocations: revoked.SignedList


class StoreMade(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    key_id: str
    fingerprint: str


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


def create_store(
    folder: Path,
    run: str,
    *,
    actor: str,
    reason: str = "",
    clock_ms: Callable[[], int] = wall_ms,
    seed: bytes | None = None,
) -> StoreMade:
    """Make a new run's database and first key: all of it, or nothing. AuthError if there is one."""
    _check_run(run)
    paths = StorePaths(folder)
    try:
        folder.mkdir(mode=database.FOLDER_MODE, parents=True, exist_ok=True)
        if paths.database.exists():
            raise StoreFailed(
                f"There is an auth server's state at {paths.database} already.",
                why="Making a new one would throw away who may take part, and the signing keys.",
                advice="Use it as it is, or choose another folder (POTLUCK_HOME or --home).",
            )
        with hold_store_lock(paths.lock):
            draft = StorePaths(folder / f".making-{secrets.token_hex(4)}")
            try:
                key = SigningKey(seed or secrets.token_bytes(SEED_BYTES))
                _make(draft, run, key, clock_ms(), actor, reason)
                # The database comes last: where it is, everything is.
                paths.keys.mkdir(mode=database.FOLDER_MODE, exist_ok=True)
                name = signing_keys.file_name(key.key_id)
                (draft.keys / name).rename(paths.keys / name)
                signing_keys.keep_names(paths.keys)
                draft.head.rename(paths.head)
                draft.database.rename(paths.database)
                signing_keys.keep_names(folder)
            finally:
                shutil.rmtree(draft.folder, ignore_errors=True)
    except (OSError, sqlite3.Error) as error:
        raise told(error, paths.database) from error
    return StoreMade(run=run, key_id=key.key_id.hex(), fingerprint=fingerprint(key.public_key))


def _make(
    draft: StorePaths, run: str, key: SigningKey, now_ms: int, actor: str, reason: str
) -> None:
    draft.folder.mkdir(mode=database.FOLDER_MODE)
    signing_keys.write_key_file(draft.keys, key)
    connection = database.create_database(draft.database)
    try:
        chain = audit.Chain(0, audit.first_hash(run))
        row = signing_keys.first_row(run, key, now_ms)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "INSERT INTO store VALUES (1, ?, ?, 0, ?, 0, NULL)", (run, now_ms, DEFAULT_GRACE_MS)
        )
        signing_keys.keep_row(connection, row)
        chain.append(
            connection, now_ms, Entry(act=Act.MADE, actor=actor, reason=reason, detail=run)
        )
        chain.append(
            connection,
            now_ms,
            Entry(
                act=Act.KEY_MADE, actor=actor, reason="The run's first key.",
                detail=fingerprint(key.public_key),
            ),
        )  # fmt: skip
        keys = SigningKeys(run, (row,), {key.key_id: key})
        revoked.issue_list(connection, keys, now_ms)
        head = sign_head(run, chain.number, chain.hash, key)
        write_head(connection, head)
        connection.execute("COMMIT")
        # As one file it can be put into its place by one rename.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    write_head_file(draft.head, head)


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
        self.run, serial, self.grace_ms = _store_row(connection, paths.database)
        self._listeners: list[Callable[[], None]] = []
        self._live_tokens = count_live(connection, clock_ms())
        self._published = _published(connection, self.run, paths)
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
        )
        self.found_wrong = what_is_wrong(
            connection, self.run, self._published.keys.all_verifying, paths.head
        )
        if not self.found_wrong:
            catch_up(connection, paths.head)
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


class Reader:
    """The state of a folder for those who only read, beside a running server or without one."""

    def __init__(self, folder: Path, *, clock_ms: Callable[[], int] = wall_ms) -> None:
        self.paths = StorePaths(folder)
        self.clock_ms = clock_ms

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the database, whatever is written meanwhile."""
        with database.reading(self.paths.database) as connection:
            yield connection

    def run(self, connection: sqlite3.Connection) -> str:
        return _store_row(connection, self.paths.database)[0]

    def published(self) -> Published:
        with self.reading() as connection:
            return _published(connection, self.run(connection), self.paths)

    def verifying_keys(self, connection: sqlite3.Connection) -> dict[bytes, VerifyingKey]:
        return signing_keys.load(connection, self.run(connection), self.paths.keys).verifying()


def _store_row(connection: sqlite3.Connection, path: Path) -> tuple[str, int, int]:
    row = connection.execute("SELECT run, last_serial, grace_ms FROM store").fetchone()
    if row is None:
        raise damaged(path, "it does not say for which run it is")
    run, serial, grace_ms = row
    return str(run), int(serial), int(grace_ms)


def _published(connection: sqlite3.Connection, run: str, paths: StorePaths) -> Published:
    issued = revoked.newest_list(connection)
    if issued is None:
        raise damaged(paths.database, "it has no revocation list")
    return Published(signing_keys.load(connection, run, paths.keys), issued)


def _check_run(run: str) -> None:
    if len(run) > LONGEST_RUN or not re.match(RUN_PATTERN, run):
        raise StoreFailed(
            f"{run[:LONGEST_RUN]!r} cannot be the name of a run.",
            why="Names have letters, digits and . _ - and begin with a letter or a digit; at most "
            f"{LONGEST_RUN} characters.",
            advice="Choose another one: it stands in every token and invite.",
        )
