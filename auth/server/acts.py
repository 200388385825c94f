"""The acts of moderators: on names, codes and keys, and how they are done or refused.

An act waits for the disk like everything else, but not behind a queue of renewals: it is `urgent`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from auth.errors import AuthError
from auth.keys import SEED_BYTES, SigningKey, fingerprint, peer_id_of
from auth.roles import Role, in_order
from auth.server import accounts, codes, listings, revoked, signing_keys, tokens_issued
from auth.server.accounts import (
    Account,
    AccountName,
    AccountState,
    BareName,
    PeerKey,
    SerialNumber,
    account_name,
    parse_name,
    parse_target,
)
from auth.server.audit import Act, AuditEntry
from auth.server.database import spell_roles
from auth.server.signing_keys import SigningKeys
from auth.server.store import Store
from auth.server.writer import Transaction
from auth.tokens import DEFAULT_LIFE_MS, Token, sign_token

T = TypeVar("T")


class NotDone(AuthError):
    """The request makes no sense now: it was done already, or there is no such thing."""


def act(store: Store, operation: Callable[[Transaction], T]) -> T:
    """Perform the operation, and wait until it is on the disk."""
    return store.writer.run(operation, urgent=True)


def log_act(
    transaction: Transaction,
    kind: Act,
    actor: str,
    reason: str,
    *,
    name: str | None = None,
    peer: bytes | None = None,
    serial: int | None = None,
    detail: str = "",
) -> None:
    transaction.log(
        AuditEntry(
            act=kind, actor=actor, reason=reason, name=name, peer=peer, serial=serial,
            detail=detail,
        )
    )  # fmt: skip


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def read_roles(words: Iterable[str]) -> tuple[Role, ...]:
    """Roles from typed words; NotDone for an unknown word, or no word at all."""
    known = {role.value: role for role in Role}
    words = list(words)
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise NotDone(
            f"{', '.join(unknown)[:100]!r} is not a role." if unknown else "No role was given.",
            why=f"The roles are {', '.join(known)}.",
            advice="Choose one or several of them.",
        )
    return in_order(known[word] for word in words)


# Who may take part: allowing, denying and revoking names, keys and tokens.
#
#     allow NAME     on the list; undoes deny and revoke (tokens from before stay dead)
#     deny NAME      off the list, and all its live tokens revoked
#     revoke NAME    all its live tokens revoked, and no login or renewal until it is allowed again
#     revoke PEER    one key, for good: nothing is issued to it until `allow PEER`
#     revoke SERIAL  one token; the node gets the next one by renewing. `allow SERIAL` takes it back
#
# Each act is one transaction with its row in the audit log; if anything is wrong nothing happens.
#
# A name that is allowed again has to log in again on each machine. It may have been revoked because
# somebody else had logged in under it, and their key could renew as well as its owner's.
#
# An act that was done already gets the same answer, and writes no row: the log records changes.


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """`change`: new, roles, was denied, was revoked, rebound, unchanged; or lifted."""

    kind: str
    value: str
    account: listings.AccountView | None
    change: str
    list_number: int
    provider_is_known: bool = True
    """False if nobody can log in under the name, because the settings have no such provider."""


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `deny` and `revoke`. `live_tokens` is how many it ended; `forget_ms` when the
    signed list no longer needs the entry (0: it was never needed there)."""

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
        """Put a name on the list, or undo a revocation.

        `roles` of None leaves them as they are (a volunteer, for a new name). `rebind` separates
        the name from its present owner: all its tokens are revoked, and the next login under it
        owns it.
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
                    connection, full, roles=wanted or (Role.VOLUNTEER,), state=AccountState.ALLOWED,
                    by=actor, now_ms=now_ms, note=note,
                )  # fmt: skip
                change = "new"
            else:
                change = _change(before, wanted, rebind=rebind)
                account = before
                if change != "unchanged":
                    account = accounts.change(
                        connection, before, roles=wanted, state=AccountState.ALLOWED, by=actor,
                        now_ms=now_ms,
                    )  # fmt: skip
                if rebind:
                    self._revoke_tokens(transaction, before, actor, reason or "let go of")
                    accounts.bind(connection, account, None)
                    codes.forget_uses(connection, account.account)
                if rebind or before.state is not AccountState.ALLOWED:
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
        """Take a name off the list (even one that never was on it), and end its tokens."""
        parsed = parse_name(name)

        def operation(transaction: Transaction) -> Revoked:
            connection = transaction.connection
            full = accounts.full_name(connection, parsed, providers or self._providers)
            account = accounts.by_name(connection, full) or accounts.add(
                connection, full, roles=(Role.VOLUNTEER,), state=AccountState.ALLOWED, by=actor,
                now_ms=transaction.now_ms,
            )  # fmt: skip
            return self._end(transaction, account, AccountState.DENIED, Act.DENIED, actor, reason)

        return act(self._store, operation)

    def revoke(self, target: str, *, actor: str, reason: str = "") -> Revoked:
        """End the access of a name, a peer or one token, everywhere within a minute."""
        meant = parse_target(target)

        def operation(transaction: Transaction) -> Revoked:
            match meant:
                case PeerKey(public_key):
                    return self._revoke_peer(transaction, public_key, actor, reason)
                case SerialNumber(serial):
                    return self._revoke_serial(transaction, serial, actor, reason)
                case AccountName() | BareName():
                    account = accounts.meant(transaction.connection, meant)
                    if account.state is AccountState.REVOKED:
                        raise NotDone(
                            f"{account.name} was revoked already.",
                            why=f"{account.changed_by} did.",
                            advice="`potluck auth audit` shows when and why.",
                        )
                    return self._end(
                        transaction, account, AccountState.REVOKED, Act.REVOKED, actor, reason
                    )

        return act(self._store, operation)

    def _end(
        self,
        transaction: Transaction,
        account: Account,
        state: AccountState,
        kind: Act,
        actor: str,
        reason: str,
    ) -> Revoked:
        """Set an account to `state`, and end all of its access."""
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
        """Put the name on the signed list, if one of its tokens could still be valid."""
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
    if before.state is not AccountState.ALLOWED:
        return f"was {before.state.value}"
    if rebind:
        return "rebound"
    return "unchanged" if roles is None or roles == before.roles else "roles"


# The acts of moderators on enrolment codes: making and cancelling them.
#
# A code in clear exists only in the answer to the act that made it. The log and the database have
# its number.


MOST_OPEN_CODES = 10_000  # stops a script that makes codes without end
DEFAULT_CODE_LIFE_MS = 7 * 24 * 3600 * 1000


class NewCode(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """In clear: shown once, stored nowhere."""
    view: listings.CodeView


class CodeActs:
    def __init__(self, store: Store) -> None:
        self._store = store

    def new(
        self,
        *,
        uses: int | None = 1,
        life_ms: int | None = DEFAULT_CODE_LIFE_MS,
        name: str = "",
        roles: Iterable[str] = (Role.VOLUNTEER.value,),
        note: str = "",
        actor: str,
        reason: str = "",
    ) -> NewCode:
        """A new code. None for `uses` or `life_ms` is without end. With a name it is for one
        person; without, each use makes a new account."""
        if uses is not None and not 0 < uses <= codes.MOST_USES:
            raise NotDone(
                f"A code cannot have {uses} uses.",
                why=f"One to {codes.MOST_USES:,} can be counted, or any number.",
                advice="Choose another number.",
            )
        if life_ms is not None and life_ms <= 0:
            raise NotDone(
                "A code cannot have expired before it is made.",
                why="Its life is not longer than nothing.",
                advice="Choose a longer one.",
            )
        wanted = read_roles(roles)
        login = _code_login(name) if name else None
        code = codes.spell_code(secrets.token_bytes(codes.CODE_RANDOM_BYTES))
        code_hash = codes.hash_of(code)
        assert code_hash is not None

        def operation(transaction: Transaction) -> NewCode:
            connection, now_ms = transaction.connection, transaction.now_ms
            if login is not None:
                _check_name(transaction, login)
            _, open_now = codes.listed(connection, now_ms, open_only=True, limit=0, offset=0)
            if open_now >= MOST_OPEN_CODES:
                raise NotDone(
                    f"There are {open_now:,} open codes already.",
                    why="A script may have gone wild.",
                    advice="Cancel some, or make one code with many uses.",
                )
            made = codes.add(
                connection, code_hash, login=login, roles=wanted, uses=uses, by=actor, note=note,
                expires_ms=None if life_ms is None else now_ms + life_ms, now_ms=now_ms,
            )  # fmt: skip
            view = listings.code_view(made, now_ms)
            uses_text = "any number of uses" if uses is None else counted(uses, "use")
            log_act(
                transaction, Act.CODE_MADE, actor, reason or note, name=view.name,
                detail=f"{made.code_id}, {uses_text}",
            )  # fmt: skip
            return NewCode(code=code, view=view)

        return act(self._store, operation)

    def cancel(self, code_id: str, *, actor: str, reason: str = "") -> listings.CodeView:
        """Nobody gets in by this code any more. People who got in keep their access."""
        number = code_id.strip().lower().removeprefix("c")

        def operation(transaction: Transaction) -> listings.CodeView:
            found = (
                codes.by_number(transaction.connection, int(number))
                if number.isascii() and number.isdigit() and len(number) <= 18
                else None
            )
            if found is None or found.cancelled_ms is not None:
                said = "was cancelled already" if found else "does not exist"
                raise NotDone(
                    f"The code {code_id[:40]!r} {said}.",
                    why="Codes are named by their number, as in c7, and not by their letters.",
                    advice="`potluck auth codes list` shows them.",
                )
            codes.cancel(transaction.connection, found.code, transaction.now_ms)
            log_act(transaction, Act.CODE_CANCELLED, actor, reason, detail=found.code_id)
            changed = codes.by_number(transaction.connection, found.code)
            assert changed is not None
            return listings.code_view(changed, transaction.now_ms)

        return act(self._store, operation)


def _check_name(transaction: Transaction, login: str) -> None:
    found = accounts.by_name(transaction.connection, AccountName(codes.PROVIDER, login))
    if found is not None and found.state is not AccountState.ALLOWED:
        raise NotDone(
            f"{found.name} may not take part, so a code would not let them in.",
            why=f"The name is {found.state.value}.",
            advice=f"`potluck auth allow {found.name}` first.",
        )


def _code_login(name: str) -> str:
    parsed = parse_name(name)
    if isinstance(parsed, BareName):
        parsed = account_name(codes.PROVIDER, parsed.login)
    if codes.is_made_up(parsed.login):
        raise NotDone(
            f"A code cannot be for {parsed.login}.",
            why="Codes without a name call people so, and the next of them would be this one.",
            advice="Choose another name.",
        )
    if parsed.provider != codes.PROVIDER:
        raise NotDone(
            f"A code cannot be for {parsed}.",
            why=f"Who gets in by a code has a name of the provider `{codes.PROVIDER}`.",
            advice=f"Use {codes.PROVIDER}:{parsed.login}, or allow the name and let them log in.",
        )
    return parsed.login


# The acts of moderators on the auth keys: a new one, one taken out of use, a courier's token.
#
# A new key is published at once and signs only after the overlap, when every node has it in its
# keyring. A key that may be in wrong hands is withdrawn: from then on none of its tokens is valid,
# and every node that is still allowed gets a new token by itself, at its next renewal.
#
# Withdrawing the key that signs needs another one, endorsed while the old one was still valid. So
# the new key is made first, in the same transaction, and signs at once.


SHORTEST_OVERLAP_MS = 90_000
"""Nodes ask for lists and keys every 20 s or so; four misses, and the difference of clocks."""

COURIER_NAME = "auth-server"
COURIER_LIFE_MS = 5 * 60 * 1000


class KeyRotated(msgspec.Struct, frozen=True, kw_only=True):
    new: listings.KeyView
    old: listings.KeyView
    signs_from_ms: int


class KeyWithdrawn(msgspec.Struct, frozen=True, kw_only=True):
    withdrawn: listings.KeyView
    new: listings.KeyView | None
    """The key that was made because the withdrawn one was in use."""
    list_number: int


class NoSuchKey(AuthError):
    """There is no auth key with this id or fingerprint here, or it was withdrawn already."""


class KeyActs:
    def __init__(self, store: Store) -> None:
        self._store = store

    def rotate(
        self, *, overlap_ms: int = DEFAULT_LIFE_MS, actor: str, reason: str = ""
    ) -> KeyRotated:
        """A new key: published now, signing after the overlap (usually the life of a token)."""

        def operation(transaction: Transaction) -> KeyRotated:
            now_ms, keys = transaction.now_ms, self._store.latest_keys()
            old = keys.active_row(now_ms)
            if keys.newest().record.from_ms > now_ms:
                raise NoSuchKey(
                    "A new key is on its way already.",
                    why=f"{keys.newest().key_id.hex()} is published, and signs when its time "
                    "comes.",
                    advice="Wait for that; if it must not be used, withdraw it.",
                )
            from_ms = now_ms + max(overlap_ms, SHORTEST_OVERLAP_MS)
            after = self._make(transaction, keys, from_ms, actor, reason)
            self._store.publish(transaction, keys=after)
            return KeyRotated(
                new=listings.key_view(after, after.rows[-1], now_ms),
                old=listings.key_view(after, old, now_ms),
                signs_from_ms=from_ms,
            )

        return self._store.writer.run(operation, urgent=True)

    def withdraw(self, key: str, *, actor: str, reason: str = "") -> KeyWithdrawn:
        """From now on no signature of this key (its id or fingerprint) is valid."""

        def operation(transaction: Transaction) -> KeyWithdrawn:
            now_ms, keys = transaction.now_ms, self._store.latest_keys()
            row = _find(keys, key)
            made = None
            newer = [other for other in keys.rows if other.place > row.place]
            if not any(
                other.withdrawn_ms is None and other.record.from_ms <= now_ms for other in newer
            ):
                keys = self._make(transaction, keys, now_ms, actor, "in place of a withdrawn key")
                made = keys.rows[-1]
            signing_keys.withdraw(transaction.connection, row.key_id, now_ms)
            after = keys.without(row.key_id, now_ms)
            self._store.publish(transaction, keys=after)
            transaction.log(
                AuditEntry(
                    act=Act.KEY_WITHDRAWN, actor=actor, reason=reason,
                    detail=f"{row.key_id.hex()} {fingerprint(row.record.public_key)}",
                )
            )  # fmt: skip
            path = self._store.paths.keys / signing_keys.file_name(row.key_id)
            transaction.after_commit(lambda: signing_keys.remove_key_file(path))
            gone = after.rows[row.place]
            return KeyWithdrawn(
                withdrawn=listings.key_view(after, gone, now_ms),
                new=None if made is None else listings.key_view(after, made, now_ms),
                list_number=self._store.latest_list_number(),
            )

        return self._store.writer.run(operation, urgent=True)

    def courier_token(
        self, peer: bytes, *, life_ms: int = COURIER_LIFE_MS, actor: str, reason: str = ""
    ) -> bytes:
        """A token for a key of the server's own, to bring a list to the peers while it is stopped.

        It has a short life and the role of a backbone, and is recorded only in the audit log.
        """

        def operation(transaction: Transaction) -> tuple[Token, SigningKey]:
            now_ms = transaction.now_ms
            key = self._store.latest_keys().active(now_ms)
            _, earliest_ms = revoked.against(transaction.connection, peer, COURIER_NAME)
            issued_ms = max(now_ms, earliest_ms)
            token = Token(
                run=self._store.run,
                username=COURIER_NAME,
                peer=peer,
                roles=(Role.BACKBONE,),
                serial=transaction.next_serial(),
                key_id=key.key_id,
                issued_ms=issued_ms,
                expires_ms=issued_ms + life_ms,
            )
            transaction.log(
                AuditEntry(
                    act=Act.COURIER,
                    actor=actor,
                    reason=reason,
                    name=COURIER_NAME,
                    peer=peer,
                    serial=token.serial,
                    detail=f"for {life_ms // 1000} s",
                )
            )
            return token, key

        return sign_token(*self._store.writer.run(operation, urgent=True))

    def _make(
        self, transaction: Transaction, keys: SigningKeys, from_ms: int, actor: str, reason: str
    ) -> SigningKeys:
        key = SigningKey(secrets.token_bytes(SEED_BYTES))
        row = keys.successor(key, transaction.now_ms, from_ms)
        path = signing_keys.write_key_file(self._store.paths.keys, key)
        transaction.if_undone(lambda: signing_keys.remove_key_file(path))
        signing_keys.keep_row(transaction.connection, row)
        transaction.log(
            AuditEntry(act=Act.KEY_MADE, actor=actor, reason=reason,
                  detail=f"{key.key_id.hex()} {fingerprint(key.public_key)}")
        )  # fmt: skip
        return keys.with_new(row, key)


def _find(keys: SigningKeys, wanted: str) -> signing_keys.KeyRow:
    wanted = wanted.strip().lower()
    for row in keys.rows:
        if wanted in (row.key_id.hex(), fingerprint(row.record.public_key)):
            if row.withdrawn_ms is not None:
                raise NoSuchKey(
                    f"The key {wanted} was withdrawn already.",
                    why="That cannot be taken back.",
                    advice="`potluck auth keys list` shows when.",
                )
            return row
    raise NoSuchKey(
        f"There is no auth key {wanted[:64]!r} here.",
        why="It is mistyped, or of another run.",
        advice="`potluck auth keys list` shows the ids and fingerprints.",
    )
