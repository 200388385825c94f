"""Hands the result of the heads' round down to the members of a cohort.

    with handing_down.shelf(average) as shelf:
        shelf.offer(HandedResult(decision, layout, memory))       # at the head, or:
        decision = await handing_down.decision(round_id, head, patience)
        await handing_down.taken(round_id, shelf, head, decision, layout)

Each member asks the head for its decision, and waits for the answer. It believes it because most
heads have signed that they have accepted it (seals.py), not because of the head. It then takes the
encoded bytes from its parent in a tree like that in which lists are handed on (handing_on.py), part
by part: it checks each part against the digest in the decision, and hands it on while the next one
is under way. A parent has the time that the bytes need to reach the member. If it has stopped or
lies, the next source is asked for what is missing, and the head last. So a head sends a large
result twice, however large its cohort is. A node that ends waits `LEAVING_SECONDS` for those that
take the result from it, or they would have to fetch the run's state.

Whoever has made the step shows the decision to any peer that asks: one that does not know how its
round ended believes nobody who says that the run is a step further and cannot show it.

Easy to get wrong: a member may ask before this peer knows its round, because it has ended there
earlier. Such a call waits `HOLD_SECONDS` for it. And a part may not be handed on before it has been
checked, or one liar would spoil it for all that are below it in the tree.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Annotated, Final

import trio
from msgspec import Meta
from torch import Tensor

from auth.bounded_map import BoundedMap
from protocols.errors import (
    Busy,
    DeadlineExceeded,
    MalformedMessage,
    PotluckError,
    Refused,
    RemoteMisbehaviour,
)
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.agreement_messages import Members, Proof, Result
from protocols.moshpit.ballots import LARGEST_GROUP, Ballot, Digest, Member, digest_of_parts
from protocols.moshpit.cohorts import DECISIONS_SHOWN, slowness_of
from protocols.moshpit.encoded_result import decode_result, encoded_bytes, memory_of, part_bytes
from protocols.moshpit.handing_on import Way, ways_to
from protocols.moshpit.layout import (
    CUT_VALUES,
    LARGEST_CHUNK_BYTES,
    MOST_VALUES,
    SMALLEST_CHUNK_BYTES,
    Layout,
    PartCut,
    PartHash,
    ResultCut,
)
from protocols.moshpit.part_messages import (
    ALIVE_SECONDS,
    ALLREDUCE_PROTOCOL,
    ROUND_ID_BYTES,
    STALL_SECONDS,
)
from protocols.moshpit.roster import Entry, KeyText, Roster, Terms, check_with_pauses
from protocols.moshpit.seals import is_proof, most_hold
from protocols.network import Network
from protocols.rpc import BulkMethod, Empty, Message, Method, Rpc, Transfer

log = logging.getLogger("potluck.moshpit")

HOLD_SECONDS: Final = 10.0  # an exchange may end that much later here than at the first member
OPEN_SECONDS: Final = 6.0
SLACK: Final = 3.0
"""A source has this many times as long as the bytes need to reach the member, however it sends: one
that sends a little now and then would hold the member for as long as it likes."""
LEAVING_SECONDS: Final = 2.0  # a node that trains may be ended earlier (node/training/departure.py)
MOST_HELD: Final = 2 * LARGEST_GROUP
MOST_HELD_OF_PEER: Final = 4  # a member asks for a decision and for its bytes
MOST_REMEMBERED: Final = 4 * LARGEST_GROUP  # who was shown what: all peers of a large run, once
SHELVES_KEPT: Final = 2  # each has the bytes of a result
DECISIONS_KEPT: Final = 2 * DECISIONS_SHOWN  # averages of parameters are among them
MOST_SHOWN_TO_PEER: Final = 4  # of one step: some 20 KB each
KNOWN_SHARE: Final = 1 / 3
"""A peer takes a result if so many of the heads that it knows were listed. When a network is cut in
two, the larger side may lack nearly half of them, and in some cohorts others become head. If all
have died, they may have decided and have told a few, so those that come in their place look first
whether anybody has made the step."""
TOO_FEW_KNOWN: Final = "The heads' round had too few of the heads that are known here."

DECISION_BYTES: Final = 128 << 10  # 350 for each head

RoundId = Annotated[bytes, Meta(min_length=ROUND_ID_BYTES, max_length=ROUND_ID_BYTES)]
Values = Annotated[int, Meta(ge=0, le=MOST_VALUES)]


def has_known_heads(listed: Iterable[PeerId], known: Sequence[frozenset[PeerId]]) -> bool:
    """Whether a list of heads has enough of those that this peer knows, by any of its sources."""
    there = frozenset(listed)
    return not known or any(len(one & there) >= KNOWN_SHARE * len(one) for one in known)


class NoDecision(PotluckError):
    """The heads' round was over without a step, or its result cannot be handed down."""


