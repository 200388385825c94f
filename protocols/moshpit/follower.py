"""What a member does for whoever coordinates: promise, note an attempt, exchange, accept, vow.

The acceptor (acceptor.py) is the memory by which nothing goes wrong; this adds the member's own
exchange to it, and the answers. Whether a ballot counts here at all, the agreement has seen to.

Easy to get wrong: what is not done is answered all the same, with what was promised, so that the
coordinator learns why. And a vow is for ever: it is not given to a coordinator of whose ballot we
hear only now. Who is deaf finds no quorum, and what it says of that must not end everybody's round.
"""

from __future__ import annotations

from collections.abc import Callable

from protocols.moshpit.acceptor import Acceptor
from protocols.moshpit.agreement_messages import (
    Accept,
    Accepted,
    Attempt,
    Forswear,
    Open,
    Opened,
    Prepare,
    Promise,
    Start,
)
from protocols.moshpit.ballots import Suspicion
from protocols.moshpit.desk import Desk
from protocols.moshpit.ending import Ending
from protocols.moshpit.own_exchange import OwnExchange
from protocols.moshpit.succession import Succession

CheckCuts = Callable[[tuple[int, ...], tuple[int, ...]], str]
"""From members and cuts of a coordinator's Start to what is wrong with them; "" if nothing is."""

FromCoordinator = Prepare | Open | Start | Accept | Forswear


class Follower:
    """One member, towards the coordinator of the highest ballot that it knows."""

    def __init__(
        self,
        desk: Desk,
        acceptor: Acceptor,
        exchange: OwnExchange,
        ending: Ending,
        succession: Succession,
        check_cuts: CheckCuts | None,
    ) -> None:
        self.excluded: dict[int, Suspicion] = {}
        """Who is not in the newest attempt that we know of, and why."""
        self._desk = desk
        self._acceptor = acceptor
        self._exchange = exchange
        self._ending = ending
        self._succession = succession
        self._check_cuts = check_cuts

    def take(self, sender: int, message: FromCoordinator) -> None:
        """A message of a ballot that is not below what we have promised."""
        ballot = message.ballot
        knew = ballot == self._acceptor.promised
        self._acceptor.promise(ballot)
        running = self._exchange.running
        if running is not None and (running < ballot or isinstance(message, Accept)):
            self._exchange.stop()
        match message:
            case Open(_, members, excluded):
                if self._acceptor.open(Attempt(ballot, members)):
                    self.excluded = {each.member: each for each in excluded}
                    self._desk.send(sender, Opened(ballot))
                    return
            case Accept(_, result) if self._exchange.doubts(result):
                self._succession.distrust(sender)
                return
            case Accept(_, result):
                if self._acceptor.accept(ballot, result):
                    self._desk.send(sender, Accepted(ballot))
                    return
            case Start():
                if not self._acceptor.vowed:
                    self._start(message)
                    return
            case Forswear() if knew:
                self._acceptor.vow()
        self._desk.send(sender, self._promise())

    def _start(self, start: Start) -> None:
        ballot = start.ballot
        if self._exchange.running == ballot:
            return
        if self._exchange.has_ended(ballot):
            self._exchange.report(ballot)
            return
        self._acceptor.open(Attempt(ballot, start.members))  # it was, by a quorum
        wrong = self._check_cuts(start.members, start.cuts) if self._check_cuts else ""
        if wrong:
            against = Suspicion(ballot.coordinator, "wrong_plan", wrong)
            self._exchange.refuse(ballot, (against,))
            self._exchange.report(ballot)
            return
        self._exchange.start(start)

    def _promise(self) -> Promise:
        acceptor = self._acceptor
        return Promise(
            acceptor.promised,
            acceptor.attempt,
            acceptor.accepted,
            self._exchange.held if self._ending.verdict is None else None,
            self._exchange.complaints(acceptor.attempt.ballot),
            acceptor.vowed,
        )
