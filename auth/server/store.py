"""The state of an auth server: one folder with its database, its keys and the head of its log.

`Store` is open for writing, in the running server or in a moderator's command when none runs;
`StoreReader` (below) only reads, also beside a running server. Frequently used data (the signed
revocation list, the key records) is kept in memory as an immutable `Published`, replaced after each
commit that changes it.

    FOLDER/auth.sqlite         the database (and -wal, -shm beside it)
    FOLDER/auth.sqlite.lock    held by the one process that writes
    FOLDER/audit.head          the signed head of the audit log, at most a second old
    FOLDER/keys/KEYID.key      the secret half of each auth key

A database that was restored from a backup has forgotten the serial numbers given out since.
`backups.py` marks its copies, and a store that finds the mark continues from a higher number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from auth.errors import AuthError
from auth.fields import LONGEST_RUN, RUN_PATTERN
from auth.file_lock import try_lock
from auth.keys import SEED_BYTES, SigningKey, fingerprint
from auth.revocations import check_room_for_keys, read_list
from auth.server import audit, database, revoked, signing_keys
from auth.server.audit import (
    Act,
    AuditEntry,
    catch_up,
    sign_head,
    what_is_wrong,
    write_head,
    write_head_file,
)
from auth.server.database import FILE_MODE
from auth.server.signing_keys import SigningKeys
from auth.server.store_errors import WHAT_SQLITE_RAISES, StoreFailed, StoreInUse, damaged, told
from auth.server.tokens_issued import DAY_MS, count_live, forget_over
from auth.server.writer import Counters, StoreWriter, Transaction
from auth.tokens import LONGEST_LIFE_MS

log = logging.getLogger(__name__)

SERIALS_A_SECOND = 10_000  # more than any server gives out; skipped per second since a backup


class StorePaths(msgspec.Struct, frozen=True):
    """The files of a store. They belong together: without its keys, a database is a run that nobody
    can join any more."""

    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / "auth.sqlite"

    @property
    def lock(self) -> Path:
        return self.folder / "auth.sqlite.lock"

    @property
    def head(self) -> Path:
        return self.folder / "audit.head"

    @property
    def keys(self) -> Path:
        return self.folder / "keys"


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the store, for /readyz and /metrics. `trouble` is empty if it can be written."""

    writable: bool
    trouble: str
    waiting: int
    database_bytes: int
    free_bytes: int