class NotOfCohort(Refused):
    """The caller was not in the cohort's round."""


class AskResult(Message, frozen=True):
    """For the result of the step that a cohort's round, with this id, was a part of."""

    round_id: RoundId


class AskBytes(Message, frozen=True):
    """For the encoded bytes of that result, from this part on: the caller has those before it."""

    round_id: RoundId
    part: Annotated[int, Meta(ge=0, le=LARGEST_GROUP)]


class AskShown(Message, frozen=True):
    """For the decision of the heads' round with this key, from one that has made its step."""

    key: KeyText


class DecidedPart(Message, frozen=True):
    """Values `start` up to `stop`, and the digest of their encoded bytes."""

    reducer: Member
    start: Values
    stop: Values
    digest: Digest


class HeadsDecision(Message, frozen=True):
    """The result of the heads' round, with the signatures that prove it: the heads' signed list,
    and those of most of them for the result of this attempt. `members`: the places of those whose
    data is in it."""

    roster: Roster
    attempt: Ballot
    members: Members
    parts: Annotated[tuple[DecidedPart, ...], Meta(min_length=1, max_length=LARGEST_GROUP)]
    chunk_bytes: Annotated[int, Meta(ge=SMALLEST_CHUNK_BYTES, le=LARGEST_CHUNK_BYTES)]
    proof: Proof

    @property
    def cut(self) -> ResultCut:
        parts = (PartCut(one.reducer, one.start, one.stop) for one in self.parts)
        return ResultCut(tuple(parts), self.chunk_bytes)

    @property
    def digest(self) -> bytes:
        return digest_of_parts({one.reducer: one.digest for one in self.parts})

    @property
    def heads(self) -> tuple[PeerId, ...]:
        """Those whose data is in the result."""
        return tuple(self.roster.entries[place].peer for place in self.members)

    @property
    def weights(self) -> dict[PeerId, float]:
        """The weight that each of these has signed."""
        entries = (self.roster.entries[place] for place in self.members)
        return {one.peer: one.weight for one in entries}

    def peers(self, most_peers: int) -> int:
        """Of how many peers the data is in the result."""
        return sum(min(self.roster.entries[place].peers, most_peers) for place in self.members)

    def weight(self, most_weight: float) -> float:
        weights = (self.roster.entries[place].weight for place in self.members)
        return float(sum(min(weight, most_weight) for weight in weights))

    async def check(self, terms: Terms, layout: Layout, known: Sequence[frozenset[PeerId]]) -> None:
        """PotluckError unless it was made by a round under these terms. `known`: the heads that
        this peer knows, from several sources. NoDecision if too few of each were listed in it: they
        may have died, or never heard of it.
        """
        roster, places = self.roster, range(len(self.roster.entries))
        if not set(self.members) <= set(places) or len(set(self.members)) < len(self.members):
            raise RemoteMisbehaviour("It hands down a result of members that are not in its list.")
        # elsewhere, some codecs need as many bytes for a part of other values
        if not self.cut.covers(layout) or any(one.start % CUT_VALUES for one in self.parts):
            raise RemoteMisbehaviour("It hands down a result of another vector.")
        await check_with_pauses(roster, terms, fewest=1)
        result = Result(self.attempt, self.members, self.digest)
        if not (is_proof(self.proof, roster, roster.round_id, result) and most_hold(self.proof)):
            raise RemoteMisbehaviour("It hands down a result that most heads do not hold.")
        if not has_known_heads(roster.members, known):
            raise NoDecision(TOO_FEW_KNOWN)


DECISION = Method(
    ALLREDUCE_PROTOCOL,
    "decided",
    AskResult,
    HeadsDecision,
    response_limit_bytes=DECISION_BYTES,
    errors={"no-decision": NoDecision, "not-of-cohort": NotOfCohort},
    training=True,
)

SHOWN = Method(
    ALLREDUCE_PROTOCOL,
    "shown",
    AskShown,
    HeadsDecision,
    response_limit_bytes=DECISION_BYTES,
    errors={"no-decision": NoDecision},
    training=True,
)

