"""Run lookups: ask whom they name, tell them what came, until each has what it wants.

Several lookups run at once and share messages: what several of them want to ask the same peer at
the same time travels together. So hundreds of keys cost one message a neighbour, not hundreds.

Easy to get wrong: a question is not cancelled when its walk ends. The answer still teaches us
about the peer, and a store that is under way should arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

import trio

from protocols.dht.contacts import Contact
from protocols.dht.lookup import Lookup
from protocols.dht.state import DhtState, log
from protocols.errors import PotluckError

MESSAGES_AT_ONCE = 64  # of one walk: a put of many keys speaks to hundreds of peers


class Errand:
    """A lookup and what it is for. A subclass may be content, or done, before the lookup is."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup

    @property
    def is_done(self) -> bool:
        """Nobody else need be asked."""
        return self.lookup.is_done

    @property
    def is_content(self) -> bool:
        """Whoever waits for it need wait no longer."""
        return self.is_done or self.lookup.waits_for_slow_only


E = TypeVar("E", bound=Errand)

Ask = Callable[[Contact, Sequence[E]], Awaitable[Sequence[Iterable[Contact]]]]
"""Ask a peer for these errands; for each of them the contacts that the answer named."""

Fits = Callable[[Sequence[E], E], bool]
"""Whether one more errand may travel in the same message."""


class _Question(Generic[E]):
    __slots__ = ("contact", "errands", "is_open", "slow_at")

    def __init__(self, contact: Contact, errands: list[E]) -> None:
        self.contact = contact
        self.errands = errands
        self.slow_at = 0.0
        self.is_open = True


class Walk(Generic[E]):
    """Invariant: each question is in `_waiting`, or open and counted in `_in_flight`, or over."""

    def __init__(self, state: DhtState, errands: Iterable[E], ask: Ask[E], fits: Fits[E]) -> None:
        self._state = state
        self._ask = ask
        self._fits = fits
        self._unfinished = list(errands)
        self._awaited = list(self._unfinished)
        self._waiting: deque[_Question[E]] = deque()
        self._by_age: deque[_Question[E]] = deque()
        self._in_flight = 0
        self._over = trio.Event()

    async def run(self) -> None:
        """Until every errand is content. What is left to be done then goes on by itself.

        trio.ClosedResourceError if the directory ends meanwhile.
        """
        self._state.check_open()
        self._state.counts.lookups += len(self._unfinished)
        self._advance()
        while not self._over.is_set():
            while self._by_age and not self._by_age[0].is_open:
                self._by_age.popleft()
            next_slow = self._by_age[0].slow_at if self._by_age else float("inf")
            with trio.move_on_at(next_slow) as patience:
                await self._over.wait()
            if patience.cancelled_caught:
                self._give_up_waiting(trio.current_time())
        if self._awaited:
            self._state.check_open()

    def _give_up_waiting(self, now: float) -> None:
        while self._by_age and self._by_age[0].slow_at <= now:
            question = self._by_age.popleft()
            if question.is_open:
                for errand in question.errands:
                    errand.lookup.slow(question.contact)
        self._advance()

    def _advance(self) -> None:
        if self._awaited:
            self._awaited = [errand for errand in self._awaited if not errand.is_content]
            if not self._awaited:
                self._over.set()
        if not self._unfinished:
            return
        self._unfinished = [errand for errand in self._unfinished if not errand.is_done]
        if self._unfinished:
            self._collect()
        self._send()
        if not self._in_flight:
            self._over.set()  # nothing is under way, so nothing can come

    def _collect(self) -> None:
        if len(self._unfinished) == 1:  # the usual case, and the fast one
            errand = self._unfinished[0]
            self._waiting.extend(_Question(one, [errand]) for one in errand.lookup.next_queries())
            return
        questions: dict[int, _Question[E]] = {}
        for errand in self._unfinished:
            for contact in errand.lookup.next_queries():
                question = questions.get(contact.node_id)
                if question is None or not self._fits(question.errands, errand):
                    question = questions[contact.node_id] = _Question(contact, [])
                    self._waiting.append(question)
                question.errands.append(errand)

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
            self._over.set()  # the directory ends, and whoever waits for this walk may outlive it
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
        self._advance()

    def _failed(self, question: _Question[E]) -> None:
        for errand in question.errands:
            errand.lookup.failed(question.contact)
