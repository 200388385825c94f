"""The world of a simulated directory: who is there, how long messages take, what gets lost.

A message takes the sum of both peers' delays. Whoever is dead says nothing at all, not even that
nobody is there: the worst that can happen to whoever asks, who notices after SLOW_SECONDS that
others should be asked meanwhile, and gives up after TIMEOUT_SECONDS. Nor are there links that
break when a peer dies, as real nodes have them: here only pings find that out, after a quarter of
an hour. And nobody hands slots over to newcomers: only publishers and readers repair. `Search`
drives one real `Lookup` through all that.

Easy to get wrong: chance comes from one seeded source, and nothing may iterate over a set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from node.simulation.dht_swarm_events import EventQueue
from node.simulation.dht_swarm_peer import Answer, Lies, Peer, random_address
from protocols.dht.contacts import Contact
from protocols.dht.families import Families
from protocols.dht.ids import node_id_of_key, position_of
from protocols.dht.lookup import Lookup
from protocols.dht.publishing import batches
from protocols.dht.routing import REFRESH_WIDTH, K
from protocols.dht.slots import Slot, supersedes
from protocols.dht.verified import VerifiedSlots
from protocols.identity import Identity

# One way, from a peer to the middle of the internet: two peers are 10 to 160 ms of round trip
# apart, as homes on one continent are.
SHORTEST_DELAY_SECONDS = 0.0025
LONGEST_DELAY_SECONDS = 0.040

SLOW_SECONDS = 0.5  # three of the longest round trips
TIMEOUT_SECONDS = 5.0

# When the swarm begins. Slots have expiries in milliseconds since 1970; any date would do.
BEGINNING_MS = 1_750_000_000_000


class World:
    """All living peers, and the clock."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.queue = EventQueue()
        self.families = Families()
        # One memory for all: each slot is really verified once, and not 20 times.
        self.verified = VerifiedSlots(1 << 20)
        self.lies = Lies(self.chance)
        self.peers: dict[int, Peer] = {}
        self.messages = 0
        self.refused_slots = 0

    @property
    def now_ms(self) -> int:
        return BEGINNING_MS + int(self.queue.now * 1000)

    def new_peer(self) -> Peer:
        identity = Identity.from_seed(self.chance.randbytes(32))
        node_id = node_id_of_key(identity.public_key)
        contact = Contact(identity.peer_id, node_id, (random_address(self.chance),))
        delay = self.chance.uniform(SHORTEST_DELAY_SECONDS, LONGEST_DELAY_SECONDS)
        peer = self.peers[node_id] = Peer(self, identity, contact, delay)
        return peer

    def die(self, peer: Peer) -> None:
        """From one moment to the next, without a word to anybody."""
        peer.is_alive = False
        del self.peers[peer.contact.node_id]

    def at(self, contact: Contact) -> Peer | None:
        """Who lives there, if that is who it should be."""
        peer = self.peers.get(contact.node_id)
        if peer is None:
            return None
        real = peer.contact.addresses
        if contact.addresses is not real and not set(real) & set(contact.addresses):
            return None
        return peer

    def exchange(
        self,
        asker: Peer,
        asked: Contact,
        ask: Callable[[Peer], Answer | int | None],
        answered: Callable[[Peer, Answer | int | None], None],
        failed: Callable[[], None],
        slow: Callable[[], None] | None = None,
    ) -> None:
        """Send a question; the answer, or that there is none, comes later."""
        self.messages += 1
        other = self.at(asked)
        after = self.queue.after

        def arrive() -> None:
            assert other is not None
            if not other.is_alive:
                give_up_later()
                return
            self.messages += 1
            after(delay, come_back, ask(other))

        def come_back(answer: Answer | int | None) -> None:
            assert other is not None
            if asker.is_alive:
                answered(other, answer)

        def give_up() -> None:
            if asker.is_alive:
                asker.table.failed(asked)
                failed()

        def give_up_later() -> None:
            if slow is not None:
                after(SLOW_SECONDS, slow)
            after(TIMEOUT_SECONDS, give_up)

        if other is None:
            give_up_later()
        else:
            delay = asker.delay + other.delay
            after(delay, arrive)

    def ping(self, asker: Peer, asked: Contact) -> None:
        """See whether a peer of the table is still there."""
        own = asker.contact
        self.exchange(
            asker,
            asked,
            lambda other: other.meets(own),
            lambda other, _: asker.meets(other.contact),
            lambda: None,
        )

    def join(self, peer: Peer, known: Iterable[Contact], done: Callable[[Peer], None]) -> None:
        """Join as a real node does: look up oneself, then somebody in every farther bucket."""

        def settled() -> None:
            peer.is_settled = True
            done(peer)

        Search(
            self,
            peer,
            peer.contact.node_id,
            lambda _: self.refresh(peer, settled),
            seeds=known,
        )

    def refresh(self, peer: Peer, done: Callable[[], None]) -> None:
        """Look up somebody in each bucket that has not seen a lookup for long, one by one."""
        stale = peer.table.buckets_to_refresh(self.queue.now)

        def next_bucket() -> None:
            if stale:
                target = peer.table.target_in(stale.pop(), self.chance)
                Search(self, peer, target, lambda _: next_bucket(), k=REFRESH_WIDTH)
            else:
                done()

        next_bucket()

    def publish(self, peer: Peer, slot: Slot, done: Callable[[int], None]) -> None:
        """Bring a slot to the k peers closest to its key; says how many took it."""

        def found(search: Search) -> None:
            to = {one.peer: one for one in search.lookup.closest_answered()}
            waiting = len(to)
            taken = 0

            def count(took: int) -> None:
                nonlocal waiting, taken
                waiting -= 1
                taken += took
                if not waiting:
                    done(taken)

            if not to:
                done(0)
            for batch in batches({slot: list(to)}):
                for one in batch.peers:
                    self.give(peer, to[one], batch.slots, count)

        Search(self, peer, position_of(slot.key), found)

    def give(
        self, sender: Peer, to: Contact, slots: Sequence[Slot], done: Callable[[int], None]
    ) -> None:
        """Send slots to one peer; says how many it took."""
        own = sender.contact

        def answered(other: Peer, taken: Answer | int | None) -> None:
            assert isinstance(taken, int)
            sender.meets(other.contact)
            done(taken)

        self.exchange(
            sender, to, lambda other: other.is_given(own, slots), answered, lambda: done(0)
        )


