"""The peers and slots of the directory that a backbone keeps over a restart, in SQLite.

One file in WAL mode: a batch of slots is one transaction, so after `kill -9` or a power loss the
file has the state after some batch, never half of one. A file that cannot be ours (damaged, of
another program, or with other tables) is moved aside with a warning, and a new one is begun. A
backbone that starts without its memory fills it from its neighbours; one that does not start helps
nobody. Only a file of a newer potluck is refused: it is sound, and worth an update.

SQLite runs code that is in a file (views, triggers, generated columns). So the schema of an opened
file is compared, word for word, with the result of our own migrations.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from node.core.peer_cache import newest_first
from node.core.private_file import FILE_MODE, FOLDER_MODE, check_is_ours
from protocols.dht import (
    LARGEST_VALUE_BYTES,
    LONGEST_KEY_BYTES,
    Contact,
    KeepingFailed,
    KeptSlot,
    Slot,
    contact_of,
)
from protocols.errors import MalformedMessage, PotluckError
from protocols.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from protocols.rpc import decode

# "pot1" in ASCII, in SQLite's field for the application of a file.
APPLICATION_ID = 0x706F7431

# A file is at version n after the first n have run on it. Append; never change one.
MIGRATIONS = (
    """
    CREATE TABLE contacts (
        peer TEXT PRIMARY KEY, addresses BLOB NOT NULL, place INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE slots (
        key TEXT NOT NULL, publisher BLOB NOT NULL, sequence INTEGER NOT NULL,
        expires INTEGER NOT NULL, value BLOB NOT NULL, withdrawn INTEGER NOT NULL,
        signature BLOB NOT NULL, PRIMARY KEY (key, publisher)
    ) WITHOUT ROWID;
    CREATE INDEX slots_by_expiry ON slots (expires);
    """,
    """
    ALTER TABLE slots ADD COLUMN forget_at INTEGER NOT NULL DEFAULT 0;
    UPDATE slots SET forget_at = expires;
    DROP INDEX slots_by_expiry;
    CREATE INDEX slots_by_end ON slots (forget_at);
    """,
)

KEPT_CONTACTS = 2048  # every peer meets a backbone; each costs some hundred bytes
LONGEST_ADDRESSES_BYTES = 4096  # of one contact: eight of the longest
LOADED_BYTES = 128 << 20  # keys and values together; twice what a node keeps for others

# How long to wait for another process with the file open (a backup, a person with sqlite3).
BUSY_SECONDS = 5.0
log = logging.getLogger(__name__)

T = TypeVar("T")


class _NotOurs(Exception):
    """The file is damaged or foreign; the text says how."""


# The errors of SQLite that blame the file, and not the disk or a lock.
_THE_FILE_ITSELF = (
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
)
_SIDE_FILES = ("", "-wal", "-shm")


class DhtStore:
    """One open file. Blocking code; calls from several threads wait for each other."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. PotluckError if neither works."""
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._connection = _open_or_begin_anew(path)
        except (OSError, sqlite3.Error, _NotOurs) as error:
            raise PotluckError(
                f"The directory cannot be kept in {path}: {error}.",
                why="A backbone needs a place for it on disk.",
                advice="Free some space and allow this user to write there, or run without "
                "--keep-slots.",
            ) from error

    def __enter__(self) -> DhtStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. May be called twice; saving after it raises KeepingFailed."""
        with self._lock:
            self._connection.close()

    @property
    def blocks(self) -> bool:
        return True

    def load_contacts(self) -> list[Contact]:
        return self._read(_contacts)

    def save_contacts(self, contacts: Sequence[Contact]) -> None:
        if not contacts:
            return
        with self._writing() as connection:
            kept = newest_first(contacts, _contacts(connection), KEPT_CONTACTS)
            connection.execute("DELETE FROM contacts")
            connection.executemany(
                "INSERT INTO contacts VALUES (?, ?, ?)",
                (
                    (one.peer, msgspec.msgpack.encode(one.addresses), place)
                    for place, one in enumerate(kept)
                ),
            )

    def load_slots(self) -> list[KeptSlot]:
        """The saved slots, without shorter-lived ones if there are more than a node could keep."""
        return self._read(lambda connection: list(_slots(connection)))

    def save_slots(self, slots: Sequence[KeptSlot], now_ms: int) -> None:
        with self._writing() as connection:
            rows = ((*msgspec.structs.astuple(one.slot), one.forget_at) for one in slots)
            connection.executemany(_SAVE_SLOT, rows)
            connection.execute("DELETE FROM slots WHERE forget_at <= ?", (now_ms,))

    def _read(self, read: Callable[[sqlite3.Connection], list[T]]) -> list[T]:
        """Read; if the file is unreadable, log that and return nothing."""
        with self._lock:
            try:
                return read(self._connection)
            except sqlite3.Error as error:
                log.warning("Not all of %s can be read: %s", self.path, error)
                return []

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        with self._lock:
            try:
                with self._connection:
                    self._connection.execute("BEGIN IMMEDIATE")
                    yield self._connection
            except sqlite3.Error as error:
                raise KeepingFailed(
                    f"The directory cannot be kept in {self.path}: {error}.",
                    why="The disk may be full or gone.",
                    advice="This node continues, but loses later changes when it ends.",
                ) from error


# If a batch has two versions of a slot, or comes after a newer one, the newer stays.
_SAVE_SLOT = """
    INSERT INTO slots (key, publisher, sequence, expires, value, withdrawn, signature, forget_at)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (key, publisher) DO UPDATE SET
        sequence = excluded.sequence, expires = excluded.expires, value = excluded.value,
        withdrawn = excluded.withdrawn, signature = excluded.signature,
        forget_at = max(forget_at, excluded.forget_at)
    WHERE excluded.sequence >= sequence
"""


def _contacts(connection: sqlite3.Connection) -> list[Contact]:
    rows = connection.execute(
        "SELECT peer, addresses FROM contacts WHERE length(addresses) <= ? ORDER BY place LIMIT ?",
        (LONGEST_ADDRESSES_BYTES, KEPT_CONTACTS),
    )
    contacts = []
    for peer, addresses in rows:
        try:
            contacts.append(contact_of(peer, decode(tuple[str, ...], addresses)))
        except MalformedMessage:
            log.warning("The directory's file contains an impossible peer: %r", peer[:64])
    return contacts


def _slots(connection: sqlite3.Connection) -> Iterator[KeptSlot]:
    rows = connection.execute(
        "SELECT key, publisher, sequence, expires, value, withdrawn, signature, forget_at"
        " FROM slots"
        " WHERE length(CAST(key AS BLOB)) <= ? AND length(value) <= ? AND length(publisher) <= ?"
        " AND length(signature) <= ? AND typeof(forget_at) = 'integer' ORDER BY expires DESC",
        (LONGEST_KEY_BYTES, LARGEST_VALUE_BYTES, PUBLIC_KEY_BYTES, SIGNATURE_BYTES),
    )
    size = 0
    for row in rows:
        size += len(row[0]) + len(row[4])
        if size > LOADED_BYTES:
            log.warning("The directory's file holds more than a node keeps; some of it was left.")
            return
        with contextlib.suppress(msgspec.ValidationError):  # no valid slot: nothing is lost
            slot = msgspec.convert((*row[:5], bool(row[5]), row[6]), Slot)
            yield KeptSlot(slot, row[7])


def _open_or_begin_anew(path: Path) -> sqlite3.Connection:
    try:
        return _open(path)
    except _NotOurs as error:
        reason = str(error)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _THE_FILE_ITSELF:
            raise
        reason = str(error)
    aside = path.with_name(path.name + ".damaged")
    for side in _SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{side}", f"{aside}{side}")
    log.warning(
        "The directory's file %s cannot be used: %s. It is moved to %s, and this node starts "
        "without what was in it.", path, reason, aside
    )  # fmt: skip
    return _open(path)


def _open(path: Path) -> sqlite3.Connection:
    _check_place(path)
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for statement in (
            "PRAGMA trusted_schema = OFF",
            "PRAGMA cell_size_check = ON",
            "PRAGMA mmap_size = 0",  # so that a damaged disk gives an error, not a signal
        ):
            connection.execute(statement)
        version = _check_content(path, connection)
        connection.execute("PRAGMA journal_mode = WAL")
        # With WAL the file is sound after a power loss; the last few batches may be missing.
        connection.execute("PRAGMA synchronous = NORMAL")
        _migrate(connection, version)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_place(path: Path) -> None:
    """Make an empty file of our own, or check the existing one and its side files."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    for side in _SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            check_is_ours(Path(f"{path}{side}"), os.lstat(f"{path}{side}"))


def _check_content(path: Path, connection: sqlite3.Connection) -> int:
    """The version of the file, 0 if it is new. _NotOurs if it is foreign or damaged."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application == APPLICATION_ID and version > len(MIGRATIONS):
        raise PotluckError(
            f"{path} was written by a newer potluck.",
            why=f"It is of version {version}, and this one knows {len(MIGRATIONS)}.",
            advice="Update potluck, or move that file away to start without it.",
        )
    if application not in (0, APPLICATION_ID) or (application == 0 and version):
        raise _NotOurs("it belongs to another program")
    if _schema_of(connection) != _schema_of_version(max(0, version)):
        raise _NotOurs("its tables are not ours")
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _NotOurs(str(verdict).splitlines()[0])
    return int(version)


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.executescript(
            f"BEGIN IMMEDIATE; {script} PRAGMA application_id = {APPLICATION_ID};"
            f" PRAGMA user_version = {number}; COMMIT;"
        )


def _schema_of_version(version: int) -> list[tuple[str, str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as model:
        for script in MIGRATIONS[:version]:
            model.executescript(script)
        return _schema_of(model)


def _schema_of(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
