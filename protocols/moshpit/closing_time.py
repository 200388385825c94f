"""When a leader closes its list, and until when anybody waits for one. Pure.

A list that closes late costs every member; one that closes early leaves somebody behind. So it is
closed as soon as one of these holds, and at least one other has joined:

    as many have joined as were expected, and all who are awaited by name (known_peers.py)
    all that are known have joined (or are no longer waited for), and the group is full
    all that are known have joined, and nobody new came for a quiet while (below), in which
    the slots were read at least once
    it is time

Of those who are awaited by name nobody counts who is lost; and while one of them is there and has
not joined, only the deadline closes the list.

Promise: nobody's messages can put the deadline off. Joins bring it nearer: whoever joins says for
how long it will wait, and the list is closed by then.

Easy to get wrong: what came, or did not, while nobody could be seen to come says nothing. After
following somebody else, and after this process or machine was stopped, the quiet begins anew.
"""

from __future__ import annotations

from protocols.identity import PeerId
from protocols.moshpit.known_peers import Awaited, KnownPeers, WaitingJoins

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


MOST_STOPS_EXCUSED = 3
"""A laptop was closed, perhaps twice. What is late again and again is too slow, and the deadline
holds for it as well."""


class ClosingTime:
    """Of one gathering. A leader closes by `deadline`; a follower waits until `gives_up_at`."""

    def __init__(
        self,
        known: KnownPeers,
        joins: WaitingJoins,
        *,
        seconds: float,
        group_size: int,
        expected: int | None,
        awaited: Awaited,
        now: float,
    ) -> None:
        self.deadline = now + seconds
        self.gives_up_at = self.deadline + GRACE_SECONDS
        self._known = known
        self._joins = joins
        self._seconds = seconds
        self._group_size = group_size
        self._expected = expected
        self._awaited = awaited
        self._arrivals = Arrivals(now)
        self._was_read = False
        self._refused: set[PeerId] = set()
        self._reads_since_arrival = 0
        self._before = (self.deadline, self.gives_up_at, expected)  # a regrouping
        self._stops_excused = 0

    # -- what happens

    def came(self, peer: PeerId, now: float) -> None:
        """We have heard from this peer, or seen its slot; only the first time counts."""
        if self._arrivals.came(peer, now):
            self._reads_since_arrival = 0

    def joined(self, patience_seconds: float, now: float) -> None:
        """Somebody waits here now, and will for so long."""
        patience = max(SHORTEST_PATIENCE_SECONDS, patience_seconds)
        self.deadline = min(self.deadline, now + patience)

    def refused(self, peer: PeerId) -> None:
        """It has come and is not to be listed: of those who are expected, one less."""
        self._refused.add(peer)

    def looked(self, now: float) -> None:
        """A read of the slots has ended, well or not."""
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

    def list_comes(self, seconds: float, now: float) -> None:
        """A list that was closed with us in it is on its way, for so long at most. (Leader after
        leader could say so, so this ends at a fixed time after the deadline.)"""
        latest = self.deadline + GRACE_SECONDS + seconds
        self.gives_up_at = max(self.gives_up_at, min(now + seconds, latest))

    def was_stopped(self, now: float) -> None:
        """This process or machine did not run until now."""
        self.begin_anew(now)
        if self._stops_excused == MOST_STOPS_EXCUSED:
            return
        self._stops_excused += 1
        self.deadline = max(self.deadline, now + SHORTEST_PATIENCE_SECONDS)
        self.gives_up_at = max(self.gives_up_at, self.deadline + GRACE_SECONDS)

    def regrouped(self, members: int, now: float) -> None:
        """We were put into a group of so many, which is still to meet."""
        self._before = (self.deadline, self.gives_up_at, self._expected)
        self._expected = members
        self.deadline = now + REGROUP_SECONDS
        self.gives_up_at = self.deadline + GRACE_SECONDS

    def regroup_undone(self) -> None:
        """That group was none."""
        self.deadline, self.gives_up_at, self._expected = self._before

    # -- what that means

    def has_come(self, now: float) -> bool:
        """Whether to close the list now, with those who wait."""
        if not self._joins:
            return False
        count = 1 + len(self._joins)
        if now >= self.deadline or self._all_have_come(count):
            return True
        if self._names_count and self._awaited.will_come(self._joins):
            return False
        if self._known.waited_for(now, self._joins):
            return False
        if count >= self._group_size and self._expected is None:
            return True
        return now >= self.quiet_at and self._reads_since_arrival > 0

    def _all_have_come(self, count: int) -> bool:
        if not self._names_count:
            return self._expected is not None and count + len(self._refused) >= self._expected
        coming = 0 if self._expected is None else self._expected - self._awaited.lost(self._joins)
        return count >= coming and self._awaited.is_complete(self._joins)

    @property
    def _names_count(self) -> bool:
        """A group that was split off has its own members, and no others."""
        return bool(self._awaited) and not self._known.is_restricted

    def nobody_comes(self, now: float) -> bool:
        """Whether it is sure before the deadline that nobody will join, while nobody has."""
        if self._known.is_restricted:
            return now >= self.quiet_at
        if self._expected is None or self._reads_since_arrival == 0:
            return False
        if self._names_count and self._awaited.is_complete(()):  # all of them are lost
            return self._expected - self._awaited.lost(()) <= 1
        return self._expected - len(self._refused) <= 1

    @property
    def quiet_at(self) -> float:
        """From when on it is quiet, if nobody comes; later while more are expected."""
        if self._expected is None or self._known.is_restricted:
            return self._arrivals.quiet_from
        missing = SHARE_WAITED_FOR_MISSING * self._seconds
        return self._arrivals.last + max(self._arrivals.quiet_seconds, missing)


# When nobody else is likely to come: the quiet period of a gathering, derived from arrivals. Pure.
#
# Peers that end their steps together arrive together, and a group of them should not wait; peers
# that arrive one by one leave gaps, and a list that is closed in a gap leaves the rest behind. So
# the quiet period is the longest of
#
#     what any network needs at the least          QUIET_SECONDS
#     three round trips to the slowest member, which is what it takes to come
#     twice the longest gap between two arrivals that was seen in this gathering
#
# and never more than `LONGEST_QUIET_SECONDS`; the gathering's deadline stands above it all.
#
# Easy to get wrong: only the first coming of a peer is an arrival. Who leaves and comes again, or
# says a thing twice, could keep a list open for ever.


QUIET_SECONDS = 0.15  # what a slot takes to be written and seen by a reader, on a busy machine
LONGEST_QUIET_SECONDS = 1.0  # gaps beyond that are no pattern to wait for
ROUND_TRIPS = 3.0  # a slot is written (1), read (1), and its owner asks to join (1)
GAPS = 2.0


class Arrivals:
    """Who has come, and when the last one did. This peer itself is the first arrival."""

    def __init__(self, now: float) -> None:
        self.last = now
        self.slowest_round_trip = 0.0
        self._came: set[PeerId] = set()
        self._longest_gap = 0.0

    def came(self, peer: PeerId, now: float) -> bool:
        """Note an arrival; whether it is one."""
        if peer in self._came:
            return False
        self._longest_gap = max(self._longest_gap, now - self.last)
        self._came.add(peer)
        self.last = now
        return True

    def looked(self, now: float, *, first: bool) -> None:
        """The slots were read. Before the first time nobody could be seen."""
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
        """The moment from which on it is quiet."""
        return self.last + self.quiet_seconds
