"""One attempt at a round while it runs: how far it is, and which member it fails because of.

All tasks of an attempt (butterfly.py has them, towards reducers and towards senders) share an
`ExchangeAttempt`. The first suspicion ends them all: the scopes of our own tasks are cancelled, and
the handlers that serve others tell them, unless a frame is just being sent, which member we gave up
on.

In this file: `ExchangeAttempt`; `LinkMeter`, which measures links; `StreamPace` and `ArrivalPace`,
which let streams over one uplink and over one downlink end together; `Lateness`, which finds
members that are late with values; `watch_openings`, which finds those that do not open their
transfers.

Promise: `over` is set once and stays. When `handlers_gone` has returned after that, nothing touches
`source` or `result` any more.

Easy to get wrong: the *first* suspicion is the cause; later ones follow from it. When one member
dies, all give up, and each of the others then sees the transfers of the rest end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import trio
from torch import Tensor

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    PotluckError,
    ProtocolMisuse,
    ProtocolNotServed,
    Refused,
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.moshpit.ballots import (
    LONGEST_SUSPICION,
    Statement,
    Suspicion,
    digest_of_parts,
)
from protocols.moshpit.blame import (
    AWAITED,
    LACKING,
    NO_AVERAGES,
    NO_VALUES,
    NOT_CLOSED,
    OVERDUE,
    UNCLOSED,
)
from protocols.moshpit.exchange import ExchangePlan, Participant
from protocols.moshpit.layout import SMALL_PART
from protocols.moshpit.part_messages import (
    ALIVE_SECONDS,
    STALL_SECONDS,
    GaveUp,
    StaleAttempt,
    make_statement,
)
from protocols.moshpit.plan import UNKNOWN, predicted_link_seconds
from protocols.moshpit.reducing import NotFiniteReceived, Reduction
from protocols.network import Network
from protocols.rpc import Transfer
from protocols.tensors import NotFinite


class ExchangeAttempt:
    """The state that all tasks of one exchange share."""

    def __init__(
        self, network: Network, plan: ExchangePlan, source: Tensor, result: Tensor
    ) -> None:
        self.plan = plan
        self.source, self.result = source, result
        self.began = trio.current_time()
        self.meter = LinkMeter(network)
        values_to = self.reducers if plan.member_of(plan.me).weight > 0.0 else ()
        steps = [self.steps_to(reducer.index) for reducer in values_to]
        self.pace = StreamPace(len(plan.members), steps)
        self.reduction = Reduction(plan, source, result)
        self.arrivals = ArrivalPace(self)
        self.statements: dict[int, Statement] = {}
        self.taken_by: set[int] = set()
        """The senders that have closed their transfers to us."""
        self.suspicion: Suspicion | None = None
        self.awaited: tuple[Suspicion, ...] = ()
        """The members that this one was waiting for when the attempt failed."""
        self.over: str | None = None
        self.averages_of: dict[int, Flow] = {}
        """The averages from each reducer that has accepted our transfer."""
        self.values_to: dict[int, Flow] = {}
        """Our values to each reducer that has accepted our transfer; empty if we bring no data."""
        self.values_of: dict[int, Flow] = {}
        """The values from each sender that has opened its transfer."""
        self.last_heard: dict[int, float] = {}
        """When bytes were last seen to arrive from each of the others."""
        self.all_served = trio.Event()
        self.whole = trio.Event()
        """Our result is complete, and `result_digest` is its digest."""
        self.result_digest = b""
        self.opened_seconds = self.reduced_seconds = self.received_seconds = 0.0
        self._network = network
        self._served = 0
        self._digests: dict[int, bytes] = {}  # of the parts that are here
        self._told: dict[int, set[bytes]] = {}  # the results that each of the others says it has
        self._transfers: dict[int, list[Transfer[Any, Any, Any]]] = {}
        self._scopes: set[trio.CancelScope] = set()
        self._handlers = 0
        self._handler_left = trio.Event()
        self.lateness = Lateness(self, self._round_trip)

    def _round_trip(self, member: int) -> float:
        link = self._network.link(self.plan.member_of(member).peer)
        return 0.0 if link is None else link.round_trip_seconds or 0.0

    # -- the members

    @property
    def others(self) -> tuple[Participant, ...]:
        return tuple(member for member in self.plan.members if member.index != self.plan.me)

    @property
    def reducers(self) -> tuple[Participant, ...]:
        """The others that reduce something, in an order that differs from member to member.

        Each member starts with the one after it, so that not all begin with the same reducer.
        """
        members, cuts, mine = self.plan.members, self.plan.cuts, self.plan.my_place
        places = [(mine + step) % len(members) for step in range(1, len(members))]
        return tuple(members[place] for place in places if cuts[place] < cuts[place + 1])

    @property
    def senders(self) -> tuple[Participant, ...]:
        """The others that open a transfer to us: all of them, if we reduce anything."""
        return self.others if self.reduction.chunks else ()

    def steps_to(self, member: int) -> int:
        """How many places it comes after us in the order in which we begin with them, from 1."""
        plan = self.plan
        return (plan.place_of(member) - plan.my_place) % len(plan.members)

    # -- how it ends

    def suspect(self, member: int, code: str, text: str) -> None:
        """End the attempt because of this member, unless it has ended already."""
        if self.over is None:
            self.suspicion = Suspicion(member, code, _cut(text))
            self.awaited = self.lateness.awaited()
            self.stop(f"Gave up on member {member}: {text}")

    def stop(self, reason: str) -> None:
        """End everything. The others are told this reason. Never waits."""
        if self.over is None:
            self.over = reason
            for scope in self._scopes:
                scope.cancel()

    @contextmanager
    def blaming(self, member: int, *, opening: bool = False) -> Iterator[None]:
        """A failure in the block ends the attempt, with a suspicion against this member."""
        try:
            yield
        except NotFinite as error:  # our own values, or sums
            self.suspect(self.plan.me, "not_finite", error.what)
        except ProtocolMisuse:
            raise
        except PotluckError as error:
            self.suspect(member, _code_of(error, opening), error.what)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Run the block until the attempt is over."""
        scope = trio.CancelScope()
        self._scopes.add(scope)
        if self.over is not None:
            scope.cancel()
        try:
            with scope:
                yield
        finally:
            self._scopes.discard(scope)

    # -- members that are only slow

    @contextmanager
    def transferring(self, member: int, transfer: Transfer[Any, Any, Any]) -> Iterator[None]:
        """While the block runs, any bytes from this member show that this transfer is alive."""
        transfers = self._transfers.setdefault(member, [])
        transfers.append(transfer)
        try:
            yield
        finally:
            transfers.remove(transfer)

    def heard(self, place: int) -> None:
        """Bytes have arrived from the other at this place, of any kind (butterfly.py)."""
        member = self.others[place].index
        self.last_heard[member] = trio.current_time()
        for transfer in self._transfers.get(member, ()):
            transfer.extend_timeouts()

    # -- how far it is

    def opened(self, reducer: int) -> None:
        """A reducer has accepted our transfer."""
        chunks = len(self.plan.chunks_at(self.plan.place_of(reducer)))
        self.averages_of[reducer] = Flow(chunks)
        if self.plan.member_of(self.plan.me).weight > 0.0:
            self.values_to[reducer] = Flow(chunks)
        if len(self.averages_of) == len(self.reducers):
            self.opened_seconds = trio.current_time() - self.began

    def arrived(self, sender: int, transfer: Transfer[Any, Any, Any]) -> None:
        """A sender has opened its transfer."""
        chunks = self.reduction.chunks if self.plan.member_of(sender).weight > 0.0 else ()
        self.values_of[sender] = Flow(len(chunks), transfer)

    def not_accepted(self) -> set[int]:
        """Reducers that have not accepted our transfer yet."""
        return {reducer.index for reducer in self.reducers} - self.averages_of.keys()

    def not_arrived(self) -> set[int]:
        """Senders that have not opened their transfer yet."""
        return {sender.index for sender in self.senders} - self.values_of.keys()

    def served(self) -> None:
        """A sender has received everything from us."""
        self._served += 1
        if self._served == len(self.senders):
            self.all_served.set()

    def has_part(self, reducer: int, digest: bytes) -> None:
        """All averages of a part have arrived."""
        self._digests[reducer] = digest
        if len(self._digests) == len(self.reducers) + bool(self.reduction.chunks):
            self.result_digest = digest_of_parts(self._digests)
            self.whole.set()

    def told(self, member: int, digest: bytes) -> None:
        """Another member has said in a closing message which result it has."""
        self._told.setdefault(member, set()).add(digest)

    @property
    def closing(self) -> Set[int]:
        """The others that owe us a closing message: all of them, or those that reduce."""
        return {one.index for one in (*self.senders, *self.reducers)}

    @property
    def unclosed(self) -> Set[int]:
        """Those of them of which one is missing, in either direction."""
        senders = {one.index for one in self.senders} - self.taken_by
        return senders | {one.index for one in self.reducers} - self.statements.keys()

    @property
    def unfinished(self) -> Set[int]:
        """The reducers whose averages are not all here."""
        return {one.index for one in self.reducers} - self._digests.keys()

    def contradicted_by(self) -> tuple[int, ...]:
        """The members that have another result than ours. Known when all have closed their
        transfers."""
        told = sorted(self._told.items())
        return tuple(member for member, digests in told if digests != {self.result_digest})

    def furthest_behind(self) -> int:
        """The member to name when the time is over: a sender whose values we wait for, else a
        reducer whose averages we wait for, else a member that has not closed its transfer;
        ourselves only if there is no other."""
        weighted = [member.index for member in self.senders if member.weight > 0.0]
        if weighted and not self.reduction.is_finished:
            return min(weighted, key=lambda index: chunks_of(self.values_of, index))
        if self.unfinished:
            return min(self.unfinished, key=lambda index: chunks_of(self.averages_of, index))
        closing = sorted(self.unclosed or self.closing or {self.plan.me})
        return min(closing, key=lambda index: chunks_of(self.values_of, index))

    # -- handlers that serve others, in tasks that are not ours

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run a handler's block until the attempt is over."""
        self._handlers += 1
        try:
            with self.within():
                yield
        finally:
            self._handlers -= 1
            self._handler_left.set()
            self._handler_left = trio.Event()

    async def handlers_gone(self) -> None:
        """Wait until no handler works for this attempt any more: soon, once it is over."""
        while self._handlers:
            await self._handler_left.wait()

    # -- our own part

    def own_statement(self) -> Statement:
        """Our statement, made once, when our part is finished."""
        me, plan = self.plan.me, self.plan
        if me not in self.statements:
            digest = self.reduction.digest
            self.statements[me] = make_statement(
                self._network.identity, plan.round_id, plan.ballot, me, digest
            )
            self.reduced_seconds = trio.current_time() - self.began
            self.has_part(me, digest)
        return self.statements[me]


