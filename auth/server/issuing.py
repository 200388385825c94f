"""Giving out access passes: join by a proven identity or by a code, renew by the proof of a key.

    a peer proves its key          prove()        challenge, signature, once
    a person proves who they are   join()         the provider's word, checked by whoever calls
                                   join_by_code() the code
    a node goes on                 renew()        its key alone: it has logged in before
    the pass                       Granted        signed only after its row is on the disk

Every pass and every refusal is in the audit log before it is answered. The lookups, the serial
number, the token's row and the log's row are one operation in one transaction, so that nobody who
was denied a moment ago gets a pass "at the same time".

Easy to get wrong: refusing by raising inside the operation, which would undo the log's row. An
operation returns its refusal, and `_answer` raises it afterwards.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

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
from auth.server.account_names import AccountName, NotAName, account_name
from auth.server.accounts import Account, State
from auth.server.audit import Act, Entry
from auth.server.join_refused import JoinReason, JoinRefused
from auth.server.store import Store
from auth.server.transaction import Transaction
from auth.statements import SignedRefusal, SignedTime, sentence, sign_refusal, sign_time
from auth.tokens import DEFAULT_LIFE_MS, Token, is_genuine, read_token, sign_token

AWAY_MS = 30 * 24 * 3600 * 1000
"""How long a node may be away and still renew by its key alone. A month covers a holiday."""

KEYS_PER_ACCOUNT = 32  # nodes of one person at a time; bounds what one stolen login can do
REMEMBERED_TOKENS = 16_384  # saves a verification each at renewal; some 5 MB
CLOCK_WAIT_MS = 1000  # a token may be dated this much ahead rather than be refused


class IssuerSettings(msgspec.Struct, frozen=True, kw_only=True):
    auth_url: str
    endpoints: tuple[str, ...] = ()
    token_life_ms: int = DEFAULT_LIFE_MS
    grace_ms: int = 3600 * 1000
    away_ms: int = AWAY_MS
    keys_per_account: int = KEYS_PER_ACCOUNT


class UnusableSettings(AuthError):
    """Passes made with these settings would be accepted by nobody."""

    exit_code = 2


class VerifiedIdentity(Protocol):
    """Who somebody is, at the word of a provider that was checked."""

    @property
    def provider(self) -> str: ...

    @property
    def subject(self) -> str:
        """What the provider calls them for good, whatever their login is."""

    @property
    def login(self) -> str: ...


class ProvenPeer(msgspec.Struct, frozen=True):
    """A key whose owner answered a challenge; the pass answers to that challenge."""

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


class _Issue(msgspec.Struct, frozen=True):
    """What the transaction decided; the signatures follow when it is on the disk."""

    token: Token
    key: SigningKey


_Outcome = _Issue | JoinRefused


class Issuer:
    """Answers peers. One per server, used from one event loop."""

    def __init__(
        self,
        store: Store,
        settings: IssuerSettings,
        *,
        random: Callable[[int], bytes] = secrets.token_bytes,
        steady_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        """`steady_ms` is a clock that never goes back; the ages of challenges are taken from it."""
        self._store = store
        self.settings = settings
        self._random = random
        self._steady_ms = steady_ms
        self._secret = random(SECRET_BYTES)
        self._used = UsedChallenges()
        self._issued: OrderedDict[bytes, None] = OrderedDict()
        self._check_settings()

    def _check_settings(self) -> None:
        """A pass that nobody would accept is found now, and not by the first who joins."""
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
            self._answer(_Issue(token, key), ProvenPeer(peer, self.challenge(peer)[0]))
        except ValueError as error:
            raise UnusableSettings(
                f"With these settings no pass can be made: {error}.",
                why="A token lives too long, or an address is too long, or there are too many.",
                advice="Look at tokens.life_seconds, tokens.grace_seconds, endpoints and "
                "public_url in the server's settings (auth.toml).",
            ) from None

    # -- proofs --------------------------------------------------------------------------------

    def challenge(self, peer: bytes) -> tuple[bytes, int]:
        """A challenge for the owner of this key, and for how many seconds it holds."""
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

        def operation(transaction: Transaction) -> _Outcome:
            found = self._account_of_identity(transaction, identity)
            name = f"{identity.provider}:{identity.login}"
            if isinstance(found, JoinRefused):
                return self._refuse(transaction, found, address, proven.peer, name)
            reason = f"{identity.provider} confirmed {identity.login}."
            outcome = self._grant(transaction, found, proven.peer, address, Act.JOINED, reason)
            if found.subject is None and isinstance(outcome, _Issue):
                accounts.bind(transaction.connection, found, identity.subject)
            return outcome

        return self._answer(await self._store.writer.perform(operation), proven)

    async def join_by_code(self, proven: ProvenPeer, code: str, address: str) -> Granted:
        """A pass for whoever has an enrolment code that is still good."""
        code_hash = codes.hash_of(code)

        def operation(transaction: Transaction) -> _Outcome:
            found = self._account_of_code(transaction, code_hash, proven.peer)
            if isinstance(found, JoinRefused):
                return self._refuse(transaction, found, address, proven.peer, codes.PROVIDER)
            account, used = found
            reason = f"By enrolment code {used.code_id}."
            outcome = self._grant(transaction, account, proven.peer, address, Act.JOINED, reason)
            if isinstance(outcome, _Issue):
                self._count_use(transaction, used, account, proven.peer)
            return outcome

        return self._answer(await self._store.writer.perform(operation), proven)

    async def renew(
        self,
        proven: ProvenPeer,
        token_bytes: bytes,
        address: str,
        *,
        check: Callable[[Token], None] | None = None,
    ) -> Granted:
        """The next pass of a node that has logged in before. Its token may be over already.

        `check` sees the genuine token before anything is written; what it raises comes out.
        """
        token = self._genuine(token_bytes, proven)
        if isinstance(token, JoinRefused):
            raise await self.refused(token, address, peer=proven.peer)
        if check is not None:
            check(token)

        def operation(transaction: Transaction) -> _Outcome:
            connection = transaction.connection
            known = accounts.peer(connection, proven.peer)
            if known is None or transaction.now_ms - known.seen_ms > self.settings.away_ms:
                refusal = JoinRefused(JoinReason.LOGIN_OVER)
                return self._refuse(transaction, refusal, address, proven.peer, token.username)
            account = accounts.by_number(connection, known.account)
            reason = f"The node holds its key; after token {token.serial}."
            return self._grant(transaction, account, proven.peer, address, Act.RENEWED, reason)

        return self._answer(await self._store.writer.perform(operation), proven)

    async def refused(
        self,
        refusal: JoinRefused,
        address: str,
        *,
        peer: bytes | None = None,
        name: str | None = None,
    ) -> JoinRefused:
        """Put a refusal that was decided elsewhere (by a provider) into the log; gives it back."""
        if self._store.refusals.is_written(address, refusal.code, self._store.clock_ms()):
            await self._store.writer.perform(
                lambda transaction: self._log_refusal(transaction, refusal, address, peer, name)
            )
        return refusal

    async def refused_elsewhere(
        self,
        peer: bytes | None,
        provider: str,
        login: str,
        code: str,
        why: str,
        address: str,
    ) -> None:
        """As `refused`, for what an identity provider, or the person there, has refused."""
        refusal = JoinRefused(JoinReason.LOGIN, f"{code}: {why}")
        await self.refused(refusal, address, peer=peer, name=f"{provider}:{login}")

    # -- what is signed beside passes ----------------------------------------------------------

    def signed_refusal(self, code: str, refusal: AuthError, answered: bytes) -> bytes:
        """The refusal as an answer to this challenge (or nonce), so that nobody else can say it."""
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
        ours = token.run == self._store.run and token.peer == proven.peer
        if ours and (token_bytes in self._issued or self._is_signed(token_bytes, token)):
            return token
        return JoinRefused(JoinReason.TOKEN)

    def _is_signed(self, token_bytes: bytes, token: Token) -> bool:
        key = self._store.keys.all_verifying.get(token.key_id)
        return key is not None and is_genuine(token_bytes, key)

    def _remember(self, token_bytes: bytes) -> None:
        self._issued[token_bytes] = None
        if len(self._issued) > REMEMBERED_TOKENS:
            self._issued.popitem(last=False)

    # -- inside the transaction ----------------------------------------------------------------

    def _account_of_identity(
        self, transaction: Transaction, identity: VerifiedIdentity
    ) -> Account | JoinRefused:
        connection = transaction.connection
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
    ) -> tuple[Account, codes.Code] | JoinRefused:
        connection = transaction.connection
        code = codes.by_hash(connection, code_hash) if code_hash is not None else None
        if code is None:
            return JoinRefused(JoinReason.CODE_UNKNOWN)
        state = code.state(transaction.now_ms)
        if state is codes.CodeState.CANCELLED:
            return JoinRefused(JoinReason.CODE_CANCELLED)
        earlier = codes.account_of_earlier_use(connection, code.code, peer)
        if earlier is not None:
            return accounts.by_number(connection, earlier), code
        if state is codes.CodeState.USED_UP:
            return JoinRefused(JoinReason.CODE_USED_UP)
        if state is codes.CodeState.EXPIRED:
            return JoinRefused(JoinReason.CODE_EXPIRED)
        name = AccountName(codes.PROVIDER, code.login or f"{code.code_id}-{code.uses + 1}")
        found = accounts.by_name(connection, name)
        if found is None:
            found = accounts.add(
                connection, name, roles=code.roles, state=State.ALLOWED,
                by=code.made_by, now_ms=transaction.now_ms, note=code.note,
            )  # fmt: skip
        return found, code

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
    ) -> _Outcome:
        """A token for this account and key, in the database and the log; or a refusal there."""
        connection, now_ms = transaction.connection, transaction.now_ms
        banned, counts_from_ms = revoked.against(connection, peer, account.name)
        refusal = (
            JoinRefused(JoinReason.PEER_REVOKED)
            if banned
            else self._reason_against(transaction, account, peer, renewing=act is Act.RENEWED)
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
            expires_ms=issued_ms + self.settings.token_life_ms,
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
        return _Issue(token, key)

    def _reason_against(
        self, transaction: Transaction, account: Account, peer: bytes, *, renewing: bool
    ) -> JoinRefused | None:
        connection = transaction.connection
        if account.state is State.DENIED:
            return JoinRefused(JoinReason.DENIED)
        if account.state is State.REVOKED:
            return JoinRefused(JoinReason.REVOKED)
        if renewing:
            return None
        known = accounts.peer(connection, peer)
        if known is not None and known.account != account.account:
            owner = accounts.by_number(connection, known.account)
            if owner.state is not State.ALLOWED:
                return JoinRefused(JoinReason.PEER_OF_ANOTHER)
        if known is None or known.account != account.account:
            since_ms = transaction.now_ms - self.settings.token_life_ms - self.settings.grace_ms
            in_use = accounts.keys_in_use(connection, account.account, since_ms)
            if in_use >= self.settings.keys_per_account:
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
            self._log_refusal(transaction, refusal, address, peer, name)
        return refusal

    def _log_refusal(
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

    # -- after it ------------------------------------------------------------------------------

    def _answer(self, outcome: _Outcome, proven: ProvenPeer) -> Granted:
        if isinstance(outcome, JoinRefused):
            raise outcome
        token, key = outcome.token, outcome.key
        token_bytes = sign_token(token, key)
        self._remember(token_bytes)
        settings = self.settings
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
            self._secret, peer, self._random(RANDOM_BYTES), self._steady_ms() + life_ms
        )
