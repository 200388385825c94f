"""`/potluck/run/1.0.0`: the messages to fetch a run's signed definition.

    DEFINITION   [run, digest of the one that the caller has]  ->  [definition, state]

The definition is bytes here; node/run/signed.py decodes it. A caller that already has the newest
one gets a short answer, without the definition.

An answer may come from a stranger. The method limits its size before it is read. Its content is
believed only after the organiser's signature is verified.
"""

from __future__ import annotations

from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from protocols.errors import PotluckError, Unreachable
from protocols.rpc import Message, Method

PROTOCOL = "/potluck/run/1.0.0"

LARGEST_DEFINITION_BYTES = (64 << 10) + 192  # the largest run.toml, with key, moment, signature
LONGEST_RUN = 64  # characters, as in a token
DIGEST_BYTES = 32  # BLAKE3 of the definition as sent; empty: the caller has none

RunName = Annotated[str, Meta(min_length=1, max_length=LONGEST_RUN)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class DefinitionRequest(Message, frozen=True, gc=False):
    run: RunName
    known: Digest = b""


class DefinitionResponse(Message, frozen=True, gc=False):
    """`definition` is empty if the caller has the same one, and if this peer has none."""

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
    """A peer gave out something else as the run's definition."""

    exit_code = 3


class UnusableDefinition(PotluckError):
    """A genuine definition that this potluck cannot use: too new, or invalid.

    `signed_ms` is the time of its signature, so that no older one is used instead.
    """

    exit_code = 3
    signed_ms: int = 0


class NoDefinition(Unreachable):
    """No peer that was asked has the run's definition.

    `reasons`: the errors of the peers, without their names, to compare with those of earlier tries.
    """

    reasons: frozenset[str] = frozenset()


def digest_of(definition: bytes) -> bytes:
    return blake3(definition).digest()