def chunks_of(flows: Mapping[int, Flow], member: int) -> int:
    """How many chunks have come from this member; -1 if its transfer is not even open."""
    flow = flows.get(member)
    return -1 if flow is None else flow.done


def _code_of(error: PotluckError, opening: bool) -> str:
    match error:
        case DeadlineExceeded() | Unreachable() if opening:
            return "unreachable"
        case NotFiniteReceived():
            return "not_finite"
        case RemoteMisbehaviour():
            return "malformed"
        case DeadlineExceeded():
            return "stalled"
        case Unreachable():
            return "cut"
        case GaveUp() | StaleAttempt():
            # It has ended its attempt, perhaps because of a third member: no fault of its own.
            return "gave_up"
        case Busy():
            return "busy"
        case Refused() | ProtocolNotServed():
            return "refused"
    return "gave_up"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SUSPICION else text[: LONGEST_SUSPICION - 1] + "…"


# ---- measuring links
#
# How long the values of an exchange have taken to leave is not seen at its own streams. A stream
# takes a chunk into buffers at once, or waits because its reader waits for others. And a reader
# that gets chunks in whole packets sees all of a chunk at once. But the network knows for how long
# bytes of this node were on their way, on all links together, and how many they were.
#
# The downlink is busy while the rest of a chunk whose header has arrived is awaited. Waiting for
# the next chunk to begin is not busy: the other end had nothing to send. Time shared by several
# transfers counts once.


