"""The auth keys: their secret halves in files, and their endorsements in the database.

One file for each key, mode 0600, in a folder of mode 0700 beside the database; the database holds
the records that peers get (`auth.keyring`). A key is published before it signs: for the length of
the *overlap* both the old and the new one are known everywhere, and the old one still signs. Each
key is endorsed by the one before it, so an invite that pins an old one stays good.

The key that signs now is the newest one whose time has come and that was not withdrawn.

Easy to get wrong: the file has to be on the disk before the record commits, or a power loss leaves
a run whose key nobody has.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import msgspec

from auth.errors import AuthError, NotAKey
from auth.keyring import MOST_KEYS, KeyRecord, endorse
from auth.keys import SEED_BYTES, SigningKey, VerifyingKey, fingerprint
from auth.server.database import FOLDER_MODE, check_is_ours, write_new_file
from auth.server.store_errors import StoreFailed, told

FIRST_LINE = "potluck auth key, keep it secret"
LONGEST_FILE_BYTES = 256  # the real one has 98

KEY_LIFE_MS = 10 * 365 * 24 * 3600 * 1000
"""How long a key may sign. Rotation ends its use long before; this limit must never do so."""

NEW_YEAR_2026_MS = 1_767_225_600_000  # every correct clock is later


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key in the database. `place` counts from 0, the run's first key."""

    record: KeyRecord
    made_ms: int
    withdrawn_ms: int | None
    place: int

    @property
    def key_id(self) -> bytes:
        return self.record.key_id

    @property
    def was_put_back(self) -> bool:
        """Whether it came by its file after a restore: it may have signed before it was here."""
        return self.place > 0 and self.record.from_ms < self.made_ms


class TooManyKeys(AuthError):
    """The chain of keys is as long as peers accept."""


class SigningKeys:
    """All keys of the run. A snapshot: acts that change keys make a new one."""

    def __init__(
        self, run: str, rows: tuple[KeyRow, ...], private: dict[bytes, SigningKey]
    ) -> None:
        self.run = run
        self.rows = rows
        self._private = private
        self._usable = [row for row in rows if row.withdrawn_ms is None and row.key_id in private]
        self.records = tuple(row.record for row in rows)
        self.all_verifying = {row.key_id: VerifyingKey(row.record.public_key) for row in rows}
        self.fingerprints = tuple(fingerprint(record.public_key) for record in self.records)
        self.withdrawn = tuple(row.key_id for row in rows if row.withdrawn_ms is not None)

    def active(self, now_ms: int) -> SigningKey:
        """The key that signs now."""
        return self._private[self.active_row(now_ms).key_id]

    def active_row(self, now_ms: int) -> KeyRow:
        for row in reversed(self._usable):
            if row.record.from_ms <= now_ms < row.record.until_ms:
                return row
        if not self._usable:
            raise StoreFailed(
                "The auth server has no key to sign with.",
                why="The files in its keys folder are missing, or all keys were withdrawn.",
                advice="Put the keys folder of the last backup in its place.",
            )
        return self._usable[0]  # the clock went back to before any of them

    def with_new(self, row: KeyRow, key: SigningKey) -> SigningKeys:
        return SigningKeys(self.run, (*self.rows, row), {**self._private, key.key_id: key})

    def without(self, key_id: bytes, now_ms: int) -> SigningKeys:
        """The keys after this one was withdrawn."""
        rows = tuple(
            msgspec.structs.replace(row, withdrawn_ms=now_ms) if row.key_id == key_id else row
            for row in self.rows
        )
        private = {other: key for other, key in self._private.items() if other != key_id}
        return SigningKeys(self.run, rows, private)

    def with_last(self, key_id: bytes) -> SigningKeys | None:
        """The keys with this one at the end of the chain, after a restore in a wrong order.

        None unless it and all that follow it were put back, and none of them was withdrawn. Those
        that follow are endorsed anew, as they were before the restore.
        """
        place = next((row.place for row in self.rows if row.key_id == key_id), len(self.rows))
        first, *others = self.rows[place:] or (None,)
        after = SigningKeys(self.run, self.rows[:place], self._private)
        if first is None or not others or not after._usable:
            return None
        for row in (*others, first):
            if row not in self._usable or not row.was_put_back:
                return None
            key = self._private[row.key_id]
            after = after.with_new(after.successor(key, row.made_ms, row.record.from_ms), key)
        return after

    def private_key(self, key_id: bytes) -> SigningKey | None:
        return self._private.get(key_id)

    def newest(self) -> KeyRow:
        return self._usable[-1] if self._usable else self.active_row(0)

    def verifying(self) -> dict[bytes, VerifyingKey]:
        """The keys whose secret half is here: only they can have signed the audit log's head."""
        return {key_id: key.verifying_key for key_id, key in self._private.items()}

    def successor(self, key: SigningKey, now_ms: int, from_ms: int) -> KeyRow:
        """The row of a new key, endorsed by the newest one."""
        if len(self.rows) >= MOST_KEYS:
            raise TooManyKeys(
                f"This run has had {MOST_KEYS} auth keys, and peers follow no longer chain.",
                why="Each key is vouched for by the one before it, from the invite's on.",
                advice="Make a new run with `potluck auth init`, and new invites.",
            )
        endorser = self._private[self.newest().key_id]
        record = endorse(self.run, key.public_key, from_ms, from_ms + KEY_LIFE_MS, endorser)
        return KeyRow(record=record, made_ms=now_ms, withdrawn_ms=None, place=len(self.rows))


