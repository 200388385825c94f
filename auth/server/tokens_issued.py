"""Every token that may still be alive: its serial, account, key and expiry.

A serial number is given once. The counter is in the database beside the rows, so that rows can be
removed when their tokens have long expired (the audit log keeps the fact that they were issued).

A clock that jumps ahead for a minute would make living tokens look expired. So rows stay a day
longer than they need to.
"""

from __future__ import annotations

import sqlite3

import msgspec

from auth.roles import Role
from auth.server.database import row_of, rows_of, spell_roles

DAY_MS = 24 * 3600 * 1000
FORGOTTEN_AT_ONCE = 5000  # rows a minute: those of 200,000 nodes; some ten milliseconds


class IssuedToken(msgspec.Struct, frozen=True, kw_only=True):
    serial: int
    account: int
    peer: bytes
    roles: tuple[Role, ...]
    key_id: bytes
    issued_ms: int
    expires_ms: int


def keep(connection: sqlite3.Connection, token: IssuedToken) -> None:
    connection.execute(
        "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            token.serial,
            token.account,
            token.peer,
            spell_roles(token.roles),
            token.key_id,
            token.issued_ms,
            token.expires_ms,
        ),
    )


def by_serial(connection: sqlite3.Connection, serial: int) -> IssuedToken | None:
    return row_of(connection, IssuedToken, "FROM tokens WHERE serial = ?", (serial,))


def live(
    connection: sqlite3.Connection, now_ms: int, *, account: int | None, limit: int
) -> list[IssuedToken]:
    """Tokens that have not expired, newest first (revoked ones too)."""
    whose, values = ("account = ? AND", (account,)) if account is not None else ("", ())
    rest = f"FROM tokens WHERE {whose} expires_ms > ? ORDER BY serial DESC LIMIT ?"
    return rows_of(connection, IssuedToken, rest, (*values, now_ms, limit))


def count_live(
    connection: sqlite3.Connection,
    now_ms: int,
    *,
    account: int | None = None,
    peer: bytes | None = None,
) -> int:
    conditions = {"account = ?": account, "peer = ?": peer}
    wanted = {text: value for text, value in conditions.items() if value is not None}
    where = "".join(f"{text} AND " for text in wanted)
    (count,) = connection.execute(
        f"SELECT count(*) FROM tokens WHERE {where} expires_ms > ?", (*wanted.values(), now_ms)
    ).fetchone()
    return int(count)


def latest_end(connection: sqlite3.Connection, account: int) -> int:
    """When the last of an account's tokens expires; 0 if it has none."""
    (end,) = connection.execute(
        "SELECT coalesce(max(expires_ms), 0) FROM tokens WHERE account = ?", (account,)
    ).fetchone()
    return int(end)


def latest_issue(connection: sqlite3.Connection, account: int) -> int:
    (issued,) = connection.execute(
        "SELECT coalesce(max(issued_ms), 0) FROM tokens WHERE account = ?", (account,)
    ).fetchone()
    return int(issued)


def since(connection: sqlite3.Connection, account: int, from_ms: int) -> list[IssuedToken]:
    """An account's tokens that were issued at that time or later."""
    where = "WHERE account = ? AND issued_ms >= ? ORDER BY serial"
    return rows_of(connection, IssuedToken, f"FROM tokens {where}", (account, from_ms))


def latest_of_peer(connection: sqlite3.Connection, peer: bytes) -> tuple[int, int]:
    """When the last of a key's tokens expires, and when it was issued; zeros if it has none."""
    end, issued = connection.execute(
        "SELECT coalesce(max(expires_ms), 0), coalesce(max(issued_ms), 0) FROM tokens"
        " WHERE peer = ?",
        (peer,),
    ).fetchone()
    return int(end), int(issued)


def forget_over(connection: sqlite3.Connection, before_ms: int) -> int:
    """Remove some of the oldest tokens that expired before that time; returns how many."""
    return connection.execute(
        "DELETE FROM tokens WHERE serial IN (SELECT serial FROM tokens ORDER BY serial LIMIT ?)"
        " AND expires_ms < ?",
        (FORGOTTEN_AT_ONCE, before_ms),
    ).rowcount
