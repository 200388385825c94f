"""Whom a gathering knows under its key: who may lead, who is waited for, and who is not. Pure.

A peer is known from its slot, from another's word, or from a message of its own. It counts until
it is *passed over* (silent, gone, looking for no group, refusing us), and counts again when it is
heard from, or has put a newer slot.

A leader invites everybody that it knows. It waits for a peer while the invitation is under way,
and then for as long as the answer deserves: a peer that says it comes has a second to do so; one
that is with another leader is asked again, for that leader may be dead; one that can only dial out
cannot be asked at all, and has a second from when it was first seen.

Easy to get wrong: whoever is no longer waited for is not passed over. It may still come.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

from protocols.identity import PeerId
from protocols.moshpit.gathering_effects import Candidate
from protocols.moshpit.roster import LARGEST_LIST

MOST_KNOWN = 2 * LARGEST_LIST  # of more than can be in one group no use can be made
COMING_SECONDS = 1.0  # from "I come" to the join: one round trip, or a dial
MOST_PROMISES = 3  # a word and its answer may cross with being sent on to another
MOST_NAMED = 8
ASK_AGAIN_SECONDS = 0.25  # a peer that is with another: its leader redirects or is passed over
MOST_ASKED = 12  # times: in 3 s a dead leader has been passed over by everybody
PROBED_AT_ONCE = 32  # more dead ones at the head of the order are found after those
INVITED_AT_ONCE = 32  # a leader opens no more links than this at one moment


class Absence(enum.Enum):
    """Why a peer was passed over."""

    UNREACHABLE = enum.auto()
    """It cannot be reached, or was silent: as far as we can tell, it is gone."""
    ELSEWHERE = enum.auto()
    """It is there, and looks for no group now, or has one."""
    AT_ODDS = enum.auto()
    """It is there and looks for a group, and we cannot be in one with it."""


@dataclass
class InvitablePeer:
    """`ask_at`: when to invite it; infinity while there is no need. `waited_until`: a list is not
    closed without it before, except by its deadline."""

    peer: PeerId
    place: bytes
    reduces: bool
    first_seen: float
    ask_at: float
    waited_until: float = math.inf
    asked: int = 0
    promises: int = 0  # to come
    named: int = 0  # times that others said that it leads
    asking: bool = False
    sequence: int = -1  # of its newest slot
    absence: Absence | None = None  # None: it counts
    reason: str = "it did not join in time"
    is_silent: bool = False  # it can only dial out, and has not
    is_unled: bool = False  # it would lead us, and has held up rounds that it led: never counts

    def is_newer(self, sequence: int) -> bool:
        return sequence > self.sequence

    def has_slot(self, sequence: int, now: float) -> None:
        if self.sequence < 0 and not self.asked:
            self.waited_until = math.inf
        self.sequence = sequence
        self._counts_again(now)

    def heard_from(self, now: float) -> None:
        """It has sent something itself."""
        self.is_silent = False
        self._counts_again(now)

    def _counts_again(self, now: float) -> None:
        if self.absence is not None and not self.is_unled:
            self.absence, self.reason = None, "it did not join in time"
            self.ask_again(now)

    def ask_again(self, now: float) -> None:
        """It is to be invited, if it was not asked too often."""
        self.asking = False
        self.waited_until = math.inf
        self.ask_at = now
        self._not_too_often(now)

    def pass_over(self, absence: Absence, reason: str) -> None:
        self.absence, self.reason = absence, reason
        self.asking = False

    def comes(self, now: float) -> None:
        """It is reminded if it does not, but waited for only once."""
        self.promises += 1
        self.asking = False
        self.ask_at = now + COMING_SECONDS if self.promises < MOST_PROMISES else math.inf
        self.waited_until = min(self.waited_until, now + COMING_SECONDS)

    def is_with_another(self, now: float) -> None:
        self.asking = False
        self.ask_at = now + ASK_AGAIN_SECONDS
        self._not_too_often(now)

    def _not_too_often(self, now: float) -> None:
        if self.asked >= MOST_ASKED:
            self.ask_at, self.waited_until = math.inf, now

    def comes_by_itself(self, now: float) -> None:
        self.asking, self.ask_at, self.is_silent = False, math.inf, True
        self.waited_until = max(now, self.first_seen + COMING_SECONDS)

    def is_asked(self) -> None:
        self.asking, self.ask_at = True, math.inf
        self.asked += 1


class KnownPeers:
    """Invariant: never more than MOST_KNOWN, never this peer itself; after `restrict` only those of
    the group count, until `lift`."""

    def __init__(
        self, me: PeerId, order: Callable[[PeerId], bytes], unled: frozenset[PeerId]
    ) -> None:
        """`unled`: who would lead this peer and does not count, whatever is heard of it."""
        self._me = me
        self._unled = unled
        self._order = order
        self._peers: dict[PeerId, InvitablePeer] = {}
        self._group: frozenset[PeerId] | None = None

    @property
    def is_restricted(self) -> bool:
        return self._group is not None

    def restrict(self, group: Iterable[Candidate], now: float) -> None:
        """From now on only these peers count, and they are all known."""
        group = tuple(group)
        self._group = frozenset(one.peer for one in group)
        for candidate in group:
            self.heard_of(candidate, now)

    def lift(self) -> None:
        """Everybody counts again."""
        self._group = None

    def heard_of(self, candidate: Candidate, now: float) -> InvitablePeer | None:
        """The peer as it is known from now on; None if it is not to be known."""
        peer = candidate.peer
        if peer == self._me or not self._counts(peer):
            return None
        known = self._peers.get(peer)
        if known is None and len(self._peers) < MOST_KNOWN:
            place = self._order(peer)
            known = self._peers[peer] = InvitablePeer(
                peer, place, candidate.reduces, now, ask_at=now
            )
            if peer in self._unled:
                known.is_unled = True
                known.pass_over(Absence.AT_ODDS, "it has held up a round that it led")
        return known

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def get(self, peer: PeerId) -> InvitablePeer | None:
        return self._peers.get(peer) if self._counts(peer) else None

    def reduces(self, peer: PeerId) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.reduces

    def pass_over(self, peer: PeerId, absence: Absence, reason: str) -> None:
        known = self._peers.get(peer)
        if known is not None:
            known.pass_over(absence, reason)

    def to_probe(self, asked: PeerId) -> list[PeerId]:
        """Of those who can be dialled and come before this peer, the first beside the one that is
        asked: it is good to know soon whether they are there."""
        before = self._order(self._me)
        able = [one for one in self._there() if one.reduces and one.place < before]
        able.sort(key=lambda one: one.place)
        return [one.peer for one in able if one.peer != asked][:PROBED_AT_ONCE]

    def first_before(self, peer: PeerId | None) -> InvitablePeer | None:
        """Of those who can be dialled and were not passed over, the first in the order, if it
        comes before this one."""
        able = (one for one in self._there() if one.reduces)
        first = min(able, key=lambda one: one.place, default=None)
        if first is None or (peer is not None and first.place > self._order(peer)):
            return None
        return first

    def passed_over(self) -> tuple[PeerId, ...]:
        """Those who could lead, and whom it is no use to name to us. Whoever only was not there
        yet is none of them."""
        return tuple(
            one.peer
            for one in self._peers.values()
            if one.reduces
            and (one.absence not in (None, Absence.ELSEWHERE) or not self._counts(one.peer))
        )

    def is_named(self, peer: PeerId, now: float) -> None:
        """Somebody who has its answer says that this peer leads. So it counts again, a few times:
        it may have begun since, or have been silent for a moment."""
        known = self.get(peer)
        if known is not None and known.named < MOST_NAMED:
            known.named += 1
            known.heard_from(now)

    def to_invite(self, now: float, joined: Container[PeerId]) -> list[PeerId]:
        """Whom to invite now; they count as asked."""
        free = INVITED_AT_ONCE - sum(one.asking for one in self._peers.values())
        due = [one for one in self._there() if one.ask_at <= now and one.peer not in joined]
        for one in due[: max(0, free)]:
            one.is_asked()
        return [one.peer for one in due[: max(0, free)]]

    def waited_for(self, now: float, joined: Container[PeerId]) -> list[PeerId]:
        """Who has not joined and may be about to."""
        return [
            one.peer for one in self._there() if one.peer not in joined and one.waited_until > now
        ]

    def next_moment(self, now: float, joined: Container[PeerId]) -> float:
        """When the next of these two answers will be another."""
        moments = [
            moment
            for one in self._there()
            if one.peer not in joined
            for moment in (one.ask_at, one.waited_until)
            if moment > now
        ]
        return min(moments, default=math.inf)

    def reasons(self) -> tuple[tuple[PeerId, str], ...]:
        """Of those who look for a group as well, why each is not with us. Whoever was put into a
        group with us has looked for one, whatever became of it."""
        return tuple(
            (one.peer, one.reason)
            for one in self._peers.values()
            if self._counts(one.peer)
            and (
                self.is_restricted
                or one.absence is Absence.AT_ODDS
                or (one.absence is None and not one.is_silent)
            )
        )

    def unreachable(self) -> tuple[PeerId, ...]:
        return tuple(
            one.peer
            for one in self._peers.values()
            if one.absence is Absence.UNREACHABLE or (one.absence is None and one.is_silent)
        )

    def _there(self) -> list[InvitablePeer]:
        return [
            one for one in self._peers.values() if one.absence is None and self._counts(one.peer)
        ]

    def _counts(self, peer: PeerId) -> bool:
        return self._group is None or peer in self._group


# The joins that wait for an answer of a gathering: one of each peer at the most. Pure.
#
# A join waits while its peer may still be in the list that is closed here. As soon as we follow
# another, who is there, it is sent on to that one. A peer that could not reach it just now has said
# so; it waits a little, and is then named the same leader again, which is there for us after all.
#
# Easy to get wrong: a peer that asks again has given its earlier join up, and that one may be gone
# *after* the new one has come: joins are told apart by their tickets, not by their peers.


NAME_AGAIN_SECONDS = 0.5
"""A peer that could not reach our leader waits here, and is sent to it again after this."""


@dataclass(frozen=True)
class _Join:
    ticket: int
    passed_over: frozenset[PeerId]
    since: float


class WaitingJoins:
    """A collection of the peers that wait, in the order in which they came."""

    def __init__(self) -> None:
        self._joins: dict[PeerId, _Join] = {}

    def __contains__(self, peer: object) -> bool:
        return peer in self._joins

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._joins)

    def __len__(self) -> int:
        return len(self._joins)

    def add(self, peer: PeerId, ticket: int, passed_over: Iterable[PeerId], now: float) -> None:
        self._joins[peer] = _Join(ticket, frozenset(passed_over), now)

    def ticket_of(self, peer: PeerId) -> int | None:
        join = self._joins.get(peer)
        return None if join is None else join.ticket

    def release(self, peer: PeerId) -> int:
        """This peer waits no longer. Returns the ticket that is to be answered."""
        return self._joins.pop(peer).ticket

    def release_all_but(self, peers: Container[PeerId]) -> list[int]:
        return [self.release(peer) for peer in list(self._joins) if peer not in peers]

    def release_to(self, leader: PeerId, now: float) -> dict[PeerId, int]:
        """Those who are to be sent on to this leader now, with their tickets."""
        due = [
            peer
            for peer, join in self._joins.items()
            if leader not in join.passed_over or now >= join.since + NAME_AGAIN_SECONDS
        ]
        return {peer: self.release(peer) for peer in due}

    @property
    def named_again_at(self) -> float:
        """When the next of those who passed our leader over is sent to it again."""
        moments = (join.since + NAME_AGAIN_SECONDS for join in self._joins.values())
        return min(moments, default=math.inf)


# Those who are awaited by name at one gathering, and what is known of each. Pure.
#
# Of a number of peers that are expected nobody knows who they are: somebody who was not counted may
# take the place of one who was, and brings samples that the others count on. Names say who is
# missing. A list that misses an awaited peer is closed
#
#     at once, as far as that peer goes,     if it is lost: gone, in another group, or refusing us
#     at the deadline                        if it is there: it has answered in this search
#     after the quiet while of closing_time  if neither is known, as without names
#
# Only the leader's names count, and they do not travel. All who count on each other read the same
# slots, so their names differ by what is on its way; and names that a joiner may add would let any
# stranger hold a list open with peers that it invents.
#
# Easy to get wrong: whoever answers that it looks for no group is there. It computes, and will
# come.


class Awaited:
    """Invariant: nobody is both there and lost, and nobody is either who is not awaited."""

    def __init__(self, peers: frozenset[PeerId]) -> None:
        self._peers = peers
        self._there: set[PeerId] = set()
        self._lost: set[PeerId] = set()
        self._asked: set[PeerId] = set()

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def __bool__(self) -> bool:
        return bool(self._peers)

    def is_there(self, peer: PeerId) -> None:
        """It has answered, whatever it was."""
        if peer in self._peers:
            self._there.add(peer)
            self._lost.discard(peer)

    def is_lost(self, peer: PeerId) -> None:
        """Its link is gone, it is in another group, or it refuses us."""
        if peer in self._peers:
            self._lost.add(peer)
            self._there.discard(peer)

    def has_left(self, peer: PeerId) -> None:
        """It had joined and does no more; whether it is there it has to say anew."""
        self._there.discard(peer)

    def to_ask(self, joined: Container[PeerId], known: Container[PeerId]) -> list[PeerId]:
        """Of whom nothing is known, and nobody has asked yet; they count as asked."""
        heard = self._there | self._lost | self._asked
        due = [one for one in sorted(self._peers - heard) if one not in joined and one not in known]
        self._asked.update(due)
        return due

    def lost(self, joined: Container[PeerId]) -> int:
        """How many do not come."""
        return sum(1 for one in self._lost if one not in joined)

    def is_complete(self, joined: Container[PeerId]) -> bool:
        """Whether all have joined who are not lost."""
        return all(one in joined for one in self._peers - self._lost)

    def will_come(self, joined: Container[PeerId]) -> bool:
        """Whether somebody is there who has not joined."""
        return any(one not in joined for one in self._there)
