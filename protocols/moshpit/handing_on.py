"""Hands the signed list of a large group on from member to member.

A list has about 290 bytes for each member. If a leader sent it to all members, it would send that
times the square of their number: 1.2 MB for 64 members, which takes ten seconds on an upload of 1
Mb/s. So the leader sends the list to as many members as fit into `LEADER_BYTES`. To the others it
sends, in a few hundred bytes, the digest of the list and where to fetch it. Each member hands the
list on to as many others as the leader does.

    leader        listed: the whole list     ->  the first members
                  fetch: digest, sources     ->  the others
    other member  `list`: digest             ->  its parent in the tree; held until that one has it

Promises: a fetched list is the one that the leader named, to the byte and with its addresses, so a
member that hands it on cannot change anything. A source that hands nothing on costs the member that
asks it the time that the list needs to reach that source, and `MARGIN_SECONDS`. Then the member
asks the next source, and the leader last. A fetch ends after at most `LONGEST_FETCH_SECONDS`.

Easy to get wrong: a late source may still be the first to answer, so it is not given up when the
next one is asked.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio
from blake3 import blake3

from auth.bounded_map import BoundedMap
from protocols.errors import Busy, DeadlineExceeded, PotluckError
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.matchmaking_messages import LIST, ListRequest, MemberList
from protocols.moshpit.roster import Entry, NotSigned
from protocols.rpc import Rpc, encode

log = logging.getLogger("potluck.moshpit")

LEADER_BYTES = 64 << 10
"""The bytes of lists that a leader sends: half a second of an upload of 1 Mb/s. A group of up to 15
gets its list from the leader directly."""

FEWEST_CHILDREN = 3
"""Each member hands the list on to at least this many: 256 members need five levels, not eight."""

FEWEST_IN_PARTS = 2
"""The same for what is handed on part by part: another level costs only the time of a part."""

SOURCES = 2  # besides the leader: the parent in the tree, and the member above that

SLOWEST_BYTES_PER_SECOND = 125_000
"""A member is assumed to have at least 1 Mb/s each way, even if it is slower or has not yet
measured its link."""

MARGIN_SECONDS = 1.0
"""For round trips, and for dialling the parent if there is no link yet."""

LONGEST_FETCH_SECONDS = 15.0
"""256 members with uploads of 1 Mb/s have their list after nine seconds."""

MOST_WAITING = 2 * LARGEST_GROUP  # calls that are held here until a list has come
MOST_WAITING_OF_PEER = 4
LISTS_KEPT = 8  # to hand on: those of the last groups, 75 KB each for 256 members


def digest_of(member_list: MemberList) -> bytes:
    """32 bytes that identify exactly this list with these addresses."""
    return blake3(encode(member_list)).digest()


@dataclass(frozen=True)
class Way:
    """How one member gets the list. `sources`: the peers to ask, in this order; none: the leader
    sends the list. `seconds`: when it should have arrived."""

    sources: tuple[PeerId, ...]
    seconds: float

    @property
    def milliseconds(self) -> int:
        return int(self.seconds * 1000)


@dataclass(frozen=True)
class Arrival:
    """When something that is handed on in parts arrives: its first part, and all of it."""

    first: float = 0.0
    whole: float = 0.0

    def handed_on(self, size: float, part: float, seconds_per_byte: float) -> Arrival:
        """When the next one has it, if it comes from this one. `part`: the bytes of a part; `size`
        if it is handed on as a whole."""
        first = self.first + part * seconds_per_byte
        last_part = self.whole + part * seconds_per_byte
        return Arrival(first, max(last_part, self.first + size * seconds_per_byte))


def ways_to(
    members: Sequence[Entry], leader: PeerId, size: int, part: int | None = None
) -> dict[PeerId, Way]:
    """How a list of this size gets to all members but its leader: along a tree whose inner places
    have the first members that can be dialled, in the order of the list, which no peer chooses.
    `part`: as for `Arrival`."""
    others = [one for one in members if one.peer != leader]
    others.sort(key=lambda one: not one.reduces)  # a stable sort
    dialled = sum(one.reduces for one in others)
    part = size if part is None else part
    children = children_for(size, part)
    uploads = {one.peer: one.up_bytes_per_second for one in members}

    def after(peer: PeerId, one: Entry, arrival: Arrival) -> Arrival:
        up = max(SLOWEST_BYTES_PER_SECOND, uploads[peer])
        down = max(SLOWEST_BYTES_PER_SECOND, one.down_bytes_per_second)
        return arrival.handed_on(size, part, max(children / up, 1.0 / down))

    ways: dict[PeerId, Way] = {}
    arrivals: dict[PeerId, Arrival] = {}
    for place, one in enumerate(others):
        above = place_above(place, children, dialled)
        sources: tuple[PeerId, ...] = ()
        if above < 0:
            arrivals[one.peer] = after(leader, one, Arrival())
        else:
            parent = others[above].peer
            sources = (parent, *ways[parent].sources)[:SOURCES]
            arrivals[one.peer] = after(parent, one, arrivals[parent])
        ways[one.peer] = Way(sources, arrivals[one.peer].whole)
    return ways


def children_for(size: float, part: float) -> int:
    """To how many others a member hands on something of this size, in such parts."""
    fewest = FEWEST_CHILDREN if part >= size else FEWEST_IN_PARTS
    return max(fewest, int(LEADER_BYTES // max(1.0, size)))


def place_above(place: int, children: int, dialled: int) -> int:
    """The place of the parent of this place in the tree; -1 is the leader. The first `dialled`
    places can be dialled."""
    above = place // children - 1
    if above >= dialled:  # too few members can be dialled
        return place % dialled if dialled else -1
    return above


def seconds_to_all(ways: Mapping[PeerId, Way]) -> float:
    """When all members should have the list; 0 if the leader sends it to all of them."""
    if not any(way.sources for way in ways.values()):
        return 0.0
    return max(way.seconds for way in ways.values())


class HandingOn:
    """The lists that this node can hand on, and those that it waits for. One for each rpc."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._kept = BoundedMap[bytes, MemberList](LISTS_KEPT)
        self._news = trio.Event()
        self._waiting: Counter[PeerId] = Counter()
        self._fetching = 0
        rpc.serve(LIST, self._hand_on)

    @property
    def fetches(self) -> bool:
        """Whether the list of a group that this node is in is on its way here."""
        return self._fetching > 0

    def keep(self, member_list: MemberList) -> None:
        """From now on, hand this list on to peers that name its digest."""
        digest = digest_of(member_list)
        self._kept[digest] = member_list
        self._news.set()
        self._news = trio.Event()

    async def fetch(
        self, digest: bytes, sources: Sequence[PeerId], seconds: float
    ) -> MemberList | PotluckError:
        """The list with this digest, or the reason why no source has handed it on. The first source
        is asked at once, the second after `seconds` and a margin, each other a margin later."""
        answers: list[MemberList] = []
        failures: list[PotluckError] = []

        async def ask(source: PeerId, failed: trio.Event) -> None:
            try:
                answers.append(await self._ask(source, digest))
                nursery.cancel_scope.cancel()
            except PotluckError as error:
                log.info("%s has handed no list on: %s", source, error)
                failures.append(error)
                failed.set()

        self._fetching += 1
        try:
            with trio.move_on_after(LONGEST_FETCH_SECONDS):
                async with trio.open_nursery() as nursery:
                    patience = min(seconds, LONGEST_FETCH_SECONDS) + MARGIN_SECONDS
                    for source in sources:
                        failed = trio.Event()
                        nursery.start_soon(ask, source, failed)
                        with trio.move_on_after(patience):
                            await failed.wait()
                        patience = MARGIN_SECONDS
        finally:
            self._fetching -= 1
        if answers:
            self.keep(answers[0])
            return answers[0]
        return failures[-1] if failures else DeadlineExceeded("No source has handed the list on.")

    async def _ask(self, source: PeerId, digest: bytes) -> MemberList:
        member_list = await self._rpc.call(
            source, LIST, ListRequest(digest), timeout=LONGEST_FETCH_SECONDS
        )
        if digest_of(member_list) != digest:
            raise NotSigned(
                f"{source} has handed on another list than the leader's.",
                why="It is broken or hostile.",
                advice="Ask the leader, or another member.",
            )
        return member_list

    async def _hand_on(self, caller: Caller, request: ListRequest) -> MemberList:
        """Answer a peer that asks for a list, perhaps before it is here."""
        peer = caller.peer
        if self._waiting.total() >= MOST_WAITING or self._waiting[peer] >= MOST_WAITING_OF_PEER:
            raise Busy("Too many wait here for a list.")
        self._waiting[peer] += 1
        try:
            with trio.move_on_after(LONGEST_FETCH_SECONDS):
                while request.digest not in self._kept:
                    await self._news.wait()
        finally:
            self._waiting[peer] -= 1
            if self._waiting[peer] == 0:
                del self._waiting[peer]
        member_list = self._kept.get(request.digest)
        if member_list is None:
            raise Busy("This list has not come here.", advice="Ask the leader for it.")
        return member_list
