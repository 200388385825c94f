"""One peer's part in finding a group under a key: a state machine without I/O, clock or chance.

Every peer that can be dialled may lead; of those that are there, the first in the hash order does.
A peer is in one of two states:

    following  it has asked one peer, earlier in the order, to list it, and waits
    leading    it knows of no earlier peer: it invites the peers it sees, holds their joins, and
               closes the list (a peer that can only dial out waits in this state, but never leads)

    leading    hears of an earlier peer             following; once that peer has answered, those
                                                    that wait here are sent on to it
    following  its leader answers with the list     end: it is a member
    following  its leader sends it on               following a still earlier peer
    following  its leader is silent or gone         the leader is passed over for the next peer
    leading    the list is closed (ClosingTime)     end: it is the leader
    either     is shown a list of others, larger    end: too late
               than what waits here
    either     deadline                             end

In this file: `Gathering` takes what is heard, and notes it in known_peers.py and closing_time.py;
`split` makes several groups of too many peers; `LeadOrFollow` decides between the two states, and
what to do in them; `LeadersWord` takes what the followed leader says.

Promises:

- Only a leader itself takes a peer out of its list, by sending it on. So a peer is never in two
  lists, unless its leader was silent; then it has another's list and takes no part in that one.
- Following goes only from later to earlier peers, so it cannot go in circles.
- A peer that does not answer is waited for once, whatever its slot says, until it sends a message
  or publishes a newer slot.
- No message can keep a list open beyond the deadline, or `latest` while too few have come.

Easy to get wrong: hearing *of* a peer (by a slot, or from another peer) is not hearing *from* it.
Waiting peers are sent on only to a peer that has answered us. Otherwise the slot of a dead peer
would cost each of them a timeout, one after the other. And a peer that was passed over counts again
only by its own message, or by a newer slot of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from protocols.identity import PeerId
from protocols.moshpit.closing_time import SHORTEST_PATIENCE_SECONDS, ClosingTime
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
from protocols.moshpit.group import Search
from protocols.moshpit.known_peers import Absence, Awaited, InvitablePeer, KnownPeers, WaitingJoins


class Gathering:
    """The state machine. The caller passes the time, and must drain `effects` after every call."""

    def __init__(
        self,
        me: PeerId,
        order: Callable[[PeerId], bytes],
        search: Search,
        now: float,
    ) -> None:
        self.me = me
        self._order = order
        self._unwelcome, self._reduces = search.unwelcome, search.offer.reduces
        self._fewest = 0 if search.splits else search.fewest
        unled = (one for one in search.unled if not self._reduces or order(one) < order(me))
        self._known = KnownPeers(me, order, frozenset(unled))
        self._joins = WaitingJoins(me, search.seat_of)
        awaited = search.awaited or frozenset()
        self._awaited = Awaited(awaited - {me}, search.coming - {me}, search.lost)
        self._closing = ClosingTime(
            self._known,
            self._joins,
            seconds=search.matchmaking_seconds,
            more_seconds=search.more_seconds,
            group_size=search.group_size,
            expected=search.expected,
            awaited=self._awaited,
            replaces=search.most_peers > 1,
            missing=search.fewest - search.offer.peers,
            for_more_seconds=search.for_more_seconds,
            now=now,
        )
        parts = GatheringParts(
            me,
            order,
            group_size=search.group_size,
            splits=search.splits,
            known=self._known,
            joins=self._joins,
            awaited=self._awaited,
            closing=self._closing,
        )
        self._course = LeadOrFollow(
            parts, reduces=self._reduces, may_be_one=search.may_be_one, now=now
        )
        self.leader = LeadersWord(parts, self._course)

    def effects(self) -> list[Effect]:
        """The effects to carry out now. Drains them."""
        return self._course.effects()

    @property
    def ended(self) -> bool:
        return self._course.ended

    @property
    def following(self) -> PeerId | None:
        """The peer that we have asked to list us. None: we lead, if we can be dialled."""
        return self._course.following

    @property
    def started_by(self) -> PeerId | None:
        """The peer that showed the list that started without us; the last one, if several did."""
        return self._course.started_by

    @property
    def looks_for_slots(self) -> bool:
        """Whether reading slots is useful. It is not for a follower: its leader tells it."""
        return not self.ended and self.following is None

    def is_held(self) -> bool:
        """Whether a leader that is there holds our join."""
        return self.following is not None and self._course.has_answered and not self.ended

    @property
    def gives_up_at(self) -> float:
        return self._closing.gives_up_at

    @property
    def latest(self) -> float:
        """By when the list is closed, whoever is missing."""
        return self._closing.latest

    def stop(self) -> None:
        """Give up the search."""
        self._course.ended = True

    # -- slots, and what is remembered

    def remembers(self, group: Sequence[Candidate], now: float) -> bool:
        """Note the members of the last groups that can be reached: they may come again. If so, they
        are asked or invited without waiting for slots. The list does not wait for any of them.
        Returns whether we expect another peer to lead.
        """
        for candidate in group:
            known = self._known.heard_of(candidate, now)
            if known is not None:
                known.waited_until = now
        self._course.reconsider(now)
        return self.following is not None

    def saw_slot(self, candidate: Candidate, sequence: int, now: float) -> None:
        """A peer has a slot under the key."""
        known = self._known.heard_of(candidate, now)
        if known is None or not known.is_newer(sequence):
            return
        if known.is_unled:
            self._leave_out(known.peer, now)
            return
        known.has_slot(sequence, now)
        self._closing.came(known.peer, now)
        self._course.reconsider(now)

    def saw_other_layout(self, peer: PeerId, why: str, now: float) -> None:
        """A peer has a slot under the key, and averages something else."""
        known = self._known.heard_of(Candidate(peer), now)
        if known is not None and peer != self.following and peer not in self._joins:
            known.pass_over(Absence.AT_ODDS, why)
            self._awaited.is_lost(peer)

    def slots_were_read(self, now: float) -> None:
        """A reading of the slots has ended, successfully or not."""
        self._closing.looked(now)
        self.tick(now)

    # -- requests of others

    def join_came(
        self,
        candidate: Candidate,
        ticket: int,
        passed_over: Iterable[PeerId],
        patience_seconds: float,
        now: float,
    ) -> None:
        """A peer asks to be listed. It has not heard from the peers that it has passed over. The
        shell has checked that it may ask: the join is signed, and the peer does not come before us.
        """
        known = self._known.heard_of(candidate, now)
        if candidate.peer in self._joins:
            self._course.add(SendAway(self._joins.release(candidate.peer)))
        if known is None or self.ended:
            self._course.add(SendAway(ticket))
            return
        if candidate.peer in self._unwelcome:
            known.pass_over(Absence.AT_ODDS, "it has held up a round")
            self._course.add(SendAway(ticket))
            self._leave_out(candidate.peer, now)
            return
        known.heard_from(now)
        known.reduces = candidate.reduces  # it has signed this
        until = now + max(SHORTEST_PATIENCE_SECONDS, patience_seconds)
        self._joins.add(candidate, ticket, passed_over, until, now)
        self._awaited.is_there(candidate.peer)
        self._closing.joined(now)
        self._closing.came(known.peer, now)
        self._course.reconsider(now)

    def _leave_out(self, peer: PeerId, now: float) -> None:
        """The peer is here, but nobody waits for it."""
        self._awaited.is_lost(peer)
        self._closing.refused(peer)
        self._course.reconsider(now)

    def join_gone(self, peer: PeerId, ticket: int, now: float) -> None:
        """A peer no longer waits: it has left, or died."""
        if self._joins.ticket_of(peer) != ticket:
            return
        self._joins.release(peer)
        self._awaited.has_left(peer)
        known = self._known.get(peer)
        if known is not None:
            known.ask_again(now)
        self._course.reconsider(now)

    def invited(self, by: PeerId, now: float) -> tuple[Reply, PeerId | None]:
        """A peer says that it leads. Returns the answer, and the leader as far as we know."""
        known = self._known.heard_of(Candidate(by), now)
        if known is None or self.ended:
            return Reply.NOT_HERE, None
        if known.is_unled:
            self._leave_out(by, now)
        else:
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
        if self.following is None and not self._reduces:
            return Reply.NOT_HERE, None
        return Reply.WITH_ANOTHER, self.following or self.me

    # -- messages that any peer may send

    def adopted(self) -> bool:
        """A peer has shown the list of a leader that we asked in this search, with our entry as we
        signed it. Returns whether we are a member now. If that leader died while it handed out its
        list, there may be no other way to become one."""
        if self.ended:
            return False
        self._course.ended = True
        return True

    def shown(
        self,
        by: PeerId,
        members: Iterable[PeerId],
        now: float,
        *,
        earlier: bool = False,
        peers: int | None = None,
    ) -> None:
        """A peer that we have asked shows a well-signed list under our key that has started.

        `earlier`: our entry in it is from an earlier search. (If it is from this one, we are a
        member: `adopted`.) `peers`: for how many peers its members come; as many as they are, if it
        is not said. If these are too few for the group to be of use, the others go on without it:
        its leader may lie.
        """
        followed = self._course.let_go_of(by, now)
        members = tuple(members)
        if self.ended:
            return
        if not earlier:  # its round is over for us, and so it is for them, now or in a moment
            for member in (by, *members):
                self._awaited.is_lost(member)
        if self.following is not None:
            pass  # our leader knows better: its list, perhaps this one, may be on its way
        elif earlier:
            self._known.pass_over(by, Absence.ELSEWHERE, "it is in a group of an earlier attempt")
        elif self._known.is_restricted and not followed:
            self._known.pass_over(by, Absence.ELSEWHERE, "it has started in another group")
        else:
            for member in (by, *members):
                self._known.pass_over(member, Absence.ELSEWHERE, "it has started in another group")
            if (len(members) if peers is None else peers) >= self._fewest:
                self._course.started_by = by
                if len(members) > 1 + len(self._joins.seated):
                    self._course.end(StartedWithoutUs(by))
        self._course.reconsider(now)

    def invitation_answered(
        self, peer: PeerId, reply: Reply, leader: Candidate | None, seconds: float, now: float
    ) -> None:
        """A peer that we invited has answered, after this many seconds. (If it has started, `shown`
        is called instead.)"""
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
        """A peer that we invited or probed cannot be reached, or sends a named refusal."""
        if peer == self.following and not self._course.has_answered:
            self._course.let_go_of(peer, now)
        known = self._known.get(peer)
        if known is not None and peer not in self._joins and peer != self.following:
            known.pass_over(absence, why)
        self._awaited.is_lost(peer)
        self._course.reconsider(now)

    def is_there(self, peer: PeerId) -> None:
        """A peer that we probed has answered. It may not be looking for a group yet."""
        self._awaited.is_there(peer)

    def link_lost(self, peer: PeerId, now: float) -> None:
        """The link with this peer is lost."""
        self._awaited.is_lost(peer)
        self._course.reconsider(now)

    def cannot_be_invited(self, peer: PeerId, now: float) -> None:
        """The peer can only dial out, and there is no link with it."""
        known = self._known.get(peer)
        if known is not None:
            known.comes_by_itself(now)
        self._course.reconsider(now)

    # -- time

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        self._course.tick(now)

    @property
    def next_deadline(self) -> float:
        """When to call `tick` at the latest."""
        return self._course.next_deadline


# ---- what the parts of a gathering share


@dataclass(frozen=True)
class GatheringParts:
    """The state that the parts of one gathering share.

    - `me`, `order`: this peer, and the hash order of the key.
    - `group_size`: the most members of one group. `splits`: more peers become several groups.
    - `known`: the peers that are known. `joins`: those that wait here. `awaited`: those expected by
      name. `closing`: when the list is closed.
    """

    me: PeerId
    order: Callable[[PeerId], bytes]
    group_size: int
    splits: bool
    known: KnownPeers
    joins: WaitingJoins
    awaited: Awaited
    closing: ClosingTime


# ---- several groups from too many peers
#
# As few groups as possible, with sizes that differ by at most one. The members of each follow one
# another in the hash order, so that no peer can choose its group. Peers that can only dial out are
# dealt to the groups in turn: every group needs a peer that can be dialled, and one of those leads.
#
# Easy to get wrong: not every peer can be placed if too few can be dialled, or if one would be left
# in a group by itself. The peers left over wait for the next round.


Member = TypeVar("Member")


def split(
    reducers: Sequence[Member], clients: Sequence[Member], largest: int
) -> list[list[Member]]:
    """Split more than `largest` members into groups of 2 to `largest`, each beginning with a
    reducer. Both sequences are in hash order; the first of all reducers is in the first group."""
    total = len(reducers) + len(clients)
    count = min(-(-total // largest), len(reducers))
    if count < 1:
        return []
    groups = _in_order(reducers, count)
    waiting = list(clients)
    while waiting:
        smallest = min(groups, key=len)
        if len(smallest) >= largest:
            break
        smallest.append(waiting.pop(0))
    return [group for group in groups if len(group) > 1]


def split_around(
    reducers: Sequence[Member],
    clients: Sequence[Member],
    largest: int,
    awaited: Container[Member],
) -> list[list[Member]]:
    """The same, but with the awaited peers in the first group, so that they average together, and
    others as far as there is room. If they do not fit into it, or there are none, split as usual.
    """
    leader, *others = reducers
    first = [leader, *(one for one in (*others, *clients) if one in awaited)]
    if not 1 < len(first) <= largest:
        return split(reducers, clients, largest)
    more = [one for one in others if one not in first]
    waiting = [one for one in clients if one not in first]
    rest, room = [*more, *waiting], largest - len(first)
    own, left = [*first, *rest[:room]], set(rest[room:])
    more, waiting = [one for one in more if one in left], [one for one in waiting if one in left]
    return [own, *split(more, waiting, largest)]


def _in_order(members: Sequence[Member], count: int) -> list[list[Member]]:
    """`count` runs of members, whose lengths differ by at most one."""
    shortest, longer = divmod(len(members), count)
    groups: list[list[Member]] = []
    start = 0
    for number in range(count):
        stop = start + shortest + (number < longer)
        groups.append(list(members[start:stop]))
        start = stop
    return groups


# ---- leading or following


PROBE_AFTER_SECONDS = 0.25
"""If the peer that we follow has not answered by then, the next ones in the order are probed
meanwhile. So a group that has lost its first half costs one timeout, not one for each peer."""

STOPPED_SECONDS = 0.5
"""A tick that is this late means that this process or machine did not run."""


class LeadOrFollow:
    """Decides which state a gathering is in, and what it does in it.

        leading     invite the peers that we see, hold their joins, and close the list when its time
                    has come. Too many for one group become several; or (`splits` is False) the list
                    has room for some, and the others are told that it has begun
        following   ask the first to list us. Once it has answered, send the peers that wait here on
                    to it. While it is silent, probe the next. When our patience is over, end

    Call `reconsider` after each change of what is known.

    Invariant: while `ended` is False, this peer follows exactly `following`, or leads (None).

    Easy to get wrong: a peer that can only dial out never leads. It waits in the state of a leader
    for a peer to follow, and closes nothing.
    """

    def __init__(
        self, parts: GatheringParts, *, reduces: bool, may_be_one: bool, now: float
    ) -> None:
        self.ended = False
        self.following: PeerId | None = None
        self.has_answered = False  # the peer that we follow
        self.started_by: PeerId | None = None  # the peer that showed a list without us
        self._me, self._order, self._group_size = parts.me, parts.order, parts.group_size
        self._splits = parts.splits
        self._known, self._joins = parts.known, parts.joins
        self._awaited, self._closing = parts.awaited, parts.closing
        self._reduces, self._may_be_one = reduces, reduces and may_be_one
        self._ticked = self._follows_since = now
        self._probe_at = math.inf
        self._effects: list[Effect] = []

    def effects(self) -> list[Effect]:
        """The effects to carry out now. Drains them."""
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    @property
    def has_probed(self) -> bool:
        """Whether the peer that we follow was silent for so long that others were probed."""
        return self._probe_at == math.inf

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        if self.ended:
            return
        self._notice_stop(now)
        self._ticked = now
        self.reconsider(now)

    def _notice_stop(self, now: float) -> None:
        """If the tick that was due did not come, nothing ran here. Whatever is heard first after
        that must not count as late: our leader may have closed its list long ago."""
        if now - self._ticked > STOPPED_SECONDS and now - self.next_deadline > STOPPED_SECONDS:
            self._closing.was_stopped(now)
            self._ticked = now

    @property
    def next_deadline(self) -> float:
        """When to call `tick` at the latest."""
        if self.ended:
            return math.inf
        since = self._ticked
        if self.following is not None:
            waits_for = self._joins.named_again_at if self.has_answered else self._probe_at
            return min(self._closing.gives_up_at, waits_for)
        closing = self._closing
        moments = [closing.latest, self._known.next_deadline(since, self._joins)]
        for moment in (closing.quiet_at, closing.usual_deadline, closing.deadline):
            if moment > since:
                moments.append(moment)
        return min(moments)

    def let_go_of(self, leader: PeerId, now: float) -> bool:
        """Stop following this leader. Returns whether we did follow it. If we lead now, the closing
        time begins anew: joins that came while we followed do not show when all are here."""
        if leader != self.following or self.ended:
            return False
        self.following, self.has_answered = None, False
        self._closing.begin_anew(now)
        return True

    def reconsider(self, now: float) -> None:
        """Do what is due by what is known now. Call it after each change of that."""
        if self.ended:
            return
        self._notice_stop(now)
        if self.following is None:
            first = self._known.first_before(self._me if self._reduces else None)
            if first is not None:
                self._follow(first, now)
            elif self._reduces:
                self._lead(now)
            elif now >= self._closing.deadline or self.started_by is not None:
                self.end(self._why_nothing())
        else:
            self._wait_for(self.following, now)

    def end(self, ending: Ending) -> None:
        self.ended = True
        is_group = self._may_be_one and isinstance(ending, Nobody) and not ending.unreachable
        self.add(Lead({}) if is_group else End(ending))

    # -- following

    def _follow(self, leader: InvitablePeer, now: float) -> None:
        self.following, self.has_answered = leader.peer, False
        self._follows_since = now
        self._probe_at = now + PROBE_AFTER_SECONDS
        self._closing.follows()
        self.add(Follow(leader.peer, self._known.passed_over()))

    def _wait_for(self, leader: PeerId, now: float) -> None:
        if self.has_answered:
            self._send_on(leader, now)
        elif now >= self._probe_at:
            self._probe_at = math.inf
            self._effects.extend(Probe(peer) for peer in self._known.to_probe(leader))
        if now >= self._closing.gives_up_at:
            self.let_go_of(leader, now)
            self._known.pass_over(leader, Absence.AT_ODDS, "it did not close its list in time")
            ending = self._why_nothing()
            has_waited = now - self._follows_since >= self._closing.longest_seconds
            if isinstance(ending, NotTogether) and has_waited:  # or it may have begun later than us
                ending = NotTogether(ending.reasons, unlisted_by=leader)
            self.end(ending)

    def _send_on(self, leader: PeerId, now: float) -> None:
        """Send waiting peers on to our leader. A peer that has passed the leader over is sent only
        after a while, although we can reach the leader."""
        for peer, ticket in self._joins.release_to(leader, now).items():
            self.add(SendOn(ticket, leader))
            known = self._known.get(peer)
            if known is not None:
                known.ask_again(now)  # should we lead again

    # -- leading

    def _lead(self, now: float) -> None:
        for peer in self._known.to_invite(now, self._joins):
            self.add(SendInvite(peer, self._known.reduces(peer)))
        if self._joins or now >= self._closing.quiet_at:  # without joins, others may have died
            self._effects.extend(
                Probe(peer) for peer in self._awaited.to_ask(self._joins, self._known)
            )
        if self._closing.has_come(now):
            self._close(now)
        elif self._is_surely_alone(now) or (
            now >= self._closing.deadline and not self._joins.seated
        ):
            self.end(self._why_nothing())

    def _is_surely_alone(self, now: float) -> bool:
        if self._joins.seated or self._known.waited_for(now, self._joins):
            return False
        return self.started_by is not None or self._closing.nobody_comes(now)

    def _close(self, now: float) -> None:
        """Close the list with the peers that wait, or as many as a group may have. The others get
        groups of their own, or none."""
        ordered = sorted((self._me, *self._joins.seated), key=self._order)
        if len(ordered) > self._group_size and not self._splits:
            ordered = self._first_of(ordered)
        if len(ordered) > self._group_size:
            reducers = [one for one in ordered if one == self._me or self._known.reduces(one)]
            clients = [one for one in ordered if one not in set(reducers)]
            own, *others = split_around(reducers, clients, self._group_size, self._awaited)
            for group in others:
                self._send_group(group)
            self._known.restrict(self._candidates(own), now)
            ordered = sorted(own, key=self._order)
        if len(ordered) > 1:
            self.ended = True
            self.add(Lead({one: self._joins.release(one) for one in ordered if one != self._me}))

    def _first_of(self, ordered: list[PeerId]) -> list[PeerId]:
        """As many as fit into the group: this peer, the awaited peers, then the others."""
        others = [one for one in ordered if one != self._me]
        others.sort(key=lambda one: one not in self._awaited)  # a stable sort
        return sorted((self._me, *others[: self._group_size - 1]), key=self._order)

    def _send_group(self, group: list[PeerId]) -> None:
        candidates = self._candidates(group)
        for peer in group:
            self.add(Regroup(self._joins.release(peer), candidates))

    def _candidates(self, group: Iterable[PeerId]) -> tuple[Candidate, ...]:
        return tuple(Candidate(one, one == self._me or self._known.reduces(one)) for one in group)

    # -- the end

    def _why_nothing(self) -> Ending:
        if self.started_by is not None:
            return StartedWithoutUs(self.started_by)
        reasons = self._known.reasons()
        if reasons:
            return NotTogether(reasons)
        return Nobody(self._known.unreachable())


# ---- messages of the leader that we follow


MOST_REDIRECTS = 32
"""An honest chain is as long as a random order has records: 7 for 1,024 peers."""


class LeadersWord:
    """Takes what the leader that we follow says, or what is seen of it.

        it answers          it is there: the peers that wait here are sent on to it
        it lists us         end: we are a member
        it lets us fetch    we are in its list, and get the list from a member: we wait longer
        it sends us on      we follow a still earlier peer
        it makes a group    there were too many: from now on only that group counts
        it is gone          unreachable, silent, refuses by name, or looks for no group: the next

    Drain the effects of the gathering after every call.

    Promise: a message of any other peer changes nothing.

    Easy to get wrong: a leader is a stranger, and may lie. It can send us only to an earlier peer,
    not for ever, and into one group only. A leader that does anything else is passed over, and what
    it did is undone.
    """

    def __init__(self, parts: GatheringParts, course: LeadOrFollow) -> None:
        self._me, self._order, self._group_size = parts.me, parts.order, parts.group_size
        self._splits = parts.splits
        self._known, self._joins = parts.known, parts.joins
        self._awaited, self._closing = parts.awaited, parts.closing
        self._course = course
        self._redirects = 0
        self._grouped_by: PeerId | None = None

    def answers(self, leader: PeerId, round_trip_seconds: float, now: float) -> None:
        """The leader is there, and has our join."""
        self._closing.measured(round_trip_seconds)
        if leader != self._course.following or self._course.has_answered or self._course.ended:
            return
        self._course.has_answered = True
        self._course.tick(now)

    def lists_us(self, leader: PeerId) -> bool:
        """The leader has sent a valid list. Returns whether we are a member now."""
        if leader != self._course.following or self._course.ended:
            return False
        self._course.ended = True
        return True

    def lets_us_fetch(self, leader: PeerId, seconds: float, now: float) -> None:
        """The leader has closed its list with us in it. The list arrives within this time, or not
        at all."""
        if leader == self._course.following and not self._course.ended:
            self._closing.list_comes(seconds, now)

    def sends_us_on(self, leader: PeerId, to: Candidate, now: float) -> None:
        """The leader names an earlier peer."""
        if not self._course.let_go_of(leader, now):
            return
        self._redirects += 1
        honest = self._order(to.peer) < self._order(leader) and to.peer != self._me
        named = self._known.heard_of(to, now) if honest else None
        self._known.is_named(to.peer, now)
        if named is None or self._redirects > MOST_REDIRECTS:
            self._known.pass_over(leader, Absence.AT_ODDS, "it named an impossible leader")
        elif named.is_unled:
            why = "it follows a peer whose rounds came to nothing"
            self._known.pass_over(leader, Absence.AT_ODDS, why)
        self._course.reconsider(now)

    def makes_a_group(self, leader: PeerId, group: tuple[Candidate, ...], now: float) -> None:
        """There were too many peers under the key: from now on only these count.

        This may happen once, as the group is then small enough. A leader that makes groups again
        and again could hold us for ever, so its group is forgotten.
        """
        if not self._course.let_go_of(leader, now):
            return
        peers = {one.peer for one in group}
        if not self._splits:
            self._known.pass_over(leader, Absence.AT_ODDS, "it divides a round that is not divided")
        elif self._known.is_restricted:
            self._known.pass_over(leader, Absence.AT_ODDS, "it made a group of a group")
            if leader == self._grouped_by:
                self._known.lift()
                self._closing.regroup_undone()
        elif self._me not in peers or not 2 <= len(peers) <= self._group_size:
            self._known.pass_over(leader, Absence.AT_ODDS, "it made an impossible group")
        else:
            self._known.restrict(group, now)
            self._grouped_by = leader
            for ticket in self._joins.release_all_but(peers):
                self._course.add(SendAway(ticket))
            self._closing.regrouped(len(peers), now)
        self._course.reconsider(now)

    def is_gone(self, leader: PeerId, absence: Absence, why: str, now: float) -> None:
        """The leader looks for no group, refuses us by name, cannot be reached, or was silent."""
        if not self._course.let_go_of(leader, now):
            return
        self._known.pass_over(leader, absence, why)
        if absence is Absence.ELSEWHERE:
            self._awaited.is_there(leader)
        else:
            self._awaited.is_lost(leader)
        self._course.reconsider(now)
