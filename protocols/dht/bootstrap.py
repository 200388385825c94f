"""Joining the swarm, and rejoining it, for ever.

Two kinds of peers are tried: the bootstrap addresses that a person gave, and peers that this node
knew before (from its cache, or lost since). All are greeted. When one has answered, this node looks
itself up. So it meets its neighbours, and they meet it.

Bootstrap does not end with the first answer. Each bootstrap address that has not answered is tried
again, ever more rarely. Nodes that start at the same moment with the same addresses may first form
separate groups; the retries join them into one swarm. Lost peers are tried again for the same
reason: after a split of the network, each half needs them to find the other.

If nobody answers, it is mostly not our fault, and a person has to be told the cause.
`BootstrapState` has each address's last failure in words.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import trio

from protocols.dht.asking import Asker
from protocols.dht.contacts import Contact, contact_of
from protocols.dht.reading import SlotReader
from protocols.dht.routing import REFRESH_WIDTH
from protocols.dht.state import DhtState, log
from protocols.errors import MalformedMessage, PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.not_allowed import NotAllowed

GREETED_AT_ONCE = 8
CACHED_PEERS = 128  # of the cache, tried as long as we know nobody
REJOINED_RARER = 30  # the factor by which an address is tried more rarely once we have joined

# After a failed round, a random part of the delay is left out, so that nodes that lost the swarm
# together do not come back together.
JITTER = 0.5


class Joined(enum.Enum):
    ALONE = "alone"
    """No bootstrap address and no known peer: this node waits for others to come."""
    TRYING = "trying"
    JOINED = "joined"


@dataclass(frozen=True)
class AddressState:
    """One bootstrap address: whether it has answered, and if not, why, in words."""

    address: str
    answered: bool = False
    attempts: int = 0
    failure: str = ""


@dataclass(frozen=True)
class BootstrapState:
    joined: Joined
    addresses: tuple[AddressState, ...]
    cached_peers: int
    """How many peers of the cache are tried beside the addresses."""
    rounds_failed: int = 0
    """How many rounds in a row have failed at every address."""

    def __str__(self) -> str:
        if self.joined is not Joined.TRYING:
            return str(self.joined.value)
        failed = "; ".join(f"{one.address}: {one.failure}" for one in self.addresses if one.failure)
        return f"trying: {failed or 'no answer yet'}"


class _Place:
    """A bootstrap address and the results of its tries."""

    __slots__ = ("address", "answered", "attempts", "contact", "failure", "next_try", "refused")

    def __init__(self, address: str, contact: Contact) -> None:
        self.address = address
        self.contact = contact
        self.answered = False
        self.refused = False
        self.attempts = 0
        self.failure = ""
        self.next_try = 0.0


class Bootstrap:
    """Greets peers until they answer. Looks this node up when it has met some."""

    def __init__(self, state: DhtState, asker: Asker, reader: SlotReader) -> None:
        self._state = state
        self._asker = asker
        self._reader = reader
        self._places = [_place(address) for address in state.settings.bootstrap]
        self._places = [one for one in self._places if one.contact.peer != state.peer_id]
        self._cached: list[Contact] = []
        self._rounds_failed = 0
        self._complaints: set[str] = set()
        self._is_new_here = True
        self._changed = trio.Event()
        self.joined = trio.Event()
        """Set when this node has met a peer and looked itself up for the first time."""
        self._turned_away = trio.Event()
        self._refusal: NotAllowed | None = None

    def add_cached(self, contacts: Iterable[Contact]) -> None:
        """Add peers from the cache."""
        fresh = [one for one in contacts if one.peer != self._state.peer_id]
        self._cached = fresh[:CACHED_PEERS]

    def state(self) -> BootstrapState:
        if not self._state.is_alone:
            joined = Joined.JOINED
        else:
            joined = Joined.TRYING if self._places or self._cached else Joined.ALONE
        addresses = tuple(
            AddressState(one.address, one.answered, one.attempts, one.failure)
            for one in self._places
        )
        return BootstrapState(joined, addresses, len(self._cached), self._rounds_failed)

    async def turned_away(self) -> NotAllowed:
        """Wait until the last answer of all greeted peers is that this node may not take part."""
        while self._refusal is None:
            await self._turned_away.wait()
        return self._refusal

    async def run(self) -> None:
        """Keep trying, for ever."""
        state = self._state
        if not self._places and not self._cached:
            self.joined.set()  # the first of a new swarm is complete by itself
        while True:
            self._changed = trio.Event()
            await self._try_all()
            if state.is_alone:
                self._is_new_here = True
            elif self._is_new_here:
                self._is_new_here = False
                await self._look_around()
            with trio.move_on_after(self._seconds_until_next_round()):
                await self._changed.wait()

    def try_again_now(self) -> None:
        """Retry now what has failed, because something has changed."""
        self._rounds_failed = 0
        for place in self._places:
            place.attempts, place.next_try = 0, 0.0
        self._changed.set()

    def met_somebody(self) -> None:
        """A new peer is in the table. If we have not joined yet, join through it."""
        if self._is_new_here:
            self._changed.set()

    def lost_somebody(self) -> None:
        """A peer no longer answers. If it was the last one, bootstrap again."""
        if self._state.is_alone and not self._is_new_here:
            self._changed.set()

    async def _look_around(self) -> None:
        """Look ourselves up, and then everything farther away."""
        state = self._state
        await self._reader.closest([state.own_id])
        now = trio.current_time()
        indices = state.table.buckets_to_refresh(now)
        targets = [state.table.target_in(one, state.network.random) for one in indices]
        if targets:
            await self._reader.closest(targets, REFRESH_WIDTH)
        if not self.joined.is_set():
            log.info("joined the swarm: %d peers are known", len(state.table))
            self.joined.set()

    async def _try_all(self) -> None:
        now = trio.current_time()
        is_alone = self._state.is_alone
        due = [
            one for one in self._places if one.next_try <= now and (is_alone or not one.answered)
        ]
        contacts = [one.contact for one in due]
        if is_alone:
            named = {one.peer for one in contacts}
            contacts += [one for one in self._cached if one.peer not in named]
        if not contacts:
            return
        failures = await self._greet_all(contacts)
        for place in due:
            self._note(place, failures.get(place.contact.peer))
        if len(failures) < len(contacts):
            self._rounds_failed, self._complaints = 0, set()
            return
        self._rounds_failed += 1
        refusals = [one for one in failures.values() if isinstance(one, NotAllowed)]
        if len(refusals) == len(failures) and all(place.refused for place in self._places):
            self._refusal = refusals[0]
            self._turned_away.set()
        if self._state.is_alone:
            self._complain()

    async def _greet_all(self, contacts: Iterable[Contact]) -> dict[PeerId, PotluckError]:
        """Greet these; return the errors of those that failed."""
        failures: dict[PeerId, PotluckError] = {}
        limit = trio.CapacityLimiter(GREETED_AT_ONCE)

        async def greet(contact: Contact) -> None:
            async with limit:
                try:
                    await self._asker.greet(contact)
                except PotluckError as error:
                    failures[contact.peer] = error

        async with trio.open_nursery() as nursery:
            for contact in contacts:
                nursery.start_soon(greet, contact)
        return failures

    def _note(self, place: _Place, failure: PotluckError | None) -> None:
        settings = self._state.settings
        place.attempts += 1
        place.answered = failure is None
        place.refused = isinstance(failure, NotAllowed)
        place.failure = "" if failure is None else str(failure)
        longest = settings.longest_retry_seconds
        if not self._state.is_alone:
            longest *= REJOINED_RARER
        delay = min(longest, settings.first_retry_seconds * 2 ** min(place.attempts - 1, 30))
        place.next_try = trio.current_time() + self._shortened(delay)

    def _complain(self) -> None:
        """Log the failures that were not logged yet, whenever the number of attempts has doubled.

        The addresses of one peer fail together.
        """
        rounds = self._rounds_failed
        if rounds & (rounds - 1):
            return
        failures: dict[str, list[str]] = {}
        for place in self._places:
            if place.failure:
                failures.setdefault(place.failure, []).append(place.address)
        said = {f"cannot join at {', '.join(at)}: {why}" for why, at in failures.items()}
        if self._cached:
            known = len(self._cached)
            none = "the peer" if known == 1 else f"none of {known} peers"
            either = "does not answer either" if known == 1 else "answers either"
            said.add(f"{none} known from before {either}")
        for words in sorted(said - self._complaints):
            log.warning("%s", words)
        self._complaints = said

    def _seconds_until_next_round(self) -> float:
        settings = self._state.settings
        now = trio.current_time()
        is_alone = self._state.is_alone
        waiting = [one.next_try - now for one in self._places if is_alone or not one.answered]
        if is_alone and self._cached:
            delay = settings.first_retry_seconds * 2 ** min(self._rounds_failed, 30)
            waiting.append(self._shortened(min(settings.longest_retry_seconds, delay)))
        seconds = min(waiting, default=settings.longest_retry_seconds)
        return max(seconds, MINIMUM_SECONDS)

    def _shortened(self, seconds: float) -> float:
        return seconds * (1 - JITTER * self._state.network.random.random())


MINIMUM_SECONDS = 0.1  # between two rounds, whatever the settings


def _place(address: str) -> _Place:
    body, _, peer = address.rpartition("/p2p/")
    try:
        return _Place(address, contact_of(peer, (body,)))
    except MalformedMessage as error:
        raise ProtocolMisuse(
            f"{address!r} is no address to join at.",
            why=error.what,
            advice="It has to end in /p2p/ and the peer id of the node there.",
        ) from None
