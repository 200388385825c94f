"""Gives out access passes: join by a proven identity or by a code, renew by the proof of a key.

    a peer proves its key          prove()        challenge, signature, once
    a person proves who they are   join()         by a provider's word, which the caller checked
                                   join_by_code() by the code
    a node continues               renew()        by its key alone: it has logged in before
    the pass                       Granted        signed only after its row is on the disk

Every pass and every refusal is in the audit log before it is answered. The decision is made in one
transaction with that row (below).

Easy to get wrong: a token must not be signed before the commit. A token that is signed and not in
the log could be used by anybody who saw it; one that is in the log and was never signed is
harmless.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from auth.bounded_map import BoundedMap
from auth.challenges import DEFAULT_LIFE_MS as CHALLENGE_LIFE_MS
from auth.challenges import (
    RANDOM_BYTES,
    SECRET_BYTES,
    UsedChallenges,
    check_challenge,
    check_proof,
    make_challenge,
)
from auth.errors import AuthError, NotAKey
from auth.fields import LONGEST_TEXT, LONGEST_USERNAME
from auth.keys import SigningKey, VerifyingKey
from auth.passes import AccessPass, sign_pass
from auth.refusals import AccessRefused, Reason
from auth.roles import Role
from auth.server import accounts, codes, revoked, tokens_issued
from auth.server.accounts import Account, AccountName, AccountState, NotAName, account_name
from auth.server.audit import Act
from auth.server.join_refused import JoinReason, JoinRefused
from auth.server.store import Store
from auth.server.writer import Transaction
from auth.statements import SignedRefusal, SignedTime, sentence, sign_refusal, sign_time
from auth.tokens import DEFAULT_LIFE_MS, Token, is_genuine, read_token, sign_token

__all__ = ["Granted", "Issuer", "IssuerSettings", "ProvenPeer", "UnusableSettings"]

REMEMBERED_TOKENS = 16_384  # saves a verification each at renewal; some 5 MB


class UnusableSettings(AuthError):
    """No node would accept passes made with these settings."""

    exit_code = 2


class ProvenPeer(msgspec.Struct, frozen=True):
    """A key whose owner answered a challenge, which the pass will contain."""

    peer: bytes
    challenge: bytes


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    pass_bytes: bytes
    token_bytes: bytes
    username: str
    roles: tuple[str, ...]
    serial: int
    issued_ms: int
    expires_ms: int


class Issuer:
    """Answers peers. One per server, used from one event loop."""

    def __init__(
        self,
        store: Store,
        settings: IssuerSettings,
        *,
        steady_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        """`steady_ms` is a clock that never goes back, for the ages of challenges."""
        self._store = store
        self.settings = settings
        self._granting = Granting(store, settings)
        self._steady_ms = steady_ms
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._used = UsedChallenges()
        self._issued = BoundedMap[bytes, None](REMEMBERED_TOKENS)
        self._check_settings()

    def _check_settings(self) -> None:
        """Find a pass that no node would accept now, and not when the first person joins."""
        now_ms = self._store.clock_ms()
        key = self._store.keys.active(now_ms)
        peer = key.public_key
        try:
            token = Token(
                run=self._store.run,
                username="a" * LONGEST_USERNAME,
                peer=peer,
                roles=tuple(Role),
                serial=1,
                key_id=key.key_id,
                issued_ms=now_ms,
                expires_ms=now_ms + self.settings.token_life_ms,
            )
            self._sign(Decision(token, key), ProvenPeer(peer, self.challenge(peer)[0]))
        except ValueError as error:
            raise UnusableSettings(
                f"With these settings no pass can be made: {error}.",
                why="A token lives too long, or an address is too long, or there are too many.",
                advice="Look at tokens.life_seconds, tokens.grace_seconds, endpoints and "
                "public_url in the server's settings (auth.toml).",
            ) from None

    # -- proofs --------------------------------------------------------------------------------

    def challenge(self, peer: bytes) -> tuple[bytes, int]:
        """A challenge for the owner of this key, and for how many seconds it is valid."""
        return self._challenge(peer, CHALLENGE_LIFE_MS), CHALLENGE_LIFE_MS // 1000

    async def prove(
        self, peer: bytes, challenge: bytes, proof: bytes, purpose: str, address: str
    ) -> ProvenPeer:
        """Check that the peer holds its key, and use the challenge up. JoinRefused if not."""
        now_ms = self._steady_ms()
        try:
            expires_ms = check_challenge(self._secret, peer, challenge, now_ms)
            check_proof(
                VerifyingKey(peer), proof, challenge, self._store.run,
                self._store.keys.fingerprints, purpose,
            )  # fmt: skip
            self._used.use(challenge, expires_ms, now_ms)
        except AccessRefused as error:
            reason = (
                JoinReason.CHALLENGE if error.reason is Reason.CHALLENGE else JoinReason.SIGNATURE
            )
            raise await self.refused(JoinRefused(reason, why=error.why), address) from None
        except (NotAKey, ValueError):
            raise await self.refused(JoinRefused(JoinReason.SIGNATURE), address) from None
        return ProvenPeer(peer, challenge)

    # -- passes --------------------------------------------------------------------------------

    async def join(self, proven: ProvenPeer, identity: VerifiedIdentity, address: str) -> Granted:
        """A pass for somebody whose identity a provider has confirmed."""
        outcome = await self._store.writer.perform(
            lambda transaction: self._granting.join(transaction, identity, proven.peer, address)
        )
        return self._answer(outcome, proven)

    async def join_by_code(self, proven: ProvenPeer, code: str, address: str) -> Granted:
        """A pass for somebody with a valid enrolment code."""
        code_hash = codes.hash_of(code)
        outcome = await self._store.writer.perform(
            lambda transaction: self._granting.join_by_code(
                transaction, code_hash, proven.peer, address
            )
        )
        return self._answer(outcome, proven)

    async def renew(
        self,
        proven: ProvenPeer,
        token_bytes: bytes,
        address: str,
        *,
        check_peer: Callable[[bytes], None] = lambda _peer: None,
        check_account: Callable[[str], None] = lambda _name: None,
    ) -> Granted:
        """The next pass of a node that has logged in before. Its token may have expired already.

        `check_peer` is called with the proven key of a genuine token. `check_account` is called in
        the writer's thread, with the name of the account that the key belongs to, when nothing else
        is against a new token. Either may raise; then nothing is written.
        """
        token = self._genuine(token_bytes, proven)
        if isinstance(token, JoinRefused):
            raise await self.refused(token, address, peer=proven.peer)
        check_peer(proven.peer)
        outcome = await self._store.writer.perform(
            lambda transaction: self._granting.renew(
                transaction, token, proven.peer, address, check_account
            )
        )
        return self._answer(outcome, proven)

    async def refused(
        self,
        refusal: JoinRefused,
        address: str,
        *,
        peer: bytes | None = None,
        name: str | None = None,
    ) -> JoinRefused:
        """Log a refusal that was decided elsewhere (by a provider), and return it."""
        if self._store.refusals.is_written(address, refusal.code, self._store.clock_ms()):
            await self._store.writer.perform(
                lambda transaction: self._granting.log_refusal(
                    transaction, refusal, address, peer, name
                )
            )
        return refusal

    # -- other signed documents --------------------------------------------------------------------

    def signed_refusal(self, code: str, refusal: AuthError, answered: bytes) -> bytes:
        """The refusal as an answer to this challenge (or nonce), so that nobody else can send
        it."""
        now_ms = self._store.clock_ms()
        key = self._store.keys.active(now_ms)
        return sign_refusal(
            SignedRefusal(
                run=self._store.run,
                answered=answered,
                time_ms=now_ms,
                code=code,
                what=sentence(refusal.what),
                why=sentence(refusal.why),
                advice=sentence(refusal.advice),
                key_id=key.key_id,
            ),
            key,
        )

    def signed_time(self, nonce: bytes) -> bytes:
        now_ms = self._store.clock_ms()
        key = self._store.keys.active(now_ms)
        return sign_time(SignedTime(self._store.run, nonce, now_ms, key.key_id), key)

    def _genuine(self, token_bytes: bytes, proven: ProvenPeer) -> Token | JoinRefused:
        """The token, if any of our keys, withdrawn ones too, signed it for this peer and run."""
        try:
            token = read_token(token_bytes)
        except AccessRefused as error:
            return JoinRefused(JoinReason.TOKEN, why=error.why)
        if token.run != self._store.run or token.peer != proven.peer:
            return JoinRefused(JoinReason.TOKEN)
        key = self._store.keys.all_verifying.get(token.key_id)
        if key is None:
            what = f"This auth server does not know the auth key {token.key_id.hex()} of the token."
            return JoinRefused(JoinReason.UNKNOWN_KEY, what)
        if token_bytes in self._issued or is_genuine(token_bytes, key):
            return token
        return JoinRefused(JoinReason.TOKEN)

    def _remember(self, token_bytes: bytes) -> None:
        self._issued[token_bytes] = None

    # -- after it ------------------------------------------------------------------------------

    def _answer(self, outcome: Outcome, proven: ProvenPeer) -> Granted:
        if isinstance(outcome, JoinRefused):
            raise outcome
        granted = self._sign(outcome, proven)
        self._remember(granted.token_bytes)
        return granted

    def _sign(self, decision: Decision, proven: ProvenPeer) -> Granted:
        token, key, settings = decision.token, decision.key, self.settings
        token_bytes = sign_token(token, key)
        renewal_ms = settings.token_life_ms + settings.grace_ms
        access_pass = AccessPass(
            run=token.run,
            token=token_bytes,
            endpoints=settings.endpoints,
            keys=self._store.keys.records,
            server_time_ms=self._store.clock_ms(),
            challenge=proven.challenge,
            next_challenge=self._challenge(proven.peer, renewal_ms),
            auth_url=settings.auth_url,
            token_grace_ms=settings.grace_ms,
            key_id=key.key_id,
        )
        return Granted(
            pass_bytes=sign_pass(access_pass, key),
            token_bytes=token_bytes,
            username=token.username,
            roles=tuple(role.value for role in token.roles),
            serial=token.serial,
            issued_ms=token.issued_ms,
            expires_ms=token.expires_ms,
        )

    def _challenge(self, peer: bytes, life_ms: int) -> bytes:
        return make_challenge(
            self._secret, peer, secrets.token_bytes(RANDOM_BYTES), self._steady_ms() + life_ms
        )


# The decision about a token: made, written and logged in one transaction.
#
# Three ways in (an identity that a provider confirmed, an enrolment code, a key that has logged in
# before) lead to one `_grant`, which checks everything that could forbid it. The answer is a
# `Decision` to be signed once it is on the disk, or a `JoinRefused`.
#
# Easy to get wrong: a refusal is returned, because raising it would undo the row in the log.
# Whether a name may take part is checked inside the transaction, after every earlier act of a
# moderator.


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
    """A person's identity, confirmed by a provider."""

    @property
    def provider(self) -> str: ...

    @property
    def subject(self) -> str:
        """The provider's permanent id for the person, whatever their login is."""

    @property
    def login(self) -> str: ...


