"""`scripts/simulate dht`: thousands of nodes of the directory, with deaths, churn or liars.

The swarm grows from three nodes by joining, at a rate at which about two of a hundred are always
still joining. Then slots are published and read by unrelated nodes. Depending on the plan, part of
the nodes die at once, or for hours some die and others come, or a share of them has lied from the
beginning. The real table, lookup, storage and publisher decide everything. These are simulated:

- Time (`EventQueue`). Ten thousand nodes as trio tasks would take an hour and all the memory; as
  calls that are due at a moment they take minutes. Nothing waits: time jumps to the next event.
- Messages (`World`). One takes the sum of both peers' delays. A dead peer says nothing at all, the
  worst that can happen to a caller, who asks others after SLOW_SECONDS and gives up after
  TIMEOUT_SECONDS. There are no links that break when a peer dies; only pings find that out, after a
  quarter of an hour. Only publishers and readers repair: no slots are handed to newcomers.
  `SimulatedSearch` drives one real `Lookup` through all that.
- Peers (`SimulatedPeer`). The service's messages are calls here: a peer answers at once, and the
  search gets the answer when the link's delay is over. A liar answers as well, with other liars,
  with inventions nearer to the target than any real node, and with real peers at wrong addresses;
  it keeps nothing that it is given.

Two rates are measured: *found* means that a slot of the publisher was there; *success* that it was
the newest that its publisher had finished publishing when the read began. A read counts if the slot
was live all the while, whether or not its publisher was. *Hops* are how many nodes had to be asked
one after the other until the reader reached the node closest to the key, of all that answered; that
node included, so 1 is one of the reader's table.

A reader repairs outdated replicas, so measuring heals a swarm; reads that should show a damage
repair nothing. The same seed gives the same run only while events of one moment happen in the order
in which they were scheduled, chance comes from one seeded source, and nothing iterates over a set.
A table holds only peers that were spoken with. A percentile here is a value that occurred, never
one between two.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lab.simulate.rare_collections import rare_collections
from protocols.dht import Contact, Families, Slot, SlotRefused
from protocols.dht.ids import node_id_of_key, position_of
from protocols.dht.lookup import Lookup
from protocols.dht.publisher import Publisher, PublishingSettings, batches
from protocols.dht.routing import REFRESH_SECONDS, REFRESH_WIDTH, K, RoutingTable
from protocols.dht.slots import VerifiedSlots, supersedes
from protocols.dht.storage import Storage
from protocols.identity import Identity, PeerId
from protocols.rpc import encode

if TYPE_CHECKING:
    from protocols.dht import Slot


class EventQueue:
    """Invariant: no event is before `now`. Time is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call this after this many seconds."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call, arguments))

    def run_until(self, moment: float) -> None:
        """Let everything happen that is due by then; it is that moment afterwards."""
        events = self._events
        while events and events[0][0] <= moment:
            self.now, _, call, arguments = heapq.heappop(events)
            call(*arguments)
        self.now = max(self.now, moment)

    def run_while(self, unfinished: Callable[[], object]) -> None:
        """Let things happen until this is no longer true, or nothing is left to happen."""
        events = self._events
        while events and unfinished():
            self.now, _, call, arguments = heapq.heappop(events)
            call(*arguments)


@dataclass
class Reads:
    """The results of a series of reads."""

    hops: list[int] = field(default_factory=list)
    hops_to_first_slot: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    milliseconds: list[int] = field(default_factory=list)
    found: int = 0
    newest: int = 0

    @property
    def counted(self) -> int:
        return len(self.messages)

    @property
    def found_rate(self) -> float:
        return self.found / max(1, self.counted)

    @property
    def success_rate(self) -> float:
        return self.newest / max(1, self.counted)

    def figures(self) -> dict[str, Any]:
        return {
            "hops_p50": percentile(self.hops, 50),
            "hops_p99": percentile(self.hops, 99),
            "hops_to_first_slot_p50": percentile(self.hops_to_first_slot, 50),
            "hops_to_first_slot_p99": percentile(self.hops_to_first_slot, 99),
            "messages_per_get_p50": percentile(self.messages, 50),
            "messages_per_get_p99": percentile(self.messages, 99),
            "get_virtual_ms_p50": percentile(self.milliseconds, 50),
            "reads": self.counted,
            "found_rate": round(self.found_rate, 6),
            "success_rate": round(self.success_rate, 6),
        }


