"""The peers that a gathering knows under its key: which may lead, and which are awaited. Pure.

A peer is known from its slot, from another peer, or from a message of its own. It counts until it
is *passed over* (silent, gone, looking for no group, refusing us). It counts again when it sends a
message or publishes a newer slot.

A leader invites all peers that it knows. It waits for a peer while the invitation is under way, and
then as long as the answer justifies. A peer that says it comes has a second to do so. A peer that
is with another leader is asked again, because that leader may be dead. A peer that can only dial
out cannot be asked, and has four seconds from when it was first seen.

Easy to get wrong: a peer that is no longer waited for is not passed over. It may still come.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

from protocols.identity import PeerId
from protocols.moshpit.gathering_effects import Candidate
from protocols.moshpit.roster import LARGEST_LIST

MOST_KNOWN = 2 * LARGEST_LIST  # more peers than fit into one group are of no use
COMING_SECONDS = 1.0  # from "I come" to the join: one round trip, or a dial
DIALLING_SECONDS = 4.0
"""For a peer that can only dial out: it may first dial one that does not lead, and be sent on. At
homes both dials may go through a relay, and have taken up to 1.7 s each on a busy machine."""
MOST_PROMISES = 3  # a promise to come may cross with a message that sends the peer on
MOST_NAMED = 8
ASK_AGAIN_SECONDS = 0.25  # a peer with another leader: that one sends it on or is passed over
MOST_ASKED = 12  # times: in 3 s all peers have passed over a dead leader
PROBED_AT_ONCE = 32  # more dead peers at the head of the order are found after these
INVITED_AT_ONCE = 32  # a leader opens no more links than this at one moment


class Absence(enum.Enum):
    """Why a peer was passed over."""

    UNREACHABLE = enum.auto()
    """It cannot be reached, or was silent: it seems to be gone."""
    ELSEWHERE = enum.auto()
    """It is there, but looks for no group now, or has one."""
    AT_ODDS = enum.auto()
    """It is there and looks for a group, but we cannot be in one with it."""


@dataclass
class InvitablePeer:
    """`ask_at`: when to invite it; infinity if there is no need. `waited_until`: before this, a
    list is closed without it only at the deadline."""

    peer: PeerId
    place: bytes
    reduces: bool
    first_seen: float
    ask_at: float
    waited_until: float = math.inf
    asked: int = 0
    promises: int = 0  # to come
    named: int = 0  # how often others said that it leads
    asking: bool = False
    sequence: int = -1  # of its newest slot
    absence: Absence | None = None  # None: it counts
    reason: str = "it did not join in time"
    is_silent: bool = False  # it can only dial out, and has not
    is_unled: bool = False  # it would lead us, and its rounds came to nothing: never counts

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
        """Invite it again, unless it was asked too often."""
        self.asking = False
        self.waited_until = math.inf
        self.ask_at = now
        self._not_too_often(now)

    def pass_over(self, absence: Absence, reason: str) -> None:
        self.absence, self.reason = absence, reason
        self.asking = False

    def comes(self, now: float) -> None:
        """It says that it comes. It is reminded if it does not, but waited for only once."""
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
        self.waited_until = max(now, self.first_seen + DIALLING_SECONDS)

    def is_asked(self) -> None:
        self.asking, self.ask_at = True, math.inf
        self.asked += 1


class KnownPeers:
    """Invariant: never more than MOST_KNOWN peers, and never this peer itself. After `restrict`
    only the peers of the group count, until `lift`."""

    def __init__(
        self, me: PeerId, order: Callable[[PeerId], bytes], unled: frozenset[PeerId]
    ) -> None:
        """`unled`: peers earlier in the order that never count, whatever is heard of them."""
        self._me = me
        self._unled = unled
        self._order = order
        self._peers: dict[PeerId, InvitablePeer] = {}
        self._group: frozenset[PeerId] | None = None

    @property
    def is_restricted(self) -> bool:
        return self._group is not None

    def restrict(self, group: Iterable[Candidate], now: float) -> None:
        """Only these peers count from now on, and all of them are known."""
        group = tuple(group)
        self._group = frozenset(one.peer for one in group)
        for candidate in group:
            self.heard_of(candidate, now)

    def lift(self) -> None:
        """All peers count again."""
        self._group = None

    def heard_of(self, candidate: Candidate, now: float) -> InvitablePeer | None:
        """Note a peer, and return its entry; None if there is no entry for it."""
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
                known.pass_over(Absence.AT_ODDS, "a round that it led came to nothing")
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
        """The first peers before this one that can be dialled, without the one that is asked. It
        is useful to know soon whether they are there."""
        before = self._order(self._me)
        able = [one for one in self._there() if one.reduces and one.place < before]
        able.sort(key=lambda one: one.place)
        return [one.peer for one in able if one.peer != asked][:PROBED_AT_ONCE]

    def first_before(self, peer: PeerId | None) -> InvitablePeer | None:
        """The first peer in the order that can be dialled and was not passed over, if it comes
        before this one."""
        able = (one for one in self._there() if one.reduces)
        first = min(able, key=lambda one: one.place, default=None)
        if first is None or (peer is not None and first.place > self._order(peer)):
            return None
        return first

    def passed_over(self) -> tuple[PeerId, ...]:
        """The peers that could lead, but that others need not name to us. Peers that merely were
        not there yet are not among them."""
        return tuple(
            one.peer
            for one in self._peers.values()
            if one.reduces
            and (one.absence not in (None, Absence.ELSEWHERE) or not self._counts(one.peer))
        )

    def is_named(self, peer: PeerId, now: float) -> None:
        """A peer that has its answer says that this peer leads. So it counts again, a few times: it
        may have begun since, or have been silent only for a moment."""
        known = self.get(peer)
        if known is not None and known.named < MOST_NAMED:
            known.named += 1
            known.heard_from(now)

    def to_invite(self, now: float, joined: Container[PeerId]) -> list[PeerId]:
        """The peers to invite now. From now on they count as asked."""
        free = INVITED_AT_ONCE - sum(one.asking for one in self._peers.values())
        due = [one for one in self._there() if one.ask_at <= now and one.peer not in joined]
        for one in due[: max(0, free)]:
            one.is_asked()
        return [one.peer for one in due[: max(0, free)]]

    def waited_for(self, now: float, joined: Container[PeerId]) -> list[PeerId]:
        """The peers that have not joined, but may be about to."""
        return [
            one.peer for one in self._there() if one.peer not in joined and one.waited_until > now
        ]

    def next_deadline(self, now: float, joined: Container[PeerId]) -> float:
        """When the result of `to_invite` or `waited_for` changes next."""
        moments = [
            moment
            for one in self._there()
            if one.peer not in joined
            for moment in (one.ask_at, one.waited_until)
            if moment > now
        ]
        return min(moments, default=math.inf)

    def reasons(self) -> tuple[tuple[PeerId, str], ...]:
        """Why each of the others that look for a group is not with us. A peer that was put into a
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


