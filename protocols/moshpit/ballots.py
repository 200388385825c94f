"""The terms of a round's messages: members, ballots, signed statements, suspicions.

A *member* is an index into the round's signed roster, so that a byte names a peer. A *ballot* is
one try to bring the round to its end: a number, and the member that coordinates it. Ballots are
totally ordered. In a *statement*, a reducer signs which bytes it has sent for its part in one
ballot; a *seal* is a member's signature that it has accepted a result. A *suspicion* is a member's
complaint about another, as a code and in words.

Easy to get wrong: the digest of a result is made from the statements, part by part
(`digest_of_result`), not from the bytes again. So two members with different results also have two
different statements for some part. If the reducer signed both, they prove that it sent different
results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from protocols.identity import SIGNATURE_BYTES
from protocols.rpc import Message

LARGEST_GROUP = 256
"""Members of a round: each sends to each, so a group costs as the square of its members."""
LARGEST_BALLOT_NUMBER = 65_535  # it is signed as 16 bits
MOST_BALLOTS_MISSED = LARGEST_GROUP + 44
"""An honest round needs as many ballots as it has members, and a few more. A peer that names a
ballot further ahead of all known ones could use up the numbers, and so end the round."""
DIGEST_BYTES = 32
LONGEST_SUSPICION = 240  # characters, of the words; the code is for machines
LONGEST_CODE = 24

_RESULT_DOMAIN = b"potluck moshpit result 1"

Member = Annotated[int, Meta(ge=0, le=LARGEST_GROUP - 1)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Ballot(Message, frozen=True, order=True):
    """One try at the round, ordered by number, then by coordinator."""

    number: Annotated[int, Meta(ge=0, le=LARGEST_BALLOT_NUMBER)]
    coordinator: Member

    def __str__(self) -> str:
        return f"{self.number}.{self.coordinator}"


class Statement(Message, frozen=True, gc=False):
    """A reducer's statement about what it has sent to all members in one ballot.

    `part` is the reducer's own index. The signature is over (round id, ballot, part, digest).
    """

    part: Member
    digest: Digest
    signature: Signature


class Seal(Message, frozen=True, gc=False):
    """A member's signature that it has accepted a result, and whether it holds it (seals.py)."""

    member: Member
    signature: Signature
    holds: bool


class Suspicion(Message, frozen=True, gc=False):
    """One member's complaint about another (or about itself, for its own data)."""

    member: Member
    code: Annotated[str, Meta(min_length=1, max_length=LONGEST_CODE)]
    text: Annotated[str, Meta(max_length=LONGEST_SUSPICION)] = ""


def digest_of_result(statements: Iterable[Statement]) -> bytes:
    """The digest of a whole result, from the parts' digests in the order of the parts."""
    return digest_of_parts({statement.part: statement.digest for statement in statements})


def digest_of_parts(digests: Mapping[int, bytes]) -> bytes:
    """The same, from the digest of each reducer's part."""
    hasher = blake3(_RESULT_DOMAIN)
    for part, digest in sorted(digests.items()):
        hasher.update(part.to_bytes(2, "big"))
        hasher.update(digest)
    return hasher.digest()
