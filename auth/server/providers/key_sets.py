"""A provider's public keys, and which of them may have signed a token.

Only the algorithms in our list are used: signatures with a public key. With `none` anybody could
sign, and with the HS family the provider's public key, which everybody has, would be the secret.
Each algorithm takes keys of one kind, so no header can use a key for another purpose.

Only the public numbers are passed to the JWT library. A key set that also holds private keys, or a
symmetric key, gives nothing usable here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import jwt
import msgspec

from auth.server.providers.fetching import Fetcher

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
        raise fetcher.unavailable("what is there is no set of keys", url)
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
