"""Runs lookups: asks the peers that they name and reports the results, until each is done.

Several lookups run at once and share messages: their requests to the same peer at the same time
travel together. So hundreds of keys cost one message a neighbour.

A request is not cancelled when its walk ends. The answer still tells us about the peer, and a store
in flight should arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import trio

from protocols.dht.contacts import Contact
from protocols.dht.lookup import Lookup
from protocols.dht.state import DhtState, log
from protocols.errors import PotluckError

OPERATIONS_PER_CHECKPOINT = 32  # one or two milliseconds of choosing the first peers
MESSAGES_AT_ONCE = 64  # of one walk: a put of many keys asks hundreds of peers


class QueryPlan(Protocol):
    """Says which peers to ask next, and gets the results: see `lookup.Lookup`."""

    def next_queries(self) -> list[Contact]: ...

    def answered(self, contact: Contact, closer: Iterable[Contact], /) -> None: ...

    def failed(self, contact: Contact, /) -> None: ...

    def slow(self, contact: Contact, /) -> None: ...

    @property
    def is_done(self) -> bool: ...

    @property
    def waits_for_slow_only(self) -> bool: ...


class Operation:
    """A lookup and its purpose. A subclass may be done before the lookup is."""

    def __init__(self, lookup: QueryPlan) -> None:
        self.lookup = lookup

    @property
    def is_done(self) -> bool:
        """Whether no more peers need be asked."""
        return self.lookup.is_done


E = TypeVar("E", bound=Operation)

Ask = Callable[[Contact, Sequence[E]], Awaitable[Sequence[Iterable[Contact]]]]
"""Ask a peer for these operations; return for each the contacts that the answer named."""


@dataclass(frozen=True)
class MessageLimits(Generic[E]):
    """The limits of one message: the number of operations, and their bytes by `size_of`."""

    operations: int
    bytes: int
    size_of: Callable[[E], int]


class _Request(Generic[E]):
    __slots__ = ("contact", "is_open", "operations", "size", "slow_at")

    def __init__(self, contact: Contact, operations: list[E]) -> None:
        self.contact = contact
        self.operations = operations
        self.size = 0
        self.slow_at = 0.0
        self.is_open = True


class Walk(Generic[E]):
    """One run of several operations.

    Invariant: each request is in `_waiting`, or open and counted in `_in_flight`, or over.
    `_unfinished` has the operations that were not done when last checked, `_awaited` those of them
    that the caller still waits for.

    An operation changes only when one of its own requests is answered, fails or is slow. So only
    those operations are checked then; otherwise thousands of operations would cost their square. An
    operation that was done is not checked again: it may go on in another walk, while requests of
    this one are still open.
    """

    def __init__(
        self, state: DhtState, operations: Iterable[E], ask: Ask[E], limits: MessageLimits[E]
    ) -> None:
        self._state = state
        self._ask = ask
        self._limits = limits
        self._operations = list(operations)
        self._unfinished = set(self._operations)
        self._awaited = set(self._operations)
        self._waiting: deque[_Request[E]] = deque()
        self._by_age: deque[_Request[E]] = deque()
        self._in_flight = 0
        self._over = trio.Event()

    async def run(self) -> None:
        """Run until the caller need not wait for any operation. The rest goes on in the background.

        trio.ClosedResourceError if the directory ends meanwhile. A task of the directory itself is
        cancelled then, and must raise that instead: the error would come from the directory itself.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._state.check_open()
        self._state.counts.lookups += len(self._operations)
        await self._begin()
        while not self._over.is_set():
            while self._by_age and not self._by_age[0].is_open:
                self._by_age.popleft()
            next_slow = self._by_age[0].slow_at if self._by_age else float("inf")
            with trio.move_on_at(next_slow) as patience:
                await self._over.wait()
            if patience.cancelled_caught:
                self._give_up_waiting(trio.current_time())
        if self._awaited:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._state.check_open()

    async def _begin(self) -> None:
        """Collect the first requests of all operations, to share messages, and send them."""
        requests: dict[int, _Request[E]] = {}
        for start in range(0, len(self._operations), OPERATIONS_PER_CHECKPOINT):
            if start:
                await trio.lowlevel.checkpoint()
            self._look_at(self._operations[start : start + OPERATIONS_PER_CHECKPOINT], requests)
        self._send()
        self._end_if_over()

    def _give_up_waiting(self, now: float) -> None:
        waited_for: list[E] = []
        while self._by_age and self._by_age[0].slow_at <= now:
            request = self._by_age.popleft()
            if request.is_open:
                waited_for += request.operations
                for operation in request.operations:
                    operation.lookup.slow(request.contact)
        self._advance(dict.fromkeys(waited_for))

    def _advance(self, operations: Iterable[E]) -> None:
        """Go on with the operations that have a new result."""
        self._look_at(operations, {})
        self._send()
        self._end_if_over()

    def _look_at(self, operations: Iterable[E], requests: dict[int, _Request[E]]) -> None:
        """Note which of these need no more waiting, and collect the requests of the others."""
        for operation in operations:
            if operation not in self._unfinished:
                continue
            if operation.is_done:
                self._unfinished.remove(operation)
                self._awaited.discard(operation)
                continue
            for contact in operation.lookup.next_queries():
                self._collect(operation, contact, requests)
            if operation.lookup.waits_for_slow_only:
                self._awaited.discard(operation)

    def _collect(self, operation: E, contact: Contact, requests: dict[int, _Request[E]]) -> None:
        size = self._limits.size_of(operation)
        request = requests.get(contact.node_id)
        if (
            request is None
            or len(request.operations) >= self._limits.operations
            or request.size + size > self._limits.bytes
        ):
            request = requests[contact.node_id] = _Request(contact, [])
            self._waiting.append(request)
        request.operations.append(operation)
        request.size += size

    def _end_if_over(self) -> None:
        # with no request in flight, no answer can come
        if not self._awaited or not self._in_flight:
            self._over.set()

    def _send(self) -> None:
        while self._waiting and self._in_flight < MESSAGES_AT_ONCE:
            request = self._waiting.popleft()
            request.slow_at = trio.current_time() + self._state.settings.slow_seconds
            self._by_age.append(request)
            self._in_flight += 1
            self._state.nursery.start_soon(self._run, request)

    async def _run(self, request: _Request[E]) -> None:
        contact = request.contact
        try:
            named = await self._ask(contact, request.operations)
        except trio.Cancelled:
            self._over.set()  # the directory ends; a caller of this walk may still be running
            raise
        except PotluckError as error:
            log.debug("%s failed in a lookup: %s", contact.peer, error)
            self._failed(request)
        except Exception:  # noqa: BLE001 - a bug here must not end the node
            log.exception("a request to %s ended by an error of our own", contact.peer)
            self._failed(request)
        else:
            for operation, contacts in zip(request.operations, named, strict=True):
                operation.lookup.answered(contact, contacts)
        request.is_open = False
        self._in_flight -= 1
        self._advance(request.operations)

    def _failed(self, request: _Request[E]) -> None:
        for operation in request.operations:
            operation.lookup.failed(request.contact)


