"""One search for a group: carries out what gathering.py decides.

`GroupSearch` runs several tasks side by side. Each reports what it learns to the gathering: this
peer's slot is published and the others' slots are read, time passes, a leader is asked to list this
peer, and other peers are invited. Joins and invitations from others come in through matchmaking.py;
joins wait here for their answer.

In this file: `GroupSearch`; `SearchContext`, which its parts share; then the parts: `Patience`, for
silent peers; `GroupSlots`; `Inviting`; `JoinTickets`, the joins that wait here; `ListsShown`, the
signed lists that others show; `AskingALeader`.

Promise: nothing outlives `run`: joins that still wait are answered, and everything else is
cancelled.

Easy to get wrong: the gathering may change its mind with every call. So `_go_on` carries out its
effects after each call, and this module remembers none of its earlier decisions.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from protocols.errors import Busy, DeadlineExceeded, PotluckError, ProtocolNotServed, Unreachable
from protocols.identity import PeerId
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.gathering import Gathering
from protocols.moshpit.gathering_effects import (
    Candidate,
    Effect,
    End,
    Ending,
    Follow,
    Lead,
    Nobody,
    NotTogether,
    Probe,
    Regroup,
    Reply,
    SendAway,
    SendInvite,
    SendOn,
    StartedWithoutUs,
)
from protocols.moshpit.group import (
    Group,
    NoGroup,
    Search,
    late,
    never_listed,
    nobody_else,
    not_together,
    overtaken,
)
from protocols.moshpit.handing_on import (
    LONGEST_FETCH_SECONDS,
    SOURCES,
    HandingOn,
    digest_of,
    seconds_to_all,
    ways_to,
)
from protocols.moshpit.known_peers import Absence
from protocols.moshpit.matchmaking_messages import (
    INVITE,
    JOIN,
    LAYOUT_MARK_BYTES,
    MOST_PASSED_OVER,
    NOT_HERE,
    STILL_THERE,
    GroupSlot,
    Invitation,
    InvitationAnswer,
    JoinAnswer,
    JoinReply,
    JoinRequest,
    MemberList,
    Place,
    short_enough,
)
from protocols.moshpit.roster import (
    FEWEST_MEMBERS,
    LARGEST_LIST,
    NONCE_BYTES,
    Entry,
    NotSigned,
    Roster,
    Terms,
    WrongLeader,
    check_entry,
    check_own_entry,
    check_terms,
    check_with_pauses,
    hash_order,
    sign_entry,
    sign_roster,
)
from protocols.rpc import LONGEST_MILLISECONDS, Empty, encode

if TYPE_CHECKING:
    from protocols.dht import Dht, SlotEntry
    from protocols.network import Network
    from protocols.rpc import Rpc

ADDRESSES_IN_A_LIST = 3  # of each member: all members get those of all


class GroupSearch:
    """Made by `Matchmaker.find_group`. `met_before`: the members of the last such groups. `started`
    is called with each list that has started."""

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
        """Search for a group. May be called once."""
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
                if self._context.search.awaited or self._context.search.coming:
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
            with trio.move_on_at(self._gathering.next_deadline):
                await self._context.next_change()
            self._gathering.tick(trio.current_time())
            self._go_on()

    async def _watch_links(self) -> None:
        """Stop awaiting a peer when its link is lost."""
        network = self._context.network
        with network.link_events() as events:
            async for event in events:
                if network.link(event.peer) is None:
                    self._gathering.link_lost(event.peer, trio.current_time())
                    self._go_on()

    # -- requests of others

    async def join(self, peer: PeerId, request: JoinRequest) -> JoinAnswer:
        """Hold a join until there is an answer to it."""
        return await self._tickets.join(peer, request)

    def invite(self, peer: PeerId, invitation: Invitation) -> InvitationAnswer:
        """Answer a peer that says that it leads."""
        return self._inviting.invited(peer, invitation)

    def awaits_list_of(self, peer: PeerId) -> bool:
        """Whether `peer` leads us, so that a round of it may belong to a list that is on its way to
        us."""
        return self._gathering.following == peer and self._gathering.is_held()

    async def take(self, roster: Roster) -> bool:
        """A member shows the list of its leader. Returns whether we are a member by it."""
        return await self._lists.take(roster)

    def overtaken(self) -> None:
        """The run has gone on: nobody comes any more. Without effect once there is an outcome."""
        if not self._gathering.ended:
            self._gathering.stop()
            self._finish(overtaken(self._context.terms.key))

    # -- decisions of the gathering

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
            case SendInvite():
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
        """Close the list, sign it, and give it to all peers that wait, or tell them where to fetch
        it."""
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
        self._is_member(roster, seconds_to_all(ways))

    def _is_member(self, roster: Roster, list_seconds: float) -> None:
        self._show_to_all(roster)
        me = roster.index_of(self._context.me)
        self._finish(Group(roster, me, roster.round_id, list_seconds))

    def _end(self, ending: Ending) -> None:
        key = self._context.terms.key
        match ending:
            case StartedWithoutUs():
                roster = self._lists.started()
                self._show_to_all(roster)
                self._finish(late(roster))
            case Nobody(unreachable):
                self._finish(nobody_else(key, unreachable))
            case NotTogether(reasons, leader):
                error = not_together(key, reasons)
                self._finish(error if leader is None else never_listed(error, leader))

    def _show_to_all(self, roster: Roster) -> None:
        """The list has started. Show it to the peers that wait here, and to those that come
        later."""
        self._started(roster)
        self._tickets.answer_all(JoinAnswer(JoinReply.STARTED, roster))

    def _finish(self, outcome: Group | NoGroup) -> None:
        self._outcome = outcome
        self._over.set()


# ---- what the parts of a search share


class SearchContext:
    """The state that the parts of one search share. They know each other only through this.

    `go_on` carries out what the gathering has decided. `lists`: the lists that this node hands on.

    Easy to get wrong: call `go_on` after every report to the gathering. Otherwise its decision
    waits until another part calls it, perhaps for seconds.
    """

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        lists: HandingOn,
        search: Search,
        go_on: Callable[[], None],
    ) -> None:
        self.network, self.rpc, self.lists = network, rpc, lists
        self.search = search
        self.terms: Terms = search.terms
        self.go_on = go_on
        self.me = network.peer_id
        self.patience = Patience(network, rpc)
        self.gathering = Gathering(self.me, self.order, search, trio.current_time())
        self._changed = trio.Event()

    def order(self, peer: PeerId) -> bytes:
        return hash_order(self.terms.key, peer)

    # -- when the gathering has changed

    def tell_all(self) -> None:
        """Wake all waiting tasks: the gathering may have changed."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until this condition on the gathering holds."""
        while not holds():
            await self._changed.wait()

    async def next_change(self) -> None:
        await self._changed.wait()

    # -- how peers are named to others

    def place_of(self, candidate: Candidate) -> Place:
        if candidate.peer == self.me:
            addresses = self.network.addresses()
        else:
            addresses = self.network.addresses_of(candidate.peer)
        return Place(candidate.peer, candidate.reduces, short_enough(addresses))

    def learn(self, place: Place) -> Candidate:
        if place.peer != self.me:
            self.network.learn_addresses(place.peer, place.addresses)
        return Candidate(place.peer, place.reduces)

    def own_addresses(self) -> tuple[str, ...]:
        """Empty if this peer cannot be dialled."""
        return short_enough(self.network.addresses()) if self.search.offer.reduces else ()

    def nonce(self) -> bytes:
        return self.network.random.randbytes(NONCE_BYTES)

    def sign_entry(self, leader: PeerId) -> Entry:
        """Our signed entry for a list of this leader."""
        offer, nonce = self.search.offer, self.nonce()
        return sign_entry(self.network.identity, self.terms, leader, offer, nonce)


