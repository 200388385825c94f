"""Who gets a token: decided, written and logged in one transaction.

Three ways in (an identity that a provider confirmed, an enrolment code, a key that has logged in
before) lead to one `_grant`, which looks at everything that could speak against it. The answer is
a `Decision` to be signed once it is on the disk, or a `JoinRefused`.

Easy to get wrong: refusing by raising, which would undo the row in the log. A refusal is returned.
And the order of two questions: whether a name may take part is asked inside the transaction, after
every act of a moderator before it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from auth.fields import LONGEST_TEXT
from auth.keys import SigningKey
from auth.server import accounts, codes, revoked, tokens_issued
from auth.server.account_names import AccountName, NotAName, account_name
from auth.server.accounts import Account, State
from auth.server.audit import Act, Entry
from auth.server.join_refused import JoinReason, JoinRefused
from auth.server.store import Store
from auth.server.transaction import Transaction
from auth.tokens import DEFAULT_LIFE_MS, Token

AWAY_MS = 30 * 24 * 3600 * 1000
"""How long a node may be away and still renew by its key alone. A month covers a holiday."""

KEYS_PER_ACCOUNT = 32  # nodes of one person at a time; bounds what one stolen login can do
CLOCK_WAIT_MS = 1000  # a token may be dated this much ahead rather than be refused


class IssuerSettings(msgspec.Struct, frozen=True, kw_only=True):
    auth_url: str
    endpoints: tuple[str, ...] = ()
    token_life_ms: int = DEFAULT_LIFE_MS
    grace_ms: int = 3600 * 1000
    away_ms: int = AWAY_MS
    keys_per_account: int = KEYS_PER_ACCOUNT


class VerifiedIdentity(Protocol):
    """Who somebody is, at the word of a provider that was checked."""

    @property
    def provider(self) -> str: ...

    @property
    def subject(self) -> str:
        """What the provider calls them for good, whatever their login is."""

    @property
    def login(self) -> str: ...


class Decision(msgspec.Struct, frozen=True):
    """What the transaction decided; the signatures follow when it is on the disk."""

    token: Token
    key: SigningKey


Outcome = Decision | JoinRefused


class Granting:
    """The three ways in, as operations of the writer's."""

    def __init__(self, store: Store, settings: IssuerSettings) -> None:
        self._store = store
        self._settings = settings

    def join(
        self, transaction: Transaction, identity: VerifiedIdentity, peer: bytes, address: str
    ) -> Outcome:
        found = self._account_of_identity(transaction, identity)
        if isinstance(found, JoinRefused):
            return self._refuse(transaction, found, address, peer, _name_said(identity))
        reason = f"{identity.provider} confirmed {identity.login}."
        outcome = self._grant(transaction, found, peer, address, Act.JOINED, reason)
        if found.subject is None and isinstance(outcome, Decision):
            accounts.bind(transaction.connection, found, identity.subject)
        return outcome

    def join_by_code(
        self, transaction: Transaction, code_hash: bytes | None, peer: bytes, address: str
    ) -> Outcome:
        found = self._account_of_code(transaction, code_hash, peer)
        if isinstance(found, JoinRefused):
            return self._refuse(transaction, found, address, peer, codes.PROVIDER)
        account, code, is_new = found
        reason = f"By enrolment code {code.code_id}."
        outcome = self._grant(transaction, account, peer, address, Act.JOINED, reason)
        if isinstance(outcome, Decision):
            self._count_use(transaction, code, account, peer)
        elif is_new:  # a name that is on the list without a row in the log would be a riddle
            accounts.remove_new(transaction.connection, account)
        return outcome

    def renew(self, transaction: Transaction, token: Token, peer: bytes, address: str) -> Outcome:
        """`token` is genuine, and of this peer and run; it may be over."""
        known = accounts.peer(transaction.connection, peer)
        if known is None or transaction.now_ms - known.seen_ms > self._settings.away_ms:
            refusal = JoinRefused(JoinReason.LOGIN_OVER)
            return self._refuse(transaction, refusal, address, peer, token.username)
        account = accounts.by_number(transaction.connection, known.account)
        reason = f"The node holds its key; after token {token.serial}."
        return self._grant(transaction, account, peer, address, Act.RENEWED, reason)

    def log_refusal(
        self,
        transaction: Transaction,
        refusal: JoinRefused,
        address: str,
        peer: bytes | None,
        name: str | None,
    ) -> None:
        transaction.log(
            Entry(
                act=Act.REFUSED, actor="peer", name=name, peer=peer,
                reason=f"{refusal.code}: {refusal.what}"[:LONGEST_TEXT], detail=f"from {address}",
            )
        )  # fmt: skip

    def _account_of_identity(
        self, transaction: Transaction, identity: VerifiedIdentity
    ) -> Account | JoinRefused:
        connection = transaction.connection
        if identity.provider == codes.PROVIDER:  # those names belong to who has a code
            return JoinRefused(JoinReason.NOT_ON_THE_LIST)
        found = accounts.by_subject(connection, identity.provider, identity.subject)
        if found is not None:
            return found
        try:
            name = account_name(identity.provider, identity.login)
        except NotAName as error:
            return JoinRefused(JoinReason.NOT_ON_THE_LIST, why=error.why)
        found = accounts.by_name(connection, name)
        if found is None:
            return JoinRefused(
                JoinReason.NOT_ON_THE_LIST,
                f"{name} is not on the list of those who may take part.",
            )
        if found.subject is not None:
            return JoinRefused(JoinReason.NAME_OF_ANOTHER)
        return found

    def _account_of_code(
        self, transaction: Transaction, code_hash: bytes | None, peer: bytes
    ) -> tuple[Account, codes.Code, bool] | JoinRefused:
        """Whose the code is, and whether their account was made just now."""
        connection = transaction.connection
        code = codes.by_hash(connection, code_hash) if code_hash is not None else None
        if code is None:
            return JoinRefused(JoinReason.CODE_UNKNOWN)
        state = code.state(transaction.now_ms)
        if state is codes.CodeState.CANCELLED:
            return JoinRefused(JoinReason.CODE_CANCELLED)
        earlier = codes.account_of_earlier_use(connection, code.code, peer)
        if earlier is not None:
            return accounts.by_number(connection, earlier), code, False
        if state is codes.CodeState.USED_UP:
            return JoinRefused(JoinReason.CODE_USED_UP)
        if state is codes.CodeState.EXPIRED:
            return JoinRefused(JoinReason.CODE_EXPIRED)
        name = AccountName(codes.PROVIDER, code.login or codes.made_up_login(code))
        found = accounts.by_name(connection, name)
        if found is not None:
            return found, code, False
        made = accounts.add(
            connection, name, roles=code.roles, state=State.ALLOWED,
            by=code.made_by, now_ms=transaction.now_ms, note=code.note,
        )  # fmt: skip
        return made, code, True

    def _count_use(
        self, transaction: Transaction, code: codes.Code, account: Account, peer: bytes
    ) -> None:
        connection = transaction.connection
        if codes.account_of_earlier_use(connection, code.code, peer) is None:
            codes.use(connection, code, peer, account.account, transaction.now_ms)

    def _grant(
        self,
        transaction: Transaction,
        account: Account,
        peer: bytes,
        address: str,
        act: Act,
        reason: str,
    ) -> Outcome:
        """A token for this account and key, in the database and the log; or a refusal there."""
        connection, now_ms = transaction.connection, transaction.now_ms
        banned, counts_from_ms = revoked.against(connection, peer, account.name)
        refusal = (
            JoinRefused(JoinReason.PEER_REVOKED)
            if banned
            else self._reason_against(transaction, account, peer)
        )
        if refusal is None and counts_from_ms > now_ms + CLOCK_WAIT_MS:
            refusal = JoinRefused(JoinReason.CLOCK)
        if refusal is not None:
            return self._refuse(transaction, refusal, address, peer, account.name)
        key = self._store.latest_keys().active(now_ms)
        issued_ms = max(now_ms, counts_from_ms)
        token = Token(
            run=self._store.run,
            username=account.name,
            peer=peer,
            roles=account.roles,
            serial=transaction.next_serial(),
            key_id=key.key_id,
            issued_ms=issued_ms,
            expires_ms=issued_ms + self._settings.token_life_ms,
        )
        if act is Act.RENEWED:
            accounts.peer_seen(connection, peer, now_ms)
        else:
            accounts.peer_logged_in(connection, peer, account.account, now_ms)
        tokens_issued.keep(
            connection,
            tokens_issued.IssuedToken(
                serial=token.serial,
                account=account.account,
                peer=peer,
                roles=account.roles,
                key_id=key.key_id,
                issued_ms=token.issued_ms,
                expires_ms=token.expires_ms,
            ),
        )
        transaction.log(
            Entry(
                act=act, actor="peer", name=account.name, peer=peer, serial=token.serial,
                reason=reason,
            )
        )  # fmt: skip
        transaction.after_commit(self._store.count_token)
        return Decision(token, key)

    def _reason_against(
        self, transaction: Transaction, account: Account, peer: bytes
    ) -> JoinRefused | None:
        connection = transaction.connection
        if account.state is State.DENIED:
            return JoinRefused(JoinReason.DENIED)
        if account.state is State.REVOKED:
            return JoinRefused(JoinReason.REVOKED)
        known = accounts.peer(connection, peer)
        if known is not None and known.account != account.account:
            owner = accounts.by_number(connection, known.account)
            if owner.state is not State.ALLOWED:
                return JoinRefused(JoinReason.PEER_OF_ANOTHER)
        # Renewals too: otherwise keys that logged in by and by could all come back at once.
        since_ms = transaction.now_ms - self._settings.token_life_ms - self._settings.grace_ms
        counts_already = (
            known is not None and known.account == account.account and known.seen_ms >= since_ms
        )
        if not counts_already:
            in_use = accounts.keys_in_use(connection, account.account, since_ms)
            if in_use >= self._settings.keys_per_account:
                return JoinRefused(JoinReason.TOO_MANY_KEYS)
        return None

    def _refuse(
        self,
        transaction: Transaction,
        refusal: JoinRefused,
        address: str,
        peer: bytes,
        name: str | None,
    ) -> JoinRefused:
        if self._store.refusals.is_written(address, refusal.code, transaction.now_ms):
            self.log_refusal(transaction, refusal, address, peer, name)
        return refusal


def _name_said(identity: VerifiedIdentity) -> str:
    """The name in the log: as accounts are called, so that a search for it finds this as well."""
    try:
        return str(account_name(identity.provider, identity.login))
    except NotAName:
        return f"{identity.provider}:{identity.login}"