# The joins that wait for an answer of a gathering: at most one of each peer. Pure.
#
# A join waits while its peer may still be in the list that is closed here. As soon as we follow
# another peer that is there, the join is sent on to that peer. If the joining peer says that it
# could not reach that leader just now, it waits a little and is then sent to it again, because we
# can reach it.
#
# Some gatherings have *seats*: of several peers with the same seat, the one that comes for most
# peers is listed, and the others wait in vain. Those with the leader's own seat do, too. The heads
# of cohorts gather so.
#
# Easy to get wrong: a peer that asks again has given up its earlier join, whose end may be noticed
# *after* the new one has come. So joins are told apart by their tickets, not by their peers.


NAME_AGAIN_SECONDS = 0.5
"""A peer that could not reach our leader waits here for this long, and is sent to it again."""


@dataclass(frozen=True)
class _Join:
    ticket: int
    passed_over: frozenset[PeerId]
    since: float
    until: float
    peers: int


class WaitingJoins:
    """The peers that wait, in the order in which they came. `me` has a seat, too."""

    def __init__(self, me: PeerId, seat_of: Callable[[PeerId], int] | None = None) -> None:
        self._me, self._seat_of = me, seat_of
        self._joins: dict[PeerId, _Join] = {}

    def __contains__(self, peer: object) -> bool:
        return peer in self._joins

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._joins)

    def __len__(self) -> int:
        return len(self._joins)

    def add(
        self,
        candidate: Candidate,
        ticket: int,
        passed_over: Iterable[PeerId],
        until: float,
        now: float,
    ) -> None:
        """This peer waits from now on, until then."""
        join = _Join(ticket, frozenset(passed_over), now, until, candidate.peers)
        self._joins[candidate.peer] = join

    @property
    def until(self) -> list[float]:
        """Until when each waits of those that would be listed, the first to go first. A cohort from
        which many come has one voice."""
        return sorted(self._joins[one].until for one in self.seated)

    def lacks(self, peers: Iterable[PeerId]) -> bool:
        """Whether one of these has not joined, nor another one with its seat. One that comes for
        itself alone does not count: its cohort may have met without it, and come later."""
        missing = [one for one in peers if one not in self._joins]
        if self._seat_of is None or not missing:
            return bool(missing)
        come = (one for one, join in self._joins.items() if join.peers > 1)
        taken = {self._seat_of(one) for one in (self._me, *come)}
        return any(self._seat_of(one) not in taken for one in missing)

    @property
    def seated(self) -> list[PeerId]:
        """Those that would be listed now."""
        if self._seat_of is None:
            return list(self._joins)
        first: dict[int, PeerId] = {}
        for peer in sorted(self._joins, key=lambda one: -self._joins[one].peers):  # a stable sort
            first.setdefault(self._seat_of(peer), peer)
        first.pop(self._seat_of(self._me), None)
        chosen = set(first.values())
        return [peer for peer in self._joins if peer in chosen]

    @property
    def peers(self) -> int:
        """How many peers these come for."""
        return sum(self._joins[peer].peers for peer in self.seated)

    def ticket_of(self, peer: PeerId) -> int | None:
        join = self._joins.get(peer)
        return None if join is None else join.ticket

    def release(self, peer: PeerId) -> int:
        """This peer waits no longer. Returns the ticket of the join to answer."""
        return self._joins.pop(peer).ticket

    def release_all_but(self, peers: Container[PeerId]) -> list[int]:
        return [self.release(peer) for peer in list(self._joins) if peer not in peers]

    def release_to(self, leader: PeerId, now: float) -> dict[PeerId, int]:
        """The peers to send on to this leader now, with their tickets."""
        due = [
            peer
            for peer, join in self._joins.items()
            if leader not in join.passed_over or now >= join.since + NAME_AGAIN_SECONDS
        ]
        return {peer: self.release(peer) for peer in due}

    @property
    def named_again_at(self) -> float:
        """When the next peer that had passed over our leader is sent to it again."""
        moments = (join.since + NAME_AGAIN_SECONDS for join in self._joins.values())
        return min(moments, default=math.inf)


