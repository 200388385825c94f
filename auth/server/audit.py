"""The audit log: rows are only appended, and every row hashes the one before it.

A row's hash covers all of its fields and the hash of the row before, so an edited, removed,
inserted or moved row breaks the chain at a place that `verify` names. Two more things are needed:

- An attacker who edits a row could compute all later hashes anew. So the *head* (how many rows, and
  the last hash) is signed with the auth key in every transaction.
- An attacker who cuts off the end could put an older signed head back. So the newest head is also
  kept in a file beside the database, and a person can write it down: `verify` takes it as an
  argument.

An attacker who holds the signing key and replaces everything (database, head file and keys) is only
found with a head that was written down elsewhere.

The raw bytes of a row are compared. A text that is not UTF-8 must not be decoded into something
that could have been written; it is a broken row.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NewType

import msgspec

from auth.keys import SigningKey, VerifyingKey
from auth.server.database import rows_of, write_new_file

AuditHash = NewType("AuditHash", bytes)

HASH_BYTES = 32
LONGEST_TEXT = 500  # characters of a reason or a detail; a moderator's sentence fits well
LONGEST_NAME = 200  # characters; longer than any account's name

_GENESIS = b"potluck audit log 1\x00"


class Act(enum.StrEnum):
    """The kind of a row. These words are on the wire and in the file: never change one."""

    MADE = "made"
    STARTED = "started"
    JOINED = "joined"
    RENEWED = "renewed"
    REFUSED = "refused"
    REFUSALS = "refusals"  # several that were only counted, see store.py
    ALLOWED = "allowed"
    DENIED = "denied"
    REVOKED = "revoked"
    LIFTED = "lifted"
    CODE_MADE = "code made"
    CODE_CANCELLED = "code cancelled"
    KEY_MADE = "key made"
    KEY_WITHDRAWN = "key withdrawn"
    BACKED_UP = "backed up"
    BACKUP_FAILED = "backup failed"  # after a row that said it was made
    RESTORED = "restored"
    COURIER = "courier"  # a token for the server itself, to spread a list when it is stopped
    CLOCK = "clock went back"
    TAMPERED = "tampered"  # damage that was found in the log when it was opened


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An event to record; the log adds the number, the time and the hash."""

    act: Act
    actor: str
    """The actor: `local:alice` (a moderator), `server`, or `peer` (a request from a peer)."""
    reason: str = ""
    name: str | None = None
    peer: bytes | None = None
    serial: int | None = None
    detail: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    at_ms: int
    act: str
    actor: str
    name: str | None
    peer: bytes | None
    serial: int | None
    reason: str
    detail: str
    hash: bytes


class Chain:
    """The end of the log, for the one thread that writes it.

    Invariant: `number` and `hash` are those of the last row in the open transaction; `mark` and
    `return_to` undo a transaction that is rolled back.
    """

    def __init__(self, number: int, last_hash: AuditHash) -> None:
        self.number = number
        self.hash = last_hash

    def mark(self) -> tuple[int, AuditHash]:
        return self.number, self.hash

    def return_to(self, mark: tuple[int, AuditHash]) -> None:
        self.number, self.hash = mark

    def append(self, connection: sqlite3.Connection, at_ms: int, entry: AuditEntry) -> int:
        """Add a row to the open transaction, and return its number."""
        number = self.number + 1
        fields = (
            number,
            at_ms,
            str(entry.act),
            one_line(entry.actor, LONGEST_NAME),
            None if entry.name is None else one_line(entry.name, LONGEST_NAME),
            entry.peer,
            entry.serial,
            one_line(entry.reason, LONGEST_TEXT),
            one_line(entry.detail, LONGEST_TEXT),
        )
        row_hash = hash_of(self.hash, fields)
        connection.execute(_INSERT, (*fields, row_hash))
        self.number, self.hash = number, row_hash
        return number


_INSERT = "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_COLUMNS = ", ".join(Row.__struct_fields__)


