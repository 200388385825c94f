"""How the signed list of a large group gets to all of its members: from one to the next.

A list has about 290 bytes for each member. A leader that sent it to everybody would send the square
of that: 1.2 MB for 64 members, which takes ten seconds on an upload of 1 Mb/s. So the leader sends
the list to as many members as fit into `LEADER_BYTES`, and tells the others, in a few hundred
bytes, the digest of the list and where to fetch it. Each member hands it on to as many as the
leader does.

    leader        listed: the whole list     ->  the first members
                  fetch: digest, sources     ->  the others
    other member  `list`: digest             ->  its parent in the tree; held until that one has it

Promises: a list that was fetched is to the byte the one that the leader has named, addresses
included: nobody who hands it on can change anything. A source that hands nothing on costs the
member that asks it `MARGIN_SECONDS` and the time that the bytes may take to come down to it; then
it asks the next, and the leader last. A fetch ends after `LONGEST_FETCH_SECONDS` at the latest.

Easy to get wrong: a source that is late may still be the first to answer, so it is not given up
when the next one is asked.
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
"""Of lists that a leader sends: half a second of an upload of 1 Mb/s. A group of up to 15 has its
list from the leader directly."""

FEWEST_CHILDREN = 3
"""Each hands the list on to so many at least: 256 members are five levels then, not eight."""

SOURCES = 2  # that a member is named beside the leader: its parent in the tree, and the next above

SLOWEST_BYTES_PER_SECOND = 125_000
"""An upload of 1 Mb/s is what a member may need for handing a list on. One that is slower, or that
has not measured its link yet, is reckoned with as if it had that."""

MARGIN_SECONDS = 1.0
"""For round trips, and for dialling the parent where there is no link yet."""

LONGEST_FETCH_SECONDS = 15.0
"""256 members with uploads of 1 Mb/s have their list after nine seconds."""

MOST_WAITING = 2 * LARGEST_GROUP  # calls that are held here until a list has come
MOST_WAITING_OF_PEER = 4
LISTS_KEPT = 8  # to hand on: those of the last groups, 75 KB each for 256 members


def digest_of(member_list: MemberList) -> bytes:
    """32 bytes that stand for exactly this list with these addresses."""
    return blake3(encode(member_list)).digest()


@dataclass(frozen=True)
class Way:
    """How the list comes to one member. `sources`: whom it asks for it, in this order; none: the
    leader sends it the list. `seconds`: when it should have come."""

    sources: tuple[PeerId, ...]
    seconds: float

    @property
    def milliseconds(self) -> int:
        return int(self.seconds * 1000)


def ways_to(members: Sequence[Entry], leader: PeerId, list_bytes: int) -> dict[PeerId, Way]:
    """How a list of so many bytes comes to everybody but its leader: along a tree whose inner
    places have the first that can be dialled, in the order of the list, which nobody chooses."""
    others = [one for one in members if one.peer != leader]
    others.sort(key=lambda one: not one.reduces)  # else as they were
    dialled = sum(one.reduces for one in others)
    children = max(FEWEST_CHILDREN, LEADER_BYTES // list_bytes)
    rates = {one.peer: one.up_bytes_per_second for one in members}

    def seconds_of(peer: PeerId) -> float:
        return children * list_bytes / max(SLOWEST_BYTES_PER_SECOND, rates[peer])

    ways: dict[PeerId, Way] = {}
    for place, one in enumerate(others):
        above = place // children - 1  # its parent's place; -1 is the leader
        if above >= dialled:  # those who can be dialled are too few for all
            above = place % dialled if dialled else -1
        if above < 0:
            ways[one.peer] = Way((), seconds_of(leader))
            continue
        parent = others[above].peer
        sources = (parent, *ways[parent].sources)[:SOURCES]
        ways[one.peer] = Way(sources, ways[parent].seconds + seconds_of(parent))
    return ways


def seconds_to_all(ways: Mapping[PeerId, Way]) -> float:
    """When a list should have come to everybody; 0 where the leader sends it to all of them."""
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
        """Whether a list is on its way here of a group that this node is in."""
        return self._fetching > 0

    def keep(self, member_list: MemberList) -> None:
        """Hand this list on from now on, to those who name its digest."""
        digest = digest_of(member_list)
        self._kept[digest] = member_list
        self._news.set()
        self._news = trio.Event()

    async def fetch(
        self, digest: bytes, sources: Sequence[PeerId], seconds: float
    ) -> MemberList | PotluckError:
        """The list of this digest, or why none of the sources has handed it on. The first is asked
        at once, the second after so many seconds and a margin, each other a margin later."""
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
        return failures[-1] if failures else DeadlineExceeded("Nobody has handed the list on.")

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
        """Somebody asks for a list, perhaps before it is here."""
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
