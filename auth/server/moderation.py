"""Everything that moderators do and read, over one open store.

`potluck auth …` uses this directly when no server runs, and the running server for requests on its
local socket. All of it is blocking.

    allow NAME     on the list; undoes deny and revoke (tokens from before stay dead)
    deny NAME      off the list, and all its live tokens revoked
    revoke NAME    all its live tokens revoked, and no login or renewal until it is allowed again
    revoke PEER    one key, for good: nothing is issued to it until `allow PEER`
    revoke SERIAL  one token; the node gets the next one by renewing. `allow SERIAL` takes it back

Each act is one transaction with its row in the audit log; if anything is wrong nothing happens. It
waits for the disk like everything else, but not behind a queue of renewals: it is `urgent`. An act
that was done already gets the same answer, and writes no row: the log records changes.

Reading must not wait for writing. Everything that only reads has a connection of its own, and sees
one state of the database.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from auth.errors import AuthError
from auth.keys import SEED_BYTES, SigningKey, fingerprint, peer_id_of
from auth.revocations import RevocationsFull
from auth.roles import Role, in_order
from auth.server import (
    accounts,
    audit,
    backups,
    codes,
    database,
    revoked,
    signing_keys,
    tokens_issued,
    views,
)
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
from auth.server.audit import Act, AuditVerdict
from auth.server.backups import BackupMade
from auth.server.database import spell_roles
from auth.server.signing_keys import SigningKeys
from auth.server.store import Store, StoreReader
from auth.server.writer import Transaction
from auth.tokens import (
    CLOCK_TOLERANCE_MS,
    DEFAULT_LIFE_MS,
    LONGEST_LIFE_MS,
    Token,
    sign_token,
)

T = TypeVar("T")

MOST_LISTED = 5_000  # of anything at once: a few MB of answer


class NotDone(AuthError):
    """The request makes no sense now: it was done already, or there is no such thing."""


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """`change`: new, roles, was denied, was revoked, rebound, unchanged; or lifted. `forget_ms` as
    in `Revoked`, for the tokens that a `rebind` ended."""

    kind: str
    value: str
    account: views.AccountView | None
    change: str
    list_number: int
    forget_ms: int = 0
    provider_is_known: bool = True
    """False if nobody can log in under the name, because the settings have no such provider."""


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `deny` and `revoke`. `live_tokens` is how many it ended; `forget_ms` when the
    signed list no longer needs the entry (0: it was never needed there)."""

    kind: str
    value: str
    account: views.AccountView | None
    change: str
    live_tokens: int
    list_number: int
    forget_ms: int
    open_code: str | None = None
    """The id of the code that made the name, if anybody who has it still gets in by it."""


MOST_OPEN_CODES = 10_000  # stops a script that makes codes without end
DEFAULT_CODE_LIFE_MS = 7 * 24 * 3600 * 1000


