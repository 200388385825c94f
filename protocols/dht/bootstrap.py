"""Joining the swarm, and rejoining it when it is lost.

Two kinds of peers are tried: the bootstrap addresses that a person gave, and peers that this node
knew before (from its cache, or lost since). All are greeted. When one has answered, this node looks
itself up. So it meets its neighbours, and they meet it.

Bootstrap does not end with the first answer. Each bootstrap address that has not answered is tried
again, ever more rarely. Nodes that start at the same moment with the same addresses may first form
separate groups; the retries join them into one swarm. Lost peers are tried again for the same
reason: after a split of the network, each half needs them to find the other.

If no peer answers, a person has to learn why. `BootstrapState` has each address's last failure in
words.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import trio

from protocols.dht.contacts import Contact, contact_of
from protocols.dht.reader import SlotReader
from protocols.dht.requester import Requester
from protocols.dht.routing import REFRESH_WIDTH
from protocols.dht.state import DhtState, log
from protocols.errors import MalformedMessage, PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.not_allowed import NotAllowed

GREETED_AT_ONCE = 8
CACHED_PEERS = 128  # of the cache, tried as long as we know nobody
JOINED_DELAY_FACTOR = 30  # the factor by which an address is tried more rarely once we have joined

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
    refused: bool = False
    """It does not let this node in, or its answer proves nothing; `failure` says why."""


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


class _Address:
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

    def __init__(self, state: DhtState, requester: Requester, reader: SlotReader) -> None:
        self._state = state
        self._requester = requester
        self._reader = reader
        self._addresses = [_address_from(address) for address in state.settings.bootstrap]
        self._addresses = [one for one in self._addresses if one.contact.peer != state.peer_id]
        self._cached: list[Contact] = []
        self._rounds_failed = 0
        self._logged: set[str] = set()
        self._must_join = True
        self._changed = trio.Event()
        self.joined = trio.Event()
        """Set when this node has met a peer and looked itself up for the first time."""
        self._turned_away = trio.Event()
        self._refusal: NotAllowed | None = None

    @property
    def refusal(self) -> NotAllowed | None:
        """What all greeted peers have answered last, if they refuse this node."""
        return self._refusal

    def add_cached(self, contacts: Iterable[Contact]) -> None:
        """Add peers from the cache."""
        fresh = [one for one in contacts if one.peer != self._state.peer_id]
        self._cached = fresh[:CACHED_PEERS]

    def state(self) -> BootstrapState:
        if not self._state.is_alone:
            joined = Joined.JOINED
        else:
            joined = Joined.TRYING if self._addresses or self._cached else Joined.ALONE
        addresses = tuple(
            AddressState(one.address, one.answered, one.attempts, one.failure, one.refused)
            for one in self._addresses
        )
        return BootstrapState(joined, addresses, len(self._cached), self._rounds_failed)

    async def turned_away(self, after: NotAllowed | None = None) -> NotAllowed:
        """Wait until the last answer of all greeted peers is that this node may not take part. With
        `after`, the result of an earlier call, until they say so again."""
        while self._refusal is None or self._refusal is after:
            await self._turned_away.wait()
        return self._refusal

    async def run(self) -> None:
        """Keep trying until cancelled."""
        state = self._state
        if not self._addresses and not self._cached:
            self.joined.set()  # the first of a new swarm is complete by itself
        while True:
            self._changed = trio.Event()
            await self._try_all()
            if state.is_alone:
                self._must_join = True
            elif self._must_join:
                self._must_join = False
                await self._fill_table()
            with trio.move_on_after(self._seconds_until_next_round()):
                await self._changed.wait()

    def try_again_now(self) -> None:
        """Retry now what has failed, because something has changed."""
        self._rounds_failed = 0
        for address in self._addresses:
            address.attempts, address.next_try = 0, 0.0
        self._changed.set()

    def linked(self, peer: PeerId) -> None:
        """There is a direct link to this peer. If it did not answer before, try it again now."""
        for address in self._addresses:
            if address.contact.peer == peer and address.failure:
                address.next_try = 0.0
                self._changed.set()

    def peer_added(self) -> None:
        """A new peer is in the table. If we have not joined yet, join through it."""
        if self._must_join:
            self._changed.set()

    def peer_lost(self) -> None:
        """A peer no longer answers. If it was the last one, bootstrap again."""
        if self._state.is_alone and not self._must_join:
            self._changed.set()

    async def _fill_table(self) -> None:
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
            one for one in self._addresses if one.next_try <= now and (is_alone or not one.answered)
        ]
        contacts = [one.contact for one in due]
        if is_alone:
            named = {one.peer for one in contacts}
            contacts += [one for one in self._cached if one.peer not in named]
        if not contacts:
            return
        ended = await self._greet_all(contacts)
        if not ended:
            return  # cut short before anybody had answered or failed
        self._refusal = None
        for address in due:
            if address.contact.peer in ended:  # else it is tried again
                self._note(address, ended[address.contact.peer])
                if self._changed.is_set():
                    address.next_try = 0.0  # it may have failed before the change
        failures = {peer: error for peer, error in ended.items() if error is not None}
        if len(failures) < len(ended):
            self._rounds_failed, self._logged = 0, set()
            return
        self._rounds_failed += 1
        refusals = [one for one in failures.values() if isinstance(one, NotAllowed)]
        if len(refusals) == len(failures) and all(address.refused for address in self._addresses):
            self._refusal = refusals[0]
            self._turned_away.set()
            self._turned_away = trio.Event()
        if self._state.is_alone:
            self._log_failures()

    async def _greet_all(self, contacts: Iterable[Contact]) -> dict[PeerId, PotluckError | None]:
        """Greet these, in this order, and return their errors; None: it answered. Once one has, or
        something has changed, the others get MORE_SECONDS: peers of an old cache may all be gone,
        and take ten seconds each.
        """
        ended: dict[PeerId, PotluckError | None] = {}
        waiting = deque(contacts)

        async def greet_on() -> None:
            while waiting:
                contact = waiting.popleft()
                try:
                    await self._requester.greet(contact)
                except PotluckError as error:
                    ended[contact.peer] = error
                else:
                    ended[contact.peer] = None
                    end_soon()

        def end_soon() -> None:
            scope.deadline = min(scope.deadline, trio.current_time() + MORE_SECONDS)

        async def end_when_changed() -> None:
            await self._changed.wait()
            end_soon()

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as watching:
                watching.start_soon(end_when_changed)
                async with trio.open_nursery() as greeting:
                    for _ in range(GREETED_AT_ONCE):
                        greeting.start_soon(greet_on)
                watching.cancel_scope.cancel()
        return ended

    def _note(self, address: _Address, failure: PotluckError | None) -> None:
        settings = self._state.settings
        address.attempts += 1
        address.answered = failure is None
        address.refused = isinstance(failure, NotAllowed)
        address.failure = "" if failure is None else str(failure)
        longest = settings.longest_retry_seconds
        if not self._state.is_alone:
            longest *= JOINED_DELAY_FACTOR
        delay = min(longest, settings.first_retry_seconds * 2 ** min(address.attempts - 1, 30))
        address.next_try = trio.current_time() + self._shortened(delay)

    def _log_failures(self) -> None:
        """Log the failures that were not logged yet, whenever the number of attempts has doubled.

        The addresses of one peer fail together.
        """
        rounds = self._rounds_failed
        if rounds & (rounds - 1):
            return
        failures: dict[str, list[str]] = {}
        for address in self._addresses:
            if address.failure:
                failures.setdefault(address.failure, []).append(address.address)
        said = {f"cannot join at {', '.join(at)}: {why}" for why, at in failures.items()}
        if self._cached:
            known = len(self._cached)
            none = "the peer" if known == 1 else f"none of {known} peers"
            either = "does not answer either" if known == 1 else "answers either"
            said.add(f"{none} known from before {either}")
        for words in sorted(said - self._logged):
            log.warning("%s", words)
        self._logged = said

    def _seconds_until_next_round(self) -> float:
        settings = self._state.settings
        now = trio.current_time()
        is_alone = self._state.is_alone
        waiting = [one.next_try - now for one in self._addresses if is_alone or not one.answered]
        if is_alone and self._cached:
            delay = settings.first_retry_seconds * 2 ** min(self._rounds_failed, 30)
            waiting.append(self._shortened(min(settings.longest_retry_seconds, delay)))
        seconds = min(waiting, default=settings.longest_retry_seconds)
        return max(seconds, MINIMUM_SECONDS)

    def _shortened(self, seconds: float) -> float:
        return seconds * (1 - JITTER * self._state.network.random.random())


MORE_SECONDS = 1.0  # for the others to answer, when one has
MINIMUM_SECONDS = 0.1  # between two rounds, whatever the settings


def _address_from(address: str) -> _Address:
    body, _, peer = address.rpartition("/p2p/")
    try:
        return _Address(address, contact_of(peer, (body,)))
    except MalformedMessage as error:
        raise ProtocolMisuse(
            f"{address!r} is not an address to join at.",
            why=error.what,
            advice="It has to end in /p2p/ and the peer id of the node there.",
        ) from None