class Decision(msgspec.Struct, frozen=True):
    """The result of the transaction; it is signed when it is on the disk."""

    token: Token
    key: SigningKey


Outcome = Decision | JoinRefused


class Granting:
    """The three ways in, as operations of the writer."""

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
        elif is_new:  # a name on the list without a row in the log could not be explained
            accounts.remove_new(transaction.connection, account)
        return outcome

    def renew(
        self,
        transaction: Transaction,
        token: Token,
        peer: bytes,
        address: str,
        check_account: Callable[[str], None],
    ) -> Outcome:
        """`token` is genuine, and of this peer and run; it may have expired."""
        known = accounts.peer(transaction.connection, peer)
        if known is None or transaction.now_ms - known.seen_ms > self._settings.away_ms:
            refusal = JoinRefused(JoinReason.LOGIN_OVER)
            return self._refuse(transaction, refusal, address, peer, token.username)
        account = accounts.by_number(transaction.connection, known.account)
        reason = f"The node holds its key; after token {token.serial}."
        return self._grant(transaction, account, peer, address, Act.RENEWED, reason, check_account)

    def log_refusal(
        self,
        transaction: Transaction,
        refusal: JoinRefused,
        address: str,
        peer: bytes | None,
        name: str | None,
    ) -> None:
        reason = f"{refusal.code}: {refusal.what}"[:LONGEST_TEXT]
        transaction.log(Act.REFUSED, "peer", reason, name=name, peer=peer, detail=f"from {address}")

    def _account_of_identity(
        self, transaction: Transaction, identity: VerifiedIdentity
    ) -> Account | JoinRefused:
        connection = transaction.connection
        if identity.provider == codes.PROVIDER:  # those names belong to people with a code
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
        """The account of the code, and whether it was made just now."""
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
        login = code.login or codes.made_up_login(connection, code)
        name = AccountName(codes.PROVIDER, login)
        found = accounts.by_name(connection, name)
        if found is not None:
            return found, code, False
        made = accounts.add(
            connection, name, roles=code.roles, state=AccountState.ALLOWED,
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
        check_account: Callable[[str], None] = lambda _name: None,
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
        check_account(account.name)
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
        transaction.log(act, "peer", reason, name=account.name, peer=peer, serial=token.serial)
        transaction.after_commit(self._store.count_token)
        return Decision(token, key)

    def _reason_against(
        self, transaction: Transaction, account: Account, peer: bytes
    ) -> JoinRefused | None:
        connection = transaction.connection
        if account.state is AccountState.DENIED:
            return JoinRefused(JoinReason.DENIED)
        if account.state is AccountState.REVOKED:
            return JoinRefused(JoinReason.REVOKED)
        known = accounts.peer(connection, peer)
        if known is not None and known.account != account.account:
            owner = accounts.by_number(connection, known.account)
            if owner.state is not AccountState.ALLOWED:
                return JoinRefused(JoinReason.PEER_OF_ANOTHER)
        # Renewals too: otherwise keys that logged in over time could all come back at once.
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
    """The account's name in the log, so that a search for it finds this as well."""
    try:
        return str(account_name(identity.provider, identity.login))
    except NotAName:
        return f"{identity.provider}:{identity.login}"
