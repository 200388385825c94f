"""Run lookups: ask whom they name, tell them what came, until each has what it wants.

Several lookups run at once and share messages: what several of them want to ask the same peer at
the same time travels together. So hundreds of keys cost one message a neighbour, not hundreds.

Easy to get wrong: a question is not cancelled when its walk ends. The answer still teaches us
about the peer, and a store that is under way should arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import trio

from protocols.dht.contacts import Contact
from protocols.dht.state import DhtState, log
from protocols.errors import PotluckError

ERRANDS_WITHOUT_A_PAUSE = 32  # a millisecond or two of looking for whom to ask first
MESSAGES_AT_ONCE = 64  # of one walk: a put of many keys speaks to hundreds of peers


class Questions(Protocol):
    """Says whom to ask next, and is told what came of it: see `lookup.Lookup`."""

    def next_queries(self) -> list[Contact]: ...

    def answered(self, contact: Contact, closer: Iterable[Contact], /) -> None: ...

    def failed(self, contact: Contact, /) -> None: ...

    def slow(self, contact: Contact, /) -> None: ...

    @property
    def is_done(self) -> bool: ...

    @property
    def waits_for_slow_only(self) -> bool: ...


class Errand:
    """A lookup and what it is for. A subclass may be done before the lookup is."""

    def __init__(self, lookup: Questions) -> None:
        self.lookup = lookup

    @property
    def is_done(self) -> bool:
        """Nobody else need be asked."""
        return self.lookup.is_done

    @property
    def is_content(self) -> bool:
        """Whoever waits for it need wait no longer, though it is not done."""
        return self.lookup.waits_for_slow_only


E = TypeVar("E", bound=Errand)

Ask = Callable[[Contact, Sequence[E]], Awaitable[Sequence[Iterable[Contact]]]]
"""Ask a peer for these errands; for each of them the contacts that the answer named."""


@dataclass(frozen=True)
class Load(Generic[E]):
    """How much one message carries: so many errands, of so many bytes together by `size_of`."""

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
    """Invariant: each question is in `_waiting`, or open and counted in `_in_flight`, or over;
    `_unfinished` has the errands that were not done yet when last looked at, `_awaited` those of
    them that are not content either.

    An errand changes only when a question of its own is answered, fails or is slow: so only those
    are looked at then, or thousands of errands would cost their square. And one that was done is
    looked at no more: it may go on in another walk, while questions of this one are still open.
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
        """Until every errand is content. What is left to be done then goes on by itself.

        trio.ClosedResourceError if the directory ends meanwhile.
        """
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
            self._state.check_open()

    async def _begin(self) -> None:
        """Collect the first questions of all, so that they share messages, and then send them."""
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
        """Go on with these, whose questions have come to something."""
        self._look_at(errands, {})
        self._send()
        self._end_if_over()

    def _look_at(self, errands: Iterable[E], questions: dict[int, _Question[E]]) -> None:
        """Note which of these are content, and what the others have to ask."""
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
        # with nothing under way, nothing can come
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
        self._advance(question.errands)

    def _failed(self, question: _Question[E]) -> None:
        for errand in question.errands:
            errand.lookup.failed(question.contact)
