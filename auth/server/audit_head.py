"""The head of the audit log: how many rows there are and the last hash, signed by the auth key.

It stands in the database, new with every transaction, and in the file `audit.head` beside it, at
most a second old. The signature is what keeps somebody who edits the database from hashing the
whole log anew; the file is what shows that the end was cut off and an older signed head put back.
A third copy is a moderator's own: `NUMBER:HASH`, written down, is checked by `verify` too.

A store that is opened looks at both heads first (`what_is_wrong`). What it finds becomes a row of
the log, because the next transaction signs a new head, and the evidence in the old one is gone.

Easy to get wrong: after `kill -9` the file may be behind the database, and that is no edit. Ahead
of it, it never is: it is written only after the transaction is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import msgspec

from auth.keys import SigningKey, VerifyingKey
from auth.server.audit import HASH_BYTES, Act, ChainVerdict, follow
from auth.server.database import FILE_MODE

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
    """What `audit --verify` found. `what` says it in a sentence, also when all is well."""

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
    """Replace the file whole, on the disk when this returns. OSError as the system says it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    text = (
        f"potluck audit head\nnumber {head.number}\nhash {head.hash.hex()}\n"
        f"key {head.key_id.hex()}\nsignature {head.signature.hex()}\n"
    )
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, FILE_MODE), "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def read_head_file(path: Path) -> Head | None:
    """None if there is no such file, or what is there is not one of ours."""
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
    """`NUMBER:HASH`, as a moderator wrote it down; None if it is not that."""
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
    """Walk the whole log and hold it to every head there is. Reads one state of the database."""
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
    """What the two heads say against the log, without walking it; empty if nothing."""
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
    """After a crash: the head beside the database may be behind. Only if nothing is wrong."""
    head = read_head(connection)
    if head is not None and head != read_head_file(head_file):
        with contextlib.suppress(OSError):  # a full disk: it stays behind, which is no harm
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