HANDED = BulkMethod(
    ALLREDUCE_PROTOCOL,
    "handed",
    opening=AskBytes,
    accepted=Empty,
    closing=Empty,
    closed=Empty,
    chunk_limit_bytes=LARGEST_CHUNK_BYTES,
    stall_seconds=STALL_SECONDS,
    errors={"no-decision": NoDecision, "not-of-cohort": NotOfCohort},
    training=True,
)

HandedTransfer = Transfer[Empty, Empty, Empty]


class HandedResult:
    """A result with its encoded bytes. `parts`: how many of its parts are here and checked, in
    order; all, if it is not said."""

    def __init__(
        self,
        decision: HeadsDecision,
        layout: Layout,
        memory: memoryview,
        parts: int | None = None,
    ) -> None:
        self.decision, self.layout, self.memory = decision, layout, memory
        self.parts = len(decision.parts) if parts is None else parts
        self._is_given_up = False
        self._news = trio.Event()

    @cached_property
    def sizes(self) -> list[int]:
        """Of each part. They are counted once: a large result has tens of thousands of chunks."""
        return part_bytes(self.layout, self.decision.cut)

    @property
    def is_whole(self) -> bool:
        return self.parts == len(self.decision.parts)

    def part_came(self) -> None:
        self.parts += 1
        self._tell()

    def give_up(self) -> None:
        """No source has the parts that are missing."""
        self._is_given_up = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def has(self, part: int) -> bool:
        return part < self.parts

    async def until_here(self, part: int) -> None:
        """Wait until this part is here. NoDecision if it will not come."""
        while not self.has(part):
            if self._is_given_up:
                raise NoDecision("No source has handed down all of the result to this peer.")
            await self._news.wait()

    def ways(self, entries: Sequence[Entry], head: PeerId) -> dict[PeerId, Way]:
        """How it gets from this head to these members: those with the fastest links hand it on,
        also if they were in no step lately. Behind slow ones they would miss the next step, too."""
        fastest_first = sorted(entries, key=lambda one: slowness_of(one.turn))  # a stable sort
        return ways_to(fastest_first, head, sum(self.sizes), max(self.sizes))

    def decode(self, into: Tensor) -> None:
        decode_result(self.memory, self.layout, self.decision.cut, into)


class ResultShelf:
    """Where the members of one cohort find one result."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        """`entries`: of the members, in the order in which they become head."""
        self._entries = entries
        self.members = frozenset(one.peer for one in entries)
        self._offered: HandedResult | None = None
        self._prepared: HandedResult | None = None
        self._failure: NoDecision | None = None
        self._decided = trio.Event()
        self._head: PeerId | None = None
        """The member that decides, if it is another one."""
        self._taken: set[PeerId] = set()
        self._news = trio.Event()

    def offer(self, offered: HandedResult) -> None:
        self._offered = offered
        self._decided.set()

    def take_back(self) -> None:
        """What is offered will never be whole; another head may decide."""
        if self._offered is not None:
            self._offered.give_up()
        self._offered, self._decided = None, trio.Event()

    def prepare(self, offered: HandedResult) -> None:
        """Offer it as soon as it is confirmed. This member is the head."""
        self._prepared, self._head = offered, None

    def confirm(self, *, applied: bool) -> None:
        """The head has applied what was prepared, or has not."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and applied:
            self.offer(prepared)
        elif prepared is not None:
            self.failed(NoDecision("The head has not applied the result of the heads' round."))

    def failed(self, error: NoDecision) -> None:
        if self._offered is None:
            self._failure, self._prepared = error, None
            self._decided.set()

    def ends(self) -> None:
        """The averaging is over; what is prepared may still be confirmed."""
        if self._prepared is None:
            self.failed(NoDecision("This peer has no result to hand down."))

    async def found(self) -> HandedResult:
        while self._offered is None:
            if self._failure is not None:
                raise self._failure
            await self._decided.wait()
        return self._offered

    def way_to(self, me: PeerId, head: PeerId, offered: HandedResult) -> Way:
        """How this head's result gets to this member."""
        self._head = head
        return offered.ways(self._entries, head)[me]

    def longest_to(self, peer: PeerId, me: PeerId, offered: HandedResult) -> float:
        """For how long this member may take this result from one source."""
        heads = {self._head or me, me}  # if the head was lost, it takes what this one has
        ways = [offered.ways(self._entries, head).get(peer) for head in heads]
        return _longest(max((way.seconds for way in ways if way is not None), default=0.0))

    def is_taken_by(self, peer: PeerId) -> None:
        """This member has the result."""
        self._taken.add(peer)
        self._news.set()
        self._news = trio.Event()

    async def handed_on(self, me: PeerId, is_there: Callable[[PeerId], bool]) -> None:
        """Wait until the members that take the result from this one have it, if there is one."""
        if self._offered is None or not self._offered.is_whole:
            return
        head = self._head or me
        ways = self._offered.ways(self._entries, head)
        children = {
            peer for peer, way in ways.items() if (way.sources[0] if way.sources else head) == me
        }
        while any(is_there(one) for one in children - self._taken):
            await self._news.wait()


