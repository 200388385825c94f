"""What the one says whom a gathering follows, or what is seen of it: the other end of our join.

    it answers          it is there: whoever waits here is sent on to it
    it lists us         the end: we are a member
    it lets us fetch    we are in its list, and get that from a member: our patience is longer
    it sends us on      we follow somebody earlier still
    it makes a group    there were too many: from now on only that group counts
    it is gone          unreachable, silent, refuses by name, or looks for no group: the next

Promise: a word of anybody but the one we follow changes nothing.

Easy to get wrong: a leader may lie, and is a stranger. It can send us only to somebody earlier, not
for ever, and into one group only; who does otherwise is passed over, and what it did is undone.
"""

from __future__ import annotations

from protocols.identity import PeerId
from protocols.moshpit.gathering_effects import Candidate, SendAway
from protocols.moshpit.gathering_parts import GatheringParts
from protocols.moshpit.known_peers import Absence
from protocols.moshpit.lead_or_follow import LeadOrFollow

MOST_REDIRECTS = 32
"""Honest chains are as long as a random order has records: 7 for 1,024 peers."""


class LeadersWord:
    """Of one gathering, whose parts it shares. `effects` of the gathering, as after every call."""

    def __init__(self, parts: GatheringParts, course: LeadOrFollow) -> None:
        self._me, self._order, self._group_size = parts.me, parts.order, parts.group_size
        self._known, self._joins = parts.known, parts.joins
        self._awaited, self._closing = parts.awaited, parts.closing
        self._course = course
        self._redirects = 0
        self._grouped_by: PeerId | None = None

    def answers(self, leader: PeerId, round_trip_seconds: float, now: float) -> None:
        """It is there, and has our join."""
        self._closing.measured(round_trip_seconds)
        if leader != self._course.following or self._course.has_answered or self._course.ended:
            return
        self._course.has_answered = True
        self._course.tick(now)

    def lists_us(self, leader: PeerId) -> bool:
        """It has sent the list, and the list is good. Whether we are a member now."""
        if leader != self._course.following or self._course.ended:
            return False
        self._course.ended = True
        return True

    def lets_us_fetch(self, leader: PeerId, seconds: float, now: float) -> None:
        """It has closed its list with us in it, which comes within so long, or not at all."""
        if leader == self._course.following and not self._course.ended:
            self._closing.list_comes(seconds, now)

    def sends_us_on(self, leader: PeerId, to: Candidate, now: float) -> None:
        """It names somebody before it."""
        if not self._course.let_go_of(leader, now):
            return
        self._redirects += 1
        honest = self._order(to.peer) < self._order(leader) and to.peer != self._me
        named = self._known.heard_of(to, now) if honest else None
        self._known.is_named(to.peer, now)
        if named is None or self._redirects > MOST_REDIRECTS:
            self._known.pass_over(leader, Absence.AT_ODDS, "it named an impossible leader")
        self._course.reconsider(now)

    def makes_a_group(self, leader: PeerId, group: tuple[Candidate, ...], now: float) -> None:
        """There were too many under the key; from now on these are all that count.

        Once: the group is small enough then. Who makes groups again and again would keep us for
        ever, so its group is forgotten.
        """
        if not self._course.let_go_of(leader, now):
            return
        peers = {one.peer for one in group}
        if self._known.is_restricted:
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
        """It looks for no group, refuses us by name, cannot be reached, or was silent."""
        if not self._course.let_go_of(leader, now):
            return
        self._known.pass_over(leader, absence, why)
        if absence is Absence.ELSEWHERE:
            self._awaited.is_there(leader)
        else:
            self._awaited.is_lost(leader)
        self._course.reconsider(now)
