"""The messages by which the members of a round end it together; `switchboard.Agree` carries them.

    ballot 0:      Start ->  ... exchange ...  Holding <-  Accept ->  Accepted <-  Decided ->
    after trouble: Trouble <-  Prepare ->  Promise <-  Open ->  Opened <-  Start ->  (as above)

The arrows are from the coordinator of the ballot (->) or to it (<-). `BallotQuery` and `Progress`
go both ways: they say that the sender is alive, and how far it is. `Outbid` names a higher ballot.
If no quorum is alive, `Forswear` asks for a vow never to accept a result (the answer is a
`Promise`), and `GivenUp` says that the vows are not enough to be certain.

Every type is bounded: at most `LARGEST_GROUP` members, statements and cuts, 32-byte digests.
`check` does what types cannot (indices beyond the roster, members out of order).

Easy to get wrong: these messages may be lost, duplicated, delayed and reordered. Each has all that
its receiver needs, and receiving one twice is the same as receiving it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from protocols.errors import RemoteMisbehaviour
from protocols.moshpit.ballots import (
    LARGEST_GROUP,
    Ballot,
    Digest,
    Member,
    Seal,
    Statement,
    Suspicion,
)
from protocols.rpc import Message

SUSPICIONS_PER_MESSAGE = 32  # the first ones; a single one can rule a member out
LONGEST_REASON = 200  # characters; why a round is discarded, for people
LARGEST_CUT = 1 << 48  # values of a vector: far more than any has, and far from overflows

Members = Annotated[tuple[Member, ...], Meta(min_length=1, max_length=LARGEST_GROUP)]
Cuts = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=LARGEST_CUT)], ...],
    Meta(min_length=2, max_length=LARGEST_GROUP + 1),
]
Statements = Annotated[tuple[Statement, ...], Meta(max_length=LARGEST_GROUP)]
Contradicted = Annotated[tuple[Member, ...], Meta(max_length=LARGEST_GROUP)]
Suspicions = Annotated[tuple[Suspicion, ...], Meta(max_length=SUSPICIONS_PER_MESSAGE)]
Exclusions = Annotated[tuple[Suspicion, ...], Meta(max_length=LARGEST_GROUP)]
Reason = Annotated[str, Meta(max_length=LONGEST_REASON)]


class Result(Message, frozen=True):
    """The value that is agreed on: commit the result of this attempt. None instead: discard.

    `attempt` is the ballot whose exchange made it; the data of `members` is in it.
    """

    attempt: Ballot
    members: Members
    digest: Digest


class Acceptance(Message, frozen=True):
    """The last value that an acceptor accepted, and in which ballot. `result` None: discard."""

    ballot: Ballot
    result: Result | None


class Proof(Message, frozen=True):
    """That a quorum has accepted a result in this ballot."""

    ballot: Ballot
    seals: Annotated[tuple[Seal, ...], Meta(min_length=1, max_length=LARGEST_GROUP)]


class Attempt(Message, frozen=True):
    """The members that take part in the exchange of a ballot."""

    ballot: Ballot
    members: Members


class Held(Message, frozen=True):
    """A member's own result of one attempt, with its statements.

    `contradicted`: the members that told it at the end that they have another result.
    """

    attempt: Ballot
    digest: Digest
    statements: Statements
    contradicted: Contradicted = ()


class Start(Message, frozen=True, tag="start"):
    """Exchange now: `cuts[k]` to `cuts[k + 1]` is the part of `members[k]`."""

    ballot: Ballot
    members: Members
    cuts: Cuts


class Holding(Message, frozen=True, tag="holding"):
    """I have the whole result of this ballot's exchange. `contradicted` told me theirs differs."""

    ballot: Ballot
    digest: Digest
    statements: Statements
    contradicted: Contradicted = ()


class Trouble(Message, frozen=True, tag="trouble"):
    """My exchange of this ballot has failed, because of these members."""

    ballot: Ballot
    suspicions: Suspicions


class Prepare(Message, frozen=True, tag="prepare"):
    """Promise me to accept nothing of a lower ballot, and stop its exchange."""

    ballot: Ballot


