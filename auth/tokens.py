"""The access token: a person, known by a name, may take part in a run with one key, for now.

    token = array [run, username, peer key, roles, serial, key id, issued, expires], signature

signed by the auth key (docs/protocols.md, "Envelopes"; the byte form is that of `documents`). The
token is no secret and proves nothing alone: a peer that shows it must also prove that it holds the
key in it. To verify tokens repeatedly, use `verified_tokens.VerifiedTokens`, which adds the checks
that change from minute to minute.

Easy to get wrong: `read_token` verifies nothing. The times are the auth server's: if a token is
from the future, allow for the difference of two clocks, CLOCK_TOLERANCE_MS.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from auth.documents import DocumentType
from auth.errors import MalformedDocument
from auth.fields import KeyId, PublicKey, RunName, Serial, TimeMs, Username
from auth.keys import SigningKey, VerifyingKey, is_nobodys_key, peer_id_of
from auth.refusals import AccessRefused, Reason
from auth.roles import MOST_ROLES, Role, in_order

DOMAIN = b"potluck token 1"
LIMIT_BYTES = 512  # the longest names there may be, and room

CLOCK_TOLERANCE_MS = 30_000
"""N of DeDLOC I.5: how far two clocks may differ. With NTP they are far closer."""

LONGEST_LIFE_MS = 7 * 24 * 3600 * 1000
"""No token lives longer, whatever the auth server says, so revocations can be dropped later."""

DEFAULT_LIFE_MS = 3600 * 1000


class Token(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """The auth server's statement about a peer. Times are milliseconds since 1970, the server's."""

    run: RunName
    username: Username
    peer: PublicKey
    roles: Annotated[tuple[Role, ...], Meta(min_length=1, max_length=MOST_ROLES)]
    serial: Serial
    key_id: KeyId  # of the auth key that signs it
    issued_ms: TimeMs
    expires_ms: TimeMs

    @property
    def peer_id(self) -> str:
        return peer_id_of(self.peer)


_TOKENS = DocumentType(Token, "token", DOMAIN, LIMIT_BYTES)


def sign_token(token: Token, key: SigningKey) -> bytes:
    """The signed bytes of a token; ValueError for one that no node would accept.

    Roles may come in any order. `token.key_id` must be that of `key`.
    """
    token = msgspec.structs.replace(token, roles=in_order(token.roles))
    if token.key_id != key.key_id:
        raise ValueError("the token names another key than the one that signs it")
    wrong = _contradiction(token)
    if wrong:
        raise ValueError(wrong)
    return _TOKENS.sign(token, key)


def read_token(data: bytes) -> Token:
    """The token in these bytes, unverified; AccessRefused(MALFORMED) if there is none."""
    try:
        token = _TOKENS.read(data)
    except MalformedDocument as error:
        raise AccessRefused(Reason.MALFORMED, why=error.what) from None
    wrong = _contradiction(token)
    if wrong:
        raise AccessRefused(Reason.MALFORMED, why=wrong)
    return token


def is_genuine(data: bytes, key: VerifyingKey) -> bool:
    """Whether this auth key signed exactly these bytes as a token."""
    return _TOKENS.genuine(data, key)


def check_times(token: Token, now_ms: int, *, grace_ms: int = 0) -> None:
    """Refuse a token that is not valid now: from `issued_ms` on, and before `expires_ms`.

    A token from the near future is accepted: its issuer's clock may be ahead by the tolerance.
    `grace_ms` is how much longer a run lets tokens live, for when its auth server is away.
    """
    if now_ms >= token.expires_ms + grace_ms:
        raise AccessRefused(
            Reason.TOKEN_EXPIRED,
            f"The access token expired {in_words(now_ms - token.expires_ms)} ago.",
        )
    if token.issued_ms > now_ms + CLOCK_TOLERANCE_MS:
        raise AccessRefused(
            Reason.TOKEN_NOT_YET_VALID,
            "The access token was issued in the future, "
            f"{in_words(token.issued_ms - now_ms)} from now.",
        )


def in_words(milliseconds: int) -> str:
    """A length of time for a person, in the unit that fits."""
    seconds = milliseconds / 1000
    for unit, length in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} seconds"


def _contradiction(token: Token) -> str:
    """The contradiction between a token's fields; empty if there is none."""
    if token.roles != in_order(token.roles):
        return "The roles in the token are not in order, each once."
    if not 0 < token.expires_ms - token.issued_ms <= LONGEST_LIFE_MS:
        return f"A token lives for up to {in_words(LONGEST_LIFE_MS)}, and not less than nothing."
    if is_nobodys_key(token.peer):
        return "The token names a key for which anybody can sign."
    return ""