class BusyClock:
    """Measures the time in which at least one thing was going on. Wrap each in `with clock:`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._going_on = 0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """The time so far, including what is going on now."""
        if not self._going_on:
            return self._seconds
        return self._seconds + trio.current_time() - self._since

    def __enter__(self) -> None:
        if self._going_on == 0:
            self._since = trio.current_time()
        self._going_on += 1

    def __exit__(self, *_error: object) -> None:
        self._going_on -= 1
        if self._going_on == 0:
            self._seconds += trio.current_time() - self._since


class LinkMeter:
    """All links together, while one exchange goes on. The exchange itself counts its bytes; its
    uplink also carries others."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._before = network.traffic()
        self.bytes_sent = self.bytes_received = 0
        self.receiving = BusyClock()

    def uplink(self) -> tuple[int, float]:
        """The bytes of this node that have arrived since the exchange began, and the seconds in
        which some were on their way."""
        before, now = self._before, self._network.traffic()
        return (
            now.sending_bytes - before.sending_bytes,
            now.sending_seconds - before.sending_seconds,
        )


# ---- streams over one uplink, and over one downlink


LEAD = 1 / 32
"""How far a stream may be ahead of the slowest, as a share of its length. With more, only some
links are used at the end of the round; with less, streams wait for each other's chunks."""