class Promise(Message, frozen=True, tag="promise"):
    """The promise, and what the sender knows. `vowed`: it will never accept a result.

    `accepted` is None if nothing was accepted, or a later `Open` made it void; `attempt` is the
    newest that the sender knows to be open; the suspicions are of that one.
    """

    ballot: Ballot
    attempt: Attempt
    accepted: Acceptance | None = None
    held: Held | None = None
    suspicions: Suspicions = ()
    vowed: bool = False


class Open(Message, frozen=True, tag="open"):
    """A quorum has promised and none of it had accepted: nothing before this ballot counts.

    `excluded` has the reason for each member that is not in the new attempt.
    """

    ballot: Ballot
    members: Members
    excluded: Exclusions = ()


class Opened(Message, frozen=True, tag="opened"):
    """Noted: my promises will name this attempt from now on."""

    ballot: Ballot


class Accept(Message, frozen=True, tag="accept"):
    """Accept this result (None: discard the round) in this ballot. `reason` is for people."""

    ballot: Ballot
    result: Result | None
    reason: Reason = ""


class Accepted(Message, frozen=True, tag="accepted"):
    """Accepted in this ballot. `seal`: signed, in a round that is sealed (seals.py)."""

    ballot: Ballot
    seal: Seal | None = None


class Decided(Message, frozen=True, tag="decided"):
    """The round is over, with this result (None: it is discarded, for certain). `proof`: of the
    result, in a round that is sealed."""

    result: Result | None
    reason: Reason = ""
    proof: Proof | None = None


class Outbid(Message, frozen=True, tag="outbid"):
    """I have promised this higher ballot."""

    ballot: Ballot


class BallotQuery(Message, frozen=True, tag="query"):
    """Are you there, and do you have a message for me? `ballot` is the highest that I know of,
    `attempt` the newest whose exchange I have begun."""

    ballot: Ballot
    attempt: Ballot | None = None


class Progress(Message, frozen=True, tag="progress"):
    """I am alive. `ballot` is the highest that I know of."""

    ballot: Ballot


class Forswear(Message, frozen=True, tag="forswear"):
    """I find no quorum. Vow never to accept a result, if you have not: then none can commit."""

    ballot: Ballot


class GivenUp(Message, frozen=True, tag="given-up"):
    """I found no quorum in this ballot, and cannot tell whether others commit: I am in doubt."""

    ballot: Ballot


AgreementMessage = (
    Start
    | Holding
    | Trouble
    | Prepare
    | Promise
    | Open
    | Opened
    | Accept
    | Accepted
    | Decided
    | Outbid
    | BallotQuery
    | Progress
    | Forswear
    | GivenUp
)


# Checks whether an honest member of a round of this size could have sent a message, by its form.
#
# `check` is given the sender that the channel has proven. It knows the roster's size and order of
# succession, but not the state of the round. So a message that fails here is wrong, whatever has
# happened: `NotAnHonestMessage` names the sender, and nothing is changed.
#
# Easy to get wrong: the coordinator's own messages carry its ballot, so any other member that sends
# one is lying. The answers carry the ballot of the coordinator to which they are sent.


class NotAnHonestMessage(RemoteMisbehaviour):
    """A message that no honest member of this round would have sent."""


FROM_COORDINATOR = Start | Prepare | Open | Accept | Forswear
TO_COORDINATOR = Holding | Trouble | Promise | Opened | Accepted


