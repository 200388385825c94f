"""The revocations, and the signed list of them that every peer gets.

An entry names an account, a key or a token. It stays on the signed list for as long as a token that
it refuses could still be valid (its expiry, the grace of a run whose server is away, and the
difference of two clocks), or until the auth keys of all those tokens are withdrawn. The ban of a
*key* lasts longer: the server issues nothing to it until a moderator lifts it. The ban of a *name*
is the state of its account.

The list only refuses tokens issued *before* an entry's time, so not one issued in the same
millisecond. So the time of an entry is later than every token that it should refuse.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from auth.revocations import (
    Entry,
    NameEntry,
    PeerEntry,
    RevocationList,
    SerialEntry,
    collapsed,
    sign_list,
)
from auth.server.database import row_of, rows_of, struct_of
from auth.server.signing_keys import SigningKeys
from auth.server.store_errors import StoreDamaged
from auth.server.tokens_issued import IssuedToken
from auth.tokens import CLOCK_TOLERANCE_MS

MARGIN_MS = 2 * CLOCK_TOLERANCE_MS  # a peer's clock may be behind, and so may the issuer's

NAME = "name"
PEER = "peer"
SERIAL = "serial"

Value = str | bytes | int


class Revocation(msgspec.Struct, frozen=True, kw_only=True):
    entry: int
    kind: str
    value: Any  # a Value
    revoked_ms: int
    forget_ms: int
    revoked_by: str
    reason: str


class SignedList(msgspec.Struct, frozen=True):
    number: int
    issued_ms: int
    signed: bytes


def add(
    connection: sqlite3.Connection,
    kind: str,
    value: Value,
    *,
    revoked_ms: int,
    forget_ms: int,
    by: str,
    reason: str,
) -> None:
    connection.execute(
        "INSERT INTO revocations (kind, value, revoked_ms, forget_ms, revoked_by, reason)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (kind, value, revoked_ms, forget_ms, by, reason),
    )


def standing(connection: sqlite3.Connection, kind: str, value: Value) -> Revocation | None:
    """The latest entry for this that was not lifted."""
    where = "WHERE kind = ? AND value = ? AND lifted_ms IS NULL ORDER BY revoked_ms DESC LIMIT 1"
    return row_of(connection, Revocation, f"FROM revocations {where}", (kind, value))


def against(connection: sqlite3.Connection, peer: bytes, name: str) -> tuple[bool, int]:
    """Whether the key is banned, and from when on tokens with this name are valid (0: always)."""
    banned, earliest_ms = False, 0
    for kind, revoked_ms in connection.execute(
        "SELECT kind, revoked_ms FROM revocations WHERE lifted_ms IS NULL"
        " AND ((kind = 'peer' AND value = ?) OR (kind = 'name' AND value = ?))",
        (peer, name),
    ):
        banned = banned or kind == PEER
        earliest_ms = max(earliest_ms, revoked_ms) if kind == NAME else earliest_ms
    return banned, earliest_ms


def refuses(connection: sqlite3.Connection, token: IssuedToken, name: str) -> bool:
    """Whether the list refuses a token of ours."""
    (found,) = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM revocations WHERE lifted_ms IS NULL AND ("
        " (kind = 'serial' AND value = ?) OR (kind = 'peer' AND value = ? AND revoked_ms > ?)"
        " OR (kind = 'name' AND value = ? AND revoked_ms > ?)))",
        (token.serial, token.peer, token.issued_ms, name, token.issued_ms),
    ).fetchone()
    return bool(found)


def lift(connection: sqlite3.Connection, kind: str, value: Value, now_ms: int) -> int:
    """Lift all entries for this; returns how many there were."""
    return connection.execute(
        "UPDATE revocations SET lifted_ms = ? WHERE kind = ? AND value = ? AND lifted_ms IS NULL",
        (now_ms, kind, value),
    ).rowcount


UNTIL_A_KEY_IS_PUT_BACK = -1
"""As `forget_ms`, before any time: off the list, but a key that the database does not know may have
signed tokens that the entry refuses."""


def shed(
    connection: sqlite3.Connection, now_ms: int, grace_ms: int, *, may_be_needed_again: bool
) -> None:
    """Take the entries off the list that refuse only tokens of withdrawn auth keys."""
    forget_ms = now_ms - grace_ms - MARGIN_MS
    connection.execute(
        "WITH alive AS (SELECT serial, account, peer FROM tokens WHERE expires_ms > ? AND key_id"
        " NOT IN (SELECT key_id FROM signing_keys WHERE withdrawn_ms IS NOT NULL))"
        " UPDATE revocations SET forget_ms = ? WHERE lifted_ms IS NULL AND forget_ms > ?"
        " AND NOT (kind = 'serial' AND value IN (SELECT serial FROM alive))"
        " AND NOT (kind = 'peer' AND value IN (SELECT peer FROM alive))"
        " AND NOT (kind = 'name' AND value IN"
        " (SELECT provider || ':' || login FROM alive JOIN accounts USING (account)))",
        (forget_ms, UNTIL_A_KEY_IS_PUT_BACK if may_be_needed_again else now_ms, now_ms),
    )


def list_again(connection: sqlite3.Connection, forget_ms: int) -> None:
    """Put the entries on the list again that an auth key which is put back may need. (An entry for
    one token is of a key that was here.)"""
    connection.execute(
        "UPDATE revocations SET forget_ms = ? WHERE lifted_ms IS NULL AND kind <> ?"
        " AND forget_ms = ?",
        (forget_ms, SERIAL, UNTIL_A_KEY_IS_PUT_BACK),
    )


def listed(connection: sqlite3.Connection, now_ms: int, limit: int) -> list[Revocation]:
    """The entries on the list or banned now, newest first."""
    where = "WHERE lifted_ms IS NULL AND (forget_ms > ? OR kind = 'peer')"
    newest_first = f"FROM revocations {where} ORDER BY entry DESC LIMIT ?"
    return rows_of(connection, Revocation, newest_first, (now_ms, limit))


def entries(connection: sqlite3.Connection, now_ms: int) -> tuple[Entry, ...]:
    """The entries of the signed list now."""
    rows = connection.execute(
        "SELECT kind, value, revoked_ms, forget_ms FROM revocations"
        " WHERE lifted_ms IS NULL AND forget_ms > ? ORDER BY entry",
        (now_ms,),
    )
    return collapsed((_entry(*row) for row in rows), now_ms)


def _entry(kind: str, value: Value, revoked_ms: int, forget_ms: int) -> Entry:
    match kind, value:
        case "name", str(username):
            return NameEntry(username, revoked_ms, forget_ms)
        case "peer", bytes(peer):
            return PeerEntry(peer, revoked_ms, forget_ms)
        case "serial", int(serial):
            return SerialEntry(serial, revoked_ms, forget_ms)
    raise StoreDamaged(
        f"A revocation of kind {kind!r} names a {type(value).__name__}.",
        why="The disk failed, or something else wrote into the database.",
        advice="Run `potluck auth audit --verify`, and consider going back to a backup.",
    )


def issue_list(connection: sqlite3.Connection, keys: SigningKeys, now_ms: int) -> SignedList:
    """Sign the present revocations as the next list, and store it. RevocationsFull if too long.

    Numbers are times, so that they go on rising when an older database is restored.
    """
    newest = newest_list(connection)
    number = max(now_ms, (newest.number if newest is not None else 0) + 1)
    key = keys.active(now_ms)
    document = sign_list(
        RevocationList(
            keys.run, number, now_ms, entries(connection, now_ms), keys.withdrawn, key.key_id
        ),
        key,
    )
    connection.execute(
        "INSERT OR REPLACE INTO revocation_list VALUES (1, ?, ?, ?)", (number, now_ms, document)
    )
    return SignedList(number, now_ms, document)


def newest_list(connection: sqlite3.Connection) -> SignedList | None:
    row = connection.execute("SELECT number, issued_ms, document FROM revocation_list").fetchone()
    return None if row is None else struct_of(SignedList, row)
