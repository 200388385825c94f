"""The signed lists that others show to a search: which make us a member, and which say we are late.

A list comes from the leader that we asked, from a peer that we asked or invited and that has
started already, or from a member whose leader died before it could tell everybody.

Promise: we become a member only by a list that is well signed, of a leader that we asked in this
search, and in which our entry is as we signed it for that leader. By one such list at the most.

Easy to get wrong: checking a list of hundreds of signatures pauses, and the search goes on
meanwhile. So whether a list still counts is asked of the gathering after the check, not before.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from protocols.identity import PeerId
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.matchmaking_messages import JoinAnswer, MemberList
from protocols.moshpit.roster import (
    Entry,
    Roster,
    check_own_entry,
    check_with_pauses,
)
from protocols.moshpit.roster_refusals import WrongLeader
from protocols.moshpit.search_context import SearchContext


class ListsShown:
    """To one search. `is_member` is told the list by which we are a member."""

    def __init__(self, context: SearchContext, is_member: Callable[[Roster], None]) -> None:
        self._context = context
        self._is_member = is_member
        self._started: tuple[PeerId, Roster] | None = None  # which has started without us
        self._signed: dict[bytes, tuple[PeerId, Entry]] = {}  # by nonce; for this leader

    def sign_entry(self, leader: PeerId) -> Entry:
        """Our entry for a list of this leader's, which is good for that list only."""
        entry = self._context.sign_entry(leader)
        self._signed[entry.nonce] = (leader, entry)
        return entry

    async def take_from_leader(self, leader: PeerId, entry: Entry, answer: JoinAnswer) -> None:
        """Become a member by the answer to our join, if that leader is still the one whom we
        follow. RosterRefused if the list is not good."""
        context, roster = self._context, answer.roster
        assert roster is not None
        if roster.leader != leader:
            raise WrongLeader(
                f"{leader} answered with a list of {roster.leader}.",
                why="It is broken or hostile.",
                advice="Do not take part in its lists.",
            )
        check_own_entry(roster, entry)
        context.lists.keep(MemberList(roster, answer.places))
        await check_with_pauses(roster, context.terms, entry, context.search.group_size)
        for place in answer.places:
            if place.peer in roster.members:
                context.learn(place)
        if context.gathering.leader.lists_us(leader):
            self._is_member(roster)

    async def take(self, roster: Roster) -> bool:
        """Become a member by a list that somebody shows, if it is that of a leader that we asked
        in this search, and our entry is in it as we signed it."""
        context = self._context
        own = next((entry for entry in roster.entries if entry.peer == context.me), None)
        if own is None or self._signed.get(own.nonce) != (roster.leader, own):
            return False
        await check_with_pauses(roster, context.terms, own, context.search.group_size)
        if not context.gathering.adopted():
            return False
        self._is_member(roster)
        context.go_on()
        return True

    async def look_at(self, by: PeerId, roster: Roster) -> None:
        """Somebody shows a list that has started. RosterRefused unless it proves that."""
        if await self.take(roster):
            return
        context = self._context
        await check_with_pauses(roster, context.terms, None, LARGEST_GROUP)
        before, self._started = self._started, (by, roster)
        earlier = context.me in roster.members
        context.gathering.shown(by, roster.members, trio.current_time(), earlier=earlier)
        if context.gathering.started_by != by:
            self._started = before  # it means nothing to us, and lists are large

    def started(self) -> Roster:
        """The list that has started without us."""
        assert self._started is not None
        return self._started[1]
