"""`/potluck/run/1.0.0`: what is asked and answered about a run's signed definition.

    DEFINITION   [run, digest of the one that the caller has]  ->  [definition, state]

The definition is bytes here: node/run/signed.py says what is in them. Whoever has the newest one
already is told so in a few bytes instead of being sent it again.

Easy to get wrong: an answer is a stranger's. Its size is bounded by the method, before it is read;
what it says is believed only when the organiser's signature has been verified.
"""

from __future__ import annotations

from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from protocols.errors import PotluckError, Unreachable
from protocols.messages import Message
from protocols.method import Method

PROTOCOL = "/potluck/run/1.0.0"

LARGEST_DEFINITION_BYTES = (64 << 10) + 192  # run.toml at its largest, key, moment, signature
LONGEST_RUN = 64  # characters, as in a token
DIGEST_BYTES = 32  # BLAKE3 of the definition as it travels; empty: the caller has none

RunName = Annotated[str, Meta(min_length=1, max_length=LONGEST_RUN)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class DefinitionRequest(Message, frozen=True, gc=False):
    run: RunName
    known: Digest = b""


class DefinitionResponse(Message, frozen=True, gc=False):
    """`definition` is empty where the caller has the same, and where this peer has none."""

    definition: Annotated[bytes, Meta(max_length=LARGEST_DEFINITION_BYTES)] = b""
    is_known: bool = False


DEFINITION = Method(
    PROTOCOL,
    "definition",
    DefinitionRequest,
    DefinitionResponse,
    request_limit_bytes=4 * LONGEST_RUN + DIGEST_BYTES + 16,
    response_limit_bytes=LARGEST_DEFINITION_BYTES + 16,
)


class NotTheDefinition(PotluckError):
    """What a peer gave out as the run's definition is not it."""

    exit_code = 3


class UnusableDefinition(PotluckError):
    """A genuine definition by which this potluck cannot take part: too new, or not right.

    `signed_ms`: when it was signed, so that an older one does not count in its place.
    """

    exit_code = 3
    signed_ms: int = 0


class NoDefinition(Unreachable):
    """Nobody who could be asked has the run's definition.

    `reasons`: what they said instead, whoever said it, to tell a new one from one that is known.
    """

    reasons: frozenset[str] = frozenset()


def digest_of(definition: bytes) -> bytes:
    return blake3(definition).digest()