# The start of a lookup: the closest peers in the routing table, and how good they are.


# The distance of the k-th nearest of evenly spread points varies, but by less than this factor in
# all but one of thousands of cases. A table with every second peer of that part of the swarm passes
# as well; the peers that it lacks are named by others.
NEAR_ENOUGH = 4


def seeds_for(state: DhtState, target: int, k: int | None = None) -> list[Contact]:
    """Our closest contacts; if there are none, stand-ins and those that failed."""
    state.table.looked_up(target, trio.current_time())
    return state.table.closest(target, k) or [
        *state.stand_ins(target),
        *state.table.closest(target, k, even_failing=True),
    ]


def lookup_from(
    state: DhtState, target: int, seeds: Sequence[Contact], k: int | None = None
) -> Lookup:
    settings = state.settings
    return Lookup(target, state.own_id, seeds, settings.k if k is None else k, settings.alpha)


def own_radius(state: DhtState) -> int:
    """The distance of the farthest of the k contacts closest to us; 0 without any."""
    around_us = state.table.closest(state.own_id)
    return around_us[-1].node_id ^ state.own_id if around_us else 0


def knows_well(state: DhtState, target: int, radius: int) -> bool:
    """Whether our table seems to have the peers that are closest to this target.

    `radius` is our own. Ids are spread evenly, so the k closest to any target are about as far from
    it as the k closest to us are from us, and those we know. If so, no lookup is needed before we
    ask these: if there are closer ones, these will name them.
    """
    closest = state.table.closest(target)
    if len(closest) < state.settings.k:
        return True
    return (closest[-1].node_id ^ target) <= NEAR_ENOUGH * radius
