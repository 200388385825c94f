"""Enrolment codes: how people get in where there is no identity provider.

A code is made by a moderator, shown once, and stored only as a hash: a copy of the database lets
nobody in. It is good for one use or several, until it expires or is cancelled. A code *with* a name
is for one person, who becomes `code:NAME`, on as many machines as it has uses. A code without a
name makes a new account at each use: `code:c7-1`, `code:c7-2` for code number 7.

The same key may use the same code again without counting: its answer may have been lost on the way,
or its token have expired. That needs a proof of the key, so it helps nobody else.

The answers distinguish used up and expired codes only for people who hold a real code; guessing 100
random bits finds none.
"""

from __future__ import annotations

import enum
import hashlib
import re
import sqlite3
from collections.abc import Sequence

import msgspec

from auth.roles import Role
from auth.server import accounts
from auth.server.database import row_of, rows_of, spell_roles

CODE_RANDOM_BYTES = 13  # 104 bits, of which 100 are spelled
CODE_LETTERS = 20  # five bits each
GROUP_LETTERS = 5
LONGEST_CODE_TEXT = 64  # the part of a typed code that is read
MOST_USES = 100_000
PROVIDER = "code"

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base32: no I, L, O, U
_AS_MEANT = str.maketrans({"I": "1", "L": "1", "O": "0", "-": None, " ": None, "\t": None})
_MADE_UP = re.compile(r"c[0-9]{1,18}-[0-9]+\Z")
_HASHED = b"potluck enrolment code 1\x00"


class CodeState(enum.StrEnum):
    OPEN = "open"
    USED_UP = "used up"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Code(msgspec.Struct, frozen=True, kw_only=True):
    code: int
    login: str | None
    roles: tuple[Role, ...]
    uses_allowed: int | None
    uses: int
    expires_ms: int | None
    made_ms: int
    made_by: str
    cancelled_ms: int | None
    note: str

    @property
    def code_id(self) -> str:
        return f"c{self.code}"

    def state(self, now_ms: int) -> CodeState:
        if self.cancelled_ms is not None:
            return CodeState.CANCELLED
        if self.uses_allowed is not None and self.uses >= self.uses_allowed:
            return CodeState.USED_UP
        if self.expires_ms is not None and now_ms >= self.expires_ms:
            return CodeState.EXPIRED
        return CodeState.OPEN


def made_up_login(connection: sqlite3.Connection, code: Code) -> str:
    """The name of the next person to use a code without a name: `c7-1`.

    A name that is there already is somebody else's: after a backup was put back, moderators deny
    people whose use of the code is not known any more.
    """
    number = code.uses + 1
    while accounts.by_name(connection, accounts.AccountName(PROVIDER, f"{code.code_id}-{number}")):
        number += 1
    return f"{code.code_id}-{number}"


def is_made_up(login: str) -> bool:
    return _MADE_UP.match(login) is not None


def open_code_behind(connection: sqlite3.Connection, name: str, now_ms: int) -> str | None:
    """The id of the code that made up this name, if it still lets people in.

    After a restore, a code that was made anew may have the number of the one that did.
    """
    provider, _, login = name.partition(":")
    if provider != PROVIDER or not is_made_up(login):
        return None
    found = by_number(connection, int(login[1:].partition("-")[0]))
    if found is None or found.login is not None or found.state(now_ms) is not CodeState.OPEN:
        return None
    return found.code_id


def spell_code(random: bytes) -> str:
    """A code in its printed form, from CODE_RANDOM_BYTES random bytes: `A1B2C-…`, four groups."""
    number = int.from_bytes(random, "big")
    letters = "".join(_ALPHABET[(number >> (5 * place)) & 31] for place in range(CODE_LETTERS))
    return "-".join(
        letters[start : start + GROUP_LETTERS] for start in range(0, CODE_LETTERS, GROUP_LETTERS)
    )


def hash_of(typed: str) -> bytes | None:
    """The hash by which the database knows a code; None for a text that is no code.

    Case, dashes and spaces do not matter, and letters that look like digits are read as those.
    """
    letters = typed[:LONGEST_CODE_TEXT].strip().upper().translate(_AS_MEANT)
    if len(letters) != CODE_LETTERS or not set(letters) <= set(_ALPHABET):
        return None
    return hashlib.sha256(_HASHED + letters.encode()).digest()


def add(
    connection: sqlite3.Connection,
    code_hash: bytes,
    *,
    login: str | None,
    roles: Sequence[Role],
    uses: int | None,
    expires_ms: int | None,
    by: str,
    note: str,
    now_ms: int,
) -> Code:
    cursor = connection.execute(
        "INSERT INTO codes (code_hash, login, roles, uses_allowed, uses, expires_ms, made_ms,"
        " made_by, note) VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)",
        (code_hash, login, spell_roles(roles), uses, expires_ms, now_ms, by, note),
    )
    found = by_number(connection, int(cursor.lastrowid or 0))
    assert found is not None
    return found


def by_number(connection: sqlite3.Connection, code: int) -> Code | None:
    return row_of(connection, Code, "FROM codes WHERE code = ?", (code,))


def by_hash(connection: sqlite3.Connection, code_hash: bytes) -> Code | None:
    return row_of(connection, Code, "FROM codes WHERE code_hash = ?", (code_hash,))


def listed(
    connection: sqlite3.Connection, now_ms: int, *, open_only: bool, limit: int
) -> tuple[list[Code], int]:
    """Newest first, and how many there are in all."""
    matching = (
        "FROM codes WHERE NOT ? OR (cancelled_ms IS NULL"
        " AND (uses_allowed IS NULL OR uses < uses_allowed)"
        " AND (expires_ms IS NULL OR expires_ms > ?))"
    )
    values = (open_only, now_ms)
    (total,) = connection.execute(f"SELECT count(*) {matching}", values).fetchone()
    newest_first = f"{matching} ORDER BY code DESC LIMIT ?"
    return rows_of(connection, Code, newest_first, (*values, limit)), int(total)


def cancel(connection: sqlite3.Connection, code: int, now_ms: int) -> None:
    connection.execute("UPDATE codes SET cancelled_ms = ? WHERE code = ?", (now_ms, code))


def account_of_earlier_use(
    connection: sqlite3.Connection, code: int, public_key: bytes
) -> int | None:
    row = connection.execute(
        "SELECT account FROM code_uses WHERE code = ? AND peer = ?", (code, public_key)
    ).fetchone()
    return None if row is None else int(row[0])


def use(
    connection: sqlite3.Connection, code: Code, public_key: bytes, account: int, now_ms: int
) -> None:
    connection.execute("UPDATE codes SET uses = uses + 1 WHERE code = ?", (code.code,))
    connection.execute(
        "INSERT INTO code_uses (code, peer, account, at_ms) VALUES (?, ?, ?, ?)",
        (code.code, public_key, account, now_ms),
    )


def forget_uses(connection: sqlite3.Connection, account: int) -> None:
    """Keys that used a code for this account may not use it again without counting."""
    connection.execute("DELETE FROM code_uses WHERE account = ?", (account,))