def first_hash(run: str) -> AuditHash:
    """The hash that a run's first row uses in place of the row before it."""
    return AuditHash(hashlib.sha256(_GENESIS + run.encode()).digest())


def hash_of(before: AuditHash, fields: tuple[object, ...]) -> AuditHash:
    return AuditHash(hashlib.sha256(before + msgspec.msgpack.encode(fields)).digest())


def chain_of(connection: sqlite3.Connection, run: str) -> Chain:
    last = connection.execute("SELECT number, hash FROM audit ORDER BY number DESC LIMIT 1")
    for number, last_hash in last:
        return Chain(int(number), AuditHash(last_hash))
    return Chain(0, first_hash(run))


class ChainVerdict(msgspec.Struct, frozen=True, kw_only=True):
    rows: int
    """How many rows were found in order, from the first on."""
    hash: bytes
    broken_row: int | None = None
    what: str = ""
    hash_at_mark: bytes | None = None


def follow(connection: sqlite3.Connection, run: str, mark: int = 0) -> ChainVerdict:
    """Check the whole log. Stops at the first row that does not follow the one before.

    `mark` is the number of a row whose hash is also returned.
    """
    before = first_hash(run)
    at_mark: bytes | None = before if mark == 0 else None
    expected = 1
    for fields in _raw_rows(connection):
        number, row_hash = fields[0], fields[-1]
        if number != expected:
            return ChainVerdict(
                rows=expected - 1, hash=before, broken_row=expected, hash_at_mark=at_mark,
                what=f"Row {expected} is missing: the next one there is row {number}.",
            )  # fmt: skip
        if (
            not isinstance(row_hash, bytes)
            or len(row_hash) != HASH_BYTES
            or hash_of(before, fields[:-1]) != row_hash
        ):
            return ChainVerdict(
                rows=expected - 1, hash=before, broken_row=expected, hash_at_mark=at_mark,
                what=f"Row {expected} is not what was written there after row {expected - 1}.",
            )  # fmt: skip
        before = AuditHash(row_hash)
        if expected == mark:
            at_mark = row_hash
        expected += 1
    return ChainVerdict(rows=expected - 1, hash=before, hash_at_mark=at_mark)


def _raw_rows(connection: sqlite3.Connection) -> Iterator[tuple[object, ...]]:
    """Every row as stored, whatever its cells hold; text that is not UTF-8 stays bytes."""
    cursor = connection.cursor()
    previous, connection.text_factory = connection.text_factory, _text_or_bytes
    try:
        yield from cursor.execute(f"SELECT {_COLUMNS} FROM audit ORDER BY number")
    finally:
        connection.text_factory = previous


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def rows(
    connection: sqlite3.Connection,
    *,
    since_ms: int | None,
    name: str | None,
    login: str | None,
    act: str | None,
    limit: int,
) -> list[Row]:
    """A part of the log, newest first. `login` is a name at any provider."""
    conditions = {
        "at_ms >= ?": since_ms,
        "name = ?": name,
        "substr(name, instr(name, ':') + 1) = ?": login,
        "act = ?": act,
    }
    wanted = {text: value for text, value in conditions.items() if value is not None}
    where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
    newest_first = f"FROM audit {where} ORDER BY number DESC LIMIT ?"
    return rows_of(connection, Row, newest_first, (*wanted.values(), limit))


def one_line(text: str, limit: int) -> str:
    """Text for one line of a terminal: short, and without characters that move a cursor."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else "�" for letter in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


# The head of the audit log: how many rows there are and the last hash, signed by the auth key.
#
# It is in the database, new with every transaction, and in the file `audit.head` beside it, at most
# a second old. The signature keeps an attacker who edits the database from hashing the whole log
# anew. The file reveals that the end was cut off and an older signed head put back. A moderator may
# have a third copy: `NUMBER:HASH`, written down, is checked by `verify` too.
#
# A store checks both heads when it is opened (`what_is_wrong`). It records any difference as a row
# of the log, because the next transaction signs a new head, and the evidence in the old one is
# gone.
#
# After `kill -9` the file may be behind the database, which is no edit. It is never ahead, because
# it is written only after the transaction is on the disk.


DOMAIN = b"potluck audit head 1"
LONGEST_HEAD_FILE_BYTES = 1024  # the real one has some 300


class Head(msgspec.Struct, frozen=True):
    number: int
    hash: bytes
    key_id: bytes
    signature: bytes

    def __str__(self) -> str:
        return f"{self.number}:{self.hash.hex()}"


class AuditVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `audit --verify`. `what` says it in a sentence, also when all is well."""

    sound: bool
    rows: int
    head: str
    broken_row: int | None = None
    what: str


