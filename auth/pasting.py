"""Bytes as a text that people copy and paste: a scheme, base64url, and a checksum at its end.

    text = to_text("potluck:", payload)
    payload = from_text("potluck:", text)       # MalformedDocument for one that was cut or mistyped

The text may also be a file's contents: lines that begin with # are for people, and white space
means nothing, so that an invite which a mail program has broken into lines is still one.

Easy to get wrong: the checksum is there to find a typing mistake, not a forger.
"""

from __future__ import annotations

import base64
import hashlib

from auth.errors import MalformedDocument

CHECKSUM_BYTES = 4  # of SHA-256: one in four thousand million mistakes goes unseen
LONGEST_TEXT_CHARACTERS = 16 << 10  # of a file, with what it says to people


def to_text(scheme: str, payload: bytes) -> str:
    encoded = base64.urlsafe_b64encode(payload + _checksum(payload)).decode("ascii")
    return scheme + encoded.rstrip("=")


def joined(text: str) -> str:
    """The text without white space and lines for people."""
    lines = [line.strip() for line in text.splitlines()]
    return "".join("".join(line.split()) for line in lines if not line.startswith("#"))


def from_text(scheme: str, text: str) -> bytes:
    """What the text stands for; MalformedDocument, which says what is wrong with it."""
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise not_an_invite("It is far too long.")
    whole = joined(text)
    if not whole.startswith(scheme):
        raise not_an_invite(f"It does not begin with {scheme}")
    encoded = whole[len(scheme) :]
    if not encoded.isascii() or not all(char.isalnum() or char in "-_" for char in encoded):
        raise not_an_invite("There are characters in it that no invite has.")
    try:
        data = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except ValueError:
        raise not_an_invite("It is cut short, or a character is missing.") from None
    payload, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if checksum != _checksum(payload) or base64.urlsafe_b64encode(data).rstrip(b"=") != (
        encoded.encode("ascii")
    ):
        raise not_an_invite("It is cut short, or a character of it is wrong.")
    return payload


def not_an_invite(why: str) -> MalformedDocument:
    return MalformedDocument(
        "This is not an invite.",
        why=why,
        advice="Copy it again, all of it, from where you were sent it; or ask for a new one.",
    )


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:CHECKSUM_BYTES]