# ---- when a silent peer counts as gone


SHORTEST_SILENCE_SECONDS = 1.0  # busy machines are silent for some tenths of a second
SILENT_ROUND_TRIPS = 5.0  # a longer silence is not jitter
NEW_LINK_SECONDS = 3.0  # a dial, a handshake and a stream: eight round trips of 0.35 s
STILL_THERE_SECONDS = 0.5  # between two questions to a leader that holds our join
MOST_OVERDUE = 3  # unanswered questions to a leader that still sends other bytes


class Patience:
    """Decides how long to wait for a peer, by what its link has measured.

    A leader that waits for others says nothing for seconds, and must be told from a dead one. So
    the peers that wait for it send it another question twice a second, `still-there`, which a
    living process answers at once. How long its silence is tolerated depends on the measured round
    trip.

    Easy to get wrong: an overloaded machine is slow to answer, but not gone. As long as any bytes
    come from it, it is asked again, a few times.
    """

    def __init__(self, network: Network, rpc: Rpc) -> None:
        self._network, self._rpc = network, rpc

    def seconds_with(self, peer: PeerId) -> float:
        """How long this peer may take to answer before it counts as gone."""
        link = self._network.link(peer)
        if link is None:
            return NEW_LINK_SECONDS
        return max(SHORTEST_SILENCE_SECONDS, SILENT_ROUND_TRIPS * (link.round_trip_seconds or 0.0))

    def round_trip(self, peer: PeerId, start: float) -> float:
        """The round trip, without dialling, of a call that began at `start` and has its answer."""
        link = self._network.link(peer)
        if link is None or link.round_trip_seconds is None:
            return 0.0
        return min(link.round_trip_seconds, trio.current_time() - start)

    async def probe(self, peer: PeerId) -> None:
        """Return when the peer has answered. Raises an error if it does not in time."""
        await self._rpc.call(peer, STILL_THERE, Empty(), timeout=self.seconds_with(peer))

    async def silence_of(
        self, leader: PeerId, answered: Callable[[PeerId, float], None]
    ) -> PotluckError:
        """Return the last error when the leader does not answer any more. Until then, call
        `answered` with each answer's round trip."""
        overdue = 0
        while True:
            start, heard = trio.current_time(), self._bytes_from(leader)
            try:
                await self.probe(leader)
            except DeadlineExceeded as error:
                overdue += 1
                if overdue >= MOST_OVERDUE or self._bytes_from(leader) <= heard:
                    return error
            except PotluckError as error:
                return error
            else:
                overdue = 0
                answered(leader, self.round_trip(leader, start))
                await trio.sleep(STILL_THERE_SECONDS)

    def _bytes_from(self, peer: PeerId) -> int:
        link = self._network.link(peer)
        return 0 if link is None else link.bytes_received