def check(
    message: AgreementMessage, sender: int, me: int, size: int, coordinators: Sequence[int]
) -> None:
    """Raise NotAnHonestMessage if no honest member of a round of `size` members with this
    succession would send it."""
    if not 0 <= sender < size or sender == me:
        _refuse(sender, f"is not another member of this round of {size}")
    if not isinstance(message, Decided):
        _check_ballot(message.ballot, sender, coordinators)
    if isinstance(message, FROM_COORDINATOR) and message.ballot.coordinator != sender:
        _refuse(sender, f"coordinates in ballot {message.ballot}, which is not its own")
    if isinstance(message, TO_COORDINATOR) and message.ballot.coordinator != me:
        _refuse(sender, f"answers in ballot {message.ballot}, which is not ours")
    if isinstance(message, Start):
        _check_members(message.members, sender, size)
        _check_cuts(message.members, message.cuts, sender)
        if me not in message.members:
            _refuse(sender, "starts an exchange with a peer that is not in it")
    elif isinstance(message, Open):
        _check_members(message.members, sender, size)
        if any(each.member >= size for each in message.excluded):
            _refuse(sender, "excludes somebody who is not in the round")
    elif isinstance(message, Accept | Decided):
        _check_result(message.result, sender, size, coordinators)
        if isinstance(message, Accept) and message.result is not None:
            _check_not_above(message.result.attempt, message.ballot, sender)
    elif isinstance(message, Holding):
        _check_statements(message.statements, sender, size)
        _check_members(message.contradicted or [0], sender, size)
    elif isinstance(message, Trouble):
        if not message.suspicions:
            _refuse(sender, "ends an attempt and names nobody")
        if any(each.member >= size for each in message.suspicions):
            _refuse(sender, "suspects somebody who is not in the round")
    elif isinstance(message, BallotQuery):
        if message.attempt is not None:
            _check_ballot(message.attempt, sender, coordinators)
            _check_not_above(message.attempt, message.ballot, sender)
    elif isinstance(message, Promise):
        _check_promise(message, sender, size, coordinators)


def _check_promise(message: Promise, sender: int, size: int, coordinators: Sequence[int]) -> None:
    _check_attempt(message.attempt, message.ballot, sender, size, coordinators)
    if message.accepted is not None:
        _check_ballot(message.accepted.ballot, sender, coordinators)
        _check_not_above(message.accepted.ballot, message.ballot, sender)
        _check_result(message.accepted.result, sender, size, coordinators)
        if message.accepted.result is not None:
            _check_not_above(message.accepted.result.attempt, message.accepted.ballot, sender)
        if message.accepted.ballot < message.attempt.ballot:
            _refuse(sender, "reports as accepted what a later attempt has made void")
    if message.held is not None:
        _check_ballot(message.held.attempt, sender, coordinators)
        _check_not_above(message.held.attempt, message.ballot, sender)
        _check_statements(message.held.statements, sender, size)
        _check_members(message.held.contradicted or [0], sender, size)
    if any(each.member >= size for each in message.suspicions):
        _refuse(sender, "suspects somebody who is not in the round")


def _check_ballot(ballot: Ballot, sender: int, coordinators: Sequence[int]) -> None:
    if ballot.coordinator not in coordinators:
        _refuse(sender, f"names ballot {ballot}, whose coordinator may not coordinate")
    if ballot.number == 0 and ballot.coordinator != coordinators[0]:
        _refuse(sender, f"names ballot {ballot}, but the first belongs to {coordinators[0]}")


def _check_not_above(inner: Ballot, outer: Ballot, sender: int) -> None:
    if inner > outer:
        _refuse(sender, f"speaks in ballot {outer} of the later ballot {inner}")


def _check_attempt(
    attempt: Attempt, ballot: Ballot, sender: int, size: int, coordinators: Sequence[int]
) -> None:
    _check_ballot(attempt.ballot, sender, coordinators)
    _check_not_above(attempt.ballot, ballot, sender)
    _check_members(attempt.members, sender, size)


def _check_members(members: Sequence[int], sender: int, size: int) -> None:
    if members[-1] >= size:
        _refuse(sender, f"names member {members[-1]} of a round of {size}")
    if any(left >= right for left, right in pairwise(members)):
        _refuse(sender, "names members out of order, or one twice")


def _check_cuts(members: Sequence[int], cuts: Sequence[int], sender: int) -> None:
    if len(cuts) != len(members) + 1:
        _refuse(sender, f"cuts the vector in {len(cuts) - 1} parts for {len(members)} members")
    if cuts[0] != 0 or any(left > right for left, right in pairwise(cuts)):
        _refuse(sender, "cuts the vector backwards")


def _check_result(
    result: Result | None, sender: int, size: int, coordinators: Sequence[int]
) -> None:
    if result is not None:
        _check_ballot(result.attempt, sender, coordinators)
        _check_members(result.members, sender, size)


def _check_statements(statements: Sequence[Statement], sender: int, size: int) -> None:
    _check_members([each.part for each in statements] or [0], sender, size)


def _refuse(sender: int, what: str) -> None:
    raise NotAnHonestMessage(
        f"Member {sender} of the round {what}.",
        why="It is broken, or it lies.",
        advice="It is left out of the round, and avoided.",
    )