class NewCode(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """In clear: shown once, stored nowhere."""
    view: views.CodeView


SHORTEST_OVERLAP_MS = 90_000
"""Nodes ask for lists and keys every 20 s or so; four misses, and the difference of clocks."""

COURIER_NAME = "auth-server"
COURIER_LIFE_MS = 5 * 60 * 1000


class KeyRotated(msgspec.Struct, frozen=True, kw_only=True):
    new: views.KeyView
    old: views.KeyView
    signs_from_ms: int


class KeyWithdrawn(msgspec.Struct, frozen=True, kw_only=True):
    withdrawn: views.KeyView
    new: views.KeyView | None
    """The key that was made because the withdrawn one was in use."""
    list_number: int
    may_lack_a_key: bool = False
    """Whether nodes ignore `new` if, after a restore, a newer key than the withdrawn one is missing
    here."""


class KeyComesTooLate(AuthError):
    """The key would need entries that were dropped, and the list has no room for them now."""

    def __init__(self, full: RevocationsFull) -> None:
        super().__init__(
            "This auth key cannot be given back any more.",
            why=f"It may have signed tokens that were revoked here. {full.what}",
            advice="Put the server back from the backup again, and give it this key before "
            "anything is revoked or withdrawn.",
        )


class NoSuchKey(AuthError):
    """There is no auth key with this id or fingerprint here, or it was withdrawn already."""


class Moderation:
    """The acts, over an open store. `providers` are the ids that a bare name may belong to."""

    def __init__(self, store: Store, *, providers: Sequence[str] = ()) -> None:
        self._store = store
        self._reader = StoreReader(store.paths.folder, clock_ms=store.clock_ms)
        self._providers = tuple(providers)

    def _do(self, operation: Callable[[Transaction], T]) -> T:
        """Perform the operation, and wait until it is on the disk."""
        return self._store.writer.run(operation, urgent=True)

    # -- names, keys and tokens: who may take part -------------------------------------------------
    #
    # A name that is allowed again has to log in again on each machine. It may have been revoked
    # because somebody else had logged in under it, and their key could renew as well as its
    # owner's.

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
            forget_ms = 0
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
                    reason_said = reason or "let go of"
                    _, forget_ms = self._revoke_tokens(transaction, before, actor, reason_said)
                    accounts.bind(connection, account, None)
                    codes.forget_uses(connection, account.account)
                if rebind or before.state is not AccountState.ALLOWED:
                    accounts.let_go_of_keys(connection, account)
                if self._date_back(transaction, account, actor, reason) and change == "unchanged":
                    change = "was revoked"
            if change != "unchanged":
                roles_text = spell_roles(account.roles)
                transaction.log(
                Act.ALLOWED, actor, reason, name=account.name,
                    detail=f"{change}; roles {roles_text}",
                )  # fmt: skip
            known = providers or self._providers
            return Allowed(
                provider_is_known=not known or full.provider in known,
                kind=revoked.NAME,
                value=account.name,
                account=views.account_view(connection, account, now_ms),
                change=change,
                list_number=self._store.latest_list_number(),
                forget_ms=forget_ms,
            )

        return self._do(operation)

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

        return self._do(operation)

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

        return self._do(operation)

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
            transaction.log(
                kind,
                actor,
                reason,
                name=account.name,
                detail=counted(live, "live token"),
            )
        return Revoked(
            kind=revoked.NAME,
            value=account.name,
            account=views.account_view(connection, account, now_ms),
            change=state.value if changed else "unchanged",
            live_tokens=live,
            list_number=self._store.latest_list_number(),
            forget_ms=forget_ms,
            open_code=codes.open_code_behind(connection, account.name, now_ms),
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
        self._store.publish_entry(transaction)
        return live, forget_ms

    def _date_back(
        self, transaction: Transaction, account: Account, actor: str, reason: str
    ) -> bool:
        """If a clock that was far ahead has dated the name's revocation, revoke instead up to now,
        and each token from then on by itself: a new token must not have to wait for that time."""
        connection, now_ms = transaction.connection, transaction.now_ms
        ahead = revoked.standing(connection, revoked.NAME, account.name)
        if ahead is None or ahead.revoked_ms <= now_ms + CLOCK_TOLERANCE_MS:
            return False
        revoked.lift(connection, revoked.NAME, account.name, now_ms)
        revoked.add(
            connection, revoked.NAME, account.name, by=actor, reason=reason,
            revoked_ms=now_ms, forget_ms=ahead.forget_ms,
        )  # fmt: skip
        withdrawn = self._store.latest_keys().withdrawn
        for token in tokens_issued.since(connection, account.account, now_ms):
            if token.key_id in withdrawn:
                continue
            revoked.add(
                connection, revoked.SERIAL, token.serial, by=actor, reason=reason,
                revoked_ms=token.issued_ms + 1,
                forget_ms=self._store.forget_ms(transaction, token.expires_ms),
            )  # fmt: skip
        self._store.publish_entry(transaction)
        return True

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
        self._store.publish_entry(transaction)
        transaction.log(
                Act.REVOKED, actor, reason, name=name, peer=peer,
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
        self._store.publish_entry(transaction)
        name = accounts.by_number(connection, token.account).name
        transaction.log(
                Act.REVOKED, actor, reason, name=name, peer=token.peer, serial=serial,
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
            shown = views.value_text(value)
            if not revoked.lift(transaction.connection, kind, value, transaction.now_ms):
                raise NotDone(
                    f"{shown} is not revoked.",
                    why="It never was, or was allowed again already.",
                    advice="`potluck auth list --revocations` shows what is revoked.",
                )
            self._store.publish(transaction)
            transaction.log(
                Act.LIFTED, actor, reason,
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

        return self._do(operation)

    def _check_not_revoked(self, transaction: Transaction, kind: str, value: revoked.Value) -> None:
        standing = revoked.standing(transaction.connection, kind, value)
        if standing is not None:
            raise NotDone(
                f"{views.value_text(value)} was revoked already.",
                why=f"{standing.revoked_by} did, and it stands.",
                advice="`potluck auth audit` shows when and why.",
            )

    # -- enrolment codes ---------------------------------------------------------------------------
    #
    # A code in clear exists only in the answer to the act that made it. The log and the database
    # have its number.

    def code_new(
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
                why="Its life must be longer than zero.",
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
            _, open_now = codes.listed(connection, now_ms, open_only=True, limit=0)
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
            view = views.code_view(made, now_ms)
            uses_text = "any number of uses" if uses is None else counted(uses, "use")
            transaction.log(
                Act.CODE_MADE, actor, reason or note, name=view.name,
                detail=f"{made.code_id}, {uses_text}",
            )  # fmt: skip
            return NewCode(code=code, view=view)

        return self._do(operation)

    def code_cancel(self, code_id: str, *, actor: str, reason: str = "") -> views.CodeView:
        """Nobody gets in by this code any more. People who got in keep their access. `code_id`: its
        number, or its letters, as of a code that was seen where it should not be."""
        number = code_id.strip().lower().removeprefix("c")
        letters = codes.hash_of(code_id)

        def operation(transaction: Transaction) -> views.CodeView:
            found = None
            if letters is not None:
                found = codes.by_hash(transaction.connection, letters)
            elif number.isascii() and number.isdigit() and len(number) <= 18:
                found = codes.by_number(transaction.connection, int(number))
            if found is None or found.cancelled_ms is not None:
                said = "was cancelled already" if found else "does not exist"
                raise NotDone(
                    f"The code {code_id[:40]!r} {said}.",
                    why="Codes are named by their number, as in c7, or by their letters.",
                    advice="`potluck auth codes list` shows them.",
                )
            codes.cancel(transaction.connection, found.code, transaction.now_ms)
            transaction.log(Act.CODE_CANCELLED, actor, reason, detail=found.code_id)
            changed = codes.by_number(transaction.connection, found.code)
            assert changed is not None
            return views.code_view(changed, transaction.now_ms)

        return self._do(operation)

    # -- auth keys ---------------------------------------------------------------------------------
    #
    # A new key is published at once and signs only after the overlap, when every node has it in
    # its keyring. A key that may be in wrong hands is withdrawn: from then on none of its tokens is
    # valid, and every node that is still allowed gets a new token by itself, at its next renewal.
    #
    # Withdrawing the key that signs needs another one, endorsed while the old one was still valid.
    # So the new key is made first, in the same transaction, and signs at once.

    def key_rotate(
        self,
        *,
        overlap_ms: int = DEFAULT_LIFE_MS,
        key_file: Path | None = None,
        actor: str,
        reason: str = "",
    ) -> KeyRotated:
        """A new key: published now, signing after the overlap (usually the life of a token).

        Or the one in `key_file`, to which this run changed after the backup that was restored: it
        signs at once, and counts for all tokens that it may have signed already. If it was put
        back before a key that is older than it, it becomes the newest, as long as none of those
        was withdrawn and no new one was made after it.
        """
        known_key = None if key_file is None else _key_in(key_file)

        def operation(transaction: Transaction) -> KeyRotated:
            now_ms, keys = transaction.now_ms, self._store.latest_keys()
            old = keys.active_row(now_ms)
            if known_key is not None:
                after = self._put_back(transaction, keys, known_key, actor, reason)
                try:
                    self._store.publish(transaction, keys=after)
                except RevocationsFull as full:
                    raise KeyComesTooLate(full) from full
                return KeyRotated(
                    new=views.key_view(after, after.rows[-1], now_ms),
                    old=views.key_view(after, old, now_ms),
                    signs_from_ms=now_ms,
                )
            if keys.newest().record.from_ms > now_ms:
                raise NoSuchKey(
                    "A new key is on its way already.",
                    why=f"{keys.newest().key_id.hex()} is published, and signs when its time "
                    "comes.",
                    advice="Wait for that; if it must not be used, withdraw it.",
                )
            from_ms = now_ms + max(overlap_ms, SHORTEST_OVERLAP_MS)
            after = self._make_key(transaction, keys, from_ms, actor, reason)
            self._store.publish(transaction, keys=after)
            return KeyRotated(
                new=views.key_view(after, after.rows[-1], now_ms),
                old=views.key_view(after, old, now_ms),
                signs_from_ms=from_ms,
            )

        return self._do(operation)

    def key_withdraw(self, key: str, *, actor: str, reason: str = "") -> KeyWithdrawn:
        """From now on no signature of this key (its id or fingerprint) is valid."""

        def operation(transaction: Transaction) -> KeyWithdrawn:
            now_ms, keys = transaction.now_ms, self._store.latest_keys()
            row = _key_called(keys, key)
            made = None
            newer = [other for other in keys.rows if other.place > row.place]
            if not any(
                other.withdrawn_ms is None and other.record.from_ms <= now_ms for other in newer
            ):
                keys = self._make_key(
                    transaction, keys, now_ms, actor, "in place of a withdrawn key"
                )
                made = keys.rows[-1]
            signing_keys.withdraw(transaction.connection, row.key_id, now_ms)
            after = keys.without(row.key_id, now_ms)
            self._shed_revocations(transaction, after)
            self._store.publish(transaction, keys=after)
            transaction.log(
                Act.KEY_WITHDRAWN, actor, reason,
                detail=f"{row.key_id.hex()} {fingerprint(row.record.public_key)}",
            )  # fmt: skip
            path = self._store.paths.keys / signing_keys.file_name(row.key_id)
            transaction.after_commit(lambda: signing_keys.remove_key_file(path))
            gone = after.rows[row.place]
            return KeyWithdrawn(
                withdrawn=views.key_view(after, gone, now_ms),
                new=None if made is None else views.key_view(after, made, now_ms),
                list_number=self._store.latest_list_number(),
                may_lack_a_key=made is not None and self._store.is_unsure(transaction),
            )

        return self._do(operation)

    def _shed_revocations(self, transaction: Transaction, keys: SigningKeys) -> None:
        """Drop what only tokens of withdrawn keys need. While there may be tokens that the database
        does not know, that is certain only once every key that may have signed is withdrawn; and
        another such key may be put back."""
        connection, now_ms = transaction.connection, transaction.now_ms
        may_have_signed = any(
            row.withdrawn_ms is None and (row.made_ms < now_ms or row.was_put_back)
            for row in keys.rows
        )
        is_unsure = self._store.is_unsure(transaction)
        if not (may_have_signed and is_unsure):
            revoked.shed(connection, now_ms, self._store.grace_ms, may_be_needed_again=is_unsure)

    def courier_token(self, peer: bytes, *, actor: str, reason: str = "") -> bytes:
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
                expires_ms=issued_ms + COURIER_LIFE_MS,
            )
            transaction.log(
                Act.COURIER, actor, reason, name=COURIER_NAME, peer=peer, serial=token.serial,
                detail=f"for {COURIER_LIFE_MS // 1000} s",
            )  # fmt: skip
            return token, key

        return sign_token(*self._do(operation))

    def _make_key(
        self, transaction: Transaction, keys: SigningKeys, from_ms: int, actor: str, reason: str
    ) -> SigningKeys:
        key = SigningKey(secrets.token_bytes(SEED_BYTES))
        return self._take_key(transaction, keys, key, from_ms, actor, reason)

    def _put_back(
        self,
        transaction: Transaction,
        keys: SigningKeys,
        key: SigningKey,
        actor: str,
        reason: str,
    ) -> SigningKeys:
        after = keys.with_last(key.key_id)
        if after is None:
            from_ms = transaction.now_ms - LONGEST_LIFE_MS
            revoked.list_again(transaction.connection, self._store.forget_ms(transaction, 0))
            return self._take_key(transaction, keys, key, from_ms, actor, reason)
        signing_keys.keep_order(
            transaction.connection,
            tuple(row for row in after.rows if row not in keys.rows),
        )
        transaction.log(
            Act.KEY_MADE, actor, reason, detail=f"{key.key_id.hex()} put back again, as the newest"
        )
        return after

    def _take_key(
        self,
        transaction: Transaction,
        keys: SigningKeys,
        key: SigningKey,
        from_ms: int,
        actor: str,
        reason: str,
    ) -> SigningKeys:
        if any(row.key_id == key.key_id for row in keys.rows):
            raise NoSuchKey(
                f"The key {key.key_id.hex()} is known here already.",
                why="Only a key that was made after the backup is missing after a restore. If the "
                "order was wrong, the newest becomes the last by being given once more, as long as "
                "no key that was given back was withdrawn, and no new one was made after it.",
                advice="`potluck auth keys list` shows the keys that this server has, and their "
                "order. If it is wrong, restore the backup again and give the keys in order.",
            )
        row = keys.successor(key, transaction.now_ms, from_ms)
        folder = self._store.paths.keys
        if signing_keys.read_key_file(folder / signing_keys.file_name(key.key_id)) is None:
            path = signing_keys.write_key_file(folder, key)
            transaction.if_undone(lambda: signing_keys.remove_key_file(path))
        signing_keys.keep_row(transaction.connection, row)
        transaction.log(
            Act.KEY_MADE, actor, reason, detail=f"{key.key_id.hex()} {fingerprint(key.public_key)}"
        )
        return keys.with_new(row, key)

    # -- reading -----------------------------------------------------------------------------------

    def accounts(
        self, *, state: str | None = None, role: str | None = None, limit: int = 100
    ) -> views.AccountList:
        """Names, in order."""
        with self._reader.reading() as connection:
            found, total = accounts.listed(
                connection, state=state, role=role, limit=_bounded(limit)
            )
            shown = (views.account_view(connection, account, self._now()) for account in found)
            return views.AccountList(accounts=tuple(shown), total=total)

    def account(self, name: str) -> views.AccountView:
        with self._reader.reading() as connection:
            found = accounts.meant(connection, parse_name(name))
            return views.account_view(connection, found, self._now())

    def tokens(self, name: str | None = None, *, limit: int = 100) -> views.TokenList:
        """Live tokens, of one name or of all."""
        now_ms = self._now()
        with self._reader.reading() as connection:
            account = None
            if name is not None:
                account = accounts.meant(connection, parse_name(name)).account
            found = tokens_issued.live(connection, now_ms, account=account, limit=_bounded(limit))
            return views.TokenList(
                tokens=views.token_views(connection, found),
                total=tokens_issued.count_live(connection, now_ms, account=account),
            )

    def revocations(self, *, limit: int = 1000) -> views.RevocationEntries:
        now_ms = self._now()
        with self._reader.reading() as connection:
            newest = revoked.newest_list(connection)
            found = revoked.listed(connection, now_ms, _bounded(limit))
            return views.RevocationEntries(
                list_number=0 if newest is None else newest.number,
                entries=tuple(views.revocation_view(each, now_ms) for each in found),
            )

    def codes(self, *, open_only: bool = False, limit: int = 100) -> views.CodeList:
        now_ms, most = self._now(), _bounded(limit)
        with self._reader.reading() as connection:
            found, total = codes.listed(connection, now_ms, open_only=open_only, limit=most)
        shown = tuple(views.code_view(code, now_ms) for code in found)
        return views.CodeList(codes=shown, total=total)

    def keys(self) -> views.KeyList:
        keys, now_ms = self._store.keys, self._now()
        return views.KeyList(keys=tuple(views.key_view(keys, row, now_ms) for row in keys.rows))

    def audit(
        self,
        *,
        since_ms: int | None = None,
        name: str | None = None,
        act: str | None = None,
        limit: int = 100,
    ) -> views.AuditRows:
        """The newest part of the log, newest first. A `name` without a provider matches at all of
        them, even if nobody of that name is on the list: refused people are in the log."""
        full = login = None
        if name is not None:
            parsed = parse_name(name)
            if isinstance(parsed, BareName):
                login = parsed.login
            else:
                full = str(parsed)
        most = _bounded(limit)
        with self._reader.reading() as connection:
            found = audit.rows(
                connection, since_ms=since_ms, name=full, login=login, act=act, limit=most + 1
            )
        rows = tuple(views.audit_row(row) for row in found[:most])
        return views.AuditRows(rows=rows, more=len(found) > most)

    def verify(self, *, head: str | None = None) -> AuditVerdict:
        """Whether the log is unchanged. `head` is a NUMBER:HASH from earlier."""
        written_down = None
        if head is not None:
            written_down = audit.parse_head(head)
            if written_down is None:
                raise NotDone(
                    f"{head[:100]!r} is not the head of an audit log.",
                    why="It is written NUMBER:HASH, the hash with 64 hexadecimal digits.",
                    advice="Copy it as `potluck auth audit --verify` or a backup showed it.",
                )
        with self._reader.reading() as connection:
            return audit.verify_log(
                connection, self._store.run, self._store.keys.verifying(),
                self._store.paths.head, written_down,
            )  # fmt: skip

    def _now(self) -> int:
        return self._store.clock_ms()

    # -- a backup ----------------------------------------------------------------------------------

    def backup(self, destination: Path, *, actor: str, reason: str = "") -> BackupMade:
        """Copy everything, keys included, to a folder that does not exist yet.

        The row in the log comes first: a copy can sign tokens, so there must be none that the log
        does not record.
        """
        destination = destination.absolute()
        backups.check_is_free(destination)
        where = f"to {destination}"
        self._do(lambda transaction: transaction.log(Act.BACKED_UP, actor, reason, detail=where))
        paths = self._store.paths
        try:
            with contextlib.ExitStack() as stack:
                state, keys = self._do(
                    lambda _: (
                        stack.enter_context(database.held_state(paths.database)),
                        backups.keys_in(paths.keys),
                    )
                )
                return backups.make_backup(paths, state, keys, destination, self._now())
        except AuthError as error:
            what = error.what
            self._do(
                lambda transaction: transaction.log(Act.BACKUP_FAILED, actor, what, detail=where)
            )
            raise


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


def _change(before: Account, roles: tuple[Role, ...] | None, *, rebind: bool) -> str:
    if before.state is not AccountState.ALLOWED:
        return f"was {before.state.value}"
    if rebind:
        return "rebound"
    return "unchanged" if roles is None or roles == before.roles else "roles"


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
            why=f"People who get in by a code have names of the provider `{codes.PROVIDER}`.",
            advice=f"Use {codes.PROVIDER}:{parsed.login}, or allow the name and let them log in.",
        )
    return parsed.login


def _key_in(path: Path) -> SigningKey:
    key = signing_keys.read_key_file(path)
    if key is None:
        raise NoSuchKey(
            f"There is no file {path}.",
            why="The file of an auth key is called KEYID.key, in the keys folder of its server.",
            advice="Look in the folder of the server that was replaced, or in a later backup.",
        )
    return key


def _key_called(keys: SigningKeys, wanted: str) -> signing_keys.KeyRow:
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
        why="It is mistyped, of another run, or newer than the backup that was put back here.",
        advice="`potluck auth keys list` shows the ids and fingerprints. A key that is newer than "
        "the backup has to be given back first, and after it those that came later: `potluck auth "
        "keys rotate --key FILE`. Its file is in a backup that was made while the key was in use.",
    )


def _bounded(limit: int) -> int:
    return max(0, min(limit, MOST_LISTED))
