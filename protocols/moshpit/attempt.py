"""One attempt at a round while it runs: what is known so far, and whom it fails for.

The tasks of an attempt (sending.py towards the reducers, serving.py towards the senders) share
this. The first suspicion ends them all: the scopes of our own tasks are cancelled, and the
handlers that serve others tell these, where a frame is not just under way, whom we gave up for.

Promise: `over` is set once and stays. When `handlers_gone` has returned after that, nothing
touches `source` or `result` any more.

Easy to get wrong: the *first* suspicion is the cause, the later ones are its echo. When one member
dies everybody gives up, and each of the others then sees transfers of the rest end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import trio
from torch import Tensor

from protocols.bulk import Transfer
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
from protocols.moshpit.exchange import ExchangePlan, Participant
from protocols.moshpit.lateness import Flow, Lateness
from protocols.moshpit.link_meter import LinkMeter
from protocols.moshpit.pacing import Pace
from protocols.moshpit.part_messages import GaveUp, StaleAttempt
from protocols.moshpit.reducing import NotFiniteReceived, Reduction
from protocols.moshpit.statements import make_statement
from protocols.network import Network
from protocols.tensor_codecs import NotFinite


class Attempt:
    """What all tasks of one exchange share."""

    def __init__(
        self, network: Network, plan: ExchangePlan, source: Tensor, result: Tensor
    ) -> None:
        self.plan = plan
        self.source, self.result = source, result
        self.began = trio.current_time()
        self.meter = LinkMeter()
        values_to = self.reducers if plan.member_of(plan.me).weight > 0.0 else ()
        steps = [self.steps_to(reducer.index) for reducer in values_to]
        self.pace = Pace(len(plan.members), steps)
        self.reduction = Reduction(plan, source, result)
        self.statements: dict[int, Statement] = {}
        self.suspicion: Suspicion | None = None
        self.awaited: tuple[Suspicion, ...] = ()
        """For whom this member was waiting when the attempt failed."""
        self.over: str | None = None
        self.averages_of: dict[int, Flow] = {}
        """The averages of each reducer that has accepted our transfer."""
        self.values_to: dict[int, Flow] = {}
        """Ours to each reducer that has accepted our transfer; to none if we bring no data."""
        self.values_of: dict[int, Flow] = {}
        """The values of each sender that has opened its transfer."""
        self.last_heard: dict[int, float] = {}
        """When bytes were last seen to come from each of the others."""
        self.all_served = trio.Event()
        self.whole = trio.Event()
        """Our result is complete, and `result_digest` is its digest."""
        self.result_digest = b""
        self.opened_seconds = self.reduced_seconds = self.received_seconds = 0.0
        self._network = network
        self._served = 0
        self._digests: dict[int, bytes] = {}  # of the parts that are here
        self._told: dict[int, set[bytes]] = {}  # which result each of the others says it has
        self._transfers: dict[int, list[Transfer[Any, Any, Any]]] = {}
        self._scopes: set[trio.CancelScope] = set()
        self._handlers = 0
        self._handler_left = trio.Event()
        self.lateness = Lateness(self, self._round_trip)

    def _round_trip(self, member: int) -> float:
        link = self._network.link(self.plan.member_of(member).peer)
        return 0.0 if link is None else link.round_trip_seconds or 0.0

    # Who takes part

    @property
    def others(self) -> tuple[Participant, ...]:
        return tuple(member for member in self.plan.members if member.index != self.plan.me)

    @property
    def reducers(self) -> tuple[Participant, ...]:
        """The others that reduce something, in an order that differs from member to member.

        Everybody starts with who comes after it, so that not all begin with the same reducer.
        """
        members, cuts, mine = self.plan.members, self.plan.cuts, self.plan.my_place
        places = [(mine + step) % len(members) for step in range(1, len(members))]
        return tuple(members[place] for place in places if cuts[place] < cuts[place + 1])

    @property
    def senders(self) -> tuple[Participant, ...]:
        """The others that open a transfer to us: all of them, if we reduce anything."""
        return self.others if self.reduction.chunks else ()

    def steps_to(self, member: int) -> int:
        """How far behind us it is in the order in which we begin with them, from 1."""
        plan = self.plan
        return (plan.place_of(member) - plan.my_place) % len(plan.members)

    # How it ends

    def suspect(self, member: int, code: str, text: str) -> None:
        """End the attempt because of this member, unless it has ended already."""
        if self.over is None:
            self.suspicion = Suspicion(member, code, _cut(text))
            self.awaited = self.lateness.awaited()
            self.stop(f"Gave up on member {member}: {text}")

    def stop(self, reason: str) -> None:
        """End everything; the others are told this reason. Never waits."""
        if self.over is None:
            self.over = reason
            for scope in self._scopes:
                scope.cancel()

    @contextmanager
    def blaming(self, member: int, *, opening: bool = False) -> Iterator[None]:
        """Whatever fails between us and this member ends the attempt, with a suspicion."""
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

    # Who is only slow

    @contextmanager
    def transferring(self, member: int, transfer: Transfer[Any, Any, Any]) -> Iterator[None]:
        """While the block runs, whatever comes from this member counts for this transfer."""
        transfers = self._transfers.setdefault(member, [])
        transfers.append(transfer)
        try:
            yield
        finally:
            transfers.remove(transfer)

    def heard(self, place: int) -> None:
        """Bytes have come from the other at this place, in whatever (pulse.py)."""
        member = self.others[place].index
        self.last_heard[member] = trio.current_time()
        for transfer in self._transfers.get(member, ()):
            transfer.is_slow()

    # How far it is

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
        """A sender has had everything from us."""
        self._served += 1
        if self._served == len(self.senders):
            self.all_served.set()

    def has_part(self, reducer: int, digest: bytes) -> None:
        """All averages of a part are here."""
        self._digests[reducer] = digest
        if len(self._digests) == len(self.reducers) + bool(self.reduction.chunks):
            self.result_digest = digest_of_parts(self._digests)
            self.whole.set()

    def told(self, member: int, digest: bytes) -> None:
        """Another member says in a closing message which result it has."""
        self._told.setdefault(member, set()).add(digest)

    @property
    def told_by(self) -> Set[int]:
        """Who has closed a transfer with us, with its whole result."""
        return self._told.keys()

    def contradicted_by(self) -> tuple[int, ...]:
        """Who has another result than we; known when all have closed their transfers."""
        told = sorted(self._told.items())
        return tuple(member for member, digests in told if digests != {self.result_digest})

    def furthest_behind(self) -> int:
        """Whom to name when the time is over: a sender whose values we still wait for, else a
        reducer whose averages we do, else who has not closed its transfer; ourselves only where
        there is nobody else."""
        weighted = [member.index for member in self.senders if member.weight > 0.0]
        if weighted and not self.reduction.is_finished:
            return min(weighted, key=lambda index: chunks_of(self.values_of, index))
        reducers = [member.index for member in self.reducers]
        unfinished = [index for index in reducers if index not in self._digests]
        if unfinished:
            return min(unfinished, key=lambda index: chunks_of(self.averages_of, index))
        others = [member.index for member in self.senders] or reducers or [self.plan.me]
        closing = [index for index in others if index not in self.told_by] or others
        return min(closing, key=lambda index: chunks_of(self.values_of, index))

    # Handlers that serve others, in tasks that are not ours

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
        """Wait until no handler works for this attempt any more. Soon, once it is over."""
        while self._handlers:
            await self._handler_left.wait()

    # Our own part

    def own_statement(self) -> Statement:
        """Made once, when our part is finished."""
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
    """How many have come from this member; -1 where its transfer is not even open."""
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
            # It has ended its attempt, perhaps for a third one's sake: nothing against it.
            return "gave_up"
        case Busy():
            return "busy"
        case Refused() | ProtocolNotServed():
            return "refused"
    return "gave_up"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SUSPICION else text[: LONGEST_SUSPICION - 1] + "…"
