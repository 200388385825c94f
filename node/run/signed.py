"""A run's definition with its organiser's signature: what peers serve and volunteers verify.

    data = sign_definition(text, organiser_key, now_ms=…)               # at the organiser
    signed = read_signed(data, run="poem", fingerprint=invite.fingerprint)      # at a volunteer

A document as those of auth/documents.py: MessagePack of [text, organiser's public key, when it was
signed], and 64 bytes of Ed25519. The text is the very bytes of run.toml.

Promises: what `read_signed` returns was signed by the key whose fingerprint was given, names the
run that was asked for, and is not older than what was seen before; else it raises, by name, and
the text has not even been parsed.

Easy to get wrong: a signature alone says nothing about *when*. Whoever served an old definition to
newcomers would split the run in two; so the latest moment seen is kept, and what is older refused.
"""

from __future__ import annotations

import msgspec

from auth.keys import SigningKey
from node.run.definition import RunDefinition
from protocols.errors import PotluckError

DOMAIN = b"potluck run definition 1\0"
LARGEST_SIGNED_BYTES = (64 << 10) + 256


class NotTheRunsDefinition(PotluckError):
    """Not what it should be: garbage, another run's, signed by another, changed, or older."""

    exit_code = 3


class SignedDefinition(msgspec.Struct, frozen=True):
    data: bytes
    """As it travels: to be served to others as it came."""
    definition: RunDefinition
    text: str
    fingerprint: str
    """Of the organiser's key."""
    signed_ms: int
    """When; a definition with a later one takes its place."""


def sign_definition(text: bytes, key: SigningKey, *, now_ms: int, after_ms: int = 0) -> bytes:
    """The signed bytes, later than `after_ms` whatever the clock says; WrongDefinition."""
    raise NotImplementedError


def read_signed(
    data: bytes, *, run: str | None, fingerprint: str, not_before_ms: int = 0
) -> SignedDefinition:
    """NotTheRunsDefinition, or (only when it is genuine) WrongDefinition and NewerPotluckNeeded."""
    raise NotImplementedError
