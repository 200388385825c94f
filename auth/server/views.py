"""The views for moderators: names, tokens, revocations, codes, keys and rows of the audit log.

Frozen structs of plain values (peer ids and key ids as text, times in milliseconds since 1970),
ready to be shown or sent as JSON. A field that has the name of a record's field is that field.

Names and reasons come from strangers. They were made printable when they were stored; nothing here
undoes that.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from auth.keys import fingerprint, peer_id_of
from auth.roles import Role
from auth.server import accounts, audit, codes, revoked, tokens_issued
from auth.server.accounts import Account
from auth.server.signing_keys import KeyRow, SigningKeys

V = TypeVar("V", bound=msgspec.Struct)


class AccountView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    provider: str
    login: str
    roles: tuple[str, ...]
    state: str
    bound: bool
    """Whether somebody has logged in under it, so that nobody else can."""
    added_by: str
    added_ms: int
    changed_by: str
    changed_ms: int
    last_seen_ms: int | None
    keys: int
    """How many different nodes have ever used it."""
    live_tokens: int
    note: str


class AccountList(msgspec.Struct, frozen=True, kw_only=True):
    accounts: tuple[AccountView, ...]
    total: int


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    serial: int
    name: str
    peer: str
    roles: tuple[str, ...]
    key_id: str
    issued_ms: int
    expires_ms: int
    revoked: bool


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    tokens: tuple[TokenView, ...]
    total: int


class RevocationView(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    value: str
    revoked_ms: int
    forget_ms: int
    on_list: bool
    """Whether peers still get it: until every token that it refuses has expired."""
    revoked_by: str
    reason: str


class RevocationEntries(msgspec.Struct, frozen=True, kw_only=True):
    list_number: int
    entries: tuple[RevocationView, ...]


class CodeView(msgspec.Struct, frozen=True, kw_only=True):
    code_id: str
    name: str | None
    roles: tuple[str, ...]
    uses: int
    uses_allowed: int | None
    expires_ms: int | None
    state: str
    made_ms: int
    made_by: str
    cancelled_ms: int | None
    note: str


class CodeList(msgspec.Struct, frozen=True, kw_only=True):
    codes: tuple[CodeView, ...]
    total: int


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    key_id: str
    fingerprint: str
    state: str
    """`signs now`, `next` (published, and does not sign yet), `older`, or `withdrawn`."""
    from_ms: int
    until_ms: int
    endorsed_by: str
    made_ms: int
    withdrawn_ms: int | None
    has_file: bool


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    keys: tuple[KeyView, ...]


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    at_ms: int
    act: str
    actor: str
    name: str | None
    peer: str | None
    serial: int | None
    reason: str
    detail: str


class AuditRows(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[AuditRow, ...]
    more: bool
    """Whether there are older ones."""


def _view(type_: type[V], record: msgspec.Struct, **others: Any) -> V:
    """The fields that the view and the record have in common, and the others."""
    names = (name for name in type_.__struct_fields__ if name not in others)
    return type_(**{name: getattr(record, name) for name in names}, **others)


def _words(roles: Iterable[Role]) -> tuple[str, ...]:
    return tuple(role.value for role in roles)


def account_view(connection: sqlite3.Connection, account: Account, now_ms: int) -> AccountView:
    seen_ms, keys = connection.execute(
        "SELECT max(seen_ms), count(*) FROM peers WHERE account = ?", (account.account,)
    ).fetchone()
    return _view(
        AccountView,
        account,
        roles=_words(account.roles),
        bound=account.subject is not None,
        last_seen_ms=seen_ms,
        keys=keys,
        live_tokens=tokens_issued.count_live(connection, now_ms, account=account.account),
    )


def token_views(
    connection: sqlite3.Connection, tokens: Iterable[tokens_issued.IssuedToken]
) -> tuple[TokenView, ...]:
    tokens = tuple(tokens)
    names = {
        number: accounts.by_number(connection, number).name
        for number in {token.account for token in tokens}
    }
    return tuple(
        _view(
            TokenView,
            token,
            name=names[token.account],
            roles=_words(token.roles),
            peer=peer_id_of(token.peer),
            key_id=token.key_id.hex(),
            revoked=revoked.refuses(connection, token, names[token.account]),
        )
        for token in tokens
    )


def revocation_view(entry: revoked.Revocation, now_ms: int) -> RevocationView:
    on_list = entry.forget_ms > now_ms
    return _view(RevocationView, entry, value=value_text(entry.value), on_list=on_list)


def value_text(value: revoked.Value) -> str:
    return peer_id_of(value) if isinstance(value, bytes) else str(value)


def code_view(code: codes.Code, now_ms: int) -> CodeView:
    name = None if code.login is None else f"{codes.PROVIDER}:{code.login}"
    return _view(
        CodeView, code, name=name, roles=_words(code.roles), state=code.state(now_ms).value
    )


def key_view(keys: SigningKeys, row: KeyRow, now_ms: int) -> KeyView:
    active = keys.active_row(now_ms)
    if row.withdrawn_ms is not None:
        state = "withdrawn"
    elif row.place == active.place:
        state = "signs now"
    else:
        state = "next" if row.place > active.place else "older"
    return _view(
        KeyView,
        row,
        key_id=row.key_id.hex(),
        fingerprint=fingerprint(row.record.public_key),
        state=state,
        from_ms=row.record.from_ms,
        until_ms=row.record.until_ms,
        endorsed_by=row.record.endorsed_by.hex(),
        has_file=keys.private_key(row.key_id) is not None,
    )


def audit_row(row: audit.Row) -> AuditRow:
    return _view(AuditRow, row, peer=None if row.peer is None else peer_id_of(row.peer))
