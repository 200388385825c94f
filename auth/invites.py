"""An invite: the short text with which somebody finds a run and knows its auth server.

    potluck:<base64url of MessagePack array and the first four bytes of its SHA-256>   (pasting.py)

The array is [run, bootstrap addresses, auth url, fingerprint, code, pin]. All of it is public
except the code, if there is one: anybody with the code can enrol with it as often as it allows. The
fingerprint pins the run's auth key, so that no other server can pass for it; `pin` does the same
for a TLS certificate that no authority has signed (SHA-256 of its DER form).

An invite may come as a file: lines that begin with # are comments, white space is ignored.

The four bytes find typing mistakes, not forgeries. An invite is as trustworthy as the way it came.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from auth.documents import Canonical
from auth.errors import MalformedDocument
from auth.fields import PRINTABLE_PATTERN, Addresses, PinnedKey, RunName, Url
from auth.keys import fingerprint_bytes, fingerprint_text
from auth.pasting import LONGEST_TEXT_CHARACTERS, from_text, not_an_invite, to_text

__all__ = ["LONGEST_TEXT_CHARACTERS", "SCHEME", "Invite", "read_invite", "write_invite"]

SCHEME = "potluck:"
LIMIT_BYTES = 6 << 10  # 16 of the longest addresses, an url, and some room
LONGEST_CODE = 64
PIN_BYTES = 32

Code = Annotated[str, Meta(max_length=LONGEST_CODE, pattern=PRINTABLE_PATTERN)]
Pin = Annotated[bytes, Meta(min_length=PIN_BYTES, max_length=PIN_BYTES)]


class _Invite(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The array that is encoded."""

    run: RunName
    bootstrap: Addresses
    auth_url: Url
    pinned: PinnedKey
    code: Code
    pin: Pin | None


class Invite(msgspec.Struct, frozen=True):
    """The contents of an invite. `code` and `pin` are empty if there is none."""

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
    """The text of an invite; ValueError for one that could not be read back."""
    payload = _INVITES.write(
        _Invite(
            invite.run,
            invite.bootstrap,
            invite.auth_url,
            fingerprint_bytes(invite.fingerprint),
            invite.code,
            invite.pin or None,
        )
    )
    return to_text(SCHEME, payload)


def read_invite(text: str) -> Invite:
    """The invite in a text or a file's contents; MalformedDocument if there is none."""
    payload = from_text(SCHEME, text)
    try:
        read = _INVITES.read(payload)
    except MalformedDocument:
        raise not_an_invite("It is of a kind that this version of potluck does not know.") from None
    pinned = fingerprint_text(read.pinned)
    return Invite(read.run, read.bootstrap, read.auth_url, pinned, read.code, read.pin or b"")
