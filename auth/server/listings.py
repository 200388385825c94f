"""Everything that a moderator can list: names, tokens, revocations, codes, keys, the audit log.

All of it only reads, is bounded by a limit, and returns frozen structs of plain values (peer ids
and key ids as text, times in milliseconds since 1970), ready to be shown or sent as JSON.

Names and reasons come from strangers. They were made printable when they were stored; nothing here
undoes that.
"""

from __future__ import annotations

import sqlite3

import msgspec

from auth.keys import fingerprint, peer_id_of
from auth.server import accounts, audit, codes, revoked, tokens_issued
from auth.server.accounts import Account
from auth.server.signing_keys import KeyRow, SigningKeys


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


class PeerView(msgspec.Struct, frozen=True, kw_only=True):
    peer: str
    first_ms: int
    login_ms: int
    seen_ms: int
    revoked: bool


class PeerList(msgspec.Struct, frozen=True, kw_only=True):
    peers: tuple[PeerView, ...]
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
    """Whether there are older ones: ask again with `before` the last number here."""


def account_view(connection: sqlite3.Connection, account: Account, now_ms: int) -> AccountView:
    seen_ms, keys = connection.execute(
        "SELECT max(seen_ms), count(*) FROM peers WHERE account = ?", (account.account,)
    ).fetchone()
    return AccountView(
        name=account.name,
        provider=account.provider,
        login=account.login,
        roles=tuple(role.value for role in account.roles),
        state=account.state.value,
        bound=account.subject is not None,
        added_by=account.added_by,
        added_ms=account.added_ms,
        changed_by=account.changed_by,
        changed_ms=account.changed_ms,
        last_seen_ms=seen_ms,
        keys=keys,
        live_tokens=tokens_issued.count_live(connection, now_ms, account=account.account),
        note=account.note,
    )


def account_list(
    connection: sqlite3.Connection,
    now_ms: int,
    *,
    state: str | None,
    role: str | None,
    text: str,
    live: bool,
    limit: int,
    offset: int,
) -> AccountList:
    found, total = accounts.listed(
        connection, state=state, role=role, text=text, limit=limit, offset=offset,
        live_at_ms=now_ms if live else None,
    )  # fmt: skip
    views = tuple(account_view(connection, account, now_ms) for account in found)
    return AccountList(accounts=views, total=total)


def peer_list(connection: sqlite3.Connection, account: Account, limit: int) -> PeerList:
    """Every key that has logged in under a name and was not removed from it, newest first."""
    found, total = accounts.peers(connection, account.account, limit)
    views = tuple(
        PeerView(
            peer=peer_id_of(known.peer),
            first_ms=known.first_ms,
            login_ms=known.login_ms,
            seen_ms=known.seen_ms,
            revoked=revoked.standing(connection, revoked.PEER, known.peer) is not None,
        )
        for known in found
    )
    return PeerList(peers=views, total=total)


def token_list(
    connection: sqlite3.Connection, now_ms: int, account: Account | None, limit: int, offset: int
) -> TokenList:
    whose = None if account is None else account.account
    found = tokens_issued.live(connection, now_ms, account=whose, limit=limit, offset=offset)
    names = {token.account: "" for token in found}
    for number in names:
        names[number] = accounts.by_number(connection, number).name
    views = tuple(
        TokenView(
            serial=token.serial,
            name=names[token.account],
            peer=peer_id_of(token.peer),
            roles=tuple(role.value for role in token.roles),
            key_id=token.key_id.hex(),
            issued_ms=token.issued_ms,
            expires_ms=token.expires_ms,
            revoked=revoked.refuses(connection, token, names[token.account]),
        )
        for token in found
    )
    return TokenList(
        tokens=views, total=tokens_issued.count_live(connection, now_ms, account=whose)
    )


def revocation_entries(
    connection: sqlite3.Connection, now_ms: int, limit: int
) -> RevocationEntries:
    newest = revoked.newest_list(connection)
    return RevocationEntries(
        list_number=0 if newest is None else newest.number,
        entries=tuple(
            RevocationView(
                kind=entry.kind,
                value=value_text(entry.value),
                revoked_ms=entry.revoked_ms,
                forget_ms=entry.forget_ms,
                on_list=entry.forget_ms > now_ms,
                revoked_by=entry.revoked_by,
                reason=entry.reason,
            )
            for entry in revoked.listed(connection, now_ms, limit)
        ),
    )


def value_text(value: revoked.Value) -> str:
    return peer_id_of(value) if isinstance(value, bytes) else str(value)


def code_view(code: codes.Code, now_ms: int) -> CodeView:
    return CodeView(
        code_id=code.code_id,
        name=None if code.login is None else f"{codes.PROVIDER}:{code.login}",
        roles=tuple(role.value for role in code.roles),
        uses=code.uses,
        uses_allowed=code.uses_allowed,
        expires_ms=code.expires_ms,
        state=code.state(now_ms).value,
        made_ms=code.made_ms,
        made_by=code.made_by,
        cancelled_ms=code.cancelled_ms,
        note=code.note,
    )


def code_list(
    connection: sqlite3.Connection, now_ms: int, *, open_only: bool, limit: int, offset: int
) -> CodeList:
    found, total = codes.listed(connection, now_ms, open_only=open_only, limit=limit, offset=offset)
    return CodeList(codes=tuple(code_view(code, now_ms) for code in found), total=total)


def key_view(keys: SigningKeys, row: KeyRow, now_ms: int) -> KeyView:
    active = keys.active_row(now_ms)
    if row.withdrawn_ms is not None:
        state = "withdrawn"
    elif row.place == active.place:
        state = "signs now"
    else:
        state = "next" if row.place > active.place else "older"
    return KeyView(
        key_id=row.key_id.hex(),
        fingerprint=fingerprint(row.record.public_key),
        state=state,
        from_ms=row.record.from_ms,
        until_ms=row.record.until_ms,
        endorsed_by=row.record.endorsed_by.hex(),
        made_ms=row.made_ms,
        withdrawn_ms=row.withdrawn_ms,
        has_file=keys.private_key(row.key_id) is not None,
    )


def key_list(keys: SigningKeys, now_ms: int) -> KeyList:
    return KeyList(keys=tuple(key_view(keys, row, now_ms) for row in keys.rows))


def audit_rows(
    connection: sqlite3.Connection,
    *,
    since_ms: int | None,
    until_ms: int | None,
    name: str | None,
    login: str | None,
    act: str | None,
    peer: bytes | None,
    before: int | None,
    limit: int,
) -> AuditRows:
    found = audit.rows(
        connection, since_ms=since_ms, until_ms=until_ms, name=name, login=login, act=act,
        peer=peer, before=before, limit=limit + 1,
    )  # fmt: skip
    return AuditRows(
        rows=tuple(
            AuditRow(
                number=row.number,
                at_ms=row.at_ms,
                act=row.act,
                actor=row.actor,
                name=row.name,
                peer=None if row.peer is None else peer_id_of(row.peer),
                serial=row.serial,
                reason=row.reason,
                detail=row.detail,
            )
            for row in found[:limit]
        ),
        more=len(found) > limit,
    )
