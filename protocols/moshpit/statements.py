"""What a reducer signs about its part, and how anybody checks it.

The digest of a part is BLAKE3 over the frames in which its result goes out: for each chunk the
five bytes of its header, and then the chunk. Every transfer computes that anyway, at both ends.
The signature covers round, ballot, part and digest under a domain of its own, so that it can be
shown to others: two statements that count for the same part of the same ballot and differ prove
that the reducer told two stories.

Easy to get wrong: the ballot is signed as well. A reducer that reduces again in a later attempt,
for other members, states another digest, and is no liar.
"""

from __future__ import annotations

import struct

from protocols.identity import Identity, PeerId, verify
from protocols.moshpit.ballots import DIGEST_BYTES, Ballot, Statement

ROUND_ID_BYTES = 32
STATEMENT_DOMAIN = b"potluck moshpit part 1"

_NUMBERS = struct.Struct(">HHH")


def statement_bytes(round_id: bytes, ballot: Ballot, part: int, digest: bytes) -> bytes:
    """What is signed: round (32 bytes), ballot number, coordinator, part (2 each), digest (32)."""
    if len(round_id) != ROUND_ID_BYTES or len(digest) != DIGEST_BYTES:
        raise ValueError("a round's id and a digest have 32 bytes")
    return round_id + _NUMBERS.pack(ballot.number, ballot.coordinator, part) + digest


def make_statement(
    identity: Identity, round_id: bytes, ballot: Ballot, part: int, digest: bytes
) -> Statement:
    """Our own statement about the part that we reduced."""
    signed = statement_bytes(round_id, ballot, part, digest)
    return Statement(part, digest, identity.sign(STATEMENT_DOMAIN, signed))


def counts(reducer: PeerId, round_id: bytes, ballot: Ballot, statement: Statement) -> bool:
    """Whether this reducer has signed this statement for this attempt at this round."""
    signed = statement_bytes(round_id, ballot, statement.part, statement.digest)
    return verify(STATEMENT_DOMAIN, reducer, statement.signature, signed)