class Store:
    """An open auth server's state. Made by `open_store`."""

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
        self._live_tokens = count_live(connection, clock_ms())
        self._published = published_in(connection, self.run, paths)
        self._latest = self._published  # in the open transaction; only the writing thread looks
        self._published.keys.active(clock_ms())  # says so now if no key's file is there
        counters = Counters(audit.chain_of(connection, self.run), serial)
        self.writer = StoreWriter(
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
    def keys(self) -> SigningKeys:
        """All keys; `.records` is for peers."""
        return self._published.keys

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the key that signs now, for a new invite."""
        return fingerprint(self.keys.active(self.clock_ms()).public_key)

    def revocation_list(self) -> revoked.SignedList:
        """The newest: `.number` and `.signed`, the bytes to pass on."""
        return self._published.revocations

    def live_tokens(self) -> int:
        """About how many tokens are alive: counted each minute, plus those issued since."""
        return self._live_tokens

    def count_token(self) -> None:
        self._live_tokens += 1

    def publish(self, transaction: Transaction, *, keys: SigningKeys | None = None) -> None:
        """Issue the next revocation list in this transaction, and publish it after the commit."""
        before = self._latest
        keys = before.keys if keys is None else keys
        after = Published(
            keys, revoked.issue_list(transaction.connection, keys, transaction.now_ms)
        )
        self._latest = after
        transaction.if_undone(lambda: self._go_back_to(before))
        transaction.after_commit(lambda: self._show(after))

    def publish_entry(self, transaction: Transaction) -> None:
        """The same after something was revoked. RevocationsFull while there is room to withdraw
        keys: that makes room again."""
        self.publish(transaction)
        check_room_for_keys(self._latest.revocations.signed)

    def latest_keys(self) -> SigningKeys:
        """The keys in the open transaction. Only for operations."""
        return self._latest.keys

    def latest_list_number(self) -> int:
        """The number of the list in the open transaction. Only for operations."""
        return self._latest.revocations.number

    def forget_ms(self, transaction: Transaction, end_ms: int) -> int:
        """Until when a token that ends then may be valid anywhere; 0 if there is none (0)."""
        latest_ms = max(end_ms, _unsure_until_ms(transaction))
        return latest_ms + self.grace_ms + revoked.MARGIN_MS if latest_ms else 0

    def is_unsure(self, transaction: Transaction) -> bool:
        """Whether there may be valid tokens that the database does not know."""
        counted_ms = _unsure_until_ms(transaction) + self.grace_ms + revoked.MARGIN_MS
        return counted_ms > transaction.now_ms

    def can_sign(self) -> bool:
        """Whether there is a key that signs now, and is within its time."""
        now_ms = self.clock_ms()
        try:
            record = self.keys.active_row(now_ms).record
        except StoreFailed:
            return False
        return record.from_ms <= now_ms < record.until_ms

    def health(self) -> Health:
        """Cheap enough for the event loop."""
        database_bytes = free_bytes = 0
        try:
            database_bytes = self.paths.database.stat().st_size
            free_bytes = shutil.disk_usage(self.paths.folder).free
            trouble = self.writer.trouble
        except OSError as error:
            trouble = str(told(error, self.paths.database))
        return Health(
            writable=not trouble,
            trouble=trouble,
            waiting=self.writer.waiting,
            database_bytes=database_bytes,
            free_bytes=free_bytes,
        )

    def _go_back_to(self, published: Published) -> None:
        self._latest = published

    def _show(self, published: Published) -> None:
        self._published = published

    def _forget(self, transaction: Transaction) -> None:
        forget_over(transaction.connection, transaction.now_ms - self.grace_ms - DAY_MS)
        self._live_tokens = count_live(transaction.connection, transaction.now_ms)

    def _doubt_what_was_forgotten(self, transaction: Transaction, back_ms: int) -> None:
        """The clock was far ahead: tokens that seemed to have expired then may be alive."""
        if back_ms > DAY_MS:
            transaction.connection.execute(
                "UPDATE store SET unsure_until_ms = max(unsure_until_ms, ?)",
                (transaction.now_ms + LONGEST_LIFE_MS,),
            )

    def refresh_list(self, transaction: Transaction) -> None:
        """A new list when an entry has expired, or when another key has begun to sign."""
        held = read_list(self._latest.revocations.signed)
        key = self._latest.keys.active(transaction.now_ms)
        wanted = revoked.entries(transaction.connection, transaction.now_ms)
        if held.key_id != key.key_id or set(held.entries) != set(wanted):
            self.publish(transaction)


def _unsure_until_ms(transaction: Transaction) -> int:
    (until_ms,) = transaction.connection.execute("SELECT unsure_until_ms FROM store").fetchone()
    return int(until_ms)


@contextlib.contextmanager
def open_store(
    folder: Path,
    *,
    clock_ms: Callable[[], int] = wall_ms,
    grace_ms: int | None = None,
    actor: str = "",
) -> Iterator[Store]:
    """The state in this folder, for writing. `actor` (a server's) is put into the audit log.

    `grace_ms` is how long peers accept expired tokens; it is stored. AuthError if another process
    writes there, or the files are damaged.
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
        transaction.log(Act.TAMPERED, "server", store.found_wrong)
    (backup_ms,) = connection.execute("SELECT backup_ms FROM store").fetchone()
    if backup_ms is not None:
        _go_on_from_backup(store, transaction, int(backup_ms))
    if actor:
        transaction.log(Act.STARTED, actor, "The server was started.")


def _go_on_from_backup(store: Store, transaction: Transaction, backup_ms: int) -> None:
    """The run went on after this copy was made, so numbers given out since are unknown here."""
    seconds = max(0, transaction.now_ms - backup_ms) // 1000 + 1
    transaction.counters.serial += seconds * SERIALS_A_SECOND
    transaction.connection.execute(
        "UPDATE store SET backup_ms = NULL, last_serial = ?, unsure_until_ms = ?",
        (transaction.counters.serial, transaction.now_ms + LONGEST_LIFE_MS),
    )
    transaction.log(
        Act.RESTORED,
        "server",
        "Put back from a backup: what happened after it was made is not known here.",
        detail=f"The backup was made {seconds} s ago; repeat the revocations since then.",
    )
    log.warning(
        "This auth server was put back from a backup of %d s ago. Repeat what moderators have done"
        " since, revocations first. If another auth key signed by then, nodes ignore this server's"
        " revocations until it has that key again: `potluck auth keys rotate --key FILE`, with the"
        " file from the keys folder of the server that was replaced; of several, the newest last."
        " If a key was withdrawn since, it counts again: withdraw it once the newest key is here."
        ' "Backup and restore" in docs/moderators.md says more',
        seconds,
    )
    store.publish(transaction)


# Reading an auth server's state without changing it, also beside a running server.
#
# Two reads see two moments. Reads that belong together are made inside one `reading`, which sees
# one state of the database, whatever is written meanwhile.


class Published(msgspec.Struct, frozen=True):
    """The state of the database at the last commit, for readers."""

    keys: SigningKeys
    revocations: revoked.SignedList


class StoreReader:
    """The state of a folder for readers, with or without a running server."""

    def __init__(self, folder: Path, *, clock_ms: Callable[[], int] = wall_ms) -> None:
        self.paths = StorePaths(folder)
        self.clock_ms = clock_ms

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the database, whatever is written meanwhile."""
        with database.reading(self.paths.database) as connection:
            yield connection

    def run(self, connection: sqlite3.Connection) -> str:
        return store_row(connection, self.paths.database)[0]

    def published(self) -> Published:
        with self.reading() as connection:
            return published_in(connection, self.run(connection), self.paths)


def store_row(connection: sqlite3.Connection, path: Path) -> tuple[str, int, int]:
    row = connection.execute("SELECT run, last_serial, grace_ms FROM store").fetchone()
    if row is None:
        raise damaged(path, "it does not say for which run it is")
    run, serial, grace_ms = row
    return str(run), int(serial), int(grace_ms)


def published_in(connection: sqlite3.Connection, run: str, paths: StorePaths) -> Published:
    issued = revoked.newest_list(connection)
    if issued is None:
        raise damaged(paths.database, "it has no revocation list")
    return Published(signing_keys.load(connection, run, paths.keys), issued)


# One writer per folder: a lock of the kernel on `auth.sqlite.lock`, held while a store is open.
#
# The database is written by the running server, or by one moderator's command when no server runs;
# never by both, because each keeps counters in memory (serials, the head of the audit log). The
# lock ends with its process however that ends. Readers need none.
#
# The lock must not be on the database itself. SQLite has locks of its own there, and closing any
# descriptor of that file would drop them all.


LONGEST_PID = 20  # characters


@contextlib.contextmanager
def hold_store_lock(path: Path) -> Iterator[None]:
    """Be the only writer. StoreInUse if another process is. The file is never removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        raise told(error, path) from error
    try:
        if not try_lock(descriptor):
            pid = os.read(descriptor, LONGEST_PID).decode("ascii", "replace").strip()
            who = f" (pid {pid})" if pid.isdigit() else ""
            raise StoreInUse(
                f"Another process{who} writes into {path.parent}.",
                why="It is the auth server, or a moderator's command.",
                advice="Moderate through the running server, or stop it first.",
            )
        # The pid is for the message to other processes; a full disk must not keep us from starting.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


# Making a new run's state: database, first key, head of the log; all of it, or nothing.
#
# It is made in a folder of its own and moved into place, the database last. So if the database is
# there, everything is, also after `kill -9` in the middle.
#
# The first key's file must be on the disk, with its name, before the database is.


DRAFT = ".making-"

DEFAULT_GRACE_MS = 3600 * 1000
"""How long peers accept expired tokens by default (decides when they may be forgotten)."""


class StoreMade(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    key_id: str
    fingerprint: str


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
        database.check_folder(folder)
        with hold_store_lock(paths.lock):
            if paths.database.exists():
                raise StoreFailed(
                    f"There is an auth server's state at {paths.database} already.",
                    why="Making a new one would throw away who may take part, and the keys.",
                    advice="Use it as it is, or choose another folder (POTLUCK_HOME or --home).",
                )
            for left in folder.glob(f"{DRAFT}*"):  # by one that was killed
                shutil.rmtree(left, ignore_errors=True)
            draft = StorePaths(folder / f"{DRAFT}{secrets.token_hex(4)}")
            try:
                key = SigningKey(seed or secrets.token_bytes(SEED_BYTES))
                _make(draft, run, key, clock_ms(), actor, reason)
                # The database comes last: if it is there, everything is.
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
            connection, now_ms, AuditEntry(act=Act.MADE, actor=actor, reason=reason, detail=run)
        )
        chain.append(
            connection,
            now_ms,
            AuditEntry(
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


def _check_run(run: str) -> None:
    if len(run) > LONGEST_RUN or not re.match(RUN_PATTERN, run):
        raise StoreFailed(
            f"{run[:LONGEST_RUN]!r} cannot be the name of a run.",
            why="Names have letters, digits and . _ - and begin with a letter or a digit; at most "
            f"{LONGEST_RUN} characters.",
            advice="Choose another one: it stands in every token and invite.",
        )


# Recording refusals in the audit log without letting anybody fill the disk with them.
#
# The first few of an address in a minute are written one by one, with all details. Later ones, and
# those above a limit for all addresses together, are counted, and each minute one row per address
# says how many there were and for which reasons. So none is left out; the record is only shorter.
#
# The counts are in memory until their minute is over. When the process is killed, up to a minute of
# *counted* refusals is missing from the log (the first few of each address are not); the row of the
# next start shows that.


MINUTE_MS = 60_000
WRITTEN_EACH = 5  # of one address in a minute; a person who tries again needs fewer
WRITTEN_IN_ALL = 300  # in a minute; at 250 bytes a row that is 110 MB in a day at the very most
MOST_ADDRESSES = 64  # counted separately; the rest are together, as OTHERS
MOST_REASONS = 24  # counted separately for one address
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
            counts = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
            transaction.log(
                Act.REFUSALS,
                "peer",
                f"{reasons.total()} more refusals in a minute, only counted.",
                detail=f"{address}: {counts}",
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
        """While nothing can be written the counts wait; older ones are merged over all
        addresses."""
        while len(self._over) > 2 * MOST_ADDRESSES:
            (_, first), (_, second), *rest = self._over
            self._over = [(OTHERS, first + second), *rest]
