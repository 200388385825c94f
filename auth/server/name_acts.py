"""Who may take part: allowing, denying and revoking names, keys and tokens.

    allow NAME     on the list; undoes deny and revoke (tokens from before stay dead)
    deny NAME      off the list, and all its live tokens revoked
    revoke NAME    all its live tokens revoked, and no login or renewal until it is allowed again
    revoke PEER    one key, for good: nothing is issued to it until `allow PEER`
    revoke SERIAL  one token; the node gets the next one by renewing. `allow SERIAL` takes it back

Each act is one transaction with its row in the audit log; if anything is wrong nothing happened.

A name that is allowed again has to log in again on each machine. It may have been revoked because
somebody else had logged in under it, and their key is as good at renewing as its owner's.

Easy to get wrong: an act that was done already still answers truthfully, and writes no row: the
log tells of changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from auth.keys import peer_id_of
from auth.roles import Role
from auth.server import accounts, codes, listings, revoked, tokens_issued
from auth.server.account_names import (
    AccountName,
    BareName,
    PeerKey,
    SerialNumber,
    parse_name,
    parse_target,
)
from auth.server.accounts import Account, State
from auth.server.acting import NotDone, act, counted, log_act, read_roles
from auth.server.audit import Act
from auth.server.rows import spell_roles
from auth.server.store import Store
from auth.server.transaction import Transaction


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """`change`: new, roles, was denied, was revoked, rebound, unchanged; or lifted."""

    kind: str
    value: str
    account: listings.AccountView | None
    change: str
    list_number: int
    provider_is_known: bool = True
    """False where nobody can log in under the name, because the settings have no such provider."""


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """Of `deny` and `revoke`. `live_tokens` is how many it ended; `forget_ms` when the signed list
    no longer needs the entry (0: it was never needed there)."""

    kind: str
    value: str
    account: listings.AccountView | None
    change: str
    live_tokens: int
    list_number: int
    forget_ms: int


class NameActs:
    """`providers` are the ids that a bare name may belong to."""

    def __init__(self, store: Store, providers: Sequence[str]) -> None:
        self._store = store
        self._providers = tuple(providers)

    def allow(
        self,
        target: str,
        *,
        roles: Iterable[str] | None = None,
        rebind: bool = False,
        note: str = "",
        actor: str,
        reason: str = "",
        providers: Sequence[str] = (),
    ) -> Allowed:
        """Put a name on the list, or take back what was revoked.

        `roles` of None leaves them as they are (a volunteer, for a new name). `rebind` lets go of
        whoever has the name: all its tokens are revoked, and the next login under it has it.
        """
        wanted = None if roles is None else read_roles(roles)
        match parse_target(target):
            case PeerKey(public_key):
                return self._lift(revoked.PEER, public_key, actor, reason)
            case SerialNumber(serial):
                return self._lift(revoked.SERIAL, serial, actor, reason)
            case (AccountName() | BareName()) as name:
                pass

        def operation(transaction: Transaction) -> Allowed:
            connection, now_ms = transaction.connection, transaction.now_ms
            full = accounts.full_name(connection, name, providers or self._providers)
            before = accounts.by_name(connection, full)
            if before is None:
                account = accounts.add(
                    connection, full, roles=wanted or (Role.VOLUNTEER,), state=State.ALLOWED,
                    by=actor, now_ms=now_ms, note=note,
                )  # fmt: skip
                change = "new"
            else:
                change = _change(before, wanted, rebind=rebind)
                account = before
                if change != "unchanged":
                    account = accounts.change(
                        connection, before, roles=wanted, state=State.ALLOWED, by=actor,
                        now_ms=now_ms,
                    )  # fmt: skip
                if rebind:
                    self._revoke_tokens(transaction, before, actor, reason or "let go of")
                    accounts.bind(connection, account, None)
                    codes.forget_uses(connection, account.account)
                if rebind or before.state is not State.ALLOWED:
                    accounts.let_go_of_keys(connection, account)
            if change != "unchanged":
                roles_text = spell_roles(account.roles)
                log_act(
                    transaction, Act.ALLOWED, actor, reason, name=account.name,
                    detail=f"{change}; roles {roles_text}",
                )  # fmt: skip
            known = providers or self._providers
            return Allowed(
                provider_is_known=not known or full.provider in known,
                kind=revoked.NAME,
                value=account.name,
                account=listings.account_view(connection, account, now_ms),
                change=change,
                list_number=self._store.latest_list_number(),
            )

        return act(self._store, operation)

    def deny(
        self, name: str, *, actor: str, reason: str = "", providers: Sequence[str] = ()
    ) -> Revoked:
        """Take a name off the list (also one that never was on it), and end its tokens."""
        parsed = parse_name(name)

        def operation(transaction: Transaction) -> Revoked:
            connection = transaction.connection
            full = accounts.full_name(connection, parsed, providers or self._providers)
            account = accounts.by_name(connection, full) or accounts.add(
                connection, full, roles=(Role.VOLUNTEER,), state=State.ALLOWED, by=actor,
                now_ms=transaction.now_ms,
            )  # fmt: skip
            return self._end(transaction, account, State.DENIED, Act.DENIED, actor, reason)

        return act(self._store, operation)

    def revoke(self, target: str, *, actor: str, reason: str = "") -> Revoked:
        """End what a name, a peer or one token has, everywhere within a minute."""
        meant = parse_target(target)

        def operation(transaction: Transaction) -> Revoked:
            match meant:
                case PeerKey(public_key):
                    return self._revoke_peer(transaction, public_key, actor, reason)
                case SerialNumber(serial):
                    return self._revoke_serial(transaction, serial, actor, reason)
                case AccountName() | BareName():
                    account = accounts.meant(transaction.connection, meant)
                    if account.state is State.REVOKED:
                        raise NotDone(
                            f"{account.name} was revoked already.",
                            why=f"{account.changed_by} did.",
                            advice="`potluck auth audit` shows when and why.",
                        )
                    return self._end(
                        transaction, account, State.REVOKED, Act.REVOKED, actor, reason
                    )

        return act(self._store, operation)

    def _end(
        self,
        transaction: Transaction,
        account: Account,
        state: State,
        kind: Act,
        actor: str,
        reason: str,
    ) -> Revoked:
        """Turn an account to `state`, and everything that it has with it."""
        connection, now_ms = transaction.connection, transaction.now_ms
        changed = account.state is not state
        live, forget_ms = 0, 0
        if changed:
            live, forget_ms = self._revoke_tokens(transaction, account, actor, reason)
            account = accounts.change(connection, account, state=state, by=actor, now_ms=now_ms)
            log_act(
                transaction,
                kind,
                actor,
                reason,
                name=account.name,
                detail=counted(live, "live token"),
            )
        return Revoked(
            kind=revoked.NAME,
            value=account.name,
            account=listings.account_view(connection, account, now_ms),
            change=state.value if changed else "unchanged",
            live_tokens=live,
            list_number=self._store.latest_list_number(),
            forget_ms=forget_ms,
        )

    def _revoke_tokens(
        self, transaction: Transaction, account: Account, actor: str, reason: str
    ) -> tuple[int, int]:
        """Put the name on the signed list, if a token of it could still count."""
        connection, now_ms = transaction.connection, transaction.now_ms
        live = tokens_issued.count_live(connection, now_ms, account=account.account)
        forget_ms = self._store.forget_ms(
            transaction, tokens_issued.latest_end(connection, account.account)
        )
        if forget_ms <= now_ms:
            return live, 0
        revoked.add(
            connection, revoked.NAME, account.name, by=actor, reason=reason, forget_ms=forget_ms,
            revoked_ms=max(now_ms, tokens_issued.latest_issue(connection, account.account) + 1),
        )  # fmt: skip
        self._store.publish(transaction)
        return live, forget_ms

    def _revoke_peer(
        self, transaction: Transaction, peer: bytes, actor: str, reason: str
    ) -> Revoked:
        connection, now_ms = transaction.connection, transaction.now_ms
        self._check_not_revoked(transaction, revoked.PEER, peer)
        known = accounts.peer(connection, peer)
        name = None if known is None else accounts.by_number(connection, known.account).name
        live = tokens_issued.count_live(connection, now_ms, peer=peer)
        end_ms, issue_ms = tokens_issued.latest_of_peer(connection, peer)
        forget_ms = self._store.forget_ms(transaction, end_ms)
        revoked.add(
            connection, revoked.PEER, peer, by=actor, reason=reason,
            revoked_ms=max(now_ms, issue_ms + 1), forget_ms=forget_ms,
        )  # fmt: skip
        self._store.publish(transaction)
        log_act(
            transaction, Act.REVOKED, actor, reason, name=name, peer=peer,
            detail=f"key; {counted(live, 'live token')}",
        )  # fmt: skip
        return Revoked(
            kind=revoked.PEER,
            value=peer_id_of(peer),
            account=None,
            change="revoked",
            live_tokens=live,
            list_number=self._store.latest_list_number(),
            forget_ms=forget_ms,
        )

    def _revoke_serial(
        self, transaction: Transaction, serial: int, actor: str, reason: str
    ) -> Revoked:
        connection, now_ms = transaction.connection, transaction.now_ms
        token = tokens_issued.by_serial(connection, serial)
        forget_ms = 0 if token is None else self._store.forget_ms(transaction, token.expires_ms)
        if token is None or forget_ms <= now_ms:
            raise NotDone(
                f"There is no live token with the serial number {serial}.",
                why="It was never issued, or is over.",
                advice="`potluck auth list` shows the live ones.",
            )
        self._check_not_revoked(transaction, revoked.SERIAL, serial)
        revoked.add(
            connection, revoked.SERIAL, serial, by=actor, reason=reason,
            revoked_ms=max(now_ms, token.issued_ms + 1), forget_ms=forget_ms,
        )  # fmt: skip
        self._store.publish(transaction)
        name = accounts.by_number(connection, token.account).name
        log_act(
            transaction, Act.REVOKED, actor, reason, name=name, peer=token.peer, serial=serial,
            detail="one token",
        )  # fmt: skip
        return Revoked(
            kind=revoked.SERIAL,
            value=str(serial),
            account=None,
            change="revoked",
            live_tokens=int(token.expires_ms > now_ms),
            list_number=self._store.latest_list_number(),
            forget_ms=forget_ms,
        )

    def _lift(self, kind: str, value: revoked.Value, actor: str, reason: str) -> Allowed:
        def operation(transaction: Transaction) -> Allowed:
            shown = listings.value_text(value)
            if not revoked.lift(transaction.connection, kind, value, transaction.now_ms):
                raise NotDone(
                    f"{shown} is not revoked.",
                    why="It never was, or was allowed again already.",
                    advice="`potluck auth list --revocations` shows what is revoked.",
                )
            self._store.publish(transaction)
            log_act(
                transaction, Act.LIFTED, actor, reason,
                peer=value if isinstance(value, bytes) else None,
                serial=value if isinstance(value, int) else None,
            )  # fmt: skip
            return Allowed(
                kind=kind,
                value=shown,
                account=None,
                change="lifted",
                list_number=self._store.latest_list_number(),
            )

        return act(self._store, operation)

    def _check_not_revoked(self, transaction: Transaction, kind: str, value: revoked.Value) -> None:
        standing = revoked.standing(transaction.connection, kind, value)
        if standing is not None:
            raise NotDone(
                f"{listings.value_text(value)} was revoked already.",
                why=f"{standing.revoked_by} did, and it stands.",
                advice="`potluck auth audit` shows when and why.",
            )


def _change(before: Account, roles: tuple[Role, ...] | None, *, rebind: bool) -> str:
    if before.state is not State.ALLOWED:
        return f"was {before.state.value}"
    if rebind:
        return "rebound"
    return "unchanged" if roles is None or roles == before.roles else "roles"
