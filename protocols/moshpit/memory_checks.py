"""What no honest member of a round would say to *this* member, by what it remembers.

message_checks.py judges a message by itself; this one judges it by the ballots that were begun
here, by what is promised and held here, and by the decision as it is known here.

Promise: nothing is changed by a check, and no honest message is refused, however late it comes.

Easy to get wrong: what an honest member says may be out of date. It may then contradict what is
remembered here of a lower ballot, and is answered as such; only what could never have been true is
refused.
"""

from __future__ import annotations

from protocols.moshpit.acceptor import Acceptor
from protocols.moshpit.agreement_messages import Accept, AgreementMessage, Decided
from protocols.moshpit.ballots import MOST_BALLOTS_MISSED, Ballot
from protocols.moshpit.ending import Ending
from protocols.moshpit.message_checks import NotAnHonestMessage
from protocols.moshpit.own_exchange import OwnExchange


def check_against_memory(
    sender: int,
    message: AgreementMessage,
    me: int,
    own: Ballot | None,
    acceptor: Acceptor,
    exchange: OwnExchange,
    ending: Ending,
    following: Ballot,
) -> None:
    """NotAnHonestMessage, if it is none. `own`: the highest ballot that was begun here;
    `following`: the highest that was heard of."""
    if isinstance(message, Decided):
        if ending.decision is not None and message.result != ending.decision.result:
            raise NotAnHonestMessage(
                f"Member {sender} says that something else was decided than is known here."
            )
        return
    ballot = message.ballot
    known = max(following, acceptor.promised).number
    if ballot.number > known + MOST_BALLOTS_MISSED:
        raise NotAnHonestMessage(
            f"Member {sender} names ballot {ballot}, and the highest known here is {known}."
        )
    if ballot.coordinator == me and (own is None or ballot > own):
        raise NotAnHonestMessage(
            f"Member {sender} names ballot {ballot}, which we have never begun."
        )
    if isinstance(message, Accept) and message.result is not None and ending.verdict is None:
        result = message.result
        if (
            acceptor.promised <= ballot == result.attempt
            and me in result.members
            and not exchange.holds(result)
        ):
            raise NotAnHonestMessage(
                f"Member {sender} proposes the result of ballot {result.attempt}, "
                "of which we do not hold that result."
            )
