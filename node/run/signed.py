"""A run's definition with its organiser's signature: what peers serve and volunteers verify.

    data = sign_definition(text, organiser_key, now_ms=…)                     # at the organiser
    signed = read_signed(data, run="poem", organiser=invite.organiser)        # at a volunteer

A document as those of auth/documents.py: MessagePack of [format, text, organiser's public key, when
it was signed], and 64 bytes of Ed25519. The text is the very bytes of run.toml.

Promises: what `read_signed` returns was signed by the key whose fingerprint was given, is of the
run that was asked for, and not older than what was seen before; else it raises, by name. Before
the signature is known to be right the text is not looked at.

Easy to get wrong: a signature alone says nothing about *when*. Whoever served an old definition to
newcomers would split the run in two; so the latest that was seen is kept (node/run/remembered.py),
and what is older is refused.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from auth.documents import DocumentType
from auth.errors import MalformedDocument
from auth.fields import PublicKey, TimeMs
from auth.keys import SigningKey, VerifyingKey, fingerprint
from node.run.definition import RunDefinition, read_definition
from node.run.mistakes import LARGEST_TEXT_BYTES
from protocols.runs.messages import LARGEST_DEFINITION_BYTES, NotTheDefinition

DOMAIN = b"potluck run definition 1"
LIMIT_BYTES = LARGEST_DEFINITION_BYTES

Text = Annotated[bytes, Meta(max_length=LARGEST_TEXT_BYTES)]


class _Document(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    text: Text
    organiser: PublicKey
    signed_ms: TimeMs


_DEFINITIONS = DocumentType(_Document, "run's definition", DOMAIN, LIMIT_BYTES)


class SignedDefinition(msgspec.Struct, frozen=True):
    data: bytes
    """As it travels: to be served to others as it came."""
    definition: RunDefinition
    text: bytes
    organiser: str
    """The fingerprint of the organiser's key."""
    signed_ms: int
    """When; a definition with a later one takes its place."""


def sign_definition(text: bytes, key: SigningKey, *, now_ms: int, after_ms: int = 0) -> bytes:
    """The signed bytes, later than `after_ms` whatever the clock says; WrongDefinition."""
    read_definition(text)
    document = _Document(text, key.public_key, max(now_ms, after_ms + 1))
    return _DEFINITIONS.sign(document, key)


def read_signed(
    data: bytes, *, run: str | None, organiser: str | None, not_before_ms: int = 0
) -> SignedDefinition:
    """What is in it, if it is genuine. `run`: which it must be of; `organiser`: the fingerprint of
    the key that must have signed it; `not_before_ms`: of the latest that was seen before. None,
    for either: whichever it names, which only a file of the owner's own may decide.

    NotTheDefinition; and, only for what is genuine, WrongDefinition and NewerPotluckNeeded.
    """
    try:
        document = _DEFINITIONS.read(data)
    except MalformedDocument as error:
        raise _not_it("It cannot be read.", error.what) from None
    signer = fingerprint(document.organiser)
    if organiser is not None and signer != organiser:
        raise _not_it(
            "It is signed by somebody else.",
            f"Its key is {signer}, and the organiser's is {organiser}.",
        )
    if not _DEFINITIONS.genuine(data, VerifyingKey(document.organiser)):
        raise _not_it("Its signature is wrong.", "It was changed after the organiser signed it.")
    if document.signed_ms < not_before_ms:
        raise _not_it(
            "It is older than one that was seen before.",
            f"It was signed {_moment(document.signed_ms)}, the other {_moment(not_before_ms)}.",
        )
    definition = read_definition(document.text)
    if run is not None and definition.name != run:
        raise _not_it(
            "It is another run's.", f"It defines {definition.name}, and {run} was asked for."
        )
    return SignedDefinition(data, definition, document.text, signer, document.signed_ms)


def _moment(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "at an impossible time"


def _not_it(what: str, why: str) -> NotTheDefinition:
    return NotTheDefinition(
        f"What was given out as the run's definition is not it. {what}",
        why=why,
        advice="Nothing was taken from it. If nobody has the right one, ask the organiser.",
    )
