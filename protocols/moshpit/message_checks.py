"""What an honest member of a round of this size may say, before anybody looks at what it means.

`check` is given the sender that the channel has proven. It knows the roster's size and order of
succession and nothing of the state of the round, so a message that fails here is wrong whatever
has happened: `NotAnHonestMessage` names the sender, and nothing has changed.

Easy to get wrong: the coordinator's own messages carry its ballot, so anybody but the coordinator
who sends one is lying; the answers to them carry the ballot of whom they are sent to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from protocols.errors import RemoteMisbehaviour
from protocols.moshpit.agreement_messages import (
    Accept,
    Accepted,
    AgreementMessage,
    Attempt,
    Decided,
    Forswear,
    Holding,
    Open,
    Opened,
    Prepare,
    Promise,
    Query,
    Result,
    Start,
    Trouble,
)
from protocols.moshpit.ballots import Ballot, Statement


class NotAnHonestMessage(RemoteMisbehaviour):
    """A message that no honest member of this round would have sent."""


FROM_COORDINATOR = Start | Prepare | Open | Accept | Forswear
TO_COORDINATOR = Holding | Trouble | Promise | Opened | Accepted


def check(
    message: AgreementMessage, sender: int, me: int, size: int, coordinators: Sequence[int]
) -> None:
    """NotAnHonestMessage if it is not one in a round of `size` members with this succession."""
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
    elif isinstance(message, Query):
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
