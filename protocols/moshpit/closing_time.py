"""Decides when a leader closes its list, and how long others wait for one. Pure.

A list that closes late costs every member time; one that closes early leaves a peer behind. So it
is closed as soon as at least one other has joined and one of these holds:

    as many have joined as were expected, with all that are awaited by name (known_peers.py)
    all that are known have joined (or are no longer waited for), and the group is full
    all that are known have joined, no new peer came for the quiet period (below), and the
    slots were read at least once in it
    the deadline has come

Peers that are known by name do not count if they are lost, unless others come in their place:
then the list waits for these as for any that are missing. While an awaited peer is there and has
not joined, nor another one with its seat, only the deadline closes the list. It also waits for the
deadline while those that have joined are too few: a large run makes a step only with most of its
peers (lifecycle.py). If rounds of the step have come to nothing, it waits for them until `latest`.
Some gatherings have a later deadline; a peer to which nobody has come leaves by the usual one if
all that are awaited are lost.

Promise: no message can put the deadline off, except for the first join, once and by little: a peer
that began long before the others must not close its list while they come. Joins bring it nearer: a
peer that joins says how long it will wait, and the list is closed before more than half of those
that would be listed go away, if with the leader they are more than half of those that are expected.
Fewer go: one impatient peer, or a liar, may not have all others left behind.

Easy to get wrong: a time in which no arrival could be noticed says nothing. After following another
peer, and after this process or machine was stopped, the quiet period begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Container

from protocols.identity import PeerId
from protocols.moshpit.known_peers import Awaited, KnownPeers, WaitingJoins

FOLLOWER_GRACE_SECONDS = 2.0
"""A follower waits for its leader's list this much longer than its own deadline. The leader may
have begun later, and learns of our deadline only when we join."""

SHORTEST_PATIENCE_SECONDS = 1.0
"""A leader gathers for at least this long after a join, whatever deadline the follower claims."""

COMPANY_SECONDS = 3.0
"""After its first join, a list stays open for so long at least if not all have come. Peers that end
their step together arrive within two seconds or so, however long this one has waited for them."""

FOR_MORE_SECONDS = 20.0
"""How much longer a list stays open for the fewest peers of which a step is made, once a round of
that step has come to nothing. After a cut in the network, the cohorts begin up to ten seconds after
one another. If each list were closed without the late ones, no round would have enough."""

REGROUP_SECONDS = 3.0
"""The time that a group that was split off has to meet: all its members are there and waiting."""

SHARE_WAITED_FOR_MISSING = 0.15
"""The share of the matchmaking time after which, without an arrival, a list is closed although
fewer have come than were expected. Some may have died since they were counted."""


MOST_STOPS_EXCUSED = 3
"""A laptop may be closed once or twice. A process that is late again and again is too slow, and the
deadline counts for it as well."""


class ClosingTime:
    """The closing time of one gathering. A leader closes its list by `deadline`, or by `latest` if
    too few have joined; a follower waits until `gives_up_at`."""

    def __init__(
        self,
        known: KnownPeers,
        joins: WaitingJoins,
        *,
        seconds: float,
        more_seconds: float = 0.0,
        group_size: int,
        expected: int | None,
        awaited: Awaited,
        replaces: bool = False,
        missing: int = 0,
        for_more_seconds: float = 0.0,
        now: float,
    ) -> None:
        """`missing`: how many peers must come, beside those for which this one comes; so many
        seconds longer than the deadline the list stays open for them. `more_seconds`: by so much
        the deadline is later than usual."""
        self._deadline = now + seconds + more_seconds
        self.usual_deadline = now + seconds
        self._latest = self._deadline + for_more_seconds if for_more_seconds else -math.inf
        self._all_wait_until = -math.inf  # after this process was stopped, nobody has left yet
        self._expected = expected
        self._known = known
        self._joins = joins
        self.gives_up_at = self.latest + FOLLOWER_GRACE_SECONDS
        self.longest_seconds = self.latest - now
        """How long any leader's list may be open."""
        self._seconds = seconds + more_seconds
        self._group_size = group_size
        self._awaited, self._replaces, self._missing = awaited, replaces, missing
        self._arrivals = Arrivals(now)
        self._was_read = False
        self._refused: set[PeerId] = set()
        self._has_company, self._enough_at = False, math.inf
        self._reads_since_arrival = 0
        self._before = self._deadlines  # of a regrouping
        self._stops_excused = 0

    @property
    def deadline(self) -> float:
        return min(self._deadline, self._most_have_left_at)

    @property
    def latest(self) -> float:
        """By when the list is closed, whoever is missing."""
        return min(max(self._deadline, self._latest), self._most_have_left_at)

    @property
    def _most_have_left_at(self) -> float:
        """When more than half of the peers that have joined have left, if the list stays open;
        never if they are too few for a group anyway."""
        until = self._joins.until
        is_group = until and 2 * (1 + len(until)) > (self._expected or 0)
        if not is_group or self._known.is_restricted:
            return math.inf
        return max(until[len(until) // 2], self._all_wait_until)

    # -- what happens

    def came(self, peer: PeerId, now: float) -> None:
        """This peer has sent a message, or its slot was seen. Only the first time counts."""
        if self._arrivals.came(peer, now):
            self._reads_since_arrival = 0

    def joined(self, now: float) -> None:
        """One more peer waits here from now on."""
        if not (self._has_company or self._known.is_restricted):
            self._has_company = True
            self._deadline = max(self._deadline, now + COMPANY_SECONDS)
        if self._joins.peers >= self._missing:
            self._enough_at = min(self._enough_at, now)

    def follows(self) -> None:
        """From now on this peer waits for a leader, which is told that it does until `latest`."""
        self.gives_up_at = max(self.gives_up_at, self.latest + FOLLOWER_GRACE_SECONDS)

    def refused(self, peer: PeerId) -> None:
        """The peer has come but will not be listed, so one peer less is expected."""
        self._refused.add(peer)

    def looked(self, now: float) -> None:
        """A reading of the slots has ended, successfully or not."""
        self._arrivals.looked(now, first=not self._was_read)
        self._was_read = True
        self._reads_since_arrival += 1

    def measured(self, round_trip_seconds: float) -> None:
        """How long an answer of somebody took."""
        self._arrivals.measured(round_trip_seconds)

    def begin_anew(self, now: float) -> None:
        """Nobody could be seen to come until now."""
        self._arrivals.begin_anew(now)
        self._reads_since_arrival = 0
        self._deadline = max(self._deadline, min(self._latest, now + COMPANY_SECONDS))

    def list_comes(self, seconds: float, now: float) -> None:
        """A list with us in it was closed, and arrives within this time. (One leader after another
        could claim that, so the wait ends at a fixed time after the deadline.)"""
        latest = self.latest + FOLLOWER_GRACE_SECONDS + seconds
        self.gives_up_at = max(self.gives_up_at, min(now + seconds, latest))

    def was_stopped(self, now: float) -> None:
        """This process or machine did not run until now."""
        self.begin_anew(now)
        if self._stops_excused == MOST_STOPS_EXCUSED:
            return
        self._stops_excused += 1
        soon = self._all_wait_until = now + SHORTEST_PATIENCE_SECONDS
        self._deadline = max(self._deadline, soon)
        self.usual_deadline = max(self.usual_deadline, soon)
        self.gives_up_at = max(self.gives_up_at, self.latest + FOLLOWER_GRACE_SECONDS)

    def regrouped(self, members: int, now: float) -> None:
        """We were put into a group of this size, which must still meet."""
        self._before = self._deadlines
        self._expected = members
        self._deadline, self._latest = now + REGROUP_SECONDS, -math.inf
        self.usual_deadline = self._deadline
        self.gives_up_at = self._deadline + FOLLOWER_GRACE_SECONDS

    def regroup_undone(self) -> None:
        """The group was not a valid one: forget it."""
        self._expected, self._deadline, self.usual_deadline, self._latest, self.gives_up_at = (
            self._before
        )

    @property
    def _deadlines(self) -> tuple[int | None, float, float, float, float]:
        times = self._deadline, self.usual_deadline, self._latest, self.gives_up_at
        return self._expected, *times

    # -- decisions

    def has_come(self, now: float) -> bool:
        """Whether to close the list now, with the peers that wait."""
        seated = self._joins.seated
        if not seated:
            return False
        count = 1 + len(seated)
        if now >= self.latest:
            return True
        if self._joins.peers < self._missing and not self._known.is_restricted:
            return False
        if now >= self.deadline:
            with_company = self._enough_at + COMPANY_SECONDS  # however many come meanwhile
            return now >= min(self.latest, self.quiet_at, with_company)
        if self._all_have_come(count):
            return True
        if self._names_count and self._awaited.will_come(self._joins):
            return False
        if self._known.waited_for(now, self._joins):
            return False
        if count >= self._group_size and self._expected is None:
            return True
        return now >= self.quiet_at and self._reads_since_arrival > 0

    def _all_have_come(self, count: int) -> bool:
        if self._is_told_all_names and self._awaited.have_all_come(self._joins):
            return True
        if not self._names_count:
            return self._expected is not None and count + len(self._refused) >= self._expected
        return count >= self._coming(self._joins) and self._awaited.is_complete(self._joins)

    def _coming(self, joined: Container[PeerId]) -> int:
        """How many of those that were expected will come, or others in their place."""
        lost = 0 if self._replaces else self._awaited.lost(joined)
        return 0 if self._expected is None else self._expected - lost

    @property
    def _names_count(self) -> bool:
        """Whether names count: not in a group that was split off, which has its own members."""
        return bool(self._awaited) and not self._known.is_restricted

    @property
    def _is_told_all_names(self) -> bool:
        """Whether nobody may come but those that are known by name."""
        return not (self._replaces or self._known.is_restricted)

    def nobody_comes(self, now: float) -> bool:
        """Whether no peer has joined, and it is certain before the deadline that none will."""
        if self._known.is_restricted:
            return now >= self.quiet_at
        if now >= self.usual_deadline and self._awaited.is_complete(()):
            return True
        if self._awaited.may_be_back and now < self.quiet_at:
            return False
        if self._expected is None or self._reads_since_arrival == 0 or self._missing > 0:
            return False
        if self._is_told_all_names and self._awaited.have_all_come(()):
            return True
        if self._names_count and self._awaited.is_complete(()):  # all of them are lost
            return self._coming(()) <= 1
        return self._expected - len(self._refused) <= 1

    @property
    def quiet_at(self) -> float:
        """When the quiet period ends if no peer comes; later while more are expected."""
        if self._expected is None or self._known.is_restricted:
            return self._arrivals.quiet_from
        missing = SHARE_WAITED_FOR_MISSING * self._seconds
        return self._arrivals.last + max(self._arrivals.quiet_seconds, missing)


# The quiet period of a gathering, after which no other peer is likely to come. Pure.
#
# Peers that end their steps together arrive together, and their group should not wait. Peers that
# arrive one by one leave gaps, and a list that is closed in a gap leaves the rest behind. So the
# quiet period is the longest of
#
#     the least that any network needs             QUIET_SECONDS
#     three round trips to the slowest member, the time that an arrival takes
#     twice the longest gap between two arrivals that was seen in this gathering
#
# and never more than `LONGEST_QUIET_SECONDS`. The gathering's deadline limits all of it.
#
# Easy to get wrong: only the first message of a peer is an arrival. Otherwise a peer that leaves
# and comes again, or repeats a message, could keep a list open for ever.


QUIET_SECONDS = 0.15  # to write a slot and have it read, on a busy machine
LONGEST_QUIET_SECONDS = 1.0  # longer gaps are no pattern to wait for
ROUND_TRIPS = 3.0  # a slot is written (1), read (1), and its owner asks to join (1)
GAPS = 2.0


class Arrivals:
    """The peers that have come, and when the last one did. This peer itself is the first."""

    def __init__(self, now: float) -> None:
        self.last = now
        self.slowest_round_trip = 0.0
        self._came: set[PeerId] = set()
        self._longest_gap = 0.0

    def came(self, peer: PeerId, now: float) -> bool:
        """Note a peer. Returns whether it is an arrival."""
        if peer in self._came:
            return False
        self._longest_gap = max(self._longest_gap, now - self.last)
        self._came.add(peer)
        self.last = now
        return True

    def looked(self, now: float, *, first: bool) -> None:
        """The slots were read. Before the first reading no peer could be seen."""
        if first and not self._came:
            self.last = now

    def measured(self, round_trip_seconds: float) -> None:
        """How long an answer of somebody took."""
        self.slowest_round_trip = max(self.slowest_round_trip, round_trip_seconds)

    def begin_anew(self, now: float) -> None:
        """Nobody could be seen to come until now."""
        self.last = now

    @property
    def quiet_seconds(self) -> float:
        wanted = max(QUIET_SECONDS, ROUND_TRIPS * self.slowest_round_trip, GAPS * self._longest_gap)
        return min(wanted, LONGEST_QUIET_SECONDS)

    @property
    def quiet_from(self) -> float:
        """When the quiet period ends."""
        return self.last + self.quiet_seconds