def percentile(values: list[int], percent: int) -> int | None:
    """The smallest value that this percentage of them do not exceed; None if there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


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
        self.peers: dict[int, SimulatedPeer] = {}
        self.messages = 0
        self.refused_slots = 0

    @property
    def now_ms(self) -> int:
        return BEGINNING_MS + int(self.queue.now * 1000)

    def new_peer(self) -> SimulatedPeer:
        identity = Identity.from_seed(self.chance.randbytes(32))
        node_id = node_id_of_key(identity.public_key)
        contact = Contact(identity.peer_id, node_id, (random_address(self.chance),))
        delay = self.chance.uniform(SHORTEST_DELAY_SECONDS, LONGEST_DELAY_SECONDS)
        peer = self.peers[node_id] = SimulatedPeer(self, identity, contact, delay)
        return peer

    def die(self, peer: SimulatedPeer) -> None:
        """End at once, without telling another node."""
        peer.is_alive = False
        del self.peers[peer.contact.node_id]

    def at(self, contact: Contact) -> SimulatedPeer | None:
        """The living peer at this address, if it is the expected one."""
        peer = self.peers.get(contact.node_id)
        if peer is None:
            return None
        real = peer.contact.addresses
        if contact.addresses is not real and not set(real) & set(contact.addresses):
            return None
        return peer

    def exchange(
        self,
        asker: SimulatedPeer,
        asked: Contact,
        ask: Callable[[SimulatedPeer], Answer | int | None],
        answered: Callable[[SimulatedPeer, Answer | int | None], None],
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

    def ping(self, asker: SimulatedPeer, asked: Contact) -> None:
        """See whether a peer of the table is still there."""
        own = asker.contact
        self.exchange(
            asker,
            asked,
            lambda other: other.meets(own),
            lambda other, _: asker.meets(other.contact),
            lambda: None,
        )

    def join(
        self, peer: SimulatedPeer, known: Iterable[Contact], done: Callable[[SimulatedPeer], None]
    ) -> None:
        """Join as a real node does: look up its own id, then one id in every farther bucket."""

        def settled() -> None:
            peer.is_settled = True
            done(peer)

        SimulatedSearch(
            self,
            peer,
            peer.contact.node_id,
            lambda _: self.refresh(peer, settled),
            seeds=known,
        )

    def refresh(self, peer: SimulatedPeer, done: Callable[[], None]) -> None:
        """Look up an id in each bucket that had no lookup for long, one after another."""
        stale = peer.table.buckets_to_refresh(self.queue.now)

        def next_bucket() -> None:
            if stale:
                target = peer.table.target_in(stale.pop(), self.chance)
                SimulatedSearch(self, peer, target, lambda _: next_bucket(), k=REFRESH_WIDTH)
            else:
                done()

        next_bucket()

    def publish(self, peer: SimulatedPeer, slot: Slot, done: Callable[[int], None]) -> None:
        """Bring a slot to the k peers closest to its key; says how many took it."""

        def found(search: SimulatedSearch) -> None:
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

        SimulatedSearch(self, peer, position_of(slot.key), found)

    def give(
        self, sender: SimulatedPeer, to: Contact, slots: Sequence[Slot], done: Callable[[int], None]
    ) -> None:
        """Send slots to one peer; says how many it took."""
        own = sender.contact

        def answered(other: SimulatedPeer, taken: Answer | int | None) -> None:
            assert isinstance(taken, int)
            sender.meets(other.contact)
            done(taken)

        self.exchange(
            sender, to, lambda other: other.is_given(own, slots), answered, lambda: done(0)
        )


class SimulatedSearch:
    """One lookup of one peer, for a place or for what is under a key, until it is done."""

    def __init__(
        self,
        world: World,
        peer: SimulatedPeer,
        target: int,
        done: Callable[[SimulatedSearch], None],
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
        """The peers that had something under the key, in the order of their answers."""
        self.held: dict[int, Sequence[Slot]] = {}
        if seeds is None:
            seeds = peer.table.closest(target, even_failing=True)
        self.lookup = Lookup(target, peer.contact.node_id, seeds, k)
        self._done: Callable[[SimulatedSearch], None] | None = done
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

    def _answered(
        self, contact: Contact, other: SimulatedPeer, answer: Answer | int | None
    ) -> None:
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


Answer = tuple[Sequence[Contact], Sequence["Slot"]]

# The parts of a liar's answer: enough of each to do harm, together k.
LIARS_IN_A_LIE = 8
INVENTED_IN_A_LIE = 8
MISPLACED_IN_A_LIE = 4

# An invented id lies within this many bits of the target. The nearest of 10,000 real ones lies
# some 242 bits away: as if the liars had tried keys since the beginning of the universe.
INVENTED_BITS = 128


class SimulatedPeer:
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
        """It has spoken with this peer. The peer in its place is pinged."""
        in_the_way = self.table.heard_from(contact, self.world.queue.now)
        if in_the_way is not None:
            self.world.ping(self, in_the_way)

    def is_asked(self, asker: Contact, target: int, key: str | None) -> Answer:
        """Its answer to `find`."""
        if self.is_liar:
            answer: Answer = (self.world.lies.about(target), ())
        else:
            slots = self.storage.get(key, self.world.now_ms) if key else ()
            answer = (self.table.closest(target), slots)
        self.meets(asker)
        return answer

    def is_given(self, sender: Contact, slots: Sequence[Slot]) -> int:
        """Its answer to `store`: how many it says that it took."""
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
    """The answers of liars. They know each other, and all honest peers."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._liars: list[Contact] = []
        self._honest: list[Contact] = []

    def learn_of(self, peer: SimulatedPeer) -> None:
        insort(self._liars if peer.is_liar else self._honest, peer.contact, key=_place)

    def about(self, target: int) -> list[Contact]:
        """Liars near the target, nearer nodes that do not exist, and peers at wrong addresses."""
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


