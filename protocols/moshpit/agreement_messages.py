"""What members of a round say to each other to end it as one; `round_messages.Agree` carries it.

    ballot 0:      Start ->  ... exchange ...  Holding <-  Accept ->  Accepted <-  Decided ->
    after trouble: Trouble <-  Prepare ->  Promise <-  Open ->  Opened <-  Start ->  (as above)

The arrows are from the coordinator of the ballot (->) or to it (<-). `Query` and `Progress` go
both ways and say that one is alive, and where one stands; `Outbid` names a higher ballot. Where
no quorum lives, `Forswear` asks for a vow never to accept a result (the answer is a `Promise`),
and `GivenUp` says that the vows are not enough to be certain.

Every type is bounded: at most `LARGEST_GROUP` members, statements and cuts, 32-byte digests. What
cannot be said by types (indices beyond the roster, members out of order) is in `message_checks`.

Easy to get wrong: these messages are lost, doubled, delayed and overtaken. Each says all that its
receiver needs, and receiving one twice is the same as receiving it once.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocols.messages import Message
from protocols.moshpit.ballots import LARGEST_GROUP, Ballot, Digest, Member, Statement, Suspicion

SUSPICIONS_PER_MESSAGE = 32  # the first that one had; a member needs one to be ruled out
LONGEST_REASON = 200  # characters, of why a round is discarded: for people
LARGEST_CUT = 1 << 48  # values of a vector: far more than any, and far less than overflows

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

    `attempt` is the ballot whose exchange made it, `members` are those whose data is in it.
    """

    attempt: Ballot
    members: Members
    digest: Digest


class Acceptance(Message, frozen=True):
    """What an acceptor has accepted last, and in which ballot. `result` None: to discard."""

    ballot: Ballot
    result: Result | None


class Attempt(Message, frozen=True):
    """Who takes part in the exchange of a ballot."""

    ballot: Ballot
    members: Members


class Held(Message, frozen=True):
    """A member's own result of one attempt, with the statements that it is made of.

    `contradicted`: by whom, who told it at the end of the exchange that theirs is another.
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
    """I have the whole result of this ballot's exchange; these have told me that theirs differs."""

    ballot: Ballot
    digest: Digest
    statements: Statements
    contradicted: Contradicted = ()


class Trouble(Message, frozen=True, tag="trouble"):
    """My exchange of this ballot has failed, because of these."""

    ballot: Ballot
    suspicions: Suspicions


class Prepare(Message, frozen=True, tag="prepare"):
    """Promise me to accept nothing of a lower ballot, and stop its exchange."""

    ballot: Ballot


class Promise(Message, frozen=True, tag="promise"):
    """The promise, and what its giver knows. `vowed`: and nothing in any ballot, ever.

    `accepted` is None where nothing was accepted, or it was made void by a later `Open`; `attempt`
    is the newest that its giver knows to be open; the suspicions are of that one.
    """

    ballot: Ballot
    attempt: Attempt
    accepted: Acceptance | None = None
    held: Held | None = None
    suspicions: Suspicions = ()
    vowed: bool = False


class Open(Message, frozen=True, tag="open"):
    """A quorum has promised and none of it had accepted: nothing before this ballot counts.

    `excluded` says of everybody who is not in the new attempt why not.
    """

    ballot: Ballot
    members: Members
    excluded: Exclusions = ()


class Opened(Message, frozen=True, tag="opened"):
    """Noted: whoever asks me for a promise will hear of this attempt."""

    ballot: Ballot


class Accept(Message, frozen=True, tag="accept"):
    """Accept this result (None: to discard the round) in this ballot. `reason` is for people."""

    ballot: Ballot
    result: Result | None
    reason: Reason = ""


class Accepted(Message, frozen=True, tag="accepted"):
    """Accepted in this ballot."""

    ballot: Ballot


class Decided(Message, frozen=True, tag="decided"):
    """The round is over, with this result (None: it is discarded, for certain)."""

    result: Result | None
    reason: Reason = ""


class Outbid(Message, frozen=True, tag="outbid"):
    """I have promised this higher ballot."""

    ballot: Ballot


class Query(Message, frozen=True, tag="query"):
    """Are you there, and is there something for me? `ballot` is the highest that I know of,
    `attempt` the newest whose exchange I have begun."""

    ballot: Ballot
    attempt: Ballot | None = None


class Progress(Message, frozen=True, tag="progress"):
    """I am alive. `ballot` is the highest that I know of."""

    ballot: Ballot


class Forswear(Message, frozen=True, tag="forswear"):
    """I find no quorum. Vow never to accept a result, unless you have: then nobody can commit."""

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
    | Query
    | Progress
    | Forswear
    | GivenUp
)
