"""Verifies an ID token: the person's identity, issued by the provider for us, now (OpenID Connect
Core, 3.1.3.7).

Pure: keys and the time are arguments. It checks the algorithm (below), the signature, the
issuer, the audience and the authorised party, the times with some leeway, the nonce if we sent one,
and the access token's hash if it is there. A failure is a LoginRefused that names the check.

Easy to get wrong: a token may be valid in every respect, but made for another program. The check of
the audience keeps another site from logging in here as its visitors.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jwt
import msgspec

from auth.server.providers.errors import LoginReason, LoginRefused, words_of_a_stranger
from auth.server.providers.fetching import Fetcher
from auth.server.providers.identity import is_safe_subject

# Real ones have one to four kilobytes; group lists make them longer.
LONGEST_TOKEN_CHARACTERS: Final = 32_768

# Between the provider's clock and ours: both are servers that keep time.
LEEWAY_SECONDS: Final = 60


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
        raise not_proven("its subject is not what the standard allows")
    if nonce is not None and claims.get("nonce") != nonce:
        raise not_proven("it was not made for this login (the nonce differs)")
    bound = access_token is not None and "at_hash" in claims
    if bound and claims["at_hash"] != half_hash(access_token or "", algorithm):
        raise not_proven("it does not belong to the access token beside it")
    return claims


def half_hash(access_token: str, algorithm: str) -> str:
    """The value of at_hash: the left half of a hash as strong as the signature's (3.1.3.6)."""
    size = "512" if algorithm == "EdDSA" else algorithm[2:]
    digest = hashlib.new(f"sha{size}", access_token.encode()).digest()
    return base64.urlsafe_b64encode(digest[: len(digest) // 2]).rstrip(b"=").decode()


def _header(token: str) -> tuple[str, str | None]:
    if len(token) > LONGEST_TOKEN_CHARACTERS or not token.isascii():
        raise not_proven(f"it is longer than {LONGEST_TOKEN_CHARACTERS} characters, or no token")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise not_proven("it is no token") from None
    algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        shown = words_of_a_stranger(str(algorithm))
        raise not_proven(f"its signature is of the kind {shown}, which is not accepted")
    if not isinstance(kind, str) or kind.upper() != "JWT":
        raise not_proven(f"it is another kind of token ({words_of_a_stranger(str(kind))})")
    if key_id is not None and not isinstance(key_id, str):
        raise not_proven("it is no token")
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
            raise not_proven("it was made for another program than this server") from None
        except jwt.InvalidIssuerError:
            raise not_proven(f"it was not issued by {issuer}") from None
        except jwt.MissingRequiredClaimError as missing:
            raise not_proven(f"it lacks the claim {missing.claim}") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise not_proven(f"it is malformed ({words_of_a_stranger(str(error))})") from None
    if not tried:
        raise UnknownKey
    raise not_proven("its signature is not by a key of the provider")


def _check_party(claims: Mapping[str, Any], client_id: str) -> None:
    several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
    party = claims.get("azp")
    if party is None and not several:
        return
    if party != client_id:
        raise not_proven("it was made for another program than this server (azp)")


def _check_times(claims: Mapping[str, Any], now: float) -> None:
    expires, issued = _time(claims, "exp"), _time(claims, "iat")
    begins = _time(claims, "nbf") if "nbf" in claims else issued
    if now >= expires + LEEWAY_SECONDS:
        raise not_proven(f"it expired {now - expires:.0f} s ago by this server's clock")
    ahead = max(issued, begins) - now
    if ahead > LEEWAY_SECONDS:
        raise not_proven(f"it is valid only in {ahead:.0f} s by this server's clock")


def _time(claims: Mapping[str, Any], claim: str) -> float:
    value = claims[claim]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise not_proven(f"its claim {claim} is no time")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise not_proven(f"its claim {claim} is no time")
    return seconds


def not_proven(why: str) -> LoginRefused:
    return LoginRefused(
        "The provider's ID token does not prove who you are.",
        reason=LoginReason.ID_TOKEN,
        why=f"It was not accepted: {why}.",
        advice="Begin the login again. If it is refused again, tell the moderators, with this"
        " message: the provider, its settings here or this server's clock may be wrong.",
    )


# A provider's public keys, and which of them may have signed a token.
#
# Only the algorithms in our list are used: signatures with a public key. With `none` anybody could
# sign, and with the HS family the provider's public key, which everybody has, would be the secret.
# Each algorithm takes keys of one kind, so no header can use a key for another purpose.
#
# Only the public numbers are passed to the JWT library. A key set that also holds private keys, or
# a symmetric key, gives nothing usable here.


# Algorithm -> (type of key, curve).
ALGORITHMS: Final[dict[str, tuple[str, str | None]]] = {
    "RS256": ("RSA", None),
    "RS384": ("RSA", None),
    "RS512": ("RSA", None),
    "PS256": ("RSA", None),
    "PS384": ("RSA", None),
    "PS512": ("RSA", None),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}

# Providers publish two to six: the key in use, the next one, and those still in tokens.
MOST_KEYS: Final = 64

# Where a token names no key, each that fits is tried.
MOST_TRIED: Final = 8

# 2048 bits are the least that the standard allows; 8192 bound what one verification costs.
RSA_BITS: Final = (2048, 8192)

# In base64url; an 8192-bit modulus has 1366 of them.
LONGEST_NUMBER_CHARACTERS: Final = 1400


class PublishedKey(msgspec.Struct, frozen=True):
    """One key as it is published (RFC 7517), public parts only."""

    kty: str
    kid: str | None = None
    use: str | None = None
    alg: str | None = None
    crv: str | None = None
    n: str | None = None
    e: str | None = None
    x: str | None = None
    y: str | None = None


class _Document(msgspec.Struct):
    keys: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class KeySet:
    keys: tuple[PublishedKey, ...]

    def candidates(self, algorithm: str, key_id: str | None) -> Iterator[jwt.PyJWK]:
        """The keys that may verify a signature by this algorithm with this key id."""
        fitting = (key for key in self.keys if _fits(key, algorithm, key_id))
        for key, _ in zip(fitting, range(MOST_TRIED), strict=False):
            usable = _usable(key, algorithm)
            if usable is not None:
                yield usable


async def fetch_keys(fetcher: Fetcher, url: str) -> KeySet:
    """The key set at this address; ProviderUnavailable when there is none."""
    answer = await fetcher.get(url)
    if answer.status != 200:
        raise fetcher.unavailable(f"it answered with status {answer.status}", url)
    document = answer.read(_Document)
    if document is None:
        raise fetcher.unavailable("the answer contains no set of keys", url)
    return KeySet(tuple(read_keys(document.keys[:MOST_KEYS])))


def read_keys(members: list[msgspec.Raw]) -> Iterator[PublishedKey]:
    """The members of a key set that have the form of a key; their use is checked later."""
    # One by one: a key of a kind that we do not know must not cost us the others.
    for member in members:
        try:
            yield msgspec.json.decode(member, type=PublishedKey)
        except (ValueError, RecursionError):
            continue


def _fits(key: PublishedKey, algorithm: str, key_id: str | None) -> bool:
    kind, curve = ALGORITHMS[algorithm]
    return (
        key.kty == kind
        and (curve is None or key.crv == curve)
        and key.use in (None, "sig")
        and key.alg in (None, algorithm, "Ed25519" if algorithm == "EdDSA" else None)
        and (key_id is None or key.kid == key_id)
    )


def _usable(key: PublishedKey, algorithm: str) -> jwt.PyJWK | None:
    numbers = {name: getattr(key, name) for name in ("n", "e", "x", "y")}
    given = {name: text for name, text in numbers.items() if text is not None}
    if any(len(text) > LONGEST_NUMBER_CHARACTERS for text in given.values()):
        return None
    data = {"kty": key.kty, **given} | ({} if key.crv is None else {"crv": key.crv})
    try:
        usable = jwt.PyJWK(data, algorithm)
    except (jwt.PyJWTError, ValueError, KeyError, TypeError):  # whatever the numbers are
        return None
    if key.kty == "RSA" and not RSA_BITS[0] <= usable.key.key_size <= RSA_BITS[1]:
        return None
    return usable
