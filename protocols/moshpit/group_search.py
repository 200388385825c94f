"""One search for a group: what gathering.py decides, carried out.

Five things run side by side, and each tells the gathering what it has learnt: the slot is
published and slots are read (group_slots.py), time passes, whoever is first is asked to list us
(asking_a_leader.py), and others are invited (inviting.py). The joins and invitations of others
come in from outside (matchmaking.py); joins wait for their answer (join_tickets.py).

Promise: nothing outlives `run`: joins that still wait are answered, all else is cancelled.

Easy to get wrong: the gathering may change its mind at every call of it, so its effects are
carried out (`_go_on`) after each, and nothing is remembered here of what it decided before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from protocols.identity import PeerId
from protocols.messages import LONGEST_MILLISECONDS, encode
from protocols.moshpit.asking_a_leader import AskingALeader
from protocols.moshpit.gathering_effects import (
    Candidate,
    Effect,
    End,
    Ending,
    Follow,
    Invite,
    Lead,
    Nobody,
    NotTogether,
    Probe,
    Regroup,
    SendAway,
    SendOn,
    StartedWithoutUs,
)
from protocols.moshpit.group import Group, NoGroup, Search, late, nobody_else, not_together
from protocols.moshpit.group_slots import PUBLISH_AFTER_SECONDS, GroupSlots
from protocols.moshpit.handing_on import HandingOn, digest_of, ways_to
from protocols.moshpit.inviting import Inviting
from protocols.moshpit.join_tickets import JoinTickets
from protocols.moshpit.lists_shown import ListsShown
from protocols.moshpit.matchmaking_messages import (
    NOT_HERE,
    Invitation,
    InvitationAnswer,
    JoinAnswer,
    JoinReply,
    JoinRequest,
    MemberList,
    Place,
)
from protocols.moshpit.roster import Roster, Terms, sign_roster
from protocols.moshpit.search_context import SearchContext

if TYPE_CHECKING:
    from protocols.dht.service import Dht
    from protocols.network import Network
    from protocols.rpc import Rpc

ADDRESSES_IN_A_LIST = 3  # of each member: all members get those of all


class GroupSearch:
    """Made by `Matchmaker.find_group`. `met_before` are those who were in such a group the last
    time; `started` is told every list that has started."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        dht: Dht,
        lists: HandingOn,
        search: Search,
        met_before: Sequence[Candidate],
        started: Callable[[Roster], None],
    ) -> None:
        self._began = trio.current_time()
        self._context = SearchContext(network, rpc, lists, search, self._go_on)
        self._gathering = self._context.gathering
        self._slots = GroupSlots(self._context, dht)
        self._lists = ListsShown(self._context, self._is_member)
        self._asking = AskingALeader(self._context, self._lists)
        self._inviting = Inviting(self._context, self._lists)
        self._tickets = JoinTickets(self._context)
        self._met_before = met_before
        self._started = started
        self._over = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._outcome: Group | NoGroup | None = None

    @property
    def terms(self) -> Terms:
        return self._context.terms

    async def run(self) -> Group:
        """Search, once."""
        network = self._context.network
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                linked = [one for one in self._met_before if network.link(one.peer)]
                follows = self._gathering.remembers(linked, self._began)
                self._go_on()
                nursery.start_soon(self._slots.publish, PUBLISH_AFTER_SECONDS if follows else 0.0)
                nursery.start_soon(self._slots.read)
                nursery.start_soon(self._keep_time)
                if self._context.search.awaited:
                    nursery.start_soon(self._watch_links)
                try:
                    await self._over.wait()
                finally:
                    self._gathering.stop()  # nothing is started from here on
                nursery.cancel_scope.cancel()
        finally:
            self._tickets.answer_all(NOT_HERE)
        if isinstance(self._outcome, Group):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    async def _keep_time(self) -> None:
        while True:
            with trio.move_on_at(self._gathering.next_moment):
                await self._context.next_change()
            self._gathering.tick(trio.current_time())
            self._go_on()

    async def _watch_links(self) -> None:
        """Whoever is awaited is no more once its link is lost."""
        network = self._context.network
        with network.link_events() as events:
            async for event in events:
                if network.link(event.peer) is None:
                    self._gathering.link_lost(event.peer, trio.current_time())
                    self._go_on()

    # -- what others ask

    async def join(self, peer: PeerId, request: JoinRequest) -> JoinAnswer:
        """Hold a join until there is an answer to it."""
        return await self._tickets.join(peer, request)

    def invite(self, peer: PeerId, invitation: Invitation) -> InvitationAnswer:
        """Somebody leads, it says."""
        return self._inviting.invited(peer, invitation)

    async def take(self, roster: Roster) -> bool:
        """A member shows the list of its leader: whether it makes us a member."""
        return await self._lists.take(roster)

    # -- what the gathering decides

    def _go_on(self) -> None:
        """Carry out what the gathering has decided."""
        for effect in self._gathering.effects():
            self._carry_out(effect)
        if self._gathering.following is None:
            self._asking.stop()
        self._context.tell_all()

    def _carry_out(self, effect: Effect) -> None:
        assert self._nursery is not None
        place_of, answer = self._context.place_of, self._tickets.answer
        match effect:
            case Follow():
                self._asking.follow(effect, self._nursery)
            case Invite():
                self._nursery.start_soon(self._inviting.invite, effect)
            case Probe(peer):
                self._nursery.start_soon(self._inviting.probe, peer)
            case SendOn(ticket, leader):
                named = place_of(Candidate(leader))
                answer(ticket, JoinAnswer(JoinReply.SENT_ON, places=(named,)))
            case SendAway(ticket):
                answer(ticket, NOT_HERE)
            case Regroup(ticket, group):
                places = tuple(place_of(one) for one in group)
                answer(ticket, JoinAnswer(JoinReply.REGROUPED, places=places))
            case Lead(tickets):
                self._lead(tuple(tickets.values()))
            case End(ending):
                self._end(ending)

    # -- endings

    def _lead(self, tickets: Sequence[int]) -> None:
        """Close the list, sign it, and give it, or where to fetch it, to all who wait."""
        context, network = self._context, self._context.network
        joins = self._tickets.requests(tickets)
        entries = [context.sign_entry(context.me), *(join.entry for join in joins)]
        started_ms = max(0, int(network.wall_time() * 1000))
        nonce = context.nonce()
        roster = sign_roster(network.identity, context.terms, entries, started_ms, nonce)
        places = tuple(
            Place(join.entry.peer, join.entry.reduces, join.addresses[:ADDRESSES_IN_A_LIST])
            for join in joins
            if join.addresses
        )
        member_list = MemberList(roster, places)
        context.lists.keep(member_list)
        listed = JoinAnswer(JoinReply.LISTED, roster, places)
        digest, where = digest_of(member_list), {place.peer: place for place in places}
        ways = ways_to(roster.entries, context.me, len(encode(member_list)))
        for number, join in zip(tickets, joins, strict=True):
            way = ways[join.entry.peer]
            sources = tuple(where[one] for one in way.sources if one in where)
            fetch = JoinAnswer(
                JoinReply.FETCH, None, sources, digest, min(LONGEST_MILLISECONDS, way.milliseconds)
            )
            self._tickets.answer(number, fetch if sources else listed)
        self._is_member(roster)

    def _is_member(self, roster: Roster) -> None:
        self._show_to_all(roster)
        self._finish(Group(roster, roster.index_of(self._context.me), roster.round_id))

    def _end(self, ending: Ending) -> None:
        key = self._context.terms.key
        match ending:
            case StartedWithoutUs():
                roster = self._lists.started()
                self._show_to_all(roster)
                self._finish(late(roster))
            case Nobody(unreachable):
                self._finish(nobody_else(key, unreachable))
            case NotTogether(reasons):
                self._finish(not_together(key, reasons))

    def _show_to_all(self, roster: Roster) -> None:
        """It has started; whoever waits here or comes later is shown it."""
        self._started(roster)
        self._tickets.answer_all(JoinAnswer(JoinReply.STARTED, roster))

    def _finish(self, outcome: Group | NoGroup) -> None:
        self._outcome = outcome
        self._over.set()