def absence_of(error: PotluckError) -> Absence:
    """The kind of absence that the error of a call shows."""
    if isinstance(error, Unreachable | DeadlineExceeded):
        return Absence.UNREACHABLE
    if isinstance(error, ProtocolNotServed):
        return Absence.ELSEWHERE
    return Absence.AT_ODDS


# ---- the slots under the group's key


log = logging.getLogger("potluck.moshpit")

FIRST_READS_SECONDS = (0.02, 0.05, 0.1, 0.2)  # between the first reads of the slots,
READ_SECONDS = 0.5  # and between all that follow
PUBLISH_AFTER_SECONDS = 0.15  # the last group's leader answers sooner, or it is not there
FULL_READ_EVERY = 4  # reads; the others ask only the first few replicas
SLOT_OUTLIVES_SECONDS = 5.0  # beyond the search, so that a peer about to come still sees it


class GroupSlots:
    """Publishes this peer's slot, and reads the others'. Both tasks end with the search's nursery.

    A slot says that its publisher looks for the group, whether it can be dialled, and where. It
    does not say whether the publisher is still alive, and it is read seconds after it was
    published.

    Writing or reading a slot costs the directory several messages. A peer that is held by a living
    leader needs neither, and among peers that meet again that is nearly everybody.
    """

    def __init__(self, context: SearchContext, dht: Dht) -> None:
        self._context = context
        self._dht = dht
        self._mark = context.terms.layout_digest[:LAYOUT_MARK_BYTES]

    async def publish(self, after_seconds: float) -> None:
        """Publish our slot, unless a leader holds us by then: its slot is enough for as long as it
        is there."""
        context, gathering = self._context, self._context.gathering
        with trio.move_on_after(after_seconds):
            await context.until(gathering.is_held)
        await context.until(lambda: not gathering.is_held())
        if gathering.ended:
            return
        slot = GroupSlot(context.search.offer.reduces, self._mark, context.own_addresses())
        seconds = gathering.latest - trio.current_time() + SLOT_OUTLIVES_SECONDS
        try:
            await self._dht.put(context.terms.key, slot, seconds, keep_up=False)
        except PotluckError as error:  # peers that joined us know us without it
            log.warning("nobody keeps our slot under %s: %s", context.terms.key, error)

    async def read(self) -> None:
        """Read the slots for as long as that is useful, and report them to the gathering."""
        context, gathering = self._context, self._context.gathering
        pauses = itertools.chain(FIRST_READS_SECONDS, itertools.repeat(READ_SECONDS))
        for number in itertools.count(1):
            await context.until(lambda: gathering.looks_for_slots)
            try:
                entries = await self._dht.get(
                    context.terms.key, latest_enough=number % FULL_READ_EVERY != 0
                )
            except PotluckError as error:  # peers that know us may still invite us
                log.debug("the slots under %s could not be read: %s", context.terms.key, error)
            else:
                self._take(entries.values())
            gathering.slots_were_read(trio.current_time())
            context.go_on()
            await trio.sleep(next(pauses))

    def _take(self, entries: Iterable[SlotEntry]) -> None:
        context, now = self._context, trio.current_time()
        for entry in sorted(entries, key=lambda one: context.order(one.publisher)):
            slot, publisher = entry.value, entry.publisher
            if publisher == context.me or not isinstance(slot, GroupSlot):
                continue
            if slot.layout != self._mark:
                why = f"it averages another layout or chunk size, {slot.layout.hex()}"
                context.gathering.saw_other_layout(publisher, why, now)
                continue
            context.network.learn_addresses(publisher, slot.addresses)
            candidate = Candidate(publisher, slot.reduces)
            context.gathering.saw_slot(candidate, entry.sequence, now)


