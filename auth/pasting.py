"""Bytes as a text that people copy and paste: a scheme, base64url, and a checksum at its end.

    text = to_text("potluck:", payload)
    payload = from_text("potluck:", text)       # MalformedDocument for one that was cut or mistyped

The text may also be a file's contents: lines that begin with # are comments, and white space is
ignored, so an invite which a mail program has broken into lines still works. So do common changes
by other programs: quotes and brackets around it, the marks of a quoted mail, words before it,
dashes made typographic, a capital at its beginning, invisible characters.

The checksum finds typing mistakes, not forgeries.
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata

from auth.errors import MalformedDocument

CHECKSUM_BYTES = 4  # of SHA-256: one in four thousand million mistakes goes unseen
LONGEST_TEXT_CHARACTERS = 16 << 10  # of a file, with its comments

COPY_AGAIN = (
    "Copy it again, all of it (in quotes if it has several lines), from where you were sent it; or "
    "ask for a new one."
)
QUOTING = ">|"  # before the lines of a quoted mail
AROUND = (
    "\"'`<>()[]{}.,;:!?*|\u00ab\u00bb\u00b4\u2018\u2019\u201a\u201c\u201d\u201e\u2026\u2039\u203a"
)
"""Quotes, brackets and the ends of sentences: an invite has none of them, or not as its last."""
DASHES = dict.fromkeys((*range(0x2010, 0x2016), 0x2212), "-")
"""Word processors put these in place of a plain dash."""


def to_text(scheme: str, payload: bytes) -> str:
    encoded = base64.urlsafe_b64encode(payload + _checksum(payload)).decode("ascii")
    return scheme + encoded.rstrip("=")


def joined(text: str) -> str:
    """The text without white space, comment lines, and the marks of quoted mails."""
    lines = [line.strip().lstrip(QUOTING).lstrip() for line in text.splitlines()]
    kept = "".join(line for line in lines if not line.startswith("#"))
    return "".join(char for char in kept.translate(DASHES) if not _is_invisible(char))


def holds(scheme: str, text: str) -> bool:
    """Whether the text has something under this scheme, right or wrong."""
    return _after(scheme, joined(text[:LONGEST_TEXT_CHARACTERS])) is not None


def from_text(scheme: str, text: str) -> bytes:
    """The decoded bytes; MalformedDocument, which says what is wrong with the text."""
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise not_an_invite("It is far too long.")
    encoded = _after(scheme, joined(text))
    if encoded is None:
        raise not_an_invite(f"It does not begin with {scheme}")
    if not encoded.isascii() or not all(char.isalnum() or char in "-_" for char in encoded):
        raise not_an_invite("There are characters in it that no invite has.")
    if len(encoded) > CHECKSUM_BYTES and (encoded.isupper() or encoded.islower()):
        raise not_an_invite("All its letters were made capital, or small: the two are different.")
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


def _after(scheme: str, whole: str) -> str | None:
    """The text after the scheme; None if the scheme is not in it."""
    found = re.search(re.escape(scheme), whole, re.IGNORECASE | re.ASCII)
    return None if found is None else whole[found.end() :].strip(AROUND)


def _is_invisible(char: str) -> bool:
    return char.isspace() or unicodedata.category(char) in ("Cf", "Cc")


def not_an_invite(why: str) -> MalformedDocument:
    return MalformedDocument(
        "This is not an invite.",
        why=why,
        advice=COPY_AGAIN,
    )


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:CHECKSUM_BYTES]
