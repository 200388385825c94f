"""Ids that nobody guesses, and the confirmation word that a person compares.

The word is shown in the terminal that began a login and on the page that the browser shows: a
person who was sent somebody else's page sees a word that is in no terminal of theirs. It is a
proquint (five letters for sixteen bits, consonants and vowels in turn), so it can be read aloud.

The word is no secret and proves nothing by itself. A cookie ties a browser to a login; the word is
for the person's eyes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Final

ID_BYTES: Final = 32  # 256 bits: as unguessable as a key
ID_CHARACTERS: Final = 43  # the same in base64url without padding

_CONSONANTS: Final = "bdfghjklmnprstvz"
_VOWELS: Final = "aiou"


def new_id() -> str:
    return secrets.token_urlsafe(ID_BYTES)


def new_word() -> str:
    """Two proquints, such as lusab-babad: 32 bits, so two open logins do not share one."""
    return "-".join(proquint(secrets.randbits(16)) for _ in range(2))


def proquint(number: int) -> str:
    return (
        _CONSONANTS[number >> 12 & 15]
        + _VOWELS[number >> 10 & 3]
        + _CONSONANTS[number >> 6 & 15]
        + _VOWELS[number >> 4 & 3]
        + _CONSONANTS[number & 15]
    )


def form_token(secret: bytes, cookie: str, page_id: str) -> str:
    """The value that a form must return: only a browser with the cookie was given it."""
    mark = hmac.digest(secret, f"{len(cookie)}:{cookie}{page_id}".encode(), "sha256")
    return base64.urlsafe_b64encode(mark).rstrip(b"=").decode()


def is_same(given: str | None, expected: str) -> bool:
    """Whether two secrets are equal, in a time that does not say where they differ."""
    return given is not None and hmac.compare_digest(
        given.encode(errors="replace"), expected.encode()
    )


def looks_like_an_id(text: str | None) -> bool:
    """Whether this could be one of our ids; a browser's cookie may be anything."""
    return (
        text is not None
        and len(text) == ID_CHARACTERS
        and text.isascii()
        and all(c.isalnum() or c in "-_" for c in text)
    )


def challenge_of(verifier: str) -> str:
    """PKCE's S256: what is shown first, for a verifier that is shown later (RFC 7636, 4.2)."""
    digest = hashlib.sha256(verifier.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