# ---- invitations


class Inviting:
    """Both sides of an invitation: inviting others to our list, and answering theirs.

    A peer that is invited answers at once where it stands. To be listed, it joins by a call of its
    own. If two peers that both lead invite each other, each answers that it is with itself. So the
    later one in the hash order learns of the earlier one, and follows it.
    """

    def __init__(self, context: SearchContext, lists: ListsShown) -> None:
        self._context = context
        self._lists = lists

    def invited(self, by: PeerId, invitation: Invitation) -> InvitationAnswer:
        """Answer a peer that says that it leads."""
        context = self._context
        check_terms(invitation.terms, context.terms)
        context.network.learn_addresses(by, invitation.addresses)
        reply, leader = context.gathering.invited(by, trio.current_time())
        context.go_on()
        place = None if leader is None else context.place_of(Candidate(leader))
        return InvitationAnswer(reply, place)

    async def invite(self, invite: SendInvite) -> None:
        """Tell a peer that we lead."""
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
        """Report to the gathering whether a peer is there. Nothing is known about a peer without a
        known address, such as one that has just come: it may be there."""
        network = self._context.network
        if network.link(peer) is None and not network.addresses_of(peer):
            return
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


# ---- joins of others


MOST_HELD = LARGEST_LIST + 256  # joins; each is a request of at most 16 KiB, usually half of one


@dataclass
class _Ticket:
    """A join that waits here, and then its answer."""

    request: JoinRequest
    answer: JoinAnswer | None = None
    answered: trio.Event = field(default_factory=trio.Event)

    def give(self, answer: JoinAnswer) -> None:
        """Set the answer, unless there is one already."""
        if self.answer is None:
            self.answer = answer
            self.answered.set()


class JoinTickets:
    """The joins of others that wait for an answer, each under a numbered ticket.

    The gathering decides about tickets, and knows nothing of what they stand for. `join` handles
    the method: it checks the request, waits, and returns the answer.

    Promise: every join is answered, at the latest when the search ends.

    Invariant: a ticket is here exactly while its join is being handled.

    Easy to get wrong: a waiting peer may leave or die just as it is answered. So the answer is
    stored here first, and a ticket with an answer is not reported to the gathering as gone.
    """

    def __init__(self, context: SearchContext) -> None:
        self._context = context
        self._numbers = itertools.count(1)
        self._tickets: dict[int, _Ticket] = {}

    async def join(self, peer: PeerId, request: JoinRequest) -> JoinAnswer:
        """Hold a join until there is an answer to it. Raises a named refusal if the peer may not
        join us."""
        self._check(peer, request)
        context, gathering = self._context, self._context.gathering
        context.network.learn_addresses(peer, request.addresses)
        number = next(self._numbers)
        ticket = self._tickets[number] = _Ticket(request)
        peers = min(request.entry.peers, context.search.most_peers)
        candidate = Candidate(peer, request.entry.reduces, peers)
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
        """Answer this ticket, if it is still there and has no answer."""
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


# ---- lists that others show