class StreamPace:
    """Lets our values reach all reducers at the same pace: a stream that is ahead waits.

        with attempt.pace.values(member, len(chunks)) as stream:
            for number, chunk in enumerate(chunks):
                await stream.turn(number, transfer)
                await transfer.send_chunk(...)

    A plan gives each stream its share of a round. But a full uplink gives each connection the same
    rate. A stream with nine tenths of a vector would starve beside fifteen with a hundredth each,
    and the averages that its reducer could send back meanwhile would be sent too late. So each
    stream of values goes at the speed of the slowest, measured as a share of its own length, as
    the plan assumes. Averages are late rather than early (they wait for everybody's values), so
    they wait for our values, too. Averages do not wait for each other: nobody waits for them but
    the one that they are for.

    `members` is the number of members in the attempt. Where chunks are long compared with their
    streams, each stream begins its chunks a little later than the one before. A stream that has
    ended holds up no other.

    Easy to get wrong: a waiting stream leaves the uplink to others, which is right only as long as
    they use it. If the slowest does not move, something else holds it up, and no stream waits for
    it. But on a slow uplink a chunk takes seconds: a stream has twice the time of the longest until
    then.
    """

    def __init__(self, members: int, expected: Iterable[int]) -> None:
        """`expected`: the places, counted from ours, to which our values will go. Streams that are
        accepted quickly wait for the others, but not for one that is still to be dialled."""
        self._members = members
        self._values = dict.fromkeys(expected, 0.0)
        self._unopened = set(self._values)
        self._stuck: set[int] = set()
        self.slowest = 0.0 if self._values else math.inf
        """How far the slowest stream of values is, from 0 to 1."""
        self._moved = trio.Event()
        self._moved_at = trio.current_time()
        self._longest_step = 0.0

    @contextmanager
    def values(self, place: int, chunks: int) -> Iterator[PacedStream]:
        """Our values for the member this many places after us, from the first chunk to the last."""
        self._unopened.discard(place)
        self.reached(place, 0.0)
        try:
            yield PacedStream(self, place, chunks, brings_values=True)
        finally:
            del self._values[place]
            self._look()

    def averages(self, place: int, chunks: int) -> PacedStream:
        """The averages of our part for the member at this place."""
        return PacedStream(self, place, chunks, brings_values=False)

    def offset(self, place: int) -> float:
        """When the stream to this member begins its chunks, from 0 to 1 within a chunk's time."""
        return (place % self._members) / self._members

    def reached(self, place: int, part: float) -> None:
        """Our values for this member are so far."""
        before, step = self.slowest, trio.current_time() - self._moved_at
        self._values[place] = part
        self._stuck.discard(place)
        self._look()
        if 0.0 < before < self.slowest:
            self._longest_step = max(self._longest_step, step)

    async def moved(self) -> bool:
        """Wait until the slowest stream has moved, or a second. False if it does not move; then no
        stream waits for it until it does."""
        moved = self._moved
        with trio.move_on_after(ALIVE_SECONDS):
            await moved.wait()
        patience = max(ALIVE_SECONDS, 2.0 * self._longest_step)
        if moved.is_set() or trio.current_time() < self._moved_at + patience:
            return True
        for place in self._unopened:
            del self._values[place]
        self._unopened.clear()
        slowest = self.slowest
        self._stuck.update(place for place, part in self._values.items() if part <= slowest)
        self._look()
        return False

    def _look(self) -> None:
        moving = (part for place, part in self._values.items() if place not in self._stuck)
        before, self.slowest = self.slowest, min(moving, default=math.inf)
        if before != self.slowest:
            self._moved_at = trio.current_time()
            self._moved.set()
            self._moved = trio.Event()


class PacedStream:
    """One stream's place among the others. Made by `StreamPace`."""

    def __init__(self, pace: StreamPace, place: int, chunks: int, *, brings_values: bool) -> None:
        self._pace, self._place, self._brings_values = pace, place, brings_values
        self._chunks = max(1, chunks)
        self._offset = pace.offset(place)

    async def turn(self, number: int, transfer: Transfer[Any, Any, Any]) -> None:
        """Return when this chunk may be sent. Until then, tell the other side that we are alive."""
        pace = self._pace
        if self._brings_values:
            pace.reached(self._place, (number + 1) / self._chunks)
        wanted = (number + self._offset) / self._chunks - LEAD
        while wanted > pace.slowest:
            moves = await pace.moved()
            await transfer.say_alive()
            if not moves:
                return