BACKBONE_NODES = 3  # whom everybody knows before joining; they are honest and outlive any churn
JOINING_SHARE = 0.002  # of the swarm, a second; joining takes some ten seconds

PUBLISHED_SLOTS = 1000
READS = 2000  # a rate of 0.999 means that two may fail
SECONDS_BETWEEN_OPERATIONS = 0.05

LONG_TTL_SECONDS = 24 * 3600.0
CHURN_TTL_SECONDS = 1800.0  # a dead publisher's slot is live for up to so long
CHURN_PUBLISHERS = 300
CHURN_READS_PER_READ = 3  # they are spread over hours, and no read is like another

CHECK_TABLE_SECONDS = 300.0  # how often a node looks whom to ping and what to refresh


@dataclass(frozen=True)
class SwarmPlan:
    """The plan of a simulation."""

    nodes: int
    seed: int
    kill: float = 0.0
    """The share of nodes that die at once."""
    churn_half_life_seconds: float | None = None
    hours: float = 4.0
    """How long the churn lasts."""
    liars: float = 0.0
    """The share of nodes that lie."""
    slots: int = PUBLISHED_SLOTS
    reads: int = READS


def simulate(plan: SwarmPlan, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run the whole plan and return its figures. All but `wall_seconds` follow from the seed."""
    began = time.perf_counter()
    with rare_collections():
        figures = _Swarm(plan, say).run()
    return {**figures, "wall_seconds": round(time.perf_counter() - began, 1)}


class _Swarm:
    """One run. `live` has every slot that was published, as its publisher last finished it."""

    def __init__(self, plan: SwarmPlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.say = say
        self.world = World(plan.seed)
        self.chance = self.world.chance
        self.backbone: list[SimulatedPeer] = []
        self.honest: list[SimulatedPeer] = []
        """Living honest nodes that have finished joining: they publish and read."""
        self.live: dict[str, Slot] = {}
        self.keys: list[str] = []
        self.made_keys = 0
        self.failed_puts = 0
        self.waiting = 0

    def run(self) -> dict[str, Any]:
        plan = self.plan
        self._grow()
        grown_messages = self.world.messages
        churn = plan.churn_half_life_seconds
        publishers = min(plan.slots, CHURN_PUBLISHERS if churn else plan.slots, len(self.honest))
        ttl = CHURN_TTL_SECONDS if churn else LONG_TTL_SECONDS
        self._publish(self.chance.sample(self.honest, publishers), ttl)
        figures: dict[str, Any] = {
            "nodes": plan.nodes,
            "seed": plan.seed,
            "liars": plan.liars,
            "kill": plan.kill,
            "churn_half_life_seconds": churn,
            "hours": plan.hours if churn else None,
            "joining_messages_per_node": round(grown_messages / plan.nodes, 1),
            "contacts_per_node": self._contacts_per_node(),
        }
        if plan.kill:
            figures |= self._kill()
        elif churn is None:
            self.say("reading")
            figures |= self._read(plan.reads).figures()
        if churn is not None:
            figures |= self._churn(churn)
        return figures | {
            "failed_puts": self.failed_puts,
            "refused_slots": self.world.refused_slots,
            "messages": self.world.messages,
            "virtual_seconds": round(self.world.queue.now, 3),
        }

    # Growing

    def _grow(self) -> None:
        nodes = self.plan.nodes
        self.say(f"letting {nodes} nodes join")
        candidates = range(min(BACKBONE_NODES, nodes), nodes)
        wanted = round(self.plan.liars * nodes)
        liars = set(self.chance.sample(candidates, min(wanted, len(candidates))))
        for _ in range(min(BACKBONE_NODES, nodes)):
            self.backbone.append(self.world.new_peer())
        self.waiting = nodes
        moment = 0.0
        for number in range(nodes):
            self.world.queue.after(moment, self._begin_one, number, number in liars)
            moment += 1 / max(1.0, JOINING_SHARE * number)
        self._finish()

    def _begin_one(self, number: int, is_liar: bool) -> None:
        of_backbone = number < len(self.backbone)
        peer = self.backbone[number] if of_backbone else self.world.new_peer()
        peer.is_liar = is_liar
        self._join(peer, self._joined)
        if (number + 1) % 1000 == 0:
            self.say(f"{number + 1} have begun to join")

    def _join(self, peer: SimulatedPeer, done: Callable[[SimulatedPeer], None]) -> None:
        self.world.lies.learn_of(peer)
        known = [one.contact for one in self.backbone if one is not peer and one.is_alive]
        self.world.join(peer, known, done)

    def _joined(self, peer: SimulatedPeer) -> None:
        self.waiting -= 1
        self._settle(peer)

    def _settle(self, peer: SimulatedPeer) -> None:
        if not peer.is_liar:
            self.honest.append(peer)
        self.world.queue.after(self.chance.random() * CHECK_TABLE_SECONDS, self._stay_fresh, peer)

    def _stay_fresh(self, peer: SimulatedPeer) -> None:
        """Ping who was quiet, refresh what is due, then look again in a while."""

        def again() -> None:
            self.world.queue.after(CHECK_TABLE_SECONDS, self._stay_fresh, peer)

        if not peer.is_alive:
            return
        for contact in peer.table.quiet(self.world.queue.now):
            self.world.ping(peer, contact)
        self.world.refresh(peer, again)

    def _contacts_per_node(self) -> float:
        sizes = [len(peer.table) for peer in self.world.peers.values()]
        return round(sum(sizes) / len(sizes), 1)

    # Publishing

    def _publish(self, publishers: list[SimulatedPeer], ttl_seconds: float) -> None:
        self.say(f"publishing {len(publishers)} slots")
        self.waiting = len(publishers)
        for number, peer in enumerate(publishers):
            delay = number * SECONDS_BETWEEN_OPERATIONS
            self.world.queue.after(delay, self._put_new, peer, ttl_seconds, self._finished_one)
        self._finish()

    def _put_new(self, peer: SimulatedPeer, ttl_seconds: float, done: Callable[[], None]) -> None:
        self.made_keys += 1
        key = f"note/{self.made_keys}"
        value = encode(f"by {peer.contact.peer}")
        slot = peer.publisher.put(key, value, int(ttl_seconds * 1000), self.world.now_ms)
        self._bring(peer, slot, done)
        self._keep_up(peer)

    def _bring(self, peer: SimulatedPeer, slot: Slot, done: Callable[[], None]) -> None:
        def published(taken: int) -> None:
            if not taken:
                self.failed_puts += 1
                peer.publisher.failed(slot.key, self.world.now_ms)
            else:
                peer.publisher.published(slot.key)
                if slot.key not in self.live:
                    self.keys.append(slot.key)
                self.live[slot.key] = slot
            done()

        self.world.publish(peer, slot, published)

    def _keep_up(self, peer: SimulatedPeer) -> None:
        due = peer.publisher.next_due()
        if due is not None and peer.is_alive:
            wait = max(0.001, (due - self.world.now_ms) / 1000)
            self.world.queue.after(wait, self._say_again, peer)

    def _say_again(self, peer: SimulatedPeer) -> None:
        if peer.is_alive:
            for slot in peer.publisher.due(self.world.now_ms):
                self._bring(peer, slot, lambda: None)
            self._keep_up(peer)

    # Reading

    def _read(self, count: int) -> Reads:
        """Read this many random live slots, each by a random node, without repairs."""
        reads = Reads()
        self.waiting = count
        for number in range(count):
            delay = number * SECONDS_BETWEEN_OPERATIONS
            self.world.queue.after(delay, self._read_one, reads, False, self._finished_one)
        self._finish()
        return reads

    def _read_one(self, reads: Reads, repair: bool, done: Callable[[], None]) -> None:
        slot = self._some_live_slot()
        if slot is None or not self.honest:
            done()
            return
        reader = self.chance.choice(self.honest)
        began = self.world.queue.now

        def finished(search: SimulatedSearch) -> None:
            if slot.expires > self.world.now_ms:
                self._count(reads, search, slot, began)
                if repair:
                    self._repair(search)
            done()

        SimulatedSearch(self.world, reader, position_of(slot.key), finished, key=slot.key)

    def _some_live_slot(self) -> Slot | None:
        while self.keys:
            place = self.chance.randrange(len(self.keys))
            slot = self.live[self.keys[place]]
            if slot.expires > self.world.now_ms:
                return slot
            self.keys[place] = self.keys[-1]
            self.keys.pop()
            del self.live[slot.key]
        return None

    def _count(self, reads: Reads, search: SimulatedSearch, wanted: Slot, began: float) -> None:
        found = search.slots.get(wanted.publisher)
        lookup = search.lookup
        reads.messages.append(search.messages)
        reads.milliseconds.append(round((self.world.queue.now - began) * 1000))
        closest = lookup.closest_answered(1)
        if closest:
            reads.hops.append(lookup.hops_to(closest[0]))
        if found is not None:
            reads.found += 1
            reads.newest += found.sequence >= wanted.sequence
            reads.hops_to_first_slot.append(lookup.hops_to(search.holders[0]))

    def _repair(self, search: SimulatedSearch) -> None:
        """Give each of the k closest the slots of the others that it did not have."""
        newest = list(search.slots.values())
        for contact in search.lookup.closest_answered():
            behind = [slot for slot in newest if slot not in search.held.get(contact.node_id, ())]
            if behind:
                self.world.give(search.peer, contact, behind, lambda _: None)

    # The nodes' failures

    def _kill(self) -> dict[str, Any]:
        everybody = list(self.world.peers.values())
        dying = self.chance.sample(everybody, round(self.plan.kill * len(everybody)))
        for peer in dying:
            self.world.die(peer)
        self.honest = [peer for peer in self.honest if peer.is_alive]
        self.say(f"{len(dying)} nodes have died; reading")
        straight_after = self._read(self.plan.reads)
        self.say("waiting for one refresh period")
        self.world.queue.run_until(self.world.queue.now + REFRESH_SECONDS)
        self.say("reading")
        later = self._read(self.plan.reads)
        return {
            **straight_after.figures(),
            "found_rate_after_refresh": round(later.found_rate, 6),
            "success_rate_after_refresh": round(later.success_rate, 6),
            "hops_p99_after_refresh": percentile(later.hops, 99),
            "messages_per_get_p50_after_refresh": percentile(later.messages, 50),
        }

    def _churn(self, half_life: float) -> dict[str, Any]:
        queue = self.world.queue
        reads = Reads()
        seconds = self.plan.hours * 3600
        ends = queue.now + seconds
        publishing = {key.publisher for key in self.live.values()}
        deaths = 0

        def live_on(peer: SimulatedPeer) -> None:
            queue.after(self.chance.expovariate(math.log(2) / half_life), die, peer)

        def die(peer: SimulatedPeer) -> None:
            nonlocal deaths
            deaths += 1
            self.world.die(peer)
            if peer.is_settled and not peer.is_liar:
                self.honest.remove(peer)
            successor = self.world.new_peer()
            successor.is_liar = peer.is_liar
            live_on(successor)
            publishes = bool(len(peer.publisher))
            self._join(successor, lambda joined: settle(joined, publishes))

        def settle(peer: SimulatedPeer, publishes: bool) -> None:
            self._settle(peer)
            if publishes:
                self._put_new(peer, CHURN_TTL_SECONDS, lambda: None)

        for peer in list(self.world.peers.values()):
            if peer not in self.backbone:
                live_on(peer)
        count = CHURN_READS_PER_READ * self.plan.reads
        for number in range(count):
            queue.after(number * seconds / count, self._read_one, reads, True, lambda: None)
        for hour in range(math.ceil(self.plan.hours)):
            self.say(f"hour {hour + 1} of churn")
            queue.run_until(min(ends, queue.now + 3600))
        return {**reads.figures(), "deaths": deaths, "publishers": len(publishing)}

    def _finished_one(self) -> None:
        self.waiting -= 1

    def _finish(self) -> None:
        self.world.queue.run_while(lambda: self.waiting > 0)
