"""Running lookups: ask the peers that they name, and report the results, until each is done.

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

ERRANDS_WITHOUT_A_PAUSE = 32  # one or two milliseconds of choosing the first peers
MESSAGES_AT_ONCE = 64  # of one walk: a put of many keys asks hundreds of peers


class Questions(Protocol):
    """Says which peers to ask next, and gets the results: see `lookup.Lookup`."""

    def next_queries(self) -> list[Contact]: ...

    def answered(self, contact: Contact, closer: Iterable[Contact], /) -> None: ...

    def failed(self, contact: Contact, /) -> None: ...

    def slow(self, contact: Contact, /) -> None: ...

    @property
    def is_done(self) -> bool: ...

    @property
    def waits_for_slow_only(self) -> bool: ...


class Errand:
    """A lookup and its purpose. A subclass may be done before the lookup is."""

    def __init__(self, lookup: Questions) -> None:
        self.lookup = lookup

    @property
    def is_done(self) -> bool:
        """Whether no more peers need be asked."""
        return self.lookup.is_done

    @property
    def is_content(self) -> bool:
        """Whether the caller need not wait any longer, though it is not done."""
        return self.lookup.waits_for_slow_only


E = TypeVar("E", bound=Errand)

Ask = Callable[[Contact, Sequence[E]], Awaitable[Sequence[Iterable[Contact]]]]
"""Ask a peer for these errands; return for each the contacts that the answer named."""


@dataclass(frozen=True)
class Load(Generic[E]):
    """The limits of one message: the number of errands, and their bytes by `size_of`."""

    errands: int
    bytes: int
    size_of: Callable[[E], int]


class _Question(Generic[E]):
    __slots__ = ("contact", "errands", "is_open", "size", "slow_at")

    def __init__(self, contact: Contact, errands: list[E]) -> None:
        self.contact = contact
        self.errands = errands
        self.size = 0
        self.slow_at = 0.0
        self.is_open = True


class Walk(Generic[E]):
    """One run of several errands.

    Invariant: each request is in `_waiting`, or open and counted in `_in_flight`, or over.
    `_unfinished` has the errands that were not done when last checked, `_awaited` those of them
    that are not content either.

    An errand changes only when one of its own requests is answered, fails or is slow. So only those
    errands are checked then; otherwise the cost of thousands of errands would be their square. An
    errand that was done is not checked again: it may go on in another walk, while requests of this
    one are still open.
    """

    def __init__(self, state: DhtState, errands: Iterable[E], ask: Ask[E], load: Load[E]) -> None:
        self._state = state
        self._ask = ask
        self._load = load
        self._errands = list(errands)
        self._unfinished = set(self._errands)
        self._awaited = set(self._errands)
        self._waiting: deque[_Question[E]] = deque()
        self._by_age: deque[_Question[E]] = deque()
        self._in_flight = 0
        self._over = trio.Event()

    async def run(self) -> None:
        """Run until every errand is content. The rest goes on in the background.

        trio.ClosedResourceError if the directory ends meanwhile. A task of the directory itself is
        cancelled then, and must raise that instead: the error would come from the directory itself.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._state.check_open()
        self._state.counts.lookups += len(self._errands)
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
        """Collect the first requests of all errands, to share messages, and send them."""
        questions: dict[int, _Question[E]] = {}
        for start in range(0, len(self._errands), ERRANDS_WITHOUT_A_PAUSE):
            if start:
                await trio.lowlevel.checkpoint()
            self._look_at(self._errands[start : start + ERRANDS_WITHOUT_A_PAUSE], questions)
        self._send()
        self._end_if_over()

    def _give_up_waiting(self, now: float) -> None:
        waited_for: list[E] = []
        while self._by_age and self._by_age[0].slow_at <= now:
            question = self._by_age.popleft()
            if question.is_open:
                waited_for += question.errands
                for errand in question.errands:
                    errand.lookup.slow(question.contact)
        self._advance(dict.fromkeys(waited_for))

    def _advance(self, errands: Iterable[E]) -> None:
        """Go on with the errands that have a new result."""
        self._look_at(errands, {})
        self._send()
        self._end_if_over()

    def _look_at(self, errands: Iterable[E], questions: dict[int, _Question[E]]) -> None:
        """Note which of these are content, and collect the requests of the others."""
        for errand in errands:
            if errand not in self._unfinished:
                continue
            if errand.is_done:
                self._unfinished.remove(errand)
                self._awaited.discard(errand)
                continue
            for contact in errand.lookup.next_queries():
                self._collect(errand, contact, questions)
            if errand.is_content:
                self._awaited.discard(errand)

    def _collect(self, errand: E, contact: Contact, questions: dict[int, _Question[E]]) -> None:
        size = self._load.size_of(errand)
        question = questions.get(contact.node_id)
        if (
            question is None
            or len(question.errands) >= self._load.errands
            or question.size + size > self._load.bytes
        ):
            question = questions[contact.node_id] = _Question(contact, [])
            self._waiting.append(question)
        question.errands.append(errand)
        question.size += size

    def _end_if_over(self) -> None:
        # with no request in flight, no answer can come
        if not self._awaited or not self._in_flight:
            self._over.set()

    def _send(self) -> None:
        while self._waiting and self._in_flight < MESSAGES_AT_ONCE:
            question = self._waiting.popleft()
            question.slow_at = trio.current_time() + self._state.settings.slow_seconds
            self._by_age.append(question)
            self._in_flight += 1
            self._state.nursery.start_soon(self._run, question)

    async def _run(self, question: _Question[E]) -> None:
        contact = question.contact
        try:
            named = await self._ask(contact, question.errands)
        except trio.Cancelled:
            self._over.set()  # the directory ends, and a caller of this walk may outlive it
            raise
        except PotluckError as error:
            log.debug("%s is passed over in a lookup: %s", contact.peer, error)
            self._failed(question)
        except Exception:  # noqa: BLE001 - a bug here must not end the node
            log.exception("a question to %s broke", contact.peer)
            self._failed(question)
        else:
            for errand, contacts in zip(question.errands, named, strict=True):
                errand.lookup.answered(contact, contacts)
        question.is_open = False
        self._in_flight -= 1
        self._advance(question.errands)

    def _failed(self, question: _Question[E]) -> None:
        for errand in question.errands:
            errand.lookup.failed(question.contact)


# The start of a lookup: the closest peers in the routing table, and how good they are.


# The distance of the k-th nearest of evenly spread points varies, but by less than this factor in
# all but one of thousands of cases. A table with every second peer of that part of the swarm passes
# as well; the peers that it lacks are named by others.
NEAR_ENOUGH = 4


def seeds_for(state: DhtState, target: int) -> list[Contact]:
    """Our closest contacts; those that failed only if there are no others."""
    state.table.looked_up(target, trio.current_time())
    return state.table.closest(target) or state.table.closest(target, even_failing=True)


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
