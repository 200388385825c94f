"""The allowlist: who may take part, with names, roles and keys.

An account is made by a moderator (`allow`, `deny`) or by an enrolment code. At the first login it
is bound to the provider's *subject*: logins can be renamed and taken by somebody else, subjects
cannot. From then on the subject finds the account, and another subject with the same login is
refused.

Three states: `allowed`; `denied` (off the list); `revoked` (all of it ended, until allowed again).

Easy to get wrong: the subject has to be looked up before the login. Otherwise somebody who renames
their login to a name on the list would get in as that person.
"""

from __future__ import annotations

import enum
import re
import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from auth.errors import AuthError, NotAKey
from auth.fields import LONGEST_USERNAME
from auth.keys import public_key_of
from auth.roles import Role
from auth.server.database import row_of, rows_of, spell_roles


class AccountState(enum.StrEnum):
    ALLOWED = "allowed"
    DENIED = "denied"
    REVOKED = "revoked"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    account: int
    provider: str
    login: str
    subject: str | None
    roles: tuple[Role, ...]
    state: AccountState
    added_ms: int
    added_by: str
    changed_ms: int
    changed_by: str
    note: str

    @property
    def name(self) -> str:
        return f"{self.provider}:{self.login}"


class KnownPeer(msgspec.Struct, frozen=True):
    """A key that has proved itself, and its account."""

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


def by_number(connection: sqlite3.Connection, account: int) -> Account:
    (found,) = rows_of(connection, Account, "FROM accounts WHERE account = ?", (account,))
    return found


def by_name(connection: sqlite3.Connection, name: AccountName) -> Account | None:
    where = "WHERE provider = ? AND login = ?"
    return row_of(connection, Account, f"FROM accounts {where}", (name.provider, name.login))


def by_subject(connection: sqlite3.Connection, provider: str, subject: str) -> Account | None:
    where = "WHERE provider = ? AND subject = ?"
    return row_of(connection, Account, f"FROM accounts {where}", (provider, subject))


def meant(connection: sqlite3.Connection, name: AccountName | BareName) -> Account:
    """The account that a moderator means; UnknownName or AmbiguousName."""
    if isinstance(name, AccountName):
        found = by_name(connection, name)
        candidates = [] if found is None else [found]
    else:
        same_login = "FROM accounts WHERE login = ? ORDER BY provider"
        candidates = rows_of(connection, Account, same_login, (name.login,))
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
    """The name of an account that may not exist yet; a bare one if it can mean only one."""
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
    limit: int,
) -> tuple[list[Account], int]:
    """Accounts by name, and how many match."""
    matching = (
        "FROM accounts WHERE (? IS NULL OR state = ?)"
        " AND (? IS NULL OR instr(',' || roles || ',', ?) > 0)"
    )
    values = (state, state, role, f",{role},")
    (total,) = connection.execute(f"SELECT count(*) {matching}", values).fetchone()
    ordered = f"{matching} ORDER BY provider, login LIMIT ?"
    return rows_of(connection, Account, ordered, (*values, limit)), int(total)


def add(
    connection: sqlite3.Connection,
    name: AccountName,
    *,
    roles: Iterable[Role],
    state: AccountState,
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
    state: AccountState | None = None,
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
    """From now on only this subject of the provider is this account; None removes the binding."""
    connection.execute(
        "UPDATE accounts SET subject = ? WHERE account = ?", (subject, account.account)
    )


def remove_new(connection: sqlite3.Connection, account: Account) -> None:
    """Remove an account that was made in this transaction, and that nothing refers to."""
    connection.execute("DELETE FROM accounts WHERE account = ?", (account.account,))


def let_go_of_keys(connection: sqlite3.Connection, account: Account) -> None:
    """None of its keys can renew any more; each has to log in again."""
    connection.execute("DELETE FROM peers WHERE account = ?", (account.account,))


def peer(connection: sqlite3.Connection, public_key: bytes) -> KnownPeer | None:
    return row_of(connection, KnownPeer, "FROM peers WHERE peer = ?", (public_key,))


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


# The names of accounts: `provider:login`, and a bare `login` if it can mean only one account.
#
# The provider is part of the name because alice at one provider is not alice at another. Logins are
# compared without regard to case (as GitHub does, and two people whose logins differ only in case
# should not both be on one list), and are stored in lower case.
#
# A moderator types a name, a peer id or a serial number. They are distinguished by their form, and
# a login that looks like one of the others has to be given in full.


LONGEST_PROVIDER = 32

_PROVIDER = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
_LOGIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+~-]*\Z")
_SERIAL = re.compile(r"#?[0-9]{1,18}\Z")
_PEER_ID_START = "12D3KooW"


class NotAName(AuthError):
    """A text that cannot be the name of an account."""

    exit_code = 2


class AccountName(msgspec.Struct, frozen=True):
    provider: str
    login: str

    def __str__(self) -> str:
        return f"{self.provider}:{self.login}"


class BareName(msgspec.Struct, frozen=True):
    """A login without its provider, which has to be looked up."""

    login: str


class PeerKey(msgspec.Struct, frozen=True):
    public_key: bytes


class SerialNumber(msgspec.Struct, frozen=True):
    serial: int


Target = AccountName | BareName | PeerKey | SerialNumber


def account_name(provider: str, login: str) -> AccountName:
    """The name for a login at a provider; NotAName if it cannot stand in a token."""
    if not _PROVIDER.match(provider):
        raise NotAName(
            f"{_shown(provider)} is not the id of an identity provider.",
            why=f"Ids have lower-case letters, digits and dashes, at most {LONGEST_PROVIDER}.",
            advice="Use one of the ids in the server's settings (auth.toml), or `code`.",
        )
    if not _LOGIN.match(login) or len(provider) + 1 + len(login) > LONGEST_USERNAME:
        raise NotAName(
            f"{_shown(login)} cannot be the name of somebody who takes part.",
            why="Names have letters, digits and . _ @ + ~ - and begin with a letter or a digit; "
            f"with their provider they have at most {LONGEST_USERNAME} characters.",
            advice="Take the login exactly as the provider shows it.",
        )
    return AccountName(provider, login.lower())


def parse_name(text: str) -> AccountName | BareName:
    provider, colon, login = text.strip().partition(":")
    if colon:
        return account_name(provider, login)
    return BareName(account_name("any", provider).login)


def parse_target(text: str) -> Target:
    """A moderator's target: a serial number (`17` or `#17`), a peer id, or a name."""
    text = text.strip()
    if _SERIAL.match(text):
        return SerialNumber(int(text.lstrip("#")))
    if text.startswith(_PEER_ID_START):
        try:
            return PeerKey(public_key_of(text))
        except NotAKey as error:
            raise NotAName(error.what, why=error.why, advice=error.advice) from None
    return parse_name(text)


def _shown(text: str) -> str:
    return repr(text[:LONGEST_USERNAME])
