"""`/potluck/allreduce/1.0.0`, bulk method `part`: the messages between a sender and a reducer.

    sender                                    reducer
    OPEN   PartOpening                  ->
                                        <-    ACCEPT
    CHUNK  of the sender's values       ->  <-  CHUNK  of the average      (both cut alike)
    CLOSE  PartTaken                    ->
                                        <-    CLOSE  PartClosed            (each when it is whole)

Each side closes its direction when it has its *whole* result, from all reducers. Both closing
messages carry the digest of that result, and each side compares them. Until then it says ALIVE.
The opening has everything that the two must agree on before a byte of data moves, and a refusal
names the difference. Every other failure ends the transfer with `GaveUp`, which tells the waiting
side for which member the reducer was waiting.

Easy to get wrong: the sender cannot check an ERROR that a reducer sends. So any failure between two
members crosses as `GaveUp`, never as the reducer's own error, which would look as if the sender had
met it.
"""

from __future__ import annotations

import struct
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from protocols.errors import PotluckError, Refused
from protocols.identity import SIGNATURE_BYTES, Identity, PeerId, verify
from protocols.moshpit.ballots import DIGEST_BYTES, Ballot, Digest, Member, Statement
from protocols.moshpit.exchange import ExchangePlan
from protocols.moshpit.layout import LARGEST_CHUNK_BYTES, MOST_VALUES
from protocols.rpc import BulkMethod, Empty, Message, encode

# A reducer's signed statement about its part, and how any peer checks it.
#
# The digest of a part is BLAKE3 over the frames in which its result is sent: for each chunk the
# five bytes of its header, and then the chunk. Every transfer computes it anyway, at both ends. The
# signature covers round, ballot, part and digest under a domain of its own, so it can be shown to
# others: two valid statements for the same part of the same ballot that differ prove that the
# reducer sent different results.
#
# Easy to get wrong: the ballot is signed, too. A reducer that reduces again in a later attempt, for
# other members, states another digest, and is not a liar.


ROUND_ID_BYTES = 32
STATEMENT_DOMAIN = b"potluck moshpit part 1"

_NUMBERS = struct.Struct(">HHH")


def statement_bytes(round_id: bytes, ballot: Ballot, part: int, digest: bytes) -> bytes:
    """The signed bytes: round (32), ballot number, coordinator, part (2 each), digest (32)."""
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


ALLREDUCE_PROTOCOL = "/potluck/allreduce/1.0.0"

STALL_SECONDS = 4.0
"""A member without a sign of life for this long is given up. A stopped process holds up the others
for this long, plus the agreement on a new attempt; together it must take less than ten seconds."""

ALIVE_SECONDS = STALL_SECONDS / 4  # Transfer.say_alive finds it due no sooner

OPENING_LIMIT_BYTES = 512  # three digests of 32 bytes and some numbers
LONGEST_BUSY_MS = 0x7FFF_FFFF

Values = Annotated[int, Meta(ge=0, le=MOST_VALUES)]
Weight = Annotated[float, Meta(ge=0.0)]

_PLAN_DOMAIN = b"potluck moshpit attempt 1\0"


class PartOpening(Message, frozen=True):
    """A sender's view of the attempt, as far as it concerns this reducer."""

    round_id: Annotated[bytes, Meta(min_length=ROUND_ID_BYTES, max_length=ROUND_ID_BYTES)]
    ballot: Ballot
    sender: Member
    part: Member
    weight: Weight
    start: Values
    stop: Values
    chunk_bytes: Annotated[int, Meta(ge=0, le=LARGEST_CHUNK_BYTES)]
    layout: Digest
    plan: Digest


class PartTaken(Message, frozen=True):
    """The digest of the sender's whole result."""

    result: Digest


class PartClosed(Message, frozen=True):
    """The reducer's signature over what it sent, and the digest of its whole result. Older versions
    say in `busy_ms` how long the sender's part took to arrive; nobody reads it any more."""

    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    result: Digest
    busy_ms: Annotated[int, Meta(ge=0, le=LONGEST_BUSY_MS)] = 0


class StaleAttempt(Refused):
    """The round or the ballot of this transfer is over here, or was never begun."""


class NotInAttempt(Refused):
    """The peer is not in the attempt, or is not the participant that it claims to be."""


class WrongPart(Refused):
    """The transfer is for a part that another member reduces."""


class PartTwice(Refused):
    """This member has already opened its transfer for this attempt."""


class PlanDiffers(Refused):
    """The two sides have different vectors, weights, cuts or chunks."""


class GaveUp(PotluckError):
    """The other side has ended the transfer, for the reason in its words."""


PART = BulkMethod(
    ALLREDUCE_PROTOCOL,
    "part",
    opening=PartOpening,
    accepted=Empty,
    closing=PartTaken,
    closed=PartClosed,
    chunk_limit_bytes=LARGEST_CHUNK_BYTES,
    message_limit_bytes=OPENING_LIMIT_BYTES,
    stall_seconds=STALL_SECONDS,
    hashed=True,
    errors={
        "stale-attempt": StaleAttempt,
        "not-a-member": NotInAttempt,
        "wrong-part": WrongPart,
        "part-twice": PartTwice,
        "plan-differs": PlanDiffers,
        "gave-up": GaveUp,
    },
    training=True,
)


def opening_for(plan: ExchangePlan, reducer_place: int) -> PartOpening:
    """Our opening to the participant at this place among the plan's members."""
    me = plan.member_of(plan.me)
    return PartOpening(
        plan.round_id,
        plan.ballot,
        plan.me,
        plan.members[reducer_place].index,
        me.weight,
        plan.cuts[reducer_place],
        plan.cuts[reducer_place + 1],
        plan.chunk_bytes,
        plan.layout.digest,
        plan_digest(plan),
    )


def plan_digest(plan: ExchangePlan) -> bytes:
    """32 bytes that are equal if members, weights, cuts and chunks are."""
    members = [(one.index, str(one.peer), float(one.weight)) for one in plan.members]
    return blake3(_PLAN_DOMAIN + encode((members, plan.cuts, plan.chunk_bytes))).digest()