class ListsShown:
    """Judges the signed lists that others show: one makes us a member, another says we are late.

    A list comes from the leader that we asked, from a peer that we asked or invited and that has
    started already, or from a member whose leader died before it could tell everybody.

    Promise: we become a member only by a well-signed list, of a leader that we asked in this
    search, with our entry as we signed it for that leader; and by at most one such list.

    `is_member` is called with the list that makes us a member, and how long it should take to reach
    all members, or 0 (`Group.list_seconds`).

    Easy to get wrong: checking hundreds of signatures pauses, so that other tasks run, and the
    search goes on meanwhile. So ask the gathering after the check, not before, whether a list still
    counts.
    """

    def __init__(self, context: SearchContext, is_member: Callable[[Roster, float], None]) -> None:
        self._context = context
        self._is_member = is_member
        self._started: tuple[PeerId, Roster] | None = None  # which has started without us
        self._signed: dict[bytes, tuple[PeerId, Entry]] = {}  # by nonce; for this leader

    def sign_entry(self, leader: PeerId) -> Entry:
        """Our signed entry, valid only for a list of this leader."""
        entry = self._context.sign_entry(leader)
        self._signed[entry.nonce] = (leader, entry)
        return entry

    async def take_from_leader(self, leader: PeerId, entry: Entry, answer: JoinAnswer) -> None:
        """Become a member by the answer to our join, if we still follow that leader. RosterRefused
        if the list is not valid."""
        context, roster = self._context, answer.roster
        assert roster is not None
        if roster.leader != leader:
            raise WrongLeader(
                f"{leader} answered with a list of {roster.leader}.",
                why="It is broken or hostile.",
                advice="Do not take part in its lists.",
            )
        check_own_entry(roster, entry)
        member_list = MemberList(roster, answer.places)
        context.lists.keep(member_list)
        await check_with_pauses(roster, context.terms, entry, context.search.group_size)
        for place in answer.places:
            if place.peer in roster.members:
                context.learn(place)
        if context.gathering.leader.lists_us(leader):
            ways = ways_to(roster.entries, leader, len(encode(member_list)))
            self._is_member(roster, seconds_to_all(ways))

    async def take(self, roster: Roster) -> bool:
        """Become a member by a list that any peer shows, if it is from a leader that we asked in
        this search and has our entry as we signed it. Returns whether we did."""
        context = self._context
        own = next((entry for entry in roster.entries if entry.peer == context.me), None)
        if own is None or self._signed.get(own.nonce) != (roster.leader, own):
            return False
        await check_with_pauses(roster, context.terms, own, context.search.group_size)
        if not context.gathering.adopted():
            return False
        self._is_member(roster, 0.0)
        context.go_on()
        return True

    async def look_at(self, by: PeerId, roster: Roster) -> None:
        """Look at a list that has started, as a peer says. RosterRefused unless the list proves
        it."""
        if await self.take(roster):
            return
        context = self._context
        fewest = 1 if context.search.may_be_one else FEWEST_MEMBERS
        await check_with_pauses(roster, context.terms, None, LARGEST_GROUP, fewest)
        before, self._started = self._started, (by, roster)
        earlier = context.me in roster.members
        most, now = context.search.most_peers, trio.current_time()
        peers = sum(min(one.peers, most) for one in roster.entries)
        context.gathering.shown(by, roster.members, now, earlier=earlier, peers=peers)
        if context.gathering.started_by != by:
            self._started = before  # the list does not concern us, and lists are large

    def started(self) -> Roster:
        """The list that started without us."""
        assert self._started is not None
        return self._started[1]


# ---- asking a leader


JOIN_OUTLIVES_SECONDS = 1.0  # beyond the gathering's patience: it cancels a join when it gives up


class AskingALeader:
    """Asks a leader to list us, and acts on its answer.

    A join is one call. It is answered when the leader closes its list, seconds later. Meanwhile the
    leader is asked whether it is still there, and given up if it is not (`Patience`).

    Promise: one leader is asked at a time. Asking another one withdraws the join from the last.

    Easy to get wrong: an answer may come after we have begun to follow another peer. So an answer
    is only reported to the gathering, which knows whom we follow.
    """

    def __init__(self, context: SearchContext, lists: ListsShown) -> None:
        self._context = context
        self._lists = lists
        self._scope = trio.CancelScope()

    def follow(self, follow: Follow, nursery: trio.Nursery) -> None:
        """Ask this leader from now on, and no other."""
        self.stop()
        self._scope = trio.CancelScope()
        nursery.start_soon(self._ask_and_tell, follow, self._scope)

    def stop(self) -> None:
        """Withdraw our join from the leader that has it, if any."""
        self._scope.cancel()

    async def _ask_and_tell(self, follow: Follow, scope: trio.CancelScope) -> None:
        """Ask a leader, and report to the gathering how that ended."""
        context, leader = self._context, follow.leader
        entry = self._lists.sign_entry(leader)
        patience = max(0.0, context.gathering.latest - trio.current_time())
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
        """A leader's answer; or the error, if it was silent or refused."""
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
        """Fetch the list that this leader has closed, from the members that it names."""
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
        """Act on the answer to our join. RosterRefused if it is not acceptable."""
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
