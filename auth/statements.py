"""Statements that an auth server signs beside passes: the time, and refusals.

Both answer a value that the asker chose or was given for this once (a nonce, a challenge), so that
an old one cannot be replayed. Both are signed, so that nobody on the way (the login page of a
hotel's network, a hostile proxy) can tell a node that it is refused. Anything unsigned is an
outage, whatever it says.

The texts of a refusal are shown to a person. They hold printable characters only; `sentence` makes
them so.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from auth.documents import DocumentType
from auth.errors import MalformedDocument, UntrustedDocument
from auth.fields import LONGEST_TEXT, KeyId, RunName, Text, TimeMs
from auth.keyring import Keyring
from auth.keys import SigningKey

TIME_DOMAIN = b"potluck time 1"
REFUSAL_DOMAIN = b"potluck refusal 1"
TIME_LIMIT_BYTES = 512
REFUSAL_LIMIT_BYTES = 8 << 10  # three sentences of 500 characters of up to four bytes
LONGEST_ANSWERED_BYTES = 128

Answered = Annotated[bytes, Meta(max_length=LONGEST_ANSWERED_BYTES)]
Code = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9-]+\Z")]


class SignedTime(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The auth server's time, for the sender of the nonce."""

    run: RunName
    nonce: Answered
    time_ms: TimeMs
    key_id: KeyId


class SignedRefusal(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A refusal for the peer that answered or sent `answered` (a challenge, a nonce).

    `code` is for machines (`refusals.Reason`, or one of the server's own), the rest for people.
    """

    run: RunName
    answered: Answered
    time_ms: TimeMs
    code: Code
    what: Text
    why: Text
    advice: Text
    key_id: KeyId


_TIMES = DocumentType(SignedTime, "signed time", TIME_DOMAIN, TIME_LIMIT_BYTES)
_REFUSALS = DocumentType(SignedRefusal, "signed refusal", REFUSAL_DOMAIN, REFUSAL_LIMIT_BYTES)


def sentence(text: str) -> str:
    """A text that is valid in a refusal: printable, and not too long."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable[:LONGEST_TEXT]


def sign_time(time: SignedTime, key: SigningKey) -> bytes:
    return _TIMES.sign(time, key)


def open_time(data: bytes, keyring: Keyring, nonce: bytes) -> SignedTime:
    """The time, as an answer to our nonce; MalformedDocument or UntrustedDocument if it is not."""
    time = _TIMES.read(data)
    _check(_TIMES, data, time, time.nonce, keyring, nonce)
    return time


def sign_refusal(refusal: SignedRefusal, key: SigningKey) -> bytes:
    """The signed bytes; the texts are made printable."""
    shown = msgspec.structs.replace(
        refusal,
        what=sentence(refusal.what),
        why=sentence(refusal.why),
        advice=sentence(refusal.advice),
    )
    return _REFUSALS.sign(shown, key)


def open_refusal(data: bytes, keyring: Keyring, answered: bytes) -> SignedRefusal:
    """The refusal of our request; MalformedDocument or UntrustedDocument if it is not that."""
    refusal = _REFUSALS.read(data)
    _check(_REFUSALS, data, refusal, refusal.answered, keyring, answered)
    for text in (refusal.what, refusal.why, refusal.advice):
        if not text.isprintable():
            raise MalformedDocument("The refusal has characters in it that cannot be shown.")
    return refusal


Statement = SignedTime | SignedRefusal


def _check(
    kind: DocumentType[SignedTime] | DocumentType[SignedRefusal],
    data: bytes,
    statement: Statement,
    answered: bytes,
    keyring: Keyring,
    asked: bytes,
) -> None:
    trusted = keyring.find(statement.key_id)
    if (
        statement.run != keyring.run
        or answered != asked
        or trusted is None
        or not trusted.signs_at(statement.time_ms)
        or not kind.genuine(data, trusted.key)
    ):
        raise UntrustedDocument(
            f"The {kind.name} is not from this run's auth server, or not about this request.",
            why="Something between here and the server answered in its place.",
            advice="See whether this network asks for a login of its own, and try again later.",
        )
