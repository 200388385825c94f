"""`/potluck/allreduce/1.0.0`, bulk method `part`: what goes between a sender and a reducer.

    sender                                    reducer
    OPEN   PartOpening                  ->
                                        <-    ACCEPT
    CHUNK  of the sender's values       ->  <-  CHUNK  of the average      (both cut alike)
    CLOSE  PartTaken                    ->
                                        <-    CLOSE  PartClosed            (each when it is whole)

Each closes its direction when it has its *whole* result, from all reducers: both closing messages
carry the digest of that, and each side compares. Until then it says ALIVE.
The opening says all that the two must agree on before a byte of data moves, and refusals say by
name what they did not. Every other failure ends the transfer with `GaveUp`, which tells whoever
waits whom the reducer was waiting for.

Easy to get wrong: an ERROR that a reducer sends is *told* to the sender and says nothing that can
be checked. So whatever goes wrong between two members crosses as `GaveUp`, and never as the error
that the reducer itself met, which would look as if the sender had met it.
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

# What a reducer signs about its part, and how anybody checks it.
#
# The digest of a part is BLAKE3 over the frames in which its result goes out: for each chunk the
# five bytes of its header, and then the chunk. Every transfer computes that anyway, at both ends.
# The signature covers round, ballot, part and digest under a domain of its own, so that it can be
# shown to others: two statements that count for the same part of the same ballot and differ prove
# that the reducer told two stories.
#
# Easy to get wrong: the ballot is signed as well. A reducer that reduces again in a later attempt,
# for other members, states another digest, and is no liar.


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


ALLREDUCE_PROTOCOL = "/potluck/allreduce/1.0.0"

STALL_SECONDS = 4.0
"""Without a sign of life a member is given up. A stopped process holds the others for this long,
the agreement on a new attempt comes on top, and all of it has to fit into ten seconds."""

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
    """The reducer's signature over what it sent, the digest of its whole result, and how long the
    sender's part took to come.

    `busy_ms` is a measurement of the link that only the receiving end can make.
    """

    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    result: Digest
    busy_ms: Annotated[int, Meta(ge=0, le=LONGEST_BUSY_MS)] = 0


class StaleAttempt(Refused):
    """The round or the ballot of this transfer is over here, or was never begun."""


class NotInAttempt(Refused):
    """This peer is no participant of the attempt, or not the one it says."""


class WrongPart(Refused):
    """The transfer is for a part that somebody else reduces."""


class PartTwice(Refused):
    """This member has already opened its transfer for this attempt."""


class PlanDiffers(Refused):
    """The two sides do not mean the same vector, weights, cuts or chunks."""


class GaveUp(PotluckError):
    """The other side has ended the transfer, for a reason that its words give."""


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
    """What we open with to the participant at this place among the plan's members."""
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
    """32 bytes that agree when members, weights, cuts and chunks do."""
    members = [(one.index, str(one.peer), float(one.weight)) for one in plan.members]
    return blake3(_PLAN_DOMAIN + encode((members, plan.cuts, plan.chunk_bytes))).digest()
