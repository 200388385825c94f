"""What the messages of a round count in: members, ballots, signed statements, suspicions.

A *member* is an index into the round's signed roster, so that a byte names a peer. A *ballot*
is one try to bring the round to its end: a number, and the member that coordinates it; ballots
are totally ordered. A reducer *states* with its signature which bytes it has sent out for its
part in one ballot. A *suspicion* is what a member has against another, in a code and in words.

Easy to get wrong: the digest of a result is made of the statements, part by part
(`digest_of_result`), and not of the bytes once more. So two members that hold different results
also hold two different statements for some part, and if both carry the reducer's signature,
these are the proof that the reducer told them different things.
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
LARGEST_BALLOT_NUMBER = 65_535  # what is signed of it are 16 bits
MOST_BALLOTS_MISSED = LARGEST_GROUP + 44
"""An honest round needs as many ballots as it has members, and a few. Whoever names one that is
further ahead of all that were heard of would use up the numbers, and end the round with them."""
DIGEST_BYTES = 32
LONGEST_SUSPICION = 240  # characters, of the words; the code is for machines
LONGEST_CODE = 24

_RESULT_DOMAIN = b"potluck moshpit result 1"

Member = Annotated[int, Meta(ge=0, le=LARGEST_GROUP - 1)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Ballot(Message, frozen=True, order=True):
    """One try at the round, ordered by number, then by who coordinates it."""

    number: Annotated[int, Meta(ge=0, le=LARGEST_BALLOT_NUMBER)]
    coordinator: Member

    def __str__(self) -> str:
        return f"{self.number}.{self.coordinator}"


class Statement(Message, frozen=True, gc=False):
    """What the reducer of a part says that it has sent to everybody in one ballot.

    `part` is the reducer's own index. The signature is over (round id, ballot, part, digest).
    """

    part: Member
    digest: Digest
    signature: Signature


class Suspicion(Message, frozen=True, gc=False):
    """What one member has against another (or, of its own data, against itself)."""

    member: Member
    code: Annotated[str, Meta(min_length=1, max_length=LONGEST_CODE)]
    text: Annotated[str, Meta(max_length=LONGEST_SUSPICION)] = ""


def digest_of_result(statements: Iterable[Statement]) -> bytes:
    """The digest of a whole result: of the parts' digests, in the order of the parts."""
    return digest_of_parts({statement.part: statement.digest for statement in statements})


def digest_of_parts(digests: Mapping[int, bytes]) -> bytes:
    """The same, from the digest of each reducer's part."""
    hasher = blake3(_RESULT_DOMAIN)
    for part, digest in sorted(digests.items()):
        hasher.update(part.to_bytes(2, "big"))
        hasher.update(digest)
    return hasher.digest()
