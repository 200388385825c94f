"""A run's definition with its organiser's signature: peers serve it and volunteers verify it.

    data = sign_definition(text, organiser_key, now_ms=…)                     # at the organiser
    signed = read_signed(data, run="poem", organiser=invite.organiser)        # at a volunteer

A document as in auth/documents.py: MessagePack of [text, organiser's public key, when it was
signed, with which version of potluck], and 64 bytes of Ed25519. The text is the exact bytes of
run.toml.

Promises: `read_signed` returns only a definition that was signed by the key with the given
fingerprint, is of the given run, and is not older than the one seen before; otherwise it raises an
error that says which. The text is not parsed before the signature is verified.

A signature does not show that a definition is current. A peer that served an old definition to
newcomers would split the run in two. So the newest one seen is remembered (node/run/kept.py), and
an older one is refused.
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
from models.errors import ModelsError
from node.net import VERSION
from node.run.definition import (
    NewerPotluckNeeded,
    RunDefinition,
    is_later,
    name_in,
    read_definition,
    too_old,
)
from node.run.mistakes import LARGEST_TEXT_BYTES, VERSION_PATTERN, WrongDefinition
from protocols.runs.messages import (
    LARGEST_DEFINITION_BYTES,
    NotTheDefinition,
    UnusableDefinition,
)

ONLY_THE_ORGANISER = (
    "Only the run's organiser can correct that: tell them. Nothing of the run was downloaded."
)
NOT_IT = "The peers gave out a wrong definition of the run."  # of a peer's definition
DOMAIN = b"potluck run definition 1"
LIMIT_BYTES = LARGEST_DEFINITION_BYTES

Text = Annotated[bytes, Meta(max_length=LARGEST_TEXT_BYTES)]
Version = Annotated[str, Meta(max_length=32, pattern=VERSION_PATTERN)]


class _Document(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    text: Text
    organiser: PublicKey
    signed_ms: TimeMs
    version: Version = VERSION


_DEFINITIONS = DocumentType(_Document, "run's definition", DOMAIN, LIMIT_BYTES)


class SignedDefinition(msgspec.Struct, frozen=True):
    data: bytes
    """The bytes as received, to serve to others."""
    definition: RunDefinition
    text: bytes
    organiser: str
    """The fingerprint of the organiser's key."""
    signed_ms: int
    """When it was signed; a later definition replaces it."""
    version: str = VERSION
    """The version of potluck that signed it, which understood all of it."""


def sign_definition(text: bytes, key: SigningKey, *, now_ms: int, after_ms: int = 0) -> bytes:
    """The signed bytes, dated later than `after_ms` whatever the clock; WrongDefinition."""
    read_definition(text)
    document = _Document(text, key.public_key, max(now_ms, after_ms + 1))
    return _DEFINITIONS.sign(document, key)


def read_signed(
    data: bytes, *, run: str | None, organiser: str | None, not_before_ms: int = 0
) -> SignedDefinition:
    """Read a genuine definition. `run`: the name it must have; `organiser`: the fingerprint of the
    key that must have signed it. With None, any is accepted, which is only right for a file of the
    owner's own. `not_before_ms`: the date of the newest one seen before.

    NotTheDefinition; and, only for a genuine one, UnusableDefinition (of which NewerPotluckNeeded
    is a subclass).
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
            "It is older than an earlier one of this run.",
            f"It was signed {_moment(document.signed_ms)}, the other {_moment(not_before_ms)}.",
        )
    try:
        definition = read_definition(document.text)
    except (WrongDefinition, NewerPotluckNeeded) as error:
        _check_run(run, name_in(document.text))
        raise unusable(error, document.version, document.signed_ms) from None
    _check_run(run, definition.name)
    return SignedDefinition(
        data, definition, document.text, signer, document.signed_ms, document.version
    )


def _check_run(asked: str | None, found: str) -> None:
    if asked is not None and found and found != asked:
        raise _not_it("It is another run's.", f"It defines {found}, but {asked} was asked for.")


def unusable(
    error: WrongDefinition | NewerPotluckNeeded | ModelsError, version: str, signed_ms: int
) -> UnusableDefinition:
    """The mistakes in a genuine definition, in words for a volunteer: only its organiser can mend
    them.

    If a later potluck signed it, it may be valid there and only look wrong here.
    """
    reasons = [error.why, error.advice if isinstance(error, ModelsError) else ""]
    why = " ".join(reason for reason in reasons if reason)
    if isinstance(error, NewerPotluckNeeded):
        found: UnusableDefinition = error
    elif is_later(version):
        found = too_old(f"The run was signed with potluck {version}. {error.what} {why}".rstrip())
    else:
        found = UnusableDefinition(error.what, why=why, advice=ONLY_THE_ORGANISER)
    found.signed_ms = signed_ms
    return found


def _moment(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "at an impossible time"


def _not_it(what: str, why: str) -> NotTheDefinition:
    return NotTheDefinition(
        f"{NOT_IT} {what}",
        why=why,
        advice="It was not used. If no peer has the right one, ask the organiser.",
    )
