"""One search for a group: what gathering.py decides, carried out.

Five things run side by side, and each tells the gathering what it has learnt: the slot is
published, slots are read, time passes, whoever is first is asked to list us, and others are
invited. The handlers of `join` and `invite` come in from outside (matchmaking.py).

Promise: nothing outlives `run`: joins that still wait are answered, all else is cancelled.

Easy to get wrong: the gathering may change its mind at every call of it, so its effects are
carried out (`_go_on`) after each, and nothing is remembered here of what it decided before.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from protocols.errors import (
    Busy,
    PotluckError,
)
from protocols.identity import PeerId
from protocols.messages import LONGEST_MILLISECONDS
from protocols.moshpit.gathering import Gathering, GatheringSettings
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
    Reply,
    SendAway,
    SendOn,
    StartedWithoutUs,
)
from protocols.moshpit.group import Group, NoGroup, Search, late, nobody_else, not_together
from protocols.moshpit.known_peers import Absence
from protocols.moshpit.matchmaking_messages import (
    INVITE,
    JOIN,
    LAYOUT_MARK_BYTES,
    MOST_PASSED_OVER,
    NOT_HERE,
    GroupSlot,
    Invitation,
    InvitationAnswer,
    JoinAnswer,
    JoinReply,
    JoinRequest,
    Place,
    short_enough,
)
from protocols.moshpit.patience import Patience, absence_of
from protocols.moshpit.roster import (
    LARGEST_GROUP,
    NONCE_BYTES,
    Entry,
    Roster,
    Terms,
    check_entry,
    check_own_entry,
    check_terms,
    check_with_pauses,
    hash_order,
    sign_entry,
    sign_roster,
)
from protocols.moshpit.roster_refusals import NotSigned, WrongLeader

if TYPE_CHECKING:
    from protocols.dht.reading import Entry as SlotEntry
    from protocols.dht.service import Dht
    from protocols.network import Network
    from protocols.rpc import Rpc

log = logging.getLogger("potluck.moshpit")

FIRST_READS_SECONDS = (0.02, 0.05, 0.1, 0.2)  # between the first reads of the slots,
READ_SECONDS = 0.5  # and between all that follow
PUBLISH_AFTER_SECONDS = 0.15  # the leader of the last time answers sooner, or it is not there
FULL_READ_EVERY = 4  # reads; the others ask the first few replicas only
SLOT_OUTLIVES_SECONDS = 5.0  # the search, so that a peer that is about to come still sees it


JOIN_OUTLIVES_SECONDS = 1.0  # the gathering, which ends it when it gives a leader up
MOST_HELD = LARGEST_GROUP + 256  # joins; each is a request of at most 16 KiB, usually half of one
ADDRESSES_IN_A_LIST = 3  # of each member: all members get those of all


@dataclass
class _Ticket:
    """A join that waits here, and then its answer."""

    request: JoinRequest
    answer: JoinAnswer | None = None
    answered: trio.Event = field(default_factory=trio.Event)


class GroupSearch:
    """Made by `Matchmaker.find_group`. `met_before` are those who were in such a group the last
    time; `started` is told every list that has started."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        dht: Dht,
        search: Search,
        met_before: Sequence[Candidate],
        started: Callable[[Roster], None],
    ) -> None:
        self.terms: Terms = search.terms
        self._network, self._rpc, self._dht = network, rpc, dht
        self._patience = Patience(network, rpc)
        self._search = search
        self._met_before = met_before
        self._started = started
        self._me = network.peer_id
        self._began = trio.current_time()
        self._gathering = Gathering(
            self._me,
            self._order,
            GatheringSettings(
                search.group_size,
                search.matchmaking_seconds,
                search.offer.reduces,
                search.expected,
            ),
            self._began,
        )
        self._numbers = itertools.count(1)
        self._tickets: dict[int, _Ticket] = {}
        self._shown: dict[PeerId, Roster] = {}
        self._signed: dict[bytes, tuple[PeerId, Entry]] = {}  # by nonce; for this leader
        self._changed = trio.Event()
        self._over = trio.Event()
        self._asking = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._outcome: Group | NoGroup | None = None

    async def run(self) -> Group:
        """Search, once."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                linked = [one for one in self._met_before if self._network.link(one.peer)]
                follows = self._gathering.remembers(linked, self._began)
                self._go_on()
                nursery.start_soon(self._publish, PUBLISH_AFTER_SECONDS if follows else 0.0)
                nursery.start_soon(self._read_slots)
                nursery.start_soon(self._keep_time)
                try:
                    await self._over.wait()
                finally:
                    self._gathering.stop()  # nothing is started from here on
                nursery.cancel_scope.cancel()
        finally:
            for ticket in self._tickets.values():
                _answer(ticket, NOT_HERE)
        if isinstance(self._outcome, Group):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    def _order(self, peer: PeerId) -> bytes:
        return hash_order(self.terms.key, peer)

    def _go_on(self) -> None:
        """Carry out what the gathering has decided."""
        for effect in self._gathering.effects():
            self._carry_out(effect)
        if self._gathering.following is None:
            self._asking.cancel()
        self._changed.set()
        self._changed = trio.Event()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Follow():
                self._asking.cancel()
                self._start(self._follow, effect)
            case Invite():
                self._start(self._invite, effect)
            case Probe(peer):
                self._start(self._probe, peer)
            case SendOn(ticket, leader):
                place = self._place(Candidate(leader))
                self._answer(ticket, JoinAnswer(JoinReply.SENT_ON, places=(place,)))
            case SendAway(ticket):
                self._answer(ticket, NOT_HERE)
            case Regroup(ticket, group):
                places = tuple(self._place(one) for one in group)
                self._answer(ticket, JoinAnswer(JoinReply.REGROUPED, places=places))
            case Lead(tickets):
                self._lead(tickets)
            case End(ending):
                self._end(ending)

    def _start(self, task: Callable[..., object], *arguments: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(task, *arguments)  # type: ignore[arg-type]

    # -- what others ask

    async def join(self, peer: PeerId, request: JoinRequest) -> JoinAnswer:
        """Hold a join until there is an answer to it."""
        self._check_join(peer, request)
        self._network.learn_addresses(peer, request.addresses)
        number = next(self._numbers)
        ticket = self._tickets[number] = _Ticket(request)
        candidate = Candidate(peer, request.entry.reduces)
        patience = request.patience_ms / 1000
        try:
            self._gathering.join_came(candidate, number, request.passed_over, patience, _now())
            self._go_on()
            await ticket.answered.wait()
        finally:
            del self._tickets[number]
            if ticket.answer is None:
                self._gathering.join_gone(peer, number, _now())
                self._go_on()
        return ticket.answer or NOT_HERE

    def _check_join(self, peer: PeerId, request: JoinRequest) -> None:
        check_terms(request.terms, self.terms)
        entry = request.entry
        if entry.peer != peer:
            raise NotSigned(
                f"{peer} asks to list {entry.peer}.",
                why="Everybody joins for itself.",
                advice="Upgrade whatever made this request.",
            )
        if not self._search.offer.reduces or (
            entry.reduces and self._order(peer) < self._order(self._me)
        ):
            raise WrongLeader(
                f"{self._me} does not lead a group with {peer} in it.",
                why="It cannot be dialled, or comes later in the order of the hashes.",
                advice="Upgrade whatever made this request.",
            )
        if len(self._tickets) >= MOST_HELD:
            raise Busy(
                f"{len(self._tickets)} joins wait here already.",
                why="A group has no more members than that.",
                advice="Wait for the next round.",
            )
        check_entry(entry, self.terms, self._me)

    def invite(self, peer: PeerId, invitation: Invitation) -> InvitationAnswer:
        """Somebody leads, it says."""
        check_terms(invitation.terms, self.terms)
        self._network.learn_addresses(peer, invitation.addresses)
        reply, leader = self._gathering.invited(peer, _now())
        self._go_on()
        place = None if leader is None else self._place(Candidate(leader))
        return InvitationAnswer(reply, place)

    # -- slots and time

    async def _publish(self, after_seconds: float) -> None:
        """Put the slot, unless we are held by a leader before: then it has a slot, and that will
        do for as long as it is there."""
        with trio.move_on_after(after_seconds):
            while not self._gathering.is_held():
                await self._changed.wait()
        while self._gathering.is_held():
            await self._changed.wait()
        if self._over.is_set():
            return
        reduces, addresses = self._search.offer.reduces, self._own_addresses()
        mark = self.terms.layout_digest[:LAYOUT_MARK_BYTES]
        seconds = self._search.matchmaking_seconds + SLOT_OUTLIVES_SECONDS
        try:
            await self._dht.put(
                self.terms.key, GroupSlot(reduces, mark, addresses), seconds, keep_up=False
            )
        except PotluckError as error:  # those who joined us know us without it
            log.warning("nobody keeps our slot under %s: %s", self.terms.key, error)

    async def _read_slots(self) -> None:
        pauses = itertools.chain(FIRST_READS_SECONDS, itertools.repeat(READ_SECONDS))
        for number in itertools.count(1):
            while not self._gathering.looks_for_slots:
                await self._changed.wait()
            start = _now()
            try:
                entries = await self._dht.get(
                    self.terms.key, latest_enough=number % FULL_READ_EVERY != 0
                )
            except PotluckError as error:  # those who know us may still invite us
                log.debug("the slots under %s could not be read: %s", self.terms.key, error)
            else:
                self._take_slots(entries.values())
            self._gathering.slots_were_read(_now() - start, _now())
            self._go_on()
            await trio.sleep(next(pauses))

    def _take_slots(self, entries: Iterable[SlotEntry]) -> None:
        mark = self.terms.layout_digest[:LAYOUT_MARK_BYTES]
        for entry in sorted(entries, key=lambda one: self._order(one.publisher)):
            slot = entry.value
            if entry.publisher == self._me or not isinstance(slot, GroupSlot):
                continue
            if slot.layout != mark:
                why = f"it averages another layout, {slot.layout.hex()}"
                self._gathering.saw_other_layout(entry.publisher, why, _now())
                continue
            self._network.learn_addresses(entry.publisher, slot.addresses)
            candidate = Candidate(entry.publisher, slot.reduces)
            self._gathering.saw_slot(candidate, entry.sequence, _now())

    async def _keep_time(self) -> None:
        while True:
            with trio.move_on_at(self._gathering.next_moment):
                await self._changed.wait()
            self._gathering.tick(_now())
            self._go_on()

    # -- asking to be listed

    async def _follow(self, follow: Follow) -> None:
        """Ask a leader, and tell the gathering how that ended."""
        leader = follow.leader
        nonce = self._nonce()
        entry = sign_entry(self._network.identity, self.terms, leader, self._search.offer, nonce)
        self._signed[nonce] = (leader, entry)
        patience = max(0.0, self._gathering.deadline - _now())
        request = JoinRequest(
            self.terms,
            entry,
            follow.passed_over[:MOST_PASSED_OVER],
            min(LONGEST_MILLISECONDS, int(patience * 1000)),
            self._own_addresses(),
        )
        with trio.CancelScope() as scope:
            self._asking = scope
            answer = await self._ask(leader, request)
        if scope.cancelled_caught:
            return
        try:
            if isinstance(answer, PotluckError):
                raise answer
            await self._take(leader, entry, answer)
        except PotluckError as error:
            log.info("%s does not list us under %s: %s", leader, self.terms.key, error)
            self._gathering.left_by(leader, absence_of(error), error.what, _now())
        self._go_on()

    async def _ask(self, leader: PeerId, request: JoinRequest) -> JoinAnswer | PotluckError:
        """A leader's answer, or why there is none: it was silent, or said so."""
        answers: list[JoinAnswer | PotluckError] = []
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                answers.append(await self._patience.silence_of(leader, self._answered))
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            seconds = self._gathering.gives_up_at - _now() + JOIN_OUTLIVES_SECONDS
            try:
                answer = await self._rpc.call(leader, JOIN, request, timeout=seconds)
                answers.append(answer)
            except PotluckError as error:
                answers.append(error)
            nursery.cancel_scope.cancel()
        return answers[0]

    def _answered(self, leader: PeerId, round_trip_seconds: float) -> None:
        self._gathering.leader_answered(leader, round_trip_seconds, _now())
        self._go_on()

    async def _take(self, leader: PeerId, entry: Entry, answer: JoinAnswer) -> None:
        """Act on an answer to our join. RosterRefused if it is not acceptable."""
        gathering = self._gathering
        match answer.reply:
            case JoinReply.LISTED if answer.roster is not None:
                roster = answer.roster
                if roster.leader != leader:
                    raise WrongLeader(
                        f"{leader} answered with a list of {roster.leader}.",
                        why="It is broken or hostile.",
                        advice="Do not take part in its lists.",
                    )
                check_own_entry(roster, entry)
                await self._check(roster, self._search.group_size, entry)
                for place in answer.places:
                    if place.peer in roster.members:
                        self._learn(place)
                if gathering.listed(leader):
                    self._is_member(roster)
            case JoinReply.SENT_ON if answer.places:
                gathering.sent_on(leader, self._learn(answer.places[0]), _now())
            case JoinReply.REGROUPED:
                group = tuple(self._learn(place) for place in answer.places)
                gathering.regrouped(leader, group, _now())
            case JoinReply.STARTED if answer.roster is not None:
                await self._look_at(leader, answer.roster)
            case _:
                why = "it looks for no group now"
                gathering.left_by(leader, Absence.ELSEWHERE, why, _now())

    async def _look_at(self, by: PeerId, roster: Roster) -> None:
        """Somebody shows a list that has started. RosterRefused unless it proves that."""
        if await self.take(roster):
            return
        await self._check(roster, LARGEST_GROUP, None)
        self._shown[by] = roster
        earlier = self._me in roster.members
        self._gathering.shown(by, roster.members, _now(), earlier=earlier)

    async def take(self, roster: Roster) -> bool:
        """Become a member by a list that somebody shows, if it is that of a leader that we asked
        in this search, and our entry is in it as we signed it."""
        own = next((entry for entry in roster.entries if entry.peer == self._me), None)
        if own is None or self._signed.get(own.nonce) != (roster.leader, own):
            return False
        await self._check(roster, self._search.group_size, own)
        if not self._gathering.adopted():
            return False
        self._is_member(roster)
        self._go_on()
        return True

    async def _check(self, roster: Roster, largest: int, mine: Entry | None) -> None:
        await check_with_pauses(roster, self.terms, mine, largest)

    # -- inviting

    async def _invite(self, invite: Invite) -> None:
        peer = invite.peer
        if not invite.reduces and self._network.link(peer) is None:
            self._gathering.cannot_be_invited(peer, _now())
            self._go_on()
            return
        invitation = Invitation(self.terms, short_enough(self._network.addresses()))
        start = _now()
        try:
            answer = await self._rpc.call(
                peer, INVITE, invitation, timeout=self._patience.seconds_with(peer)
            )
            await self._take_reply(peer, answer, self._patience.round_trip(peer, start))
        except PotluckError as error:
            self._gathering.not_met(peer, absence_of(error), error.what, _now())
        self._go_on()

    async def _take_reply(self, peer: PeerId, answer: InvitationAnswer, seconds: float) -> None:
        if answer.reply == Reply.STARTED and answer.roster is not None:
            await self._look_at(peer, answer.roster)
            return
        known = answer.reply in (Reply.COMING, Reply.WITH_ANOTHER)
        reply = Reply(answer.reply) if known else Reply.NOT_HERE
        leader = None if answer.leader is None else self._learn(answer.leader)
        self._gathering.invitation_answered(peer, reply, leader, seconds, _now())

    async def _probe(self, peer: PeerId) -> None:
        try:
            await self._patience.probe(peer)
        except PotluckError as error:
            self._gathering.not_met(peer, absence_of(error), error.what, _now())
            self._go_on()

    # -- endings

    def _lead(self, tickets: dict[PeerId, int]) -> None:
        """Close the list, sign it, and give it to all who wait."""
        identity = self._network.identity
        own = sign_entry(identity, self.terms, self._me, self._search.offer, self._nonce())
        joins = [self._tickets[number].request for number in tickets.values()]
        entries = [own, *(join.entry for join in joins)]
        started_ms = max(0, int(self._network.wall_time() * 1000))
        roster = sign_roster(identity, self.terms, entries, started_ms, self._nonce())
        places = tuple(
            Place(join.entry.peer, join.entry.reduces, join.addresses[:ADDRESSES_IN_A_LIST])
            for join in joins
            if join.addresses
        )
        listed = JoinAnswer(JoinReply.LISTED, roster, places)
        for number in tickets.values():
            self._answer(number, listed)
        self._is_member(roster)

    def _is_member(self, roster: Roster) -> None:
        self._show_to_all(roster)
        self._finish(Group(roster, roster.index_of(self._me), roster.round_id))

    def _end(self, ending: Ending) -> None:
        match ending:
            case StartedWithoutUs(by):
                self._show_to_all(self._shown[by])
                self._finish(late(self._shown[by]))
            case Nobody(unreachable):
                self._finish(nobody_else(self.terms.key, unreachable))
            case NotTogether(reasons):
                self._finish(not_together(self.terms.key, reasons))

    def _show_to_all(self, roster: Roster) -> None:
        """It has started; whoever waits here or comes later is shown it."""
        self._started(roster)
        for ticket in self._tickets.values():
            _answer(ticket, JoinAnswer(JoinReply.STARTED, roster))

    def _finish(self, outcome: Group | NoGroup) -> None:
        self._outcome = outcome
        self._over.set()

    # -- small steps

    def _answer(self, number: int, answer: JoinAnswer) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None:
            _answer(ticket, answer)

    def _place(self, candidate: Candidate) -> Place:
        if candidate.peer == self._me:
            addresses = self._network.addresses()
        else:
            addresses = self._network.addresses_of(candidate.peer)
        return Place(candidate.peer, candidate.reduces, short_enough(addresses))

    def _learn(self, place: Place) -> Candidate:
        if place.peer != self._me:
            self._network.learn_addresses(place.peer, place.addresses)
        return Candidate(place.peer, place.reduces)

    def _own_addresses(self) -> tuple[str, ...]:
        return short_enough(self._network.addresses()) if self._search.offer.reduces else ()

    def _nonce(self) -> bytes:
        return self._network.random.randbytes(NONCE_BYTES)


def _answer(ticket: _Ticket, answer: JoinAnswer) -> None:
    if ticket.answer is None:
        ticket.answer = answer
        ticket.answered.set()


def _now() -> float:
    return trio.current_time()
