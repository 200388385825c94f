"""One peer's part in finding a group under a key: a state machine without I/O, clock or chance.

Everybody who can be dialled may lead; the first in the hash order does. A peer is in one of two
states:

    following  it has asked one peer, earlier in the order, to be listed, and waits
    leading    it knows of nobody earlier: it invites whom it sees, holds their joins, and closes
               the list (a peer that can only dial out never leads, and waits in this state)

    leading    hears of somebody earlier            following; once that one has answered, whoever
                                                    waits here is sent on to it
    following  its leader answers with the list     the end: a member
    following  its leader sends it on               following somebody earlier still
    following  its leader is silent or gone         that one is passed over; the next
    leading    the list is closed (ClosingTime)     the end: the leader
    either     is shown a list with others, larger than what waits here: the end, late
    either     deadline                             the end

This file is what may be heard, and what it means: each method notes that, in known_peers.py,
waiting_joins.py and closing_time.py, and lead_or_follow.py draws the conclusions. What the one
says whom we follow is `leader`, in leaders_word.py.

Promises: only the leader itself takes a peer out of its list, by sending it on, so a peer is never
in two lists, unless its leader was silent; then it has another's list and takes no part in that
one. Following goes from later to earlier peers only, so it cannot go in circles. A peer that does
not answer is waited for once, whatever its slot says, until it is heard of anew. Nobody's
messages can keep a list open beyond the deadline.

Easy to get wrong: hearing *of* a peer (a slot, somebody's word) is not hearing *from* it. Those
who wait here are sent on only to somebody who has answered us, or a dead peer's slot would cost
everybody a timeout one after the other; and only the peer itself, or a newer slot of it, makes a
peer count again that was passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protocols.identity import PeerId
from protocols.moshpit.awaited import Awaited
from protocols.moshpit.closing_time import ClosingTime
from protocols.moshpit.gathering_effects import (
    Candidate,
    Effect,
    Reply,
    SendAway,
    StartedWithoutUs,
)
from protocols.moshpit.gathering_parts import GatheringParts
from protocols.moshpit.known_peers import Absence, KnownPeers
from protocols.moshpit.lead_or_follow import LeadOrFollow
from protocols.moshpit.leaders_word import LeadersWord
from protocols.moshpit.waiting_joins import WaitingJoins


@dataclass(frozen=True)
class GatheringSettings:
    """`reduces`: whether this peer can be dialled. `expected` counts this peer. `awaited`: who of
    those is known by name. `unwelcome`: whose joins are refused here. `splits`: more peers than fit
    become several groups, as a round of a grid needs; else those who do not fit are told that the
    group has begun without them."""

    group_size: int
    seconds: float
    reduces: bool = True
    expected: int | None = None
    awaited: frozenset[PeerId] = frozenset()
    unwelcome: frozenset[PeerId] = frozenset()
    splits: bool = True


class Gathering:
    """See the module. Times are the caller's; `effects` has to be drained after every call."""

    def __init__(
        self,
        me: PeerId,
        order: Callable[[PeerId], bytes],
        settings: GatheringSettings,
        now: float,
    ) -> None:
        self.me = me
        self._order = order
        self._settings = settings
        self._known = KnownPeers(me, order)
        self._joins = WaitingJoins()
        self._awaited = Awaited(settings.awaited - {me})
        self._closing = ClosingTime(
            self._known,
            self._joins,
            seconds=settings.seconds,
            group_size=settings.group_size,
            expected=settings.expected,
            awaited=self._awaited,
            now=now,
        )
        parts = GatheringParts(
            me,
            order,
            group_size=settings.group_size,
            splits=settings.splits,
            known=self._known,
            joins=self._joins,
            awaited=self._awaited,
            closing=self._closing,
        )
        self._course = LeadOrFollow(parts, reduces=settings.reduces, now=now)
        self.leader = LeadersWord(parts, self._course)

    def effects(self) -> list[Effect]:
        """What is to be done now; drained."""
        return self._course.effects()

    @property
    def ended(self) -> bool:
        return self._course.ended

    @property
    def following(self) -> PeerId | None:
        """Whom we have asked to be listed; None: we lead, if we can be dialled."""
        return self._course.following

    @property
    def started_by(self) -> PeerId | None:
        """Who has shown the list that has started without us, the last one if there are several."""
        return self._course.started_by

    @property
    def looks_for_slots(self) -> bool:
        """Whether reading slots is of use: a follower is told by its leader."""
        return not self.ended and self.following is None

    def is_held(self) -> bool:
        """Whether a leader that is there holds our join."""
        return self.following is not None and self._course.has_answered and not self.ended

    @property
    def gives_up_at(self) -> float:
        return self._closing.gives_up_at

    @property
    def deadline(self) -> float:
        return self._closing.deadline

    def stop(self) -> None:
        """The search is given up."""
        self._course.ended = True

    # -- what is known and read

    def remembers(self, group: Sequence[Candidate], now: float) -> bool:
        """Who was here the last time, and can be reached: perhaps they come again. Whoever will
        lead them then is asked, or asks, without waiting for slots; nobody is waited for.
        Returns whether we expect another to lead.
        """
        able = [self.me] if self._settings.reduces else []
        able += [one.peer for one in group if one.reduces]
        first = min(able, key=self._order, default=self.me)
        for candidate in group:
            if first in (self.me, candidate.peer):
                known = self._known.heard_of(candidate, now)
                if known is not None:
                    known.waited_until = now
        self._course.reconsider(now)
        return first != self.me

    def saw_slot(self, candidate: Candidate, sequence: int, now: float) -> None:
        """Somebody has a slot under the key."""
        known = self._known.heard_of(candidate, now)
        if known is None or not known.is_newer(sequence):
            return
        known.has_slot(sequence, now)
        self._closing.came(known.peer, now)
        self._course.reconsider(now)

    def saw_other_layout(self, peer: PeerId, why: str, now: float) -> None:
        """Somebody has a slot under the key and averages something else."""
        known = self._known.heard_of(Candidate(peer), now)
        if known is not None and peer != self.following and peer not in self._joins:
            known.pass_over(Absence.AT_ODDS, why)
            self._awaited.is_lost(peer)

    def slots_were_read(self, now: float) -> None:
        """A read has ended, well or not."""
        self._closing.looked(now)
        self.tick(now)

    # -- what others ask

    def join_came(
        self,
        candidate: Candidate,
        ticket: int,
        passed_over: Iterable[PeerId],
        patience_seconds: float,
        now: float,
    ) -> None:
        """Somebody asks to be listed, and has not heard from those that it passed over. The shell
        has checked that it may: it is signed, and of someone who does not come before us."""
        known = self._known.heard_of(candidate, now)
        if candidate.peer in self._joins:
            self._course.add(SendAway(self._joins.release(candidate.peer)))
        if known is None or self.ended:
            self._course.add(SendAway(ticket))
            return
        if candidate.peer in self._settings.unwelcome:
            known.pass_over(Absence.AT_ODDS, "it has held up a round")
            self._awaited.is_lost(candidate.peer)
            self._closing.refused(candidate.peer)
            self._course.add(SendAway(ticket))
            self._course.reconsider(now)
            return
        known.heard_from(now)
        known.reduces = candidate.reduces  # in its own signed words
        self._joins.add(candidate.peer, ticket, passed_over, now)
        self._awaited.is_there(candidate.peer)
        self._closing.joined(patience_seconds, now)
        self._closing.came(known.peer, now)
        self._course.reconsider(now)

    def join_gone(self, peer: PeerId, ticket: int, now: float) -> None:
        """Somebody no longer waits: it has left, or died."""
        if self._joins.ticket_of(peer) != ticket:
            return
        self._joins.release(peer)
        self._awaited.has_left(peer)
        known = self._known.get(peer)
        if known is not None:
            known.ask_again(now)
        self._course.reconsider(now)

    def invited(self, by: PeerId, now: float) -> tuple[Reply, PeerId | None]:
        """Somebody says that it leads. What to answer, and who leads as far as we know."""
        known = self._known.heard_of(Candidate(by), now)
        if known is None or self.ended:
            return Reply.NOT_HERE, None
        known.heard_from(now)
        self._awaited.is_there(by)
        self._closing.came(known.peer, now)
        silent = self.following
        if silent not in (None, by) and not self._course.has_answered and self._course.has_probed:
            assert silent is not None
            self._course.let_go_of(silent, now)
            self._known.pass_over(silent, Absence.UNREACHABLE, "it was silent")
        self._course.reconsider(now)
        if self.following == by:
            return Reply.COMING, None
        if self.following is None and not self._settings.reduces:
            return Reply.NOT_HERE, None
        return Reply.WITH_ANOTHER, self.following or self.me

    # -- what anybody may say

    def adopted(self) -> bool:
        """Somebody has shown the list of a leader that we had asked in this search, with our entry
        in it as we signed it. Whether we are a member now: it may be the only way left, if that
        leader died while it handed out its list."""
        if self.ended:
            return False
        self._course.ended = True
        return True

    def shown(
        self, by: PeerId, members: Iterable[PeerId], now: float, *, earlier: bool = False
    ) -> None:
        """Somebody, whom we had asked, shows a well-signed list under our key that has started.

        `earlier`: our entry in it is of another search than this. (If it is of this one, we are a
        member: `adopted`.)
        """
        followed = self._course.let_go_of(by, now)
        members = tuple(members)
        if self.ended:
            return
        for member in (by, *members):
            self._awaited.is_lost(member)
        if self.following is not None:
            pass  # our leader knows better: its list, perhaps this very one, may be on its way
        elif earlier:
            self._known.pass_over(by, Absence.ELSEWHERE, "it is in a group of an earlier attempt")
        elif self._known.is_restricted and not followed:
            self._known.pass_over(by, Absence.ELSEWHERE, "it has started in another group")
        else:
            for member in (by, *members):
                self._known.pass_over(member, Absence.ELSEWHERE, "it has started in another group")
            self._course.started_by = by
            if len(members) > 1 + len(self._joins):
                self._course.end(StartedWithoutUs(by))
        self._course.reconsider(now)

    def invitation_answered(
        self, peer: PeerId, reply: Reply, leader: Candidate | None, seconds: float, now: float
    ) -> None:
        """What somebody whom we invited has answered, after so long. (`shown`: it has started.)"""
        self._closing.measured(seconds)
        known = self._known.get(peer)
        if known is not None and not self.ended:
            self._awaited.is_there(peer)
            if leader is not None:
                self._known.heard_of(leader, now)
            if reply is Reply.NOT_HERE:
                known.pass_over(Absence.ELSEWHERE, "it looks for no group now")
            elif reply is Reply.COMING:
                known.comes(now)
            else:
                known.is_with_another(now)
        self._course.reconsider(now)

    def not_met(self, peer: PeerId, absence: Absence, why: str, now: float) -> None:
        """Somebody whom we invited or probed cannot be reached, or refuses us by name."""
        if peer == self.following and not self._course.has_answered:
            self._course.let_go_of(peer, now)
        known = self._known.get(peer)
        if known is not None and peer not in self._joins and peer != self.following:
            known.pass_over(absence, why)
        self._awaited.is_lost(peer)
        self._course.reconsider(now)

    def is_there(self, peer: PeerId) -> None:
        """Somebody whom we probed has answered. It may look for no group yet."""
        self._awaited.is_there(peer)

    def link_lost(self, peer: PeerId, now: float) -> None:
        """There is no link with this peer any more."""
        self._awaited.is_lost(peer)
        self._course.reconsider(now)

    def cannot_be_invited(self, peer: PeerId, now: float) -> None:
        """Somebody can only dial out, and there is no link with it."""
        known = self._known.get(peer)
        if known is not None:
            known.comes_by_itself(now)
        self._course.reconsider(now)

    # -- time

    def tick(self, now: float) -> None:
        """Do what is due."""
        self._course.tick(now)

    @property
    def next_moment(self) -> float:
        """When to tick at the latest."""
        return self._course.next_moment
