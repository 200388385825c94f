"""Asking a leader to list us, and what its answer leads to.

A join is one call that is answered when the leader closes its list, seconds later. Meanwhile it is
asked whether it is still there (patience.py), and given up when it is not.

Promise: one leader is asked at a time; to ask the next takes the join back from the last.

Easy to get wrong: an answer may come when we follow somebody else already. So nothing is done here
upon an answer but telling the gathering, which knows whom we follow.
"""

from __future__ import annotations

import logging

import trio

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.messages import LONGEST_MILLISECONDS
from protocols.moshpit.gathering_effects import Follow
from protocols.moshpit.handing_on import LONGEST_FETCH_SECONDS, SOURCES
from protocols.moshpit.known_peers import Absence
from protocols.moshpit.lists_shown import ListsShown
from protocols.moshpit.matchmaking_messages import (
    JOIN,
    MOST_PASSED_OVER,
    NOT_HERE,
    JoinAnswer,
    JoinReply,
    JoinRequest,
)
from protocols.moshpit.patience import absence_of
from protocols.moshpit.roster import Entry
from protocols.moshpit.search_context import SearchContext

log = logging.getLogger("potluck.moshpit")

JOIN_OUTLIVES_SECONDS = 1.0  # the gathering, which ends it when it gives a leader up


class AskingALeader:
    """Of one search."""

    def __init__(self, context: SearchContext, lists: ListsShown) -> None:
        self._context = context
        self._lists = lists
        self._scope = trio.CancelScope()

    def follow(self, follow: Follow, nursery: trio.Nursery) -> None:
        """Ask this leader from now on, and nobody else."""
        self.stop()
        self._scope = trio.CancelScope()
        nursery.start_soon(self._ask_and_tell, follow, self._scope)

    def stop(self) -> None:
        """Take our join back from whoever has it."""
        self._scope.cancel()

    async def _ask_and_tell(self, follow: Follow, scope: trio.CancelScope) -> None:
        """Ask a leader, and tell the gathering how that ended."""
        context, leader = self._context, follow.leader
        entry = self._lists.sign_entry(leader)
        patience = max(0.0, context.gathering.deadline - trio.current_time())
        request = JoinRequest(
            context.terms,
            entry,
            follow.passed_over[:MOST_PASSED_OVER],
            min(LONGEST_MILLISECONDS, int(patience * 1000)),
            context.own_addresses(),
        )
        with scope:
            answer = await self._ask(leader, request)
            if isinstance(answer, JoinAnswer) and answer.reply == JoinReply.FETCH:
                answer = await self._fetch(leader, answer)
        if scope.cancelled_caught:
            return
        try:
            if isinstance(answer, PotluckError):
                raise answer
            await self._take(leader, entry, answer)
        except PotluckError as error:
            log.info("%s does not list us under %s: %s", leader, context.terms.key, error)
            now = trio.current_time()
            context.gathering.leader.is_gone(leader, absence_of(error), error.what, now)
        context.go_on()

    async def _ask(self, leader: PeerId, request: JoinRequest) -> JoinAnswer | PotluckError:
        """A leader's answer, or why there is none: it was silent, or said so."""
        context = self._context
        answers: list[JoinAnswer | PotluckError] = []
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                answers.append(await context.patience.silence_of(leader, self._is_there))
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            gives_up_in = context.gathering.gives_up_at - trio.current_time()
            seconds = gives_up_in + JOIN_OUTLIVES_SECONDS
            try:
                answer = await context.rpc.call(leader, JOIN, request, timeout=seconds)
                answers.append(answer)
            except PotluckError as error:
                answers.append(error)
            nursery.cancel_scope.cancel()
        return answers[0]

    async def _fetch(self, leader: PeerId, answer: JoinAnswer) -> JoinAnswer | PotluckError:
        """The list that this leader has closed, from the member that it names."""
        context, now = self._context, trio.current_time()
        if answer.digest is None or leader != context.gathering.following:
            return NOT_HERE
        context.gathering.leader.lets_us_fetch(leader, LONGEST_FETCH_SECONDS, now)
        sources = [context.learn(place).peer for place in answer.places[:SOURCES]]
        sources = [one for one in sources if one not in (context.me, leader)]
        seconds = answer.fetch_ms / 1000
        member_list = await context.lists.fetch(answer.digest, (*sources, leader), seconds)
        if isinstance(member_list, PotluckError):
            return member_list
        return JoinAnswer(JoinReply.LISTED, member_list.roster, member_list.places)

    def _is_there(self, leader: PeerId, round_trip_seconds: float) -> None:
        now = trio.current_time()
        self._context.gathering.leader.answers(leader, round_trip_seconds, now)
        self._context.go_on()

    async def _take(self, leader: PeerId, entry: Entry, answer: JoinAnswer) -> None:
        """Act on an answer to our join. RosterRefused if it is not acceptable."""
        context, gathering = self._context, self._context.gathering
        match answer.reply:
            case JoinReply.LISTED if answer.roster is not None:
                await self._lists.take_from_leader(leader, entry, answer)
            case JoinReply.SENT_ON if answer.places:
                named = context.learn(answer.places[0])
                gathering.leader.sends_us_on(leader, named, trio.current_time())
            case JoinReply.REGROUPED:
                group = tuple(context.learn(place) for place in answer.places)
                gathering.leader.makes_a_group(leader, group, trio.current_time())
            case JoinReply.STARTED if answer.roster is not None:
                await self._lists.look_at(leader, answer.roster)
            case _:
                why = "it looks for no group now"
                gathering.leader.is_gone(leader, Absence.ELSEWHERE, why, trio.current_time())