class HandingDown:
    """The results that this node hands down. One for each rpc."""

    def __init__(self, network: Network, rpc: Rpc) -> None:
        self._network, self._me, self._rpc = network, network.peer_id, rpc
        self._shelves = BoundedMap[bytes, ResultShelf](SHELVES_KEPT)
        self._news = trio.Event()
        self._held: Counter[PeerId] = Counter()
        self._made = BoundedMap[str, HeadsDecision | None](DECISIONS_KEPT)
        self._shown_to = BoundedMap[tuple[PeerId, str], int](MOST_REMEMBERED)
        rpc.serve(DECISION, self._decide)
        rpc.serve(SHOWN, self._show)
        rpc.serve_bulk(HANDED, self._hand)

    @contextmanager
    def shelf(self, round_id: bytes, entries: Sequence[Entry]) -> Iterator[ResultShelf]:
        """A shelf for the result of this cohort's round (empty for a cohort of one). After the
        block, members still find what is on it, until some rounds later."""
        shelf = ResultShelf(entries)
        if round_id:
            self._shelves[round_id] = shelf
            self._news.set()
            self._news = trio.Event()
        try:
            yield shelf
        finally:
            shelf.ends()

    async def handed_on(self) -> None:
        """Before this node ends: wait until those that take the last result from it have it, but
        not for long."""
        if not self._shelves:
            return
        *_, shelf = self._shelves.values()
        with trio.move_on_after(LEAVING_SECONDS):
            await shelf.handed_on(self._me, lambda one: self._network.link(one) is not None)

    def made(self, key: str, decision: HeadsDecision | None) -> None:
        """This peer has made the step of the heads' round with this key, and shows the decision.
        None: it has nothing to prove it with."""
        self._made[key] = decision

    async def shown(self, key: str, peer: PeerId, patience: float) -> HeadsDecision:
        """The decision of the heads' round with this key, as that peer shows it: unchecked."""
        return await self._rpc.call(peer, SHOWN, AskShown(key), timeout=patience)

    async def decision(self, round_id: bytes, head: PeerId, patience: float) -> HeadsDecision:
        """The decision of this head, as soon as there is one."""
        return await self._rpc.call(head, DECISION, AskResult(round_id), timeout=patience)

    async def taken(
        self,
        round_id: bytes,
        shelf: ResultShelf,
        head: PeerId,
        decision: HeadsDecision,
        layout: Layout,
    ) -> HandedResult:
        """The result that this head has decided."""
        memory = memory_of(encoded_bytes(layout, decision.cut))
        offered = HandedResult(decision, layout, memory, parts=0)
        way = shelf.way_to(self._me, head, offered)
        shelf.offer(offered)  # each part of it as soon as it is here
        longest = _longest(way.seconds)
        try:
            for source in way.sources:
                due = OPEN_SECONDS + way.seconds
                try:
                    await self._take(source, round_id, offered, due, longest)
                    return offered
                except PotluckError as error:
                    log.info("%s has not handed down all: %s", source, error)
            # one that has taken a lost head's place may still be receiving it itself
            due = OPEN_SECONDS + (0.0 if head in decision.heads else way.seconds)
            await self._take(head, round_id, offered, due, longest)
            return offered
        finally:
            if not offered.is_whole:
                shelf.take_back()

    async def _take(
        self,
        peer: PeerId,
        round_id: bytes,
        offered: HandedResult,
        seconds: float,
        longest: float,
    ) -> None:
        """Take the parts that are missing from this peer. It should have all in so many `seconds`,
        and is given up after the longest."""
        with trio.move_on_after(longest):
            await self._take_parts(peer, round_id, offered, seconds)
            return
        raise DeadlineExceeded("It hands down too little, though it never stops.")

    async def _take_parts(
        self, peer: PeerId, round_id: bytes, offered: HandedResult, seconds: float
    ) -> None:
        due, cut, layout = trio.current_time() + seconds, offered.decision.cut, offered.layout
        ask = AskBytes(round_id, offered.parts)
        end = sum(offered.sizes[: offered.parts])
        transfer: HandedTransfer
        async with self._rpc.open_bulk(peer, HANDED, ask, timeout=seconds) as transfer:
            while not offered.is_whole:
                digest, part = PartHash(), cut.parts[offered.parts]
                for chunk in cut.chunks_of(part, layout):
                    place = offered.memory[end : end + chunk.encoded_bytes]
                    if await _next_chunk_bytes(transfer, due) != len(place):
                        raise RemoteMisbehaviour("It sent a chunk of another size.")
                    await transfer.receive_chunk_into(place)
                    digest.add(place)
                    end += len(place)
                if digest.digest != offered.decision.parts[offered.parts].digest:
                    raise RemoteMisbehaviour("It sent other bytes than those of the result.")
                offered.part_came()
            await transfer.finish(Empty())

    # -- answering

    async def _decide(self, caller: Caller, request: AskResult) -> HeadsDecision:
        async with self._offered_to(caller.peer, request.round_id) as (_, offered):
            return offered.decision

    async def _show(self, caller: Caller, request: AskShown) -> HeadsDecision:
        if request.key not in self._made:
            raise NoDecision("This peer has made no such step, or it was some steps ago.")
        decision = self._made[request.key]
        if decision is None:
            raise Busy("This peer has made that step and cannot show it.", advice="Ask another.")
        times = self._shown_to.get((caller.peer, request.key), 0)
        if times >= MOST_SHOWN_TO_PEER:
            raise Busy("This was shown to you already.", advice="Keep it.")
        self._shown_to[caller.peer, request.key] = times + 1
        return decision

    async def _hand(self, caller: Caller, transfer: HandedTransfer, request: AskBytes) -> None:
        async with self._offered_to(caller.peer, request.round_id) as (shelf, offered):
            # one that reads slowly would otherwise keep the bytes of each step in memory for hours
            with trio.move_on_after(shelf.longest_to(caller.peer, self._me, offered)):
                await _send_parts(transfer, offered, request.part)
                shelf.is_taken_by(caller.peer)
                return
        raise DeadlineExceeded("It takes the result too slowly.")

    @asynccontextmanager
    async def _offered_to(
        self, peer: PeerId, round_id: bytes
    ) -> AsyncIterator[tuple[ResultShelf, HandedResult]]:
        """The result of this round, for one of its members. Not for many at once."""
        if self._held.total() >= MOST_HELD or self._held[peer] >= MOST_HELD_OF_PEER:
            raise Busy("Too many wait here for a result.")
        self._held[peer] += 1
        try:
            with trio.move_on_after(HOLD_SECONDS):
                while round_id not in self._shelves:
                    await self._news.wait()
            shelf = self._shelves.get(round_id)
            if shelf is None:
                raise DeadlineExceeded("That round is not known here.")
            if peer not in shelf.members:
                raise NotOfCohort(f"{peer} was not in that round.")
            yield shelf, await shelf.found()
        finally:
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]


