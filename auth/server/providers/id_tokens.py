"""Verifies an ID token: the person's identity, issued by the provider for us, now (OpenID Connect
Core, 3.1.3.7).

Pure: keys and the time are arguments. It checks the algorithm (key_sets.py), the signature, the
issuer, the audience and the authorised party, the times with some leeway, the nonce if we sent one,
and the access token's hash if it is there. A failure is a LoginRefused that names the check.

Easy to get wrong: a token may be valid in every respect, but made for another program. The check of
the audience keeps another site from logging in here as its visitors.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final

import jwt

from auth.server.providers.errors import LoginReason, LoginRefused, words_of_a_stranger
from auth.server.providers.identity import is_safe_subject
from auth.server.providers.key_sets import ALGORITHMS, KeySet

# Real ones have one to four kilobytes; group lists make them longer.
LONGEST_TOKEN_CHARACTERS: Final = 32_768

# Between the provider's clock and ours: both are servers that keep time.
LEEWAY_SECONDS: Final = 60

_NOT_PROVEN: Final = "What the provider signed does not prove who you are."


class UnknownKey(Exception):
    """No key that we hold fits the token: fetch the keys again, they may have changed."""


def verify_id_token(
    token: str,
    keys: KeySet,
    *,
    issuer: str,
    client_id: str,
    now: float,
    nonce: str | None,
    access_token: str | None,
) -> dict[str, Any]:
    """The claims of a token that passes all checks; LoginRefused, or UnknownKey."""
    algorithm, key_id = _header(token)
    claims = _signed_claims(token, keys, algorithm, key_id, issuer=issuer, client_id=client_id)
    _check_party(claims, client_id)
    _check_times(claims, now)
    if not isinstance(claims["sub"], str) or not is_safe_subject(claims["sub"]):
        raise _refused("its subject is not what the standard allows")
    if nonce is not None and claims.get("nonce") != nonce:
        raise _refused("it was not made for this login (the nonce differs)")
    bound = access_token is not None and "at_hash" in claims
    if bound and claims["at_hash"] != half_hash(access_token or "", algorithm):
        raise _refused("it does not belong to the access token beside it")
    return claims


def half_hash(access_token: str, algorithm: str) -> str:
    """The value of at_hash: the left half of a hash as strong as the signature's (3.1.3.6)."""
    size = "512" if algorithm == "EdDSA" else algorithm[2:]
    digest = hashlib.new(f"sha{size}", access_token.encode()).digest()
    return base64.urlsafe_b64encode(digest[: len(digest) // 2]).rstrip(b"=").decode()


def _header(token: str) -> tuple[str, str | None]:
    if len(token) > LONGEST_TOKEN_CHARACTERS or not token.isascii():
        raise _refused(f"it is longer than {LONGEST_TOKEN_CHARACTERS} characters, or no token")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _refused("it is no token") from None
    algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        shown = words_of_a_stranger(str(algorithm))
        raise _refused(f"its signature is of the kind {shown}, which is not accepted")
    if not isinstance(kind, str) or kind.upper() != "JWT":
        raise _refused(f"it is another kind of token ({words_of_a_stranger(str(kind))})")
    if key_id is not None and not isinstance(key_id, str):
        raise _refused("it is no token")
    return algorithm, key_id


def _signed_claims(
    token: str, keys: KeySet, algorithm: str, key_id: str | None, *, issuer: str, client_id: str
) -> dict[str, Any]:
    tried = False
    for key in keys.candidates(algorithm, key_id):
        tried = True
        try:
            return jwt.decode(
                token,
                key=key,
                algorithms=[algorithm],
                issuer=issuer,
                audience=client_id,
                options={
                    "require": ["iss", "sub", "aud", "exp", "iat"],
                    # by ours below: against the given clock, and to say by how much
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                },
            )
        except jwt.InvalidSignatureError:
            continue
        except jwt.InvalidAudienceError:
            raise _refused("it was made for another program than this server") from None
        except jwt.InvalidIssuerError:
            raise _refused(f"it was not issued by {issuer}") from None
        except jwt.MissingRequiredClaimError as missing:
            raise _refused(f"it lacks the claim {missing.claim}") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise _refused(f"it is malformed ({words_of_a_stranger(str(error))})") from None
    if not tried:
        raise UnknownKey
    raise _refused("its signature is not by a key of the provider")


def _check_party(claims: Mapping[str, Any], client_id: str) -> None:
    several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
    party = claims.get("azp")
    if party is None and not several:
        return
    if party != client_id:
        raise _refused("it was made for another program than this server (azp)")


def _check_times(claims: Mapping[str, Any], now: float) -> None:
    expires, issued = _time(claims, "exp"), _time(claims, "iat")
    begins = _time(claims, "nbf") if "nbf" in claims else issued
    if now >= expires + LEEWAY_SECONDS:
        raise _refused(f"it expired {now - expires:.0f} s ago by this server's clock")
    ahead = max(issued, begins) - now
    if ahead > LEEWAY_SECONDS:
        raise _refused(f"it is valid only in {ahead:.0f} s by this server's clock")


def _time(claims: Mapping[str, Any], claim: str) -> float:
    value = claims[claim]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(f"its claim {claim} is no time")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise _refused(f"its claim {claim} is no time")
    return seconds


def _refused(why: str) -> LoginRefused:
    return LoginRefused(
        _NOT_PROVEN,
        reason=LoginReason.ID_TOKEN,
        why=f"Its ID token was not accepted: {why}.",
        advice="Begin the login again. If it is refused again, tell the moderators, with this"
        " message: the provider, its settings here or this server's clock may be wrong.",
    )
