"""Tokens that were verified before are not verified again: a call costs no signature for them.

What a signature proves does not change; what is asked of a token from minute to minute does:
whether it has expired, whether it was revoked, whether its auth key still counts. So the signature
is remembered by the token's exact bytes, and everything else is looked at on every use.

Only genuine tokens are remembered, so strangers cannot fill the memory; it holds CAPACITY of them
and drops the one that was used longest ago.

Easy to get wrong: a token is verified here, the peer is not. Whether the one who shows a token is
the one it names must be asked with `expect` or by comparing keys.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from auth.keyring import Keyring
from auth.keys import VerifyingKey, peer_id_of
from auth.refusals import AccessRefused, Reason
from auth.revocations import Revocations
from auth.tokens import LIMIT_BYTES, Token, check_times, is_genuine, read_token

CAPACITY = 4_096  # tokens of about 1.5 KiB with all that is kept of them: 6 MiB


class VerifiedToken(msgspec.Struct, frozen=True):
    """A genuine token, its peer's key ready to verify with, and the peer id."""

    token: Token
    key: VerifyingKey
    peer_id: str


class VerifiedTokens:
    """The tokens of a run that were found genuine.

    `keyring`, `revocations` and `grace_ms` may be exchanged or changed at any time; what was
    verified with a key that is trusted no longer does not count either.
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
        self._capacity = capacity
        self._known: OrderedDict[bytes, tuple[VerifiedToken, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def verify(self, data: bytes, now_ms: int, *, shown_by: bytes | None = None) -> VerifiedToken:
        """The token in these bytes if it counts now; AccessRefused with the reason if not.

        `shown_by` is the public key that the channel proved; a token of another is refused before
        any signature is looked at.
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
        verified = VerifiedToken(token, VerifyingKey(token.peer), peer_id_of(token.peer))
        self._known[data] = (verified, trusted.key.public_key)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return verified

    def _check(self, token: Token, now_ms: int, shown_by: bytes | None) -> None:
        """What can change between two uses, and what costs nothing to see."""
        if token.run != self.run:
            raise AccessRefused(
                Reason.WRONG_RUN, f"The access token is for the run {token.run}, not {self.run}."
            )
        if shown_by is not None and token.peer != shown_by:
            raise AccessRefused(Reason.NOT_THE_PEER)
        check_times(token, now_ms, grace_ms=self.grace_ms)
        if self.revocations.refuses(token):
            raise AccessRefused(Reason.REVOKED)