def _longest(seconds: float) -> float:
    """For how long a result that needs so many seconds may be under way from one source."""
    return SLACK * (OPEN_SECONDS + seconds)


async def _send_parts(transfer: HandedTransfer, offered: HandedResult, first: int) -> None:
    """Send the parts from this one on, each as soon as it is here."""
    cut, layout = offered.decision.cut, offered.layout
    if first > len(cut.parts):
        raise MalformedMessage(f"It asks for part {first:,} of {len(cut.parts):,}.")
    await transfer.accept(Empty())
    end = sum(offered.sizes[:first])
    for place, part in enumerate(cut.parts[first:], first):
        await _with_signs_of_life(transfer, offered, place)
        for chunk in cut.chunks_of(part, layout):
            await transfer.send_chunk(offered.memory[end : end + chunk.encoded_bytes])
            end += chunk.encoded_bytes
    await transfer.finish(Empty())


async def _next_chunk_bytes(transfer: HandedTransfer, due: float) -> int | None:
    """The size of the next chunk, which has to come until then, or soon after the one before."""
    length: int | None = None
    with trio.move_on_at(max(due, trio.current_time() + STALL_SECONDS)) as patience:
        length = await transfer.next_chunk_bytes()
    if patience.cancelled_caught:
        raise DeadlineExceeded("It hands down nothing more for now.")
    return length


async def _with_signs_of_life(transfer: HandedTransfer, offered: HandedResult, part: int) -> None:
    """Wait until this part is here. The one that waits for it is told that this peer lives."""
    while not offered.has(part):
        with trio.move_on_after(ALIVE_SECONDS):
            await offered.until_here(part)
        await transfer.say_alive()