class Search:
    """One lookup of one peer, for a place or for what is under a key, until it is done."""

    def __init__(
        self,
        world: World,
        peer: Peer,
        target: int,
        done: Callable[[Search], None],
        *,
        key: str | None = None,
        seeds: Iterable[Contact] | None = None,
        k: int = K,
    ) -> None:
        self.world = world
        self.peer = peer
        self.key = key
        self.messages = 0
        self.slots: dict[bytes, Slot] = {}
        self.holders: list[Contact] = []
        """Who had something under the key, in the order in which they answered."""
        self.held: dict[int, Sequence[Slot]] = {}
        if seeds is None:
            seeds = peer.table.closest(target, even_failing=True)
        self.lookup = Lookup(target, peer.contact.node_id, seeds, k)
        self._done: Callable[[Search], None] | None = done
        self._go_on()

    def _go_on(self) -> None:
        if self._done is None:
            return
        for contact in self.lookup.next_queries():
            self._ask(contact)
        if self.lookup.is_done:
            done, self._done = self._done, None
            self.peer.table.looked_up(self.lookup.target, self.world.queue.now)
            done(self)

    def _ask(self, contact: Contact) -> None:
        own = self.peer.contact
        target, key = self.lookup.target, self.key
        self.messages += 1
        self.world.exchange(
            self.peer,
            contact,
            lambda other: other.is_asked(own, target, key),
            lambda other, answer: self._answered(contact, other, answer),
            lambda: self._failed(contact),
            lambda: self._slow(contact),
        )

    def _answered(self, contact: Contact, other: Peer, answer: Answer | int | None) -> None:
        assert isinstance(answer, tuple)
        self.messages += 1
        self.peer.meets(other.contact)
        if self._done is None:
            return
        closer, slots = answer
        if self.key is not None:
            self.held[contact.node_id] = slots
            if slots:
                self.holders.append(contact)
                self._merge(slots)
        self.lookup.answered(contact, closer)
        self._go_on()

    def _merge(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            known = self.slots.get(slot.publisher)
            if known is None or supersedes(slot, known):
                self.slots[slot.publisher] = slot

    def _failed(self, contact: Contact) -> None:
        self.lookup.failed(contact)
        self._go_on()

    def _slow(self, contact: Contact) -> None:
        self.lookup.slow(contact)
        self._go_on()
