"""The allowlist: who may take part, under which name, in which roles, and with which keys.

An account is made by a moderator (`allow`, `deny`) or by an enrolment code. At the first login it
is bound to the *subject* that the provider gives: logins can be renamed and taken by somebody
else, subjects cannot. From then on the subject finds the account, and another subject with the
same login is refused.

Three states: `allowed`; `denied` (off the list); `revoked` (all of it ended, until allowed again).

Easy to get wrong: looking for the login before the subject. Somebody who renames their login to a
name on the list would get in as that person.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from auth.errors import AuthError
from auth.roles import Role
from auth.server.account_names import AccountName, BareName
from auth.server.rows import spell_roles, struct_of


class State(enum.StrEnum):
    ALLOWED = "allowed"
    DENIED = "denied"
    REVOKED = "revoked"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    account: int
    provider: str
    login: str
    subject: str | None
    roles: tuple[Role, ...]
    state: State
    added_ms: int
    added_by: str
    changed_ms: int
    changed_by: str
    note: str

    @property
    def name(self) -> str:
        return f"{self.provider}:{self.login}"


class KnownPeer(msgspec.Struct, frozen=True):
    """A key that has proved itself, and whose it is."""

    peer: bytes
    account: int
    first_ms: int
    login_ms: int
    seen_ms: int


class UnknownName(AuthError):
    """No account has this name."""


class AmbiguousName(AuthError):
    """Accounts at several providers have this login, or none has and several providers could."""

    exit_code = 2


_COLUMNS = (
    "account, provider, login, subject, roles, state, added_ms, added_by, changed_ms, "
    "changed_by, note"
)


def _account_of(row: Sequence[object]) -> Account:
    return struct_of(Account, row)


def by_number(connection: sqlite3.Connection, account: int) -> Account:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM accounts WHERE account = ?", (account,)
    ).fetchone()
    return _account_of(row)


def by_name(connection: sqlite3.Connection, name: AccountName) -> Account | None:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM accounts WHERE provider = ? AND login = ?",
        (name.provider, name.login),
    ).fetchone()
    return None if row is None else _account_of(row)


def by_subject(connection: sqlite3.Connection, provider: str, subject: str) -> Account | None:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM accounts WHERE provider = ? AND subject = ?", (provider, subject)
    ).fetchone()
    return None if row is None else _account_of(row)


def meant(connection: sqlite3.Connection, name: AccountName | BareName) -> Account:
    """The account that a moderator means; UnknownName or AmbiguousName."""
    if isinstance(name, AccountName):
        found = by_name(connection, name)
        candidates = [] if found is None else [found]
    else:
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM accounts WHERE login = ? ORDER BY provider", (name.login,)
        )
        candidates = [_account_of(row) for row in rows]
    if not candidates:
        shown = str(name) if isinstance(name, AccountName) else name.login
        raise UnknownName(
            f"Nobody is called {shown} here.",
            why="It is mistyped, or a name at another provider.",
            advice="`potluck auth list` shows all names.",
        )
    if len(candidates) > 1:
        raise _ambiguous(candidates[0].login, [found.provider for found in candidates])
    return candidates[0]


def full_name(
    connection: sqlite3.Connection, name: AccountName | BareName, providers: Sequence[str]
) -> AccountName:
    """The name of an account that may not exist yet; a bare one where only one can be meant."""
    if isinstance(name, AccountName):
        return name
    rows = connection.execute("SELECT provider FROM accounts WHERE login = ?", (name.login,))
    known = sorted(str(provider) for (provider,) in rows)
    candidates = known or sorted(set(providers))
    if len(candidates) == 1:
        return AccountName(candidates[0], name.login)
    raise _ambiguous(name.login, candidates)


def _ambiguous(login: str, providers: Sequence[str]) -> AmbiguousName:
    if not providers:
        return AmbiguousName(
            f"It is not clear at which identity provider {login} is meant.",
            why="The name was given without one, and none is known here.",
            advice=f"Say which, as in `github:{login}`.",
        )
    full = ", ".join(f"{provider}:{login}" for provider in providers)
    return AmbiguousName(
        f"{login} could be several people: {full}.",
        why="Each identity provider has its own names.",
        advice="Give the name in full.",
    )


def listed(
    connection: sqlite3.Connection,
    *,
    state: str | None,
    role: str | None,
    text: str,
    live_at_ms: int | None,
    limit: int,
    offset: int,
) -> tuple[list[Account], int]:
    """Accounts by name, and how many there are that fit. `text` is a part of the name.

    With `live_at_ms`, only those of which a token has not expired by then.
    """
    where = (
        "WHERE (? IS NULL OR state = ?) AND (? IS NULL OR instr(',' || roles || ',', ?) > 0)"
        " AND instr(provider || ':' || login, ?) > 0"
        " AND (? IS NULL OR EXISTS (SELECT 1 FROM tokens"
        " WHERE tokens.account = accounts.account AND expires_ms > ?))"
    )
    values = (state, state, role, f",{role},", text.lower(), live_at_ms, live_at_ms)
    (total,) = connection.execute(f"SELECT count(*) FROM accounts {where}", values).fetchone()
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM accounts {where} ORDER BY provider, login LIMIT ? OFFSET ?",
        (*values, limit, offset),
    )
    return [_account_of(row) for row in found], int(total)


def add(
    connection: sqlite3.Connection,
    name: AccountName,
    *,
    roles: Iterable[Role],
    state: State,
    by: str,
    now_ms: int,
    note: str = "",
) -> Account:
    cursor = connection.execute(
        "INSERT INTO accounts (provider, login, subject, roles, state, added_ms, added_by,"
        " changed_ms, changed_by, note) VALUES (?, ?, NULL, ?, ?, ?, ?, ?, ?, ?)",
        (name.provider, name.login, spell_roles(roles), state, now_ms, by, now_ms, by, note),
    )
    return by_number(connection, int(cursor.lastrowid or 0))


def change(
    connection: sqlite3.Connection,
    account: Account,
    *,
    roles: Iterable[Role] | None = None,
    state: State | None = None,
    by: str,
    now_ms: int,
) -> Account:
    connection.execute(
        "UPDATE accounts SET roles = ?, state = ?, changed_ms = ?, changed_by = ?"
        " WHERE account = ?",
        (
            spell_roles(account.roles if roles is None else roles),
            account.state if state is None else state,
            now_ms,
            by,
            account.account,
        ),
    )
    return by_number(connection, account.account)


def bind(connection: sqlite3.Connection, account: Account, subject: str | None) -> None:
    """From now on only this subject of the provider is this account; None lets go of it."""
    connection.execute(
        "UPDATE accounts SET subject = ? WHERE account = ?", (subject, account.account)
    )


def remove_new(connection: sqlite3.Connection, account: Account) -> None:
    """Take away an account that was made in this transaction, and that nothing refers to."""
    connection.execute("DELETE FROM accounts WHERE account = ?", (account.account,))


def let_go_of_keys(connection: sqlite3.Connection, account: Account) -> None:
    """None of its keys can renew any more; each has to log in again."""
    connection.execute("DELETE FROM peers WHERE account = ?", (account.account,))


def peer(connection: sqlite3.Connection, public_key: bytes) -> KnownPeer | None:
    row = connection.execute(
        "SELECT peer, account, first_ms, login_ms, seen_ms FROM peers WHERE peer = ?",
        (public_key,),
    ).fetchone()
    return None if row is None else struct_of(KnownPeer, row)


def peers(connection: sqlite3.Connection, account: int, limit: int) -> tuple[list[KnownPeer], int]:
    """The keys of an account, the one seen last first, and how many there are."""
    found = connection.execute(
        "SELECT peer, account, first_ms, login_ms, seen_ms FROM peers WHERE account = ?"
        " ORDER BY seen_ms DESC LIMIT ?",
        (account, limit),
    )
    (total,) = connection.execute(
        "SELECT count(*) FROM peers WHERE account = ?", (account,)
    ).fetchone()
    return [struct_of(KnownPeer, row) for row in found], int(total)


def peer_logged_in(
    connection: sqlite3.Connection, public_key: bytes, account: int, now_ms: int
) -> None:
    connection.execute(
        "INSERT INTO peers (peer, account, first_ms, login_ms, seen_ms) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (peer) DO UPDATE SET account = excluded.account,"
        " login_ms = excluded.login_ms, seen_ms = excluded.seen_ms",
        (public_key, account, now_ms, now_ms, now_ms),
    )


def peer_seen(connection: sqlite3.Connection, public_key: bytes, now_ms: int) -> None:
    connection.execute("UPDATE peers SET seen_ms = ? WHERE peer = ?", (now_ms, public_key))


def keys_in_use(connection: sqlite3.Connection, account: int, since_ms: int) -> int:
    """How many different keys of an account were seen since then."""
    (count,) = connection.execute(
        "SELECT count(*) FROM peers WHERE account = ? AND seen_ms >= ?", (account, since_ms)
    ).fetchone()
    return int(count)