# The peers that one gathering awaits by name, and what is known of each. Pure.
#
# A number of expected peers does not say which they are: a peer that was not counted may take the
# place of one that was, and whose samples the others count on. Names say which peers are missing.
# If an awaited peer is missing, the list is closed
#
#     without waiting for that peer            if it is lost: gone, in another group, or refusing us
#                                              (or was lost before, and nothing was heard of it)
#     at the deadline                          if it is there: it has answered in this search
#     after the quiet period of closing_time   if neither is known, as without names, or if another
#                                              one with its seat has joined
#
# Peers that are expected and not awaited, such as one that computes its first batch, may have
# names, too. If one of them is lost, one peer less is expected. Otherwise a list would stay open
# for the quiet period whenever such a peer has just died.
#
# Only the leader's names count, and they are not sent. Peers that count on each other read the same
# slots, so their names differ only by slots that are still on their way. If joining peers could add
# names, any stranger could hold a list open with invented peers.
#
# Easy to get wrong: a peer that answers that it looks for no group is there. It computes, and will
# come.


class Awaited:
    """`coming`: all that are expected, if all have names. Nobody waits by name for those of them
    that are not awaited: it only counts if they are lost. `lost`: those that seem to be; they are
    asked, too.

    Invariant: no peer is both there and lost, and only awaited peers are there."""

    def __init__(
        self,
        peers: frozenset[PeerId],
        coming: frozenset[PeerId] = frozenset(),
        lost: frozenset[PeerId] = frozenset(),
    ) -> None:
        self._peers, self._all = peers, peers | coming
        self._has_all_names = bool(coming)
        self._there: set[PeerId] = set()
        self._lost = {*lost & self._all}
        self._may_be_back = set(self._lost)
        self._asked: set[PeerId] = set()

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def __bool__(self) -> bool:
        return bool(self._peers)

    def is_there(self, peer: PeerId) -> None:
        """The peer has sent any answer."""
        self._lost.discard(peer)
        self._may_be_back.discard(peer)
        if peer in self._peers:
            self._there.add(peer)

    def is_lost(self, peer: PeerId) -> None:
        """The peer's link is gone, it is in another group, or it refuses us."""
        if peer in self._all:
            self._lost.add(peer)
            self._there.discard(peer)
            self._may_be_back.discard(peer)

    def has_left(self, peer: PeerId) -> None:
        """The peer had joined and left. It is there again only after another answer."""
        self._there.discard(peer)

    def to_ask(self, joined: Container[PeerId], known: Container[PeerId]) -> list[PeerId]:
        """Peers of which nothing is known and that were not asked. Now they count as asked."""
        heard = self._there | (self._lost - self._may_be_back) | self._asked
        due = [one for one in sorted(self._all - heard) if one not in joined and one not in known]
        self._asked.update(due)
        return due

    @property
    def may_be_back(self) -> bool:
        """Whether one of those that were lost before has not answered, and may yet."""
        return bool(self._may_be_back)

    def lost(self, joined: Container[PeerId]) -> int:
        """How many of them will not come."""
        return sum(1 for one in self._lost & self._peers if one not in joined)

    def have_all_come(self, joined: Container[PeerId]) -> bool:
        """Whether all that are expected have joined or are lost, as far as all have names."""
        return self._has_all_names and all(one in joined for one in self._all - self._lost)

    def is_complete(self, joined: Container[PeerId]) -> bool:
        """Whether all that are not lost have joined."""
        return all(one in joined for one in self._peers - self._lost)

    def will_come(self, joins: WaitingJoins) -> bool:
        """Whether a peer that is there has not joined, and nobody has come in its place."""
        return joins.lacks(self._there)