class ArrivalPace:
    """Lets the values of our part arrive evenly: a sender that is ahead of the slowest waits.

        await attempt.arrivals.turn(sender, number)
        ... receive this chunk of this sender ...

    An average needs the values of all senders, so our uplink only has work while the slowest sender
    goes on. A full downlink does not give each connection the same: of five over one line, one had
    four times as much as another (docs/nat.md). Bytes that are not received fill their stream's
    window, and then their sender waits and leaves the downlink to the others.

    Nobody waits for a sender from which nothing arrives.
    """

    def __init__(self, attempt: ExchangeAttempt) -> None:
        self._attempt = attempt
        self._ahead = 2 + int(LEAD * len(attempt.reduction.chunks))
        self._stuck = (-1, -1)

    async def turn(self, sender: int, number: int) -> None:
        """Return when this chunk of this sender may be received."""
        reduction = self._attempt.reduction
        while number >= reduction.finished + self._ahead:
            progress = self._progress_of_slowest()
            if progress == self._stuck:
                return
            with self._attempt.values_of[sender].holding(), trio.move_on_after(ALIVE_SECONDS):
                await reduction.averaged(number - self._ahead)
            if progress == self._progress_of_slowest():
                self._stuck = progress
                return

    def _progress_of_slowest(self) -> tuple[int, int]:
        """The chunks that have arrived from all senders, and how much from those that sent no
        more."""
        finished = self._attempt.reduction.finished
        flows = self._attempt.values_of.values()
        return finished, sum(one.arrived_bytes for one in flows if one.done <= finished)


# ---- members that are late with values
#
# A member that answers everything but sends no values looks alive to all other deadlines of an
# attempt, so values have a deadline of their own. The expected time of a flow (one direction of
# one transfer, in chunks) is the longer of
#
#     the plan's prediction               from the rates that the members have declared
#     what the others take for the same   the median of them, as far as they are
#
# Chunk k of n is due when `SLACK` times k/n of that has passed, plus a grace. Flows go evenly
# (`StreamPace`), so a flow that stops is noticed at its next chunk, before its end. A member that
# is not behind the others is not late. Each member judges what it alone can see:
#
#     no_values     a sender's values, at their reducer                     after LATE_GRACE_SECONDS
#     no_averages   a reducer's averages, at a member                       after STEP_SECONDS more
#     not_closed    a closing message, where most of the others' are here   counted from these
#
# A reducer has no averages while it waits for values, and a member has no whole result while it
# waits for averages. So each judgement comes later than the one that could explain it, and every
# member that stops says at the end which members it was waiting for (`awaited`, `overdue`).
# blame.py puts the two together.
#
# Easy to get wrong: an unknown rate is no prediction. A link of unknown rate may be slow. So the
# time in which its bytes arrive does not count, nor the same time again, in which it may have been
# busy with other transfers. A member that sends nothing, or almost nothing, gains nothing by that.


LATE_GRACE_SECONDS = 4.0
"""Added to the expected time: as long as the wait for a member that is entirely silent. A busy
machine stops for a second or two."""

STEP_SECONDS = 2.0
"""From one judgement to the next: time for a reducer to name a sender, and for all to hear of it
through the queues of a full link."""

SLACK = 3.0
"""Multiplies the expected time: a link may be much worse than when it was measured."""

ROUND_TRIPS = 4.0  # of the link, beside the grace: to be told, to send, and a queue each way
BEAT_SECONDS = 0.5  # between two checks

SLOWEST_BYTES_PER_SECOND = 10_000.0
"""The slowest rate that is excused for an uplink of unknown rate, all its transfers together. The
slowest links that anybody trains over carry ten times as much."""

SLOW_BYTES_PER_SECOND = 62_500.0
"""Half a megabit a second: assumed for a link of unknown rate, if nothing else says how long to
wait."""

NEARLY_SECONDS = 2.0
"""A member that would be late this much later is overdue. That counts against a member that another
one has found late: members check at different moments, and the first to find it ends the attempt
for all."""


