"""The joins that others have sent us and that wait for an answer, each under a numbered ticket.

The gathering decides about tickets; here is what they stand for. `join` is the handler of the
method: it checks, waits, and returns the answer.

Promise: every join is answered, at the latest when the search ends.

Easy to get wrong: whoever waits may leave, or die, in the very moment in which it is answered. So
the answer is kept here first, and a ticket that has one is not told to the gathering as gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from protocols.errors import Busy
from protocols.identity import PeerId
from protocols.moshpit.gathering_effects import Candidate
from protocols.moshpit.matchmaking_messages import NOT_HERE, JoinAnswer, JoinRequest
from protocols.moshpit.roster import LARGEST_LIST, check_entry, check_terms
from protocols.moshpit.roster_refusals import NotSigned, WrongLeader
from protocols.moshpit.search_context import SearchContext

MOST_HELD = LARGEST_LIST + 256  # joins; each is a request of at most 16 KiB, usually half of one


@dataclass
class _Ticket:
    """A join that waits here, and then its answer."""

    request: JoinRequest
    answer: JoinAnswer | None = None
    answered: trio.Event = field(default_factory=trio.Event)

    def give(self, answer: JoinAnswer) -> None:
        """The first answer is the answer."""
        if self.answer is None:
            self.answer = answer
            self.answered.set()


class JoinTickets:
    """Of one search. Invariant: a ticket is here exactly while its join is being handled."""

    def __init__(self, context: SearchContext) -> None:
        self._context = context
        self._numbers = itertools.count(1)
        self._tickets: dict[int, _Ticket] = {}

    async def join(self, peer: PeerId, request: JoinRequest) -> JoinAnswer:
        """Hold a join until there is an answer to it. A refusal, by name, if it may not join us."""
        self._check(peer, request)
        context, gathering = self._context, self._context.gathering
        context.network.learn_addresses(peer, request.addresses)
        number = next(self._numbers)
        ticket = self._tickets[number] = _Ticket(request)
        candidate = Candidate(peer, request.entry.reduces)
        patience, now = request.patience_ms / 1000, trio.current_time()
        try:
            gathering.join_came(candidate, number, request.passed_over, patience, now)
            context.go_on()
            await ticket.answered.wait()
        finally:
            del self._tickets[number]
            if ticket.answer is None:
                gathering.join_gone(peer, number, trio.current_time())
                context.go_on()
        return ticket.answer or NOT_HERE

    def requests(self, numbers: Iterable[int]) -> list[JoinRequest]:
        return [self._tickets[number].request for number in numbers]

    def answer(self, number: int, answer: JoinAnswer) -> None:
        """Give this ticket its answer, if it is still there and has none."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.give(answer)

    def answer_all(self, answer: JoinAnswer) -> None:
        for ticket in self._tickets.values():
            ticket.give(answer)

    def _check(self, peer: PeerId, request: JoinRequest) -> None:
        context, entry = self._context, request.entry
        check_terms(request.terms, context.terms)
        if entry.peer != peer:
            raise NotSigned(
                f"{peer} asks to list {entry.peer}.",
                why="Everybody joins for itself.",
                advice="Upgrade whatever made this request.",
            )
        if not context.search.offer.reduces or (
            entry.reduces and context.order(peer) < context.order(context.me)
        ):
            raise WrongLeader(
                f"{context.me} does not lead a group with {peer} in it.",
                why="It cannot be dialled, or comes later in the order of the hashes.",
                advice="Upgrade whatever made this request.",
            )
        if len(self._tickets) >= MOST_HELD:
            raise Busy(
                f"{len(self._tickets)} joins wait here already.",
                why="A group has no more members than that.",
                advice="Wait for the next round.",
            )
        check_entry(entry, context.terms, context.me)
