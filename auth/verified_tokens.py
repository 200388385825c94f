"""Remembers verified tokens, so that a call does not verify their signature again.

A token's signature stays valid; other properties change from minute to minute: whether it has
expired, was revoked, or its auth key is still trusted. So the signature is remembered by the
token's exact bytes, and everything else is checked on every use.

Only genuine tokens are remembered, so strangers cannot fill the memory; it holds CAPACITY of them
and drops the one that was used longest ago.

Easy to get wrong: this verifies the token, not the peer. Use `expect` or compare keys to check that
the peer that shows a token is the one in it.
"""

from __future__ import annotations

import msgspec

from auth.bounded_map import BoundedMap
from auth.keyring import Keyring
from auth.keys import VerifyingKey, peer_id_of
from auth.refusals import AccessRefused, Reason
from auth.revocations import Revocations
from auth.tokens import LIMIT_BYTES, Token, check_times, is_genuine, read_token

CAPACITY = 4_096  # tokens of about 1.5 KiB with all that is kept of them: 6 MiB


class VerifiedToken(msgspec.Struct, frozen=True):
    """A genuine token, its bytes, its peer's key ready to verify with, and the peer id."""

    token: Token
    data: bytes
    key: VerifyingKey
    peer_id: str


class VerifiedTokens:
    """The tokens of a run that were found genuine.

    `keyring`, `revocations` and `grace_ms` may be replaced or changed at any time; a token of a key
    that is no longer trusted is then refused, too.
    """

    def __init__(
        self,
        run: str,
        keyring: Keyring,
        revocations: Revocations,
        *,
        grace_ms: int = 0,
        capacity: int = CAPACITY,
    ) -> None:
        self.run = run
        self.keyring = keyring
        self.revocations = revocations
        self.grace_ms = grace_ms
        self._known = BoundedMap[bytes, tuple[VerifiedToken, bytes]](capacity)

    def __len__(self) -> int:
        return len(self._known)

    def verify(self, data: bytes, now_ms: int, *, shown_by: bytes | None = None) -> VerifiedToken:
        """The token in these bytes if it is valid now; AccessRefused with the reason if not.

        `shown_by` is the public key that the channel proved; another peer's token is refused before
        any signature is verified.
        """
        known = self._known.get(data)
        if known is None:
            return self._verify_anew(data, now_ms, shown_by)
        verified, auth_key = known
        token = verified.token
        self._check(token, now_ms, shown_by)
        trusted = self.keyring.allows(token)
        if trusted is None or trusted.key.public_key != auth_key:
            del self._known[data]
            raise AccessRefused(Reason.UNKNOWN_AUTH_KEY)
        self._known.move_to_end(data)
        return verified

    def _verify_anew(self, data: bytes, now_ms: int, shown_by: bytes | None) -> VerifiedToken:
        if not data:
            raise AccessRefused(Reason.TOKEN_MISSING)
        if len(data) > LIMIT_BYTES:
            raise AccessRefused(
                Reason.MALFORMED,
                why=f"A token has at most {LIMIT_BYTES} bytes, this one has {len(data):,}.",
            )
        token = read_token(data)
        self._check(token, now_ms, shown_by)
        trusted = self.keyring.allows(token)
        if trusted is None:
            raise AccessRefused(Reason.UNKNOWN_AUTH_KEY)
        if not is_genuine(data, trusted.key):
            raise AccessRefused(Reason.TOKEN_SIGNATURE)
        verified = VerifiedToken(token, data, VerifyingKey(token.peer), peer_id_of(token.peer))
        self._known[data] = (verified, trusted.key.public_key)
        return verified

    def _check(self, token: Token, now_ms: int, shown_by: bytes | None) -> None:
        """Everything that can change between two uses, and everything that is cheap to check."""
        if token.run != self.run:
            raise AccessRefused(
                Reason.WRONG_RUN, f"The access token is for the run {token.run}, not {self.run}."
            )
        if shown_by is not None and token.peer != shown_by:
            raise AccessRefused(Reason.NOT_THE_PEER)
        check_times(token, now_ms, grace_ms=self.grace_ms)
        if self.revocations.refuses(token):
            raise AccessRefused(Reason.REVOKED)
