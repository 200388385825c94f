"""One node of a simulated directory: the real table, storage and publisher, and no network.

What the service does with messages is done here with calls: a peer is asked, answers at once, and
the search that asked hears of it when the link's delay is over. A liar answers as well, with
other liars, with inventions nearer to the target than anybody can be, and with real peers at
addresses where they are not; and it keeps nothing of what it is given.

Easy to get wrong: a table may only hold peers that were spoken with. Here everybody can be
dialled, so whoever asks is taken in; what an answer names is not.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from protocols.dht.contacts import Contact
from protocols.dht.publishing import Publisher, PublishingSettings
from protocols.dht.refusals import SlotRefused
from protocols.dht.routing import RoutingTable
from protocols.dht.storage import Storage
from protocols.identity import Identity, PeerId

if TYPE_CHECKING:
    from node.simulation.dht_swarm_world import World
    from protocols.dht.slots import Slot

Answer = tuple[Sequence[Contact], Sequence["Slot"]]

# What a liar's answer is made of: enough of each to hurt, together k.
LIARS_IN_A_LIE = 8
INVENTED_IN_A_LIE = 8
MISPLACED_IN_A_LIE = 4

# An invented id lies within this many bits of the target. The nearest of 10,000 real ones lies
# some 242 bits away: as if the liars had tried keys since the beginning of the universe.
INVENTED_BITS = 128


class Peer:
    """One node. `delay` is its share of what a message takes one way, in seconds."""

    __slots__ = (
        "contact", "delay", "is_alive", "is_liar", "is_settled", "publisher", "storage",
        "table", "world",
    )  # fmt: skip

    def __init__(self, world: World, identity: Identity, contact: Contact, delay: float) -> None:
        self.world = world
        self.contact = contact
        self.delay = delay
        self.is_alive = True
        self.is_liar = False
        self.is_settled = False
        """Whether it has finished joining."""
        self.table = RoutingTable(contact.node_id)
        self.storage = Storage(world.families, own_id=contact.node_id, verified=world.verified)
        self.publisher = Publisher(identity, world.chance, PublishingSettings())

    def meets(self, contact: Contact) -> None:
        """It has spoken with this peer. Whoever stands in its way is pinged."""
        in_the_way = self.table.heard_from(contact, self.world.queue.now)
        if in_the_way is not None:
            self.world.ping(self, in_the_way)

    def is_asked(self, asker: Contact, target: int, key: str | None) -> Answer:
        """What it answers to `find`."""
        if self.is_liar:
            answer: Answer = (self.world.lies.about(target), ())
        else:
            slots = self.storage.get(key, self.world.now_ms) if key else ()
            answer = (self.table.closest(target), slots)
        self.meets(asker)
        return answer

    def is_given(self, sender: Contact, slots: Sequence[Slot]) -> int:
        """What it answers to `store`: how many it says that it took."""
        self.meets(sender)
        if self.is_liar:
            return len(slots)
        taken = 0
        for slot in slots:
            try:
                self.storage.store(slot, self.world.now_ms)
            except SlotRefused:
                self.world.refused_slots += 1
            else:
                taken += 1
        return taken


class Lies:
    """What liars say. They know each other, and all honest peers, better than anybody does."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._liars: list[Contact] = []
        self._honest: list[Contact] = []

    def learn_of(self, peer: Peer) -> None:
        insort(self._liars if peer.is_liar else self._honest, peer.contact, key=_place)

    def about(self, target: int) -> list[Contact]:
        """Liars that are near the target; nobody, still nearer; real peers, where they are not."""
        answer = _around(self._liars, target, LIARS_IN_A_LIE)
        answer += [self._invented(target) for _ in range(INVENTED_IN_A_LIE)]
        answer += [
            Contact(one.peer, one.node_id, (random_address(self._chance),))
            for one in _around(self._honest, target, MISPLACED_IN_A_LIE)
        ]
        self._chance.shuffle(answer)
        return answer

    def _invented(self, target: int) -> Contact:
        node_id = target ^ self._chance.getrandbits(INVENTED_BITS)
        return Contact(PeerId(f"nobody-{node_id:x}"), node_id, (random_address(self._chance),))


def random_address(chance: random.Random) -> str:
    """An address somewhere in the public internet."""
    host = [chance.randrange(11, 100), *(chance.randrange(256) for _ in range(3))]
    return f"/ip4/{'.'.join(map(str, host))}/tcp/4001"


def _place(contact: Contact) -> int:
    return contact.node_id


def _around(in_order: list[Contact], target: int, count: int) -> list[Contact]:
    """Some that share long beginnings with the target: those around its place in the order."""
    place = bisect_left(in_order, target, key=_place)
    start = max(0, min(place - count // 2, len(in_order) - count))
    return in_order[start : start + count]
