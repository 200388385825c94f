"""Giving out access passes: join by a proven identity or by a code, renew by the proof of a key.

    a peer proves its key          prove()        challenge, signature, once
    a person proves who they are   join()         the provider's word, checked by whoever calls
                                   join_by_code() the code
    a node goes on                 renew()        its key alone: it has logged in before
    the pass                       Granted        signed only after its row is on the disk

Every pass and every refusal is in the audit log before it is answered; who gets one is decided in
`granting.py`, in one transaction with that row.

Easy to get wrong: signing before the commit. A token that is signed and not in the log could be
used by whoever saw it; one that is in the log and was never signed harms nobody.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

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
from auth.fields import LONGEST_USERNAME
from auth.keys import VerifyingKey
from auth.passes import AccessPass, sign_pass
from auth.refusals import AccessRefused, Reason
from auth.roles import Role
from auth.server import codes
from auth.server.granting import (
    Decision,
    Granting,
    IssuerSettings,
    Outcome,
    VerifiedIdentity,
)
from auth.server.join_refused import JoinReason, JoinRefused
from auth.server.store import Store
from auth.statements import SignedRefusal, SignedTime, sentence, sign_refusal, sign_time
from auth.tokens import Token, is_genuine, read_token, sign_token

__all__ = ["Granted", "Issuer", "IssuerSettings", "ProvenPeer", "UnusableSettings"]

REMEMBERED_TOKENS = 16_384  # saves a verification each at renewal; some 5 MB


class UnusableSettings(AuthError):
    """Passes made with these settings would be accepted by nobody."""

    exit_code = 2


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
        self._granting = Granting(store, settings)
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
        outcome = await self._store.writer.perform(
            lambda transaction: self._granting.join(transaction, identity, proven.peer, address)
        )
        return self._answer(outcome, proven)

    async def join_by_code(self, proven: ProvenPeer, code: str, address: str) -> Granted:
        """A pass for whoever has an enrolment code that is still good."""
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
        outcome = await self._store.writer.perform(
            lambda transaction: self._granting.renew(transaction, token, proven.peer, address)
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
        """Put a refusal that was decided elsewhere (by a provider) into the log; gives it back."""
        if self._store.refusals.is_written(address, refusal.code, self._store.clock_ms()):
            await self._store.writer.perform(
                lambda transaction: self._granting.log_refusal(
                    transaction, refusal, address, peer, name
                )
            )
        return refusal

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
            self._secret, peer, self._random(RANDOM_BYTES), self._steady_ms() + life_ms
        )
