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
    leading    the list is closed (`_may_close`)    the end: the leader
    either     is shown a list with others, larger than what waits here: the end, late
    either     deadline                             the end

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

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protocols.identity import PeerId
from protocols.moshpit.arrivals import Arrivals
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
from protocols.moshpit.known_peers import Absence, KnownPeer, KnownPeers
from protocols.moshpit.splitting import split

GRACE_SECONDS = 2.0
"""A follower waits for its leader's list this much longer than its own deadline: the leader may
have begun later, and hears of our deadline only when we join."""

SHORTEST_PATIENCE_SECONDS = 1.0
"""Whatever a follower says of its deadline, its leader gathers for so long after its join."""

REGROUP_SECONDS = 3.0
"""A group that was split off has this long to meet: its members are all there and waiting."""

SHARE_WAITED_FOR_MISSING = 0.15
"""Of the matchmaking time: so long without an arrival, and a list is closed although fewer have
come than were expected. Some may have died since they were counted."""

MOST_REDIRECTS = 32
"""Honest chains are as long as a random order has records: 7 for 1,024 peers."""

NAME_AGAIN_SECONDS = 0.5
"""A peer that could not reach our leader waits here, and is sent to it again after this."""

PROBE_AFTER_SECONDS = 0.25
"""When the one we follow has not answered by then, the next in the order are probed meanwhile: a
group that lost its first half costs one timeout, and not one for each."""

STOPPED_SECONDS = 0.5
"""A tick that comes this late says that this process or machine did not run."""


@dataclass(frozen=True)
class GatheringSettings:
    """`reduces`: whether this peer can be dialled. `expected` counts this peer."""

    group_size: int
    seconds: float
    reduces: bool = True
    expected: int | None = None


@dataclass
class _Held:
    """A join that waits for its answer."""

    ticket: int
    passed_over: frozenset[PeerId]
    since: float


