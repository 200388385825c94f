"""The acts of moderators: who may take part, from when on no longer, and with which keys.

Each act is one transaction together with its row in the audit log, which says who did it and why;
if anything is wrong nothing has happened. Everything is blocking: the running server calls it in a
thread, a command on a stopped server directly.

    allow NAME     on the list; undoes deny and revoke (tokens from before stay dead)
    deny NAME      off the list, and all its live tokens revoked
    revoke NAME    all its live tokens revoked, and no login or renewal until it is allowed again
    revoke PEER    one key, for good: nothing is issued to it until `allow PEER`
    revoke SERIAL  one token; the node gets the next one by renewing. `allow SERIAL` takes it back

Easy to get wrong: an act that "did nothing" because it was done already still answers truthfully,
and writes no row: the log tells of changes, and of who tried without the right to.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from auth.errors import AuthError, NotAKey
from auth.keys import peer_id_of, public_key_of
from auth.roles import Role, in_order
from auth.server import accounts, audit_head, backups, codes, listings, revoked, tokens_issued
from auth.server.account_names import (
    AccountName,
    BareName,
    PeerKey,
    SerialNumber,
    account_name,
    parse_name,
    parse_target,
)
from auth.server.accounts import Account, State, UnknownName
from auth.server.audit import Act, Entry
from auth.server.audit_head import AuditVerdict
from auth.server.backups import BackupMade
from auth.server.key_acts import KeyActs
from auth.server.store import HEAD_NAME, Reader, Store
from auth.server.transaction import Transaction

MOST_LISTED = 5_000  # of anything at once: a few MB of answer
MOST_KEPT_CODES_OPEN = 10_000  # so that a script gone wild ends
DEFAULT_CODE_LIFE_MS = 7 * 24 * 3600 * 1000

T = TypeVar("T")


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """`change`: new, roles, was denied, was revoked, rebound, unchanged; or lifted."""

    kind: str
    value: str
    account: listings.AccountView | None
    change: str
    list_number: int


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


class NewCode(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """In clear: shown once, kept nowhere."""
    view: listings.CodeView


class NotDone(AuthError):
    """What was asked makes no sense now: it was done already, or there is no such thing."""


class Moderation:
    """The acts, over an open store. `providers` are the ids that a bare name may belong to."""

    def __init__(self, store: Store, *, providers: Sequence[str] = ()) -> None:
        self._store = store
        self._providers = tuple(providers)
        self._reader = Reader(store.paths.folder, clock_ms=store.clock_ms)
        self.keys_acts = KeyActs(store)
        self.key_rotate = self.keys_acts.rotate
        self.key_withdraw = self.keys_acts.withdraw
        self.courier_token = self.keys_acts.courier_token

    # -- who may take part ---------------------------------------------------------------------

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
                    accounts.let_go_of_keys(connection, account)
            if change != "unchanged":
                roles_text = accounts.spell_roles(account.roles)
                self._log(transaction, Act.ALLOWED, actor, reason, account.name, None,
                          f"{change}; roles {roles_text}")  # fmt: skip
            return Allowed(
                kind=revoked.NAME,
                value=account.name,
                account=listings.account_view(connection, account, now_ms),
                change=change,
                list_number=self._store.latest_list_number(),
            )

        return self._act(operation)

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

        return self._act(operation)

    def revoke(
        self, target: str, *, actor: str, reason: str = "", providers: Sequence[str] = ()
    ) -> Revoked:
        """End what a name, a peer or one token has, everywhere within a minute."""
        meant = parse_target(target)

        def operation(transaction: Transaction) -> Revoked:
            match meant:
                case PeerKey(public_key):
                    return self._revoke_peer(transaction, public_key, actor, reason)
                case SerialNumber(serial):
                    return self._revoke_serial(transaction, serial, actor, reason)
                case AccountName() | BareName():
                    account = self._meant(transaction, meant, providers)
                    if account.state is State.REVOKED:
                        raise NotDone(
                            f"{account.name} was revoked already.",
                            why=f"{account.changed_by} did.",
                            advice="`potluck auth audit` shows when and why.",
                        )
                    return self._end(
                        transaction, account, State.REVOKED, Act.REVOKED, actor, reason
                    )

        return self._act(operation)

    # -- enrolment codes -----------------------------------------------------------------------

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
                self._check_code_name(transaction, login)
            _, open_now = codes.listed(connection, now_ms, open_only=True, limit=0, offset=0)
            if open_now >= MOST_KEPT_CODES_OPEN:
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
            uses_text = "any number of uses" if uses is None else f"{uses} uses"
            self._log(transaction, Act.CODE_MADE, actor, reason or note, view.name, None,
                      f"{made.code_id}, {uses_text}")  # fmt: skip
            return NewCode(code=code, view=view)

        return self._act(operation)

    def code_cancel(self, code_id: str, *, actor: str, reason: str = "") -> listings.CodeView:
        """Nobody gets in by this code any more. Who has got in keeps what they have."""
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
            self._log(transaction, Act.CODE_CANCELLED, actor, reason, None, None, found.code_id)
            changed = codes.by_number(transaction.connection, found.code)
            assert changed is not None
            return listings.code_view(changed, transaction.now_ms)

        return self._act(operation)

    # -- looking -------------------------------------------------------------------------------

    def accounts(
        self,
        *,
        state: str | None = None,
        role: str | None = None,
        text: str = "",
        limit: int = 100,
        offset: int = 0,
    ) -> listings.AccountList:
        with self._reader.reading() as connection:
            return listings.account_list(
                connection, self._now(), state=state, role=role, text=text,
                limit=_bounded(limit), offset=offset,
            )  # fmt: skip

    def account(self, name: str) -> listings.AccountView:
        with self._reader.reading() as connection:
            found = accounts.meant(connection, parse_name(name))
            return listings.account_view(connection, found, self._now())

    def tokens(
        self, name: str | None = None, *, limit: int = 100, offset: int = 0
    ) -> listings.TokenList:
        """Live tokens, of one name or of all."""
        with self._reader.reading() as connection:
            account = None if name is None else accounts.meant(connection, parse_name(name))
            return listings.token_list(connection, self._now(), account, _bounded(limit), offset)

    def revocations(self, *, limit: int = 1000) -> listings.RevocationEntries:
        with self._reader.reading() as connection:
            return listings.revocation_entries(connection, self._now(), _bounded(limit))

    def revocation_list(self) -> tuple[int, bytes]:
        """The number and the signed bytes of the newest list."""
        newest = self._store.revocation_list()
        return newest.number, newest.signed

    def codes(
        self, *, open_only: bool = False, limit: int = 100, offset: int = 0
    ) -> listings.CodeList:
        with self._reader.reading() as connection:
            return listings.code_list(
                connection, self._now(), open_only=open_only, limit=_bounded(limit), offset=offset
            )

    def keys(self) -> listings.KeyList:
        return listings.key_list(self._store.keys, self._now())

    def audit(
        self,
        *,
        since_ms: int | None = None,
        until_ms: int | None = None,
        name: str | None = None,
        act: str | None = None,
        peer: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> listings.AuditRows:
        """Some of the log, newest first."""
        try:
            key = None if peer is None else public_key_of(peer)
        except NotAKey as error:
            raise NotDone(error.what, why=error.why, advice=error.advice) from None
        with self._reader.reading() as connection:
            if name is not None:
                parsed = parse_name(name)
                if isinstance(parsed, BareName):
                    name = accounts.meant(connection, parsed).name
            return listings.audit_rows(
                connection, since_ms=since_ms, until_ms=until_ms, name=name, act=act, peer=key,
                before=before, limit=_bounded(limit),
            )  # fmt: skip

    def verify(self, *, head: str | None = None) -> AuditVerdict:
        """Whether the log is as it was written. `head` is a NUMBER:HASH from earlier."""
        written_down = None
        if head is not None:
            written_down = audit_head.parse_head(head)
            if written_down is None:
                raise NotDone(
                    f"{head[:100]!r} is not the head of an audit log.",
                    why="It is written NUMBER:HASH, the hash with 64 hexadecimal digits.",
                    advice="Copy it as `potluck auth audit --verify` or a backup showed it.",
                )
        with self._reader.reading() as connection:
            return audit_head.verify_log(
                connection, self._store.run, self._store.keys.verifying(),
                self._store.paths.head, written_down,
            )  # fmt: skip

    def backup(self, destination: Path, *, actor: str, reason: str = "") -> BackupMade:
        """Copy everything, keys included, to a folder that is not there yet."""
        paths = self._store.paths
        made = backups.make_backup(paths.database, paths.keys, HEAD_NAME, destination, self._now())
        self._act(
            lambda transaction: self._log(
                transaction, Act.BACKED_UP, actor, reason, None, None, f"to {made.path}"
            )
        )
        return made

    # -- parts of acts -------------------------------------------------------------------------

    def _act(self, operation: Callable[[Transaction], T]) -> T:
        return self._store.writer.run(operation, urgent=True)

    def _now(self) -> int:
        return self._store.clock_ms()

    def _meant(
        self, transaction: Transaction, name: AccountName | BareName, providers: Sequence[str]
    ) -> Account:
        """The account of a name; a bare one is also looked for where it could be meant."""
        try:
            return accounts.meant(transaction.connection, name)
        except UnknownName:
            full = accounts.full_name(
                transaction.connection, name, providers or self._providers or ("",)
            )
            found = accounts.by_name(transaction.connection, full)
            if found is None:
                raise
            return found

    def _end(
        self,
        transaction: Transaction,
        account: Account,
        state: State,
        act: Act,
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
            self._log(transaction, act, actor, reason, account.name, None, f"{live} live tokens")
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
        name, live, end_ms, issue_ms = None, 0, 0, 0
        if known is not None:
            name = accounts.by_number(connection, known.account).name
            live = tokens_issued.count_live(connection, now_ms, peer=peer)
            end_ms, issue_ms = tokens_issued.latest_of_peer(connection, peer)
        forget_ms = self._store.forget_ms(transaction, end_ms)
        revoked.add(
            connection, revoked.PEER, peer, by=actor, reason=reason,
            revoked_ms=max(now_ms, issue_ms + 1), forget_ms=forget_ms,
        )  # fmt: skip
        self._store.publish(transaction)
        self._log(transaction, Act.REVOKED, actor, reason, name, peer, f"key; {live} live tokens")
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
        transaction.log(
            Entry(act=Act.REVOKED, actor=actor, reason=reason, name=name, peer=token.peer,
                  serial=serial, detail="one token")
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
                    advice="`potluck auth list` shows what is revoked.",
                )
            self._store.publish(transaction)
            transaction.log(
                Entry(
                    act=Act.LIFTED, actor=actor, reason=reason,
                    peer=value if isinstance(value, bytes) else None,
                    serial=value if isinstance(value, int) else None,
                )
            )  # fmt: skip
            return Allowed(
                kind=kind,
                value=shown,
                account=None,
                change="lifted",
                list_number=self._store.latest_list_number(),
            )

        return self._act(operation)

    def _check_not_revoked(self, transaction: Transaction, kind: str, value: revoked.Value) -> None:
        standing = revoked.standing(transaction.connection, kind, value)
        if standing is not None:
            raise NotDone(
                f"{listings.value_text(value)} was revoked already.",
                why=f"{standing.revoked_by} did, and it stands.",
                advice="`potluck auth audit` shows when and why.",
            )

    def _check_code_name(self, transaction: Transaction, login: str) -> None:
        found = accounts.by_name(transaction.connection, AccountName(codes.PROVIDER, login))
        if found is not None and found.state is not State.ALLOWED:
            raise NotDone(
                f"{found.name} may not take part, so a code would not let them in.",
                why=f"The name is {found.state.value}.",
                advice=f"`potluck auth allow {found.name}` first.",
            )

    def _log(
        self,
        transaction: Transaction,
        act: Act,
        actor: str,
        reason: str,
        name: str | None,
        peer: bytes | None,
        detail: str,
    ) -> None:
        transaction.log(
            Entry(act=act, actor=actor, reason=reason, name=name, peer=peer, detail=detail)
        )


def read_roles(words: Iterable[str]) -> tuple[Role, ...]:
    """Roles from what somebody typed; NotDone for a word that is none, or no word at all."""
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


def _code_login(name: str) -> str:
    parsed = parse_name(name)
    if isinstance(parsed, BareName):
        return account_name(codes.PROVIDER, parsed.login).login
    if parsed.provider != codes.PROVIDER:
        raise NotDone(
            f"A code cannot be for {parsed}.",
            why=f"Who gets in by a code has a name of the provider `{codes.PROVIDER}`.",
            advice=f"Use {codes.PROVIDER}:{parsed.login}, or allow the name and let them log in.",
        )
    return parsed.login


def _change(before: Account, roles: tuple[Role, ...] | None, *, rebind: bool) -> str:
    if before.state is not State.ALLOWED:
        return f"was {before.state.value}"
    if rebind:
        return "rebound"
    return "unchanged" if roles is None or roles == before.roles else "roles"


def _bounded(limit: int) -> int:
    return max(0, min(limit, MOST_LISTED))