class Flow:
    """One direction of one transfer, in chunks. `transfer`: if its bytes can be observed."""

    def __init__(self, chunks: int, transfer: Transfer[Any, Any, Any] | None = None) -> None:
        self.chunks, self.done = chunks, 0
        self.began = self.moved = trio.current_time()
        self.ended: float | None = None
        self.excused = 0.0
        """For how long bytes have been arriving."""
        self.held = 0.0
        """For how long we have made the sender wait for others (`ArrivalPace`)."""
        self._transfer = transfer
        self._arrived = 0
        self._looked = self.began

    @property
    def is_over(self) -> bool:
        return self.done >= self.chunks

    @property
    def arrived_bytes(self) -> int:
        """The bytes that have arrived, if they can be observed; else 0."""
        return 0 if self._transfer is None else self._transfer.bytes_arrived

    @property
    def part(self) -> float:
        return 1.0 if self.is_over else self.done / self.chunks

    def advanced(self, to: int | None = None) -> None:
        """One more chunk has arrived; or `to` chunks in all, if given."""
        done = self.done + 1 if to is None else to
        if done > self.done:
            self.moved = trio.current_time()
            self.done = done
            if self.is_over:
                self.ended = self.moved

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While the block runs, nothing is received. The sender waits from the moment at which its
        window is full: then no more bytes arrive."""
        began = trio.current_time()
        yield
        if self._transfer is not None:
            began = max(began, self._transfer.last_arrival)
        self.held += trio.current_time() - began

    def look(self, bytes_per_second: float) -> None:
        """Check whether bytes have arrived. If they are slower than this rate, they excuse only
        part of the time."""
        now, passed = trio.current_time(), trio.current_time() - self._looked
        self._looked = now
        if self._transfer is None or self.is_over:
            return
        came = self._transfer.bytes_arrived - self._arrived
        self._arrived += came
        if came:
            self.moved = now
            self.excused += min(passed, came / bytes_per_second)

    def whole_seconds(self) -> float:
        """An estimate, rather too long, of how long the whole flow takes if it need not wait for
        others."""
        if self.is_over:
            return (self.moved if self.ended is None else self.ended) - self.began - self.held
        return (trio.current_time() - self.began - self.held) * self.chunks / (self.done + 1)

    def due(self, expected: float, grace: float, *, excuses: bool) -> float:
        """The moment from which the next chunk is late."""
        excused = self.excused if excuses else 0.0
        by_the_whole = self.began + 2.0 * excused + SLACK * expected * (self.done + 1) / self.chunks
        by_the_last = self.moved + excused + SLACK * expected / self.chunks
        return grace + min(by_the_whole, by_the_last)


class Lateness:
    """Finds the members that are late, as one member of an attempt sees it."""

    def __init__(self, attempt: ExchangeAttempt, round_trip: Callable[[int], float]) -> None:
        """`round_trip` returns the measured round trip to a member, in seconds."""
        plan = attempt.plan
        values = max(1, plan.layout.values)
        seconds = predicted_link_seconds(
            [(stop - start) / values for start, stop in pairwise(plan.cuts)],
            [one.up_bytes_per_second for one in plan.members],
            [one.down_bytes_per_second for one in plan.members],
            [one.weight > 0.0 for one in plan.members],
            values * plan.layout.value_bytes,
        )
        reducers = [place for place, cuts in enumerate(pairwise(plan.cuts)) if cuts[0] < cuts[1]]
        taken = max(seconds[place][1] for place in reducers)
        self._round_seconds = max(max(each) for each in seconds)
        self._values_seconds = {  # values go as fast as the slowest reducer takes them
            one.index: max(sending, taken)
            for one, (sending, _) in zip(plan.members, seconds, strict=True)
        }
        self._unknown = {one.index for one in plan.members if one.up_bytes_per_second == UNKNOWN}
        self._slow_readers = {
            one.index for one in plan.members if one.down_bytes_per_second == UNKNOWN
        }
        self._slowest = SLOWEST_BYTES_PER_SECOND / (2 * max(1, len(plan.members) - 1))
        parts = [stop - start for start, stop in pairwise(plan.cuts)]
        self._is_small_part = parts[plan.my_place] * SMALL_PART < max(parts)
        self._vector_bytes = values * plan.layout.value_bytes
        self._senders = [one.index for one in attempt.senders if one.weight > 0.0]
        self._reducers = [one.index for one in attempt.reducers]
        self._attempt = attempt
        self._round_trip = round_trip
        self._own_part = Flow(len(attempt.reduction.chunks))
        self._most_closed: float | None = None

    async def watch(self) -> None:
        """Wait until a member is late, and suspect it."""
        while not (late := self.late()):
            await trio.sleep(BEAT_SECONDS)
            self._look()
        member, code, text = late[0]
        self._attempt.suspect(member, code, text)

    def _look(self) -> None:
        for member in self._senders:
            flow = self._attempt.values_of.get(member)
            if flow is not None:
                flow.look(self._slowest)
        self._own_part.advanced(self._attempt.reduction.finished)
        if self._most_closed is None and self._attempt.whole.is_set():
            closing, unclosed = self._attempt.closing, self._attempt.unclosed
            if len(closing - unclosed) >= len(closing) // 2:
                self._most_closed = trio.current_time()

    def late(self) -> list[tuple[int, str, str]]:
        """The late members, furthest behind first: place in the roster, code and words."""
        late = self._late_senders(LATE_GRACE_SECONDS)
        return late or self._late_reducers() or self._late_closers()

    def awaited(self) -> tuple[Suspicion, ...]:
        """The members that we wait for: those whose values are almost late; or else the one whose
        values are behind the others'; or else those whose averages are not here, as others' are; or
        else those that have not closed for some time after most others."""
        nearly = self._late_senders(LATE_GRACE_SECONDS - NEARLY_SECONDS)
        if nearly:
            return tuple(Suspicion(member, OVERDUE, text) for member, _, text in nearly)
        flows = self._flows(self._attempt.values_of, self._senders)
        behind = min(flows, key=lambda member: flows[member].part, default=None)
        if behind is not None and flows[behind].part < max(one.part for one in flows.values()):
            return (Suspicion(behind, AWAITED, "Its values are awaited."),)
        attempt = self._attempt
        lacking, unclosed = attempt.unfinished, attempt.unclosed
        if lacking and not len(lacking) == len(self._reducers) > 1:  # if all, it is our own fault
            text = "Its averages are awaited."
            return tuple(Suspicion(member, LACKING, text) for member in sorted(lacking))
        if self._most_closed is None or trio.current_time() < self._most_closed + NEARLY_SECONDS:
            return ()
        text = "Its closing message is awaited."
        return tuple(Suspicion(member, UNCLOSED, text) for member in sorted(unclosed))

    def _late_senders(self, grace: float) -> list[tuple[int, str, str]]:
        flows = self._flows(self._attempt.values_of, self._senders)
        late = []
        for member, flow in flows.items():
            others = [each for one, each in flows.items() if one != member]
            arriving = len(self._senders) - len(flows)
            if not others and not arriving:
                others = [*self._flows(self._attempt.values_to, [member]).values()]
            predicted = self._values_seconds[member]
            if member in self._unknown and self._is_small_part:
                # It is long busy with larger parts, so small ones may arrive early or late.
                predicted = max(predicted, self._vector_bytes / SLOW_BYTES_PER_SECOND)
            expected = self._expected(flow, others, arriving, predicted)
            patience = grace + ROUND_TRIPS * self._round_trip(member)
            due = flow.due(expected, patience, excuses=member in self._unknown)
            if trio.current_time() > due:
                late.append((flow.part, member, _words("of its values", flow, expected)))
        return [(member, NO_VALUES, text) for _, member, text in sorted(late)]

    def _late_reducers(self) -> list[tuple[int, str, str]]:
        flows = self._flows(self._attempt.averages_of, self._reducers)
        own = [self._own_part] if self._own_part.chunks else []
        opening = len(self._reducers) - len(flows)
        late = []
        for member, flow in flows.items():
            others = own + [each for one, each in flows.items() if one != member]
            predicted = self._round_seconds
            if not others and self._unknown:  # it may be waiting for a slow link
                predicted = max(predicted, self._vector_bytes / SLOW_BYTES_PER_SECOND)
            expected = self._expected(flow, others, opening, predicted)
            expected = max(expected, self._own_seconds(member))
            patience = LATE_GRACE_SECONDS + STEP_SECONDS + ROUND_TRIPS * self._round_trip(member)
            if trio.current_time() > flow.due(expected, patience, excuses=False):
                late.append((flow.part, member, _words("averages", flow, expected)))
        return [(member, NO_AVERAGES, text) for _, member, text in sorted(late)]

    def _own_seconds(self, reducer: int) -> float:
        """How long our own values for this reducer take, as far as it has taken them: it cannot
        average what has not arrived. A reducer that takes nothing gains nothing by that."""
        ours = self._attempt.values_to.get(reducer)
        if ours is None:
            return 0.0
        if ours.done:
            return (ours.moved - ours.began) * ours.chunks / ours.done
        others_take = any(one.done for one in self._attempt.values_to.values())
        me = self._attempt.plan.me
        return math.inf if me in self._unknown and not others_take else self._values_seconds[me]

    def _late_closers(self) -> list[tuple[int, str, str]]:
        if self._most_closed is None:
            return []
        waited = trio.current_time() - self._most_closed
        late = []
        for member in sorted(self._attempt.unclosed):
            longer = max(self._round_seconds, (self._most_closed - self._attempt.began) / 2.0)
            if member in self._slow_readers:
                longer = max(longer, self._vector_bytes / SLOW_BYTES_PER_SECOND)
            patience = LATE_GRACE_SECONDS + STEP_SECONDS + ROUND_TRIPS * self._round_trip(member)
            if waited > patience + longer:
                text = f"It has not closed its transfer, {waited:.1f} s after most of the others."
                late.append((member, NOT_CLOSED, text))
        return late

    def usual_seconds(self) -> float:
        """How long values may take, judging by those that are on their way; infinity if there are
        none. (Averages wait for a member that has not opened its transfer.)"""
        flows = [*self._attempt.values_of.values(), *self._attempt.values_to.values()]
        seconds = [one.whole_seconds() for one in flows if one.chunks]
        longest = statistics.median_high(seconds) if seconds else math.inf
        return max(self._round_seconds, longest)

    def _flows(self, flows: Mapping[int, Flow], members: Iterable[int]) -> dict[int, Flow]:
        return {member: flows[member] for member in members if member in flows}

    def _expected(self, flow: Flow, others: list[Flow], missing: int, predicted: float) -> float:
        """How long the whole flow may take; infinity if it is not behind the others. `missing`: how
        many of the others have not begun."""
        if flow.is_over:
            return math.inf
        if not others and not missing:
            return predicted
        parts = [one.part for one in others] + [0.0] * missing
        if statistics.median_low(parts) <= flow.part:
            return math.inf
        seconds = [one.whole_seconds() for one in others] + [math.inf] * missing
        return max(predicted, statistics.median_high(seconds))


def _words(what: str, flow: Flow, expected: float) -> str:
    seconds = trio.current_time() - flow.began
    return (
        f"{flow.done:,} of {flow.chunks:,} chunks {what} came in {seconds:.1f} s, where all take "
        f"about {expected:.1f} s."
    )


# ---- transfers that do not open
#
# Every member opens a transfer to every reducer at the same time, and the first transfers are full
# of values before the last are open. On a slow link, small messages then wait behind the values, at
# both ends and in both directions. So a member that has not opened, or not accepted, is waited for
# as long as other bytes come from it. A silent member is given up as early as elsewhere.
#
# Easy to get wrong: a member that says something now and then but never opens must not hold up the
# others. So this longer wait ends when the open transfers show that the links cannot be full for so
# long (`usual_seconds`), and never lasts longer than `LONGEST_OPENING_SECONDS`.


OPEN_SECONDS = 6.0
"""For dialling and being accepted: eight round trips of a bad link (600 ms), and the difference
between the moments at which two members learn that the attempt has begun."""

LONGEST_OPENING_SECONDS = 15.0
"""For members from which other bytes come: three round trips through queues of 2.5 s each way, as
23 connections with windows of 32 KiB fill them at both ends of 5 Mb/s."""


async def watch_openings(attempt: ExchangeAttempt) -> None:
    """Suspect a member that does not open or accept in time. Returns when all transfers are open,
    or a member is suspected."""
    while late := attempt.not_arrived() | attempt.not_accepted():
        opens_by, member = min((_opens_by(attempt, member), member) for member in late)
        if opens_by > trio.current_time():
            await trio.sleep_until(opens_by)
            continue
        within = f"within {opens_by - attempt.began:.0f} seconds"
        if member in attempt.not_arrived():
            attempt.suspect(member, "absent", f"It has not opened its transfer {within}.")
        else:
            attempt.suspect(member, "unreachable", f"It has not accepted our transfer {within}.")
        return


def _opens_by(attempt: ExchangeAttempt, member: int) -> float:
    """The moment at which this member is given up, as far as is known now."""
    heard = attempt.last_heard.get(member, attempt.began)
    patience = max(attempt.began + OPEN_SECONDS, heard + STALL_SECONDS)
    longest = OPEN_SECONDS + STEP_SECONDS + attempt.lateness.usual_seconds()
    return min(patience, attempt.began + min(longest, LONGEST_OPENING_SECONDS))