class Gathering:
    """See the module. Times are the caller's; `effects` has to be drained after every call.

    Invariant: while `ended` is False this peer follows exactly `following`, or leads (None).
    """

    def __init__(
        self,
        me: PeerId,
        order: Callable[[PeerId], bytes],
        settings: GatheringSettings,
        now: float,
    ) -> None:
        self.me = me
        self.ended = False
        self.following: PeerId | None = None
        self._answered = False  # the one we follow has
        self._probe_at = math.inf
        self._order = order
        self._settings = settings
        self._known = KnownPeers(me, order)
        self._held: dict[PeerId, _Held] = {}
        self._arrivals = Arrivals(now)
        self._deadline = now + settings.seconds
        self._give_up = self._deadline + GRACE_SECONDS
        self._expected = settings.expected
        self._was_read = False
        self._reads_since_arrival = 0
        self._redirects = 0
        self._shown: PeerId | None = None  # who showed a list without us
        self._ticked = now
        self._effects: list[Effect] = []

    def effects(self) -> list[Effect]:
        """What is to be done now; drained."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def leads(self) -> bool:
        return not self.ended and self.following is None and self._settings.reduces

    @property
    def looks_for_slots(self) -> bool:
        """Whether reading slots is of use: a follower is told by its leader."""
        return not self.ended and self.following is None

    def is_held(self) -> bool:
        """Whether a leader that is there holds our join."""
        return self.following is not None and self._answered and not self.ended

    @property
    def gives_up_at(self) -> float:
        return self._give_up

    @property
    def deadline(self) -> float:
        return self._deadline

    def stop(self) -> None:
        """The search is given up."""
        self.ended = True

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
        self._reconsider(now)
        return first != self.me

    def saw_slot(self, candidate: Candidate, sequence: int, now: float) -> None:
        """Somebody has a slot under the key."""
        known = self._known.heard_of(candidate, now)
        if known is None or not known.is_newer(sequence):
            return
        known.has_slot(sequence, now)
        self._arrived(known, now)
        self._reconsider(now)

    def saw_other_layout(self, peer: PeerId, why: str, now: float) -> None:
        """Somebody has a slot under the key and averages something else."""
        known = self._known.heard_of(Candidate(peer), now)
        if known is not None and peer != self.following and peer not in self._held:
            known.pass_over(Absence.AT_ODDS, why)

    def slots_were_read(self, seconds: float, now: float) -> None:
        """A read has ended, well or not, after so long."""
        self._arrivals.looked(seconds, now, first=not self._was_read)
        self._was_read = True
        self._reads_since_arrival += 1
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
        before = self._held.pop(candidate.peer, None)
        if before is not None:
            self._effects.append(SendAway(before.ticket))
        if known is None or self.ended:
            self._effects.append(SendAway(ticket))
            return
        known.heard_from(now)
        known.reduces = candidate.reduces  # in its own signed words
        held = self._held[candidate.peer] = _Held(ticket, frozenset(passed_over), now)
        patience = max(SHORTEST_PATIENCE_SECONDS, patience_seconds)
        self._deadline = min(self._deadline, now + patience)
        self._arrived(known, now)
        if self._answered and self.following is not None:
            self._send_on(candidate.peer, held, now)
        self._reconsider(now)

    def join_gone(self, peer: PeerId, ticket: int, now: float) -> None:
        """Somebody no longer waits: it has left, or died."""
        held = self._held.get(peer)
        if held is None or held.ticket != ticket:
            return
        del self._held[peer]
        known = self._known.get(peer)
        if known is not None:
            known.ask_again(now)
        self._reconsider(now)

    def invited(self, by: PeerId, now: float) -> tuple[Reply, PeerId | None]:
        """Somebody says that it leads. What to answer, and who leads as far as we know."""
        known = self._known.heard_of(Candidate(by), now)
        if known is None or self.ended:
            return Reply.NOT_HERE, None
        known.heard_from(now)
        self._arrived(known, now)
        silent = self.following
        if silent not in (None, by) and not self._answered and self._probe_at == math.inf:
            assert silent is not None
            self._let_go_of(silent, now)
            self._known.pass_over(silent, Absence.UNREACHABLE, "it was silent")
        self._reconsider(now)
        if self.following == by:
            return Reply.COMING, None
        if self.following is None and not self._settings.reduces:
            return Reply.NOT_HERE, None
        return Reply.WITH_ANOTHER, self.following or self.me

    # -- what the one says whom we follow

    def leader_answered(self, leader: PeerId, round_trip_seconds: float, now: float) -> None:
        """It is there, and has our join."""
        self._arrivals.measured(round_trip_seconds)
        if leader != self.following or self._answered or self.ended:
            return
        self._answered = True
        self._send_all_on(now)
        self.tick(now)

    def listed(self, leader: PeerId) -> bool:
        """It has sent the list, and the list is good. Whether we are a member now."""
        if leader != self.following or self.ended:
            return False
        self.ended = True
        return True

    def adopted(self) -> bool:
        """Somebody has shown the list of a leader that we had asked in this search, with our entry
        in it as we signed it. Whether we are a member now: it may be the only way left, if that
        leader died while it handed out its list."""
        if self.ended:
            return False
        self.ended = True
        return True

    def sent_on(self, leader: PeerId, to: Candidate, now: float) -> None:
        """It names somebody before it."""
        if not self._let_go_of(leader, now):
            return
        self._redirects += 1
        honest = self._order(to.peer) < self._order(leader) and to.peer != self.me
        named = self._known.heard_of(to, now) if honest else None
        self._known.is_named(to.peer, now)
        if named is None or self._redirects > MOST_REDIRECTS:
            self._known.pass_over(leader, Absence.AT_ODDS, "it named an impossible leader")
        self._reconsider(now)

    def left_by(self, leader: PeerId, absence: Absence, why: str, now: float) -> None:
        """It looks for no group, refuses us by name, cannot be reached, or was silent."""
        if self._let_go_of(leader, now):
            self._known.pass_over(leader, absence, why)
            self._reconsider(now)

    def regrouped(self, leader: PeerId, group: tuple[Candidate, ...], now: float) -> None:
        """There were too many under the key; from now on these are all that count."""
        if not self._let_go_of(leader, now):
            return
        peers = {one.peer for one in group}
        if self.me not in peers or not 2 <= len(peers) <= self._settings.group_size:
            self._known.pass_over(leader, Absence.AT_ODDS, "it made an impossible group")
            self._reconsider(now)
            return
        self._known.restrict(group, now)
        for peer in [one for one in self._held if one not in peers]:
            self._effects.append(SendAway(self._held.pop(peer).ticket))
        self._expected = len(peers)
        self._deadline = now + REGROUP_SECONDS
        self._give_up = self._deadline + GRACE_SECONDS
        self._reconsider(now)

    # -- what anybody may say

    def shown(
        self, by: PeerId, members: Iterable[PeerId], now: float, *, earlier: bool = False
    ) -> None:
        """Somebody, whom we had asked, shows a well-signed list under our key that has started.

        `earlier`: our entry in it is of another search than this. (If it is of this one, we are a
        member: `adopted`.)
        """
        followed = self._let_go_of(by, now)
        members = tuple(members)
        if self.ended:
            return
        if self.following is not None:
            pass  # our leader knows better: its list, perhaps this very one, may be on its way
        elif earlier:
            self._known.pass_over(by, Absence.ELSEWHERE, "it is in a group of an earlier attempt")
        elif self._known.is_restricted and not followed:
            self._known.pass_over(by, Absence.ELSEWHERE, "it has started in another group")
        else:
            for member in (by, *members):
                self._known.pass_over(member, Absence.ELSEWHERE, "it has started in another group")
            self._shown = by
            if len(members) > 1 + len(self._held):
                self._end(StartedWithoutUs(by))
        self._reconsider(now)

    def invitation_answered(
        self, peer: PeerId, reply: Reply, leader: Candidate | None, seconds: float, now: float
    ) -> None:
        """What somebody whom we invited has answered, after so long. (`shown`: it has started.)"""
        self._arrivals.measured(seconds)
        known = self._known.get(peer)
        if known is not None and not self.ended:
            if leader is not None:
                self._known.heard_of(leader, now)
            if reply is Reply.NOT_HERE:
                known.pass_over(Absence.ELSEWHERE, "it looks for no group now")
            elif reply is Reply.COMING:
                known.comes(now)
            else:
                known.is_with_another(now)
        self._reconsider(now)

    def not_met(self, peer: PeerId, absence: Absence, why: str, now: float) -> None:
        """Somebody whom we invited or probed cannot be reached, or refuses us by name."""
        if peer == self.following and not self._answered:
            self._let_go_of(peer, now)
        known = self._known.get(peer)
        if known is not None and peer not in self._held and peer != self.following:
            known.pass_over(absence, why)
        self._reconsider(now)

    def cannot_be_invited(self, peer: PeerId, now: float) -> None:
        """Somebody can only dial out, and there is no link with it."""
        known = self._known.get(peer)
        if known is not None:
            known.comes_by_itself(now)
        self._reconsider(now)

    # -- time

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.ended:
            return
        if now - self._ticked > STOPPED_SECONDS and now - self.next_moment > STOPPED_SECONDS:
            self._arrivals.begin_anew(now)
            self._reads_since_arrival = 0
            self._deadline = max(self._deadline, now + SHORTEST_PATIENCE_SECONDS)
            self._give_up = max(self._give_up, self._deadline + GRACE_SECONDS)
        self._ticked = now
        self._reconsider(now)

    @property
    def next_moment(self) -> float:
        """When to tick at the latest."""
        if self.ended:
            return math.inf
        if self.following is not None:
            moments = [self._give_up]
            if self._answered:
                moments += [held.since + NAME_AGAIN_SECONDS for held in self._held.values()]
            else:
                moments.append(self._probe_at)
            return min(moments)
        moments = [self._deadline, self._known.next_moment(self._ticked, self._held)]
        quiet = self._closes_when_quiet_at()
        if quiet > self._ticked:
            moments.append(quiet)
        return min(moments)

    # -- deciding

    def _reconsider(self, now: float) -> None:
        if self.ended:
            return
        if self.following is None:
            first = self._known.first_before(self.me if self._settings.reduces else None)
            if first is not None:
                self._follow(first, now)
            elif self._settings.reduces:
                self._lead(now)
            elif now >= self._deadline or self._shown is not None:
                self._end(self._why_nothing())
        elif self._answered and self._held:
            self._send_all_on(now)
        elif now >= self._probe_at and not self._answered:
            self._probe_at = math.inf
            self._effects.extend(Probe(peer) for peer in self._known.to_probe(self.following))
        elif now >= self._give_up:
            leader = self.following
            self._let_go_of(leader, now)
            self._known.pass_over(leader, Absence.AT_ODDS, "it did not close its list in time")
            self._end(self._why_nothing())

    def _follow(self, leader: KnownPeer, now: float) -> None:
        self.following, self._answered = leader.peer, False
        self._probe_at = now + PROBE_AFTER_SECONDS
        self._effects.append(Follow(leader.peer, self._known.passed_over()))

    def _lead(self, now: float) -> None:
        for peer in self._known.to_invite(now, self._held):
            self._effects.append(Invite(peer, self._known.reduces(peer)))
        if self._may_close(now):
            self._close(now)
        elif now >= self._deadline or self._is_surely_alone(now):
            self._end(self._why_nothing())

    def _may_close(self, now: float) -> bool:
        """Everybody expected is there; or everybody known is, and the group is full or nobody
        came for a while; or it is time."""
        if not self._held:
            return False
        count = 1 + len(self._held)
        if now >= self._deadline or (self._expected is not None and count >= self._expected):
            return True
        if self._known.waited_for(now, self._held):
            return False
        if count >= self._settings.group_size and self._expected is None:
            return True
        return now >= self._closes_when_quiet_at() and self._reads_since_arrival > 0

    def _closes_when_quiet_at(self) -> float:
        if self._expected is None or self._known.is_restricted:
            return self._arrivals.quiet_from
        wait = max(self._arrivals.quiet_seconds, SHARE_WAITED_FOR_MISSING * self._settings.seconds)
        return self._arrivals.last + wait

    def _is_surely_alone(self, now: float) -> bool:
        if self._held or self._known.waited_for(now, self._held):
            return False
        if self._shown is not None:
            return True
        if self._known.is_restricted:
            return now >= self._closes_when_quiet_at()
        return self._expected == 1 and self._reads_since_arrival > 0

    def _close(self, now: float) -> None:
        """Lead those who wait, or as many as a group may have and the rest in groups of its own."""
        ordered = sorted((self.me, *self._held), key=self._order)
        if len(ordered) > self._settings.group_size:
            reducers = [one for one in ordered if one == self.me or self._known.reduces(one)]
            clients = [one for one in ordered if one not in set(reducers)]
            own, *others = split(reducers, clients, self._settings.group_size)
            for group in others:
                self._send_group(group)
            self._known.restrict(self._candidates(own), now)
            ordered = sorted(own, key=self._order)
        if len(ordered) > 1:
            self.ended = True
            members = {one: self._held[one].ticket for one in ordered if one != self.me}
            self._effects.append(Lead(members))

    def _send_group(self, group: list[PeerId]) -> None:
        candidates = self._candidates(group)
        for peer in group:
            self._effects.append(Regroup(self._held.pop(peer).ticket, candidates))

    def _candidates(self, group: Iterable[PeerId]) -> tuple[Candidate, ...]:
        return tuple(Candidate(one, one == self.me or self._known.reduces(one)) for one in group)

    # -- small steps

    def _arrived(self, known: KnownPeer, now: float) -> None:
        if self._arrivals.came(known.peer, now):
            self._reads_since_arrival = 0

    def _let_go_of(self, leader: PeerId, now: float) -> bool:
        """Follow this one no more; whether we did. If we lead now, then anew: what came, or did
        not, while we followed says nothing of when all are here."""
        if leader != self.following or self.ended:
            return False
        self.following, self._answered = None, False
        self._arrivals.begin_anew(now)
        self._reads_since_arrival = 0
        return True

    def _send_all_on(self, now: float) -> None:
        for peer, held in list(self._held.items()):
            self._send_on(peer, held, now)

    def _send_on(self, peer: PeerId, held: _Held, now: float) -> None:
        """To our leader; somebody who has passed it over, after a while: it is there for us."""
        if self.following is None:
            return
        if self.following not in held.passed_over or now >= held.since + NAME_AGAIN_SECONDS:
            del self._held[peer]
            self._effects.append(SendOn(held.ticket, self.following))
            known = self._known.get(peer)
            if known is not None:
                known.ask_again(now)  # should we lead again

    def _end(self, ending: Ending) -> None:
        self.ended = True
        self._effects.append(End(ending))

    def _why_nothing(self) -> Ending:
        if self._shown is not None:
            return StartedWithoutUs(self._shown)
        reasons = self._known.reasons()
        if reasons:
            return NotTogether(reasons)
        return Nobody(self._known.unreachable())