def first_row(run: str, key: SigningKey, now_ms: int) -> KeyRow:
    """The row of a run's first key, which endorses itself.

    The clock may be wrong when it is made, and be set right later. So the key is valid from long
    before.
    """
    until_ms = max(now_ms, NEW_YEAR_2026_MS) + KEY_LIFE_MS
    record = endorse(run, key.public_key, 0, until_ms, key)
    return KeyRow(record=record, made_ms=now_ms, withdrawn_ms=None, place=0)


def load(connection: sqlite3.Connection, run: str, folder: Path) -> SigningKeys:
    """The keys in the database, with the secret halves that are in the folder."""
    rows = tuple(
        KeyRow(
            record=KeyRecord(bytes(public_key), from_ms, until_ms, bytes(by), bytes(signature)),
            made_ms=made_ms,
            withdrawn_ms=withdrawn_ms,
            place=place,
        )
        for public_key, from_ms, until_ms, by, signature, made_ms, withdrawn_ms, place in (
            connection.execute(
                "SELECT public_key, from_ms, until_ms, endorsed_by, signature, made_ms,"
                " withdrawn_ms, place FROM signing_keys ORDER BY place"
            )
        )
    )
    private = {}
    for row in rows:
        if row.withdrawn_ms is None:
            key = read_key_file(folder / file_name(row.key_id))
            if key is not None and key.key_id == row.key_id:
                private[row.key_id] = key
    return SigningKeys(run, rows, private)


def keep_row(connection: sqlite3.Connection, row: KeyRow) -> None:
    connection.execute(
        "INSERT INTO signing_keys VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?)",
        (
            row.key_id,
            row.record.public_key,
            row.record.from_ms,
            row.record.until_ms,
            row.record.endorsed_by,
            row.record.signature,
            row.made_ms,
            row.place,
        ),
    )


def keep_order(connection: sqlite3.Connection, rows: tuple[KeyRow, ...]) -> None:
    """Keep the rows of keys that have other places and endorsements than before."""
    for row in rows:
        connection.execute("DELETE FROM signing_keys WHERE key_id = ?", (row.key_id,))
    for row in rows:
        keep_row(connection, row)


def withdraw(connection: sqlite3.Connection, key_id: bytes, now_ms: int) -> None:
    connection.execute(
        "UPDATE signing_keys SET withdrawn_ms = ? WHERE key_id = ?", (now_ms, key_id)
    )


def file_name(key_id: bytes) -> str:
    return f"{key_id.hex()}.key"


def write_key_file(folder: Path, key: SigningKey) -> Path:
    """Write the secret half to the disk, name and all, before anything depends on it."""
    path = folder / file_name(key.key_id)
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        try:
            write_new_file(path, f"{FIRST_LINE}\n{key.seed.hex()}\n".encode("ascii"))
            keep_names(folder)
        except OSError:
            remove_key_file(path)
            raise
    except OSError as error:
        raise told(error, path) from error
    return path


def remove_key_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def keep_names(folder: Path) -> None:
    """A file's name is an entry of its folder: it is on the disk once the folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_key_file(path: Path) -> SigningKey | None:
    """The key in this file; None if there is no file; StoreFailed if it is not one of ours."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise told(error, path) from error
    try:
        status = os.fstat(descriptor)
        check_is_ours(path, status)
        if status.st_mode & 0o077:
            mode = f"{status.st_mode & 0o777:04o}"
            raise StoreFailed(
                f"Others may read the signing key {path}: its mode is {mode}.",
                why="With this key, anybody can be let into the run.",
                advice=f"If nobody has read it, run `chmod 600 {path}`; otherwise "
                f"withdraw the key as well (`potluck auth keys withdraw {path.stem}`).",
            )
        content = os.read(descriptor, LONGEST_FILE_BYTES)
    finally:
        os.close(descriptor)
    try:
        first, seed, rest = content.decode("ascii").split("\n")
        if first != FIRST_LINE or rest or len(seed) != 2 * SEED_BYTES:
            raise ValueError
        return SigningKey(bytes.fromhex(seed))
    except (ValueError, NotAKey):
        raise StoreFailed(
            f"{path} is not a signing key.",
            why="It may be damaged, or something else.",
            advice="Put the one of the last backup in its place.",
        ) from None
