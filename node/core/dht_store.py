"""The peers and slots of the directory that a backbone keeps over a restart, in SQLite.

A batch of slots is one transaction, so after `kill -9` or a power loss the file has the state after
some batch, never half of one. A file that cannot be ours is moved aside with a warning
(sqlite_file.py): a backbone that starts without its memory fills it from its neighbours; one that
does not start helps nobody.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from node.core.peer_cache import newest_first
from node.core.private_file import FOLDER_MODE
from node.core.sqlite_file import FileKind, NotOurs, open_or_begin_anew
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

KIND = FileKind(
    "The directory's file", APPLICATION_ID, MIGRATIONS, "this node starts without what was in it"
)

KEPT_CONTACTS = 2048  # every peer meets a backbone; each costs some hundred bytes
LONGEST_ADDRESSES_BYTES = 4096  # of one contact: eight of the longest
LOADED_BYTES = 128 << 20  # keys and values together; twice what a node keeps for others

log = logging.getLogger(__name__)

T = TypeVar("T")


class DhtStore:
    """One open file. Blocking code; calls from several threads wait for each other."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. PotluckError if neither works."""
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._connection = open_or_begin_anew(path, KIND)
        except (OSError, sqlite3.Error, NotOurs) as error:
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
