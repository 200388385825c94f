"""Inviting others to a list that we lead, and finding out who is there at all.

An invitation asks for a word, and not for a join: whoever is invited answers at once where it
stands, and joins by a call of its own.

Easy to get wrong: two that both lead invite each other. Each answers that it is with itself, and
by that the later in the hash order learns of the earlier, and follows it.
"""

from __future__ import annotations

import trio

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.gathering_effects import Candidate, Invite, Reply
from protocols.moshpit.lists_shown import ListsShown
from protocols.moshpit.matchmaking_messages import (
    INVITE,
    Invitation,
    InvitationAnswer,
    short_enough,
)
from protocols.moshpit.patience import absence_of
from protocols.moshpit.roster import check_terms
from protocols.moshpit.search_context import SearchContext


class Inviting:
    """Of one search: both sides of an invitation."""

    def __init__(self, context: SearchContext, lists: ListsShown) -> None:
        self._context = context
        self._lists = lists

    def invited(self, by: PeerId, invitation: Invitation) -> InvitationAnswer:
        """Somebody leads, it says."""
        context = self._context
        check_terms(invitation.terms, context.terms)
        context.network.learn_addresses(by, invitation.addresses)
        reply, leader = context.gathering.invited(by, trio.current_time())
        context.go_on()
        place = None if leader is None else context.place_of(Candidate(leader))
        return InvitationAnswer(reply, place)

    async def invite(self, invite: Invite) -> None:
        """Tell somebody that we lead."""
        context, peer = self._context, invite.peer
        if not invite.reduces and context.network.link(peer) is None:
            context.gathering.cannot_be_invited(peer, trio.current_time())
            context.go_on()
            return
        invitation = Invitation(context.terms, short_enough(context.network.addresses()))
        start, seconds = trio.current_time(), context.patience.seconds_with(peer)
        try:
            answer = await context.rpc.call(peer, INVITE, invitation, timeout=seconds)
            await self._take_answer(peer, answer, context.patience.round_trip(peer, start))
        except PotluckError as error:
            self._not_met(peer, error)
        context.go_on()

    async def probe(self, peer: PeerId) -> None:
        """Tell the gathering if somebody is not there."""
        try:
            await self._context.patience.probe(peer)
        except PotluckError as error:
            self._not_met(peer, error)
            self._context.go_on()
        else:
            self._context.gathering.is_there(peer)

    async def _take_answer(self, peer: PeerId, answer: InvitationAnswer, seconds: float) -> None:
        if answer.reply == Reply.STARTED and answer.roster is not None:
            await self._lists.look_at(peer, answer.roster)
            return
        known = answer.reply in (Reply.COMING, Reply.WITH_ANOTHER)
        reply = Reply(answer.reply) if known else Reply.NOT_HERE
        leader = None if answer.leader is None else self._context.learn(answer.leader)
        gathering, now = self._context.gathering, trio.current_time()
        gathering.invitation_answered(peer, reply, leader, seconds, now)

    def _not_met(self, peer: PeerId, error: PotluckError) -> None:
        gathering, now = self._context.gathering, trio.current_time()
        gathering.not_met(peer, absence_of(error), error.what, now)