def sign_head(run: str, number: int, last_hash: bytes, key: SigningKey) -> Head:
    return Head(number, last_hash, key.key_id, key.sign(DOMAIN, _signed(run, number, last_hash)))


def is_signed(run: str, head: Head, keys: Mapping[bytes, VerifyingKey]) -> bool:
    key = keys.get(head.key_id)
    return key is not None and key.verify(
        DOMAIN, head.signature, _signed(run, head.number, head.hash)
    )


def _signed(run: str, number: int, last_hash: bytes) -> bytes:
    return msgspec.msgpack.encode((run, number, last_hash))


def write_head(connection: sqlite3.Connection, head: Head) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO audit_head VALUES (1, ?, ?, ?, ?)", msgspec.structs.astuple(head)
    )


def read_head(connection: sqlite3.Connection) -> Head | None:
    row = connection.execute("SELECT number, hash, key_id, signature FROM audit_head").fetchone()
    return None if row is None else _head_of(row)


def write_head_file(path: Path, head: Head) -> None:
    """Replace the whole file; it is on the disk when this returns. OSError from the system."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    text = (
        f"potluck audit head\nnumber {head.number}\nhash {head.hash.hex()}\n"
        f"key {head.key_id.hex()}\nsignature {head.signature.hex()}\n"
    )
    try:
        write_new_file(draft, text.encode())
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def read_head_file(path: Path) -> Head | None:
    """None if there is no such file, or it is not one of ours."""
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_HEAD_FILE_BYTES).decode("ascii")
        first, number, last_hash, key_id, signature, rest = text.split("\n")
    except (OSError, ValueError):
        return None
    words = [line.partition(" ") for line in (number, last_hash, key_id, signature)]
    if first != "potluck audit head" or rest:
        return None
    if [word for word, _, _ in words] != ["number", "hash", "key", "signature"]:
        return None
    try:
        values = [int(words[0][2])] + [bytes.fromhex(value) for _, _, value in words[1:]]
    except ValueError:
        return None
    return _head_of(tuple(values))


def parse_head(text: str) -> tuple[int, bytes] | None:
    """`NUMBER:HASH`, as a moderator wrote it down; None for anything else."""
    number, _, last_hash = text.strip().partition(":")
    try:
        found = int(number), bytes.fromhex(last_hash)
    except ValueError:
        return None
    return found if found[0] >= 0 and len(found[1]) == HASH_BYTES else None


def _head_of(row: tuple[object, ...]) -> Head | None:
    match row:
        case (int(number), bytes(last_hash), bytes(key_id), bytes(signature)) if number >= 0:
            return Head(number, last_hash, key_id, signature)
    return None


def verify_log(
    connection: sqlite3.Connection,
    run: str,
    keys: Mapping[bytes, VerifyingKey],
    head_file: Path,
    written_down: tuple[int, bytes] | None = None,
) -> AuditVerdict:
    """Check the whole log against every head there is. Reads one state of the database."""
    kept = read_head_file(head_file)  # before the rows: the file is never ahead of the database
    found = follow(connection, run, kept.number if kept is not None else 0)
    text = f"{found.rows}:{found.hash.hex()}"
    since = written_down[0] if written_down is not None else 0

    def broken(row: int | None, what: str) -> AuditVerdict:
        return AuditVerdict(sound=False, rows=found.rows, head=text, broken_row=row, what=what)

    if found.broken_row is not None:
        return broken(found.broken_row, found.what)
    head = read_head(connection)
    if head is None or not is_signed(run, head, keys):
        return broken(None, "The head in the database is not signed by a key of this server.")
    if head.number != found.rows:
        return broken(min(head.number, found.rows) + 1, _wrong_number(found.rows, head))
    if head.hash != found.hash:
        return broken(found.rows, f"Row {found.rows} is not the one whose hash was signed.")
    if kept is None or not is_signed(run, kept, keys):
        return broken(None, _no_head_file(head_file))
    if kept.number > found.rows:
        return broken(found.rows + 1, _cut_off(found.rows, kept, head_file))
    if kept.hash != found.hash_at_mark:
        return broken(kept.number, f"Row {kept.number} is not the one that {head_file} tells of.")
    for number, reason in connection.execute(
        "SELECT number, reason FROM audit WHERE act = ? AND number > ? ORDER BY number LIMIT 1",
        (Act.TAMPERED, since),
    ):
        return broken(number, f"Row {number} tells of an earlier break: {reason}")
    return _held_to_note(connection, run, found, text, written_down)


def what_is_wrong(
    connection: sqlite3.Connection, run: str, keys: Mapping[bytes, VerifyingKey], head_file: Path
) -> str:
    """The differences between the two heads and the log, without reading all of it; else empty."""
    row = connection.execute(
        "SELECT number, hash FROM audit ORDER BY number DESC LIMIT 1"
    ).fetchone()
    rows, last_hash = (0, b"") if row is None else row
    head, kept = read_head(connection), read_head_file(head_file)
    if head is None or not is_signed(run, head, keys):
        return "The head in the database is not signed by a key of this server."
    if head.number != rows:
        return _wrong_number(rows, head)
    if head.hash != last_hash:
        return f"Row {rows} is not the one whose hash was signed."
    if kept is None or not is_signed(run, kept, keys):
        return _no_head_file(head_file)
    if kept.number > rows:
        return _cut_off(rows, kept, head_file)
    at_kept = connection.execute(
        "SELECT hash FROM audit WHERE number = ?", (kept.number,)
    ).fetchone()
    if at_kept is None or at_kept[0] != kept.hash:
        return f"Row {kept.number} is not the one that {head_file} tells of."
    return ""


def catch_up(connection: sqlite3.Connection, head_file: Path) -> None:
    """After a crash, bring the head file up to the database. Only if nothing is wrong."""
    head = read_head(connection)
    if head is not None and head != read_head_file(head_file):
        with contextlib.suppress(OSError):  # with a full disk it stays behind, which does no harm
            write_head_file(head_file, head)


def _wrong_number(rows: int, head: Head) -> str:
    where = "cut off" if rows < head.number else "added"
    return (
        f"The log has {rows} rows, and its signed head says {head}: rows were {where} at the end."
    )


def _no_head_file(path: Path) -> str:
    return f"The head in {path} is missing, or not signed by a key of this server."


def _cut_off(rows: int, kept: Head, path: Path) -> str:
    return f"Rows {rows + 1} to {kept.number} were cut off: {path} is newer, and says {kept}."


def _held_to_note(
    connection: sqlite3.Connection,
    run: str,
    found: ChainVerdict,
    text: str,
    written_down: tuple[int, bytes] | None,
) -> AuditVerdict:
    if written_down is not None:
        number, last_hash = written_down
        at_note = follow(connection, run, number).hash_at_mark if number <= found.rows else None
        if at_note != last_hash:
            what = (
                f"Rows {found.rows + 1} to {number} were cut off: the head you gave is newer."
                if number > found.rows
                else f"The log was written anew: row {number} is not the one you wrote down."
            )
            return AuditVerdict(
                sound=False, rows=found.rows, head=text, what=what,
                broken_row=min(number, found.rows + 1),
            )  # fmt: skip
    return AuditVerdict(
        sound=True, rows=found.rows, head=text,
        what=f"All {found.rows} rows are as they were written.",
    )  # fmt: skip
