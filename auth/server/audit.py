"""The audit log: appended to, never changed, and every row hashes the one before it.

A row's hash covers all of its fields and the hash of the row before, so an edited, removed,
inserted or moved row breaks the chain at a place that `verify` names. Two more things are needed
for that to mean something:

- Whoever edits a row could hash everything after it anew. So the *head* (how many rows, and the
  last hash) is signed with the auth key in every transaction (`audit_head.py`).
- Whoever cuts off the end could put an older signed head back. So the newest head is also kept in
  a file beside the database, and can be written down by a person: `verify` takes it as an argument.

What this does not find: everything replaced, database, head file and keys, by somebody who holds
the signing key. Only a head that was written down elsewhere finds that.

Easy to get wrong: comparing what a library makes of the bytes. A text that is not UTF-8 must not be
read as something that could have been written; it is a broken row.
"""

from __future__ import annotations

import enum
import hashlib
import sqlite3
from collections.abc import Iterator
from typing import NewType

import msgspec

from auth.server.rows import struct_of

AuditHash = NewType("AuditHash", bytes)

HASH_BYTES = 32
LONGEST_TEXT = 500  # characters of a reason or a detail; a moderator's sentence fits well
LONGEST_NAME = 200  # characters; longer than any account's name

_GENESIS = b"potluck audit log 1\x00"


class Act(enum.StrEnum):
    """What a row tells of. On the wire and in the file these are the words: never change one."""

    MADE = "made"
    STARTED = "started"
    JOINED = "joined"
    RENEWED = "renewed"
    REFUSED = "refused"
    REFUSALS = "refusals"  # several that were only counted, see refusal_log.py
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
    TAMPERED = "tampered"  # what was found wrong with the log when it was opened


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be told; the log adds the number, the time and the hash."""

    act: Act
    actor: str
    """Who did it: `local:alice` (a moderator), `server`, or `peer` (whoever asked)."""
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
    """The end of the log, as the one thread that writes it knows it.

    Invariant: `number` and `hash` are those of the last row in the open transaction; `mark` and
    `return_to` follow a transaction that is rolled back.
    """

    def __init__(self, number: int, last_hash: AuditHash) -> None:
        self.number = number
        self.hash = last_hash

    def mark(self) -> tuple[int, AuditHash]:
        return self.number, self.hash

    def return_to(self, mark: tuple[int, AuditHash]) -> None:
        self.number, self.hash = mark

    def append(self, connection: sqlite3.Connection, at_ms: int, entry: Entry) -> int:
        """Add a row to the transaction that is open, and give back its number."""
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
_COLUMNS = "number, at_ms, act, actor, name, peer, serial, reason, detail, hash"


def first_hash(run: str) -> AuditHash:
    """What the first row of a run's log hashes in place of a row before it."""
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
    """Walk the whole log. Stops at the first row that is not what followed the one before.

    `mark` is the number of a row whose hash is wanted as well.
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
    """Every row as it stands, whatever its cells hold; text that is no UTF-8 stays bytes."""
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
    since_ms: int | None = None,
    until_ms: int | None = None,
    name: str | None = None,
    login: str | None = None,
    act: str | None = None,
    peer: bytes | None = None,
    before: int | None = None,
    limit: int,
) -> list[Row]:
    """Some of the log, newest first. `login` is a name at whatever provider."""
    conditions = {
        "at_ms >= ?": since_ms,
        "at_ms < ?": until_ms,
        "name = ?": name,
        "substr(name, instr(name, ':') + 1) = ?": login,
        "act = ?": act,
        "peer = ?": peer,
        "number < ?": before,
    }
    wanted = {text: value for text, value in conditions.items() if value is not None}
    where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM audit {where} ORDER BY number DESC LIMIT ?",
        (*wanted.values(), limit),
    )
    return [struct_of(Row, fields) for fields in found]


def one_line(text: str, limit: int) -> str:
    """Text for one line of a terminal: nothing that moves a cursor or ends a line, and not long."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else "�" for letter in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
