"""An invite: the short text by which somebody finds a run and knows its auth server.

    potluck:<base64url of MessagePack array and the first four bytes of its SHA-256>

The array is [run, bootstrap addresses, auth url, fingerprint, code, pin]. All of it is public but
the code, if there is one: whoever has a code can enrol with it as often as it allows. The
fingerprint pins the run's auth key, so that no other server can pass for it; `pin` does the same
for a TLS certificate that no authority has signed (SHA-256 of its DER form).

An invite may come as a file: lines that begin with # are for people, white space means nothing.

Easy to get wrong: the four bytes are there to find a typing mistake, not a forger. An invite is
worth as much as the way it came.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from auth.documents import Canonical
from auth.errors import MalformedDocument
from auth.fields import PRINTABLE_PATTERN, Addresses, PinnedKey, RunName, Url
from auth.keys import FINGERPRINT_BYTES

SCHEME = "potluck:"
CHECKSUM_BYTES = 4  # one in four thousand million mistakes goes unseen
LIMIT_BYTES = 6 << 10  # 16 of the longest addresses and an url, and room
LONGEST_TEXT_CHARACTERS = 16 << 10  # of a file, with what it says to people
LONGEST_CODE = 64
PIN_BYTES = 32

Code = Annotated[str, Meta(max_length=LONGEST_CODE, pattern=PRINTABLE_PATTERN)]
Pin = Annotated[bytes, Meta(min_length=PIN_BYTES, max_length=PIN_BYTES)]


class _Invite(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """As it is written."""

    run: RunName
    bootstrap: Addresses
    auth_url: Url
    pinned: PinnedKey
    code: Code
    pin: Pin | None


class Invite(msgspec.Struct, frozen=True):
    """What an invite says. `code` and `pin` are empty where there is none."""

    run: str
    bootstrap: tuple[str, ...]
    auth_url: str
    fingerprint: str  # of the auth key, as `auth.keys.fingerprint` spells it
    code: str = ""
    pin: bytes = b""

    def __repr__(self) -> str:  # a code is a secret
        return f"Invite(run={self.run!r}, auth_url={self.auth_url!r})"


_INVITES = Canonical(_Invite, "invite", LIMIT_BYTES)


def write_invite(invite: Invite) -> str:
    """The text of an invite; ValueError for one that nobody could read."""
    payload = _INVITES.write(
        _Invite(
            invite.run,
            invite.bootstrap,
            invite.auth_url,
            _fingerprint_bytes(invite.fingerprint),
            invite.code,
            invite.pin or None,
        )
    )
    encoded = base64.urlsafe_b64encode(payload + _checksum(payload)).decode("ascii")
    return SCHEME + encoded.rstrip("=")


def read_invite(text: str) -> Invite:
    """What an invite says, from its text or a file's contents; MalformedDocument if it is none."""
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise _malformed("It is far too long.")
    lines = [line.strip() for line in text.splitlines()]
    joined = "".join("".join(line.split()) for line in lines if not line.startswith("#"))
    if not joined.startswith(SCHEME):
        raise _malformed(f"It does not begin with {SCHEME}")
    encoded = joined[len(SCHEME) :]
    if not encoded.isascii() or not all(char.isalnum() or char in "-_" for char in encoded):
        raise _malformed("There are characters in it that no invite has.")
    try:
        data = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except ValueError:
        raise _malformed("It is cut short, or a character is missing.") from None
    payload, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if checksum != _checksum(payload) or base64.urlsafe_b64encode(data).rstrip(b"=") != (
        encoded.encode("ascii")
    ):
        raise _malformed("It is cut short, or a character of it is wrong.")
    try:
        read = _INVITES.read(payload)
    except MalformedDocument:
        raise _malformed("It is of a kind that this version of potluck does not know.") from None
    pinned = base64.b32encode(read.pinned).decode("ascii").rstrip("=").lower()
    return Invite(read.run, read.bootstrap, read.auth_url, pinned, read.code, read.pin or b"")


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:CHECKSUM_BYTES]


def _fingerprint_bytes(text: str) -> bytes:
    try:
        raw = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except ValueError:
        raw = b""
    if len(raw) != FINGERPRINT_BYTES:
        raise ValueError("the fingerprint of a key has 26 characters of base32")
    return raw


def _malformed(why: str) -> MalformedDocument:
    return MalformedDocument(
        "This is not an invite.",
        why=why,
        advice="Copy it again, all of it, from where you were sent it; or ask for a new one.",
    )
