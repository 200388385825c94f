"""`potluck simulate dht`: thousands of nodes of the directory, and what may befall them.

The swarm grows from three nodes by joining, at a rate at which some two of a hundred are always
still at it. Then slots are published and read by nodes that have nothing to do with them; and, as
the plan wants it, part of the nodes die at once, or for hours some die and others come, or a
share of them has lied from the beginning. Everything that decides anything is the real thing
(table, lookup, storage, publisher); see `dht_swarm_world` for what is not.

Easy to get wrong: a reader repairs what it finds behind, so a swarm that is measured heals by it.
Reads that are to show a damage repair nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from node.simulation.dht_swarm_figures import Reads, percentile
from node.simulation.dht_swarm_peer import Peer
from node.simulation.dht_swarm_world import Search, World
from node.simulation.rare_collections import rare_collections
from protocols.dht.ids import position_of
from protocols.dht.routing import REFRESH_SECONDS
from protocols.dht.slots import Slot
from protocols.messages import encode

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
    """What to simulate."""

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
        self.backbone: list[Peer] = []
        self.honest: list[Peer] = []
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

    def _join(self, peer: Peer, done: Callable[[Peer], None]) -> None:
        self.world.lies.learn_of(peer)
        known = [one.contact for one in self.backbone if one is not peer and one.is_alive]
        self.world.join(peer, known, done)

    def _joined(self, peer: Peer) -> None:
        self.waiting -= 1
        self._settle(peer)

    def _settle(self, peer: Peer) -> None:
        if not peer.is_liar:
            self.honest.append(peer)
        self.world.queue.after(self.chance.random() * CHECK_TABLE_SECONDS, self._stay_fresh, peer)

    def _stay_fresh(self, peer: Peer) -> None:
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

    def _publish(self, publishers: list[Peer], ttl_seconds: float) -> None:
        self.say(f"publishing {len(publishers)} slots")
        self.waiting = len(publishers)
        for number, peer in enumerate(publishers):
            delay = number * SECONDS_BETWEEN_OPERATIONS
            self.world.queue.after(delay, self._put_new, peer, ttl_seconds, self._finished_one)
        self._finish()

    def _put_new(self, peer: Peer, ttl_seconds: float, done: Callable[[], None]) -> None:
        self.made_keys += 1
        key = f"note/{self.made_keys}"
        value = encode(f"by {peer.contact.peer}")
        slot = peer.publisher.put(key, value, int(ttl_seconds * 1000), self.world.now_ms)
        self._bring(peer, slot, done)
        self._keep_up(peer)

    def _bring(self, peer: Peer, slot: Slot, done: Callable[[], None]) -> None:
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

    def _keep_up(self, peer: Peer) -> None:
        due = peer.publisher.next_due()
        if due is not None and peer.is_alive:
            wait = max(0.001, (due - self.world.now_ms) / 1000)
            self.world.queue.after(wait, self._say_again, peer)

    def _say_again(self, peer: Peer) -> None:
        if peer.is_alive:
            for slot in peer.publisher.due(self.world.now_ms):
                self._bring(peer, slot, lambda: None)
            self._keep_up(peer)

    # Reading

    def _read(self, count: int) -> Reads:
        """Read so many random live slots, each by a random node, without repairing anything."""
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

        def finished(search: Search) -> None:
            if slot.expires > self.world.now_ms:
                self._count(reads, search, slot, began)
                if repair:
                    self._repair(search)
            done()

        Search(self.world, reader, position_of(slot.key), finished, key=slot.key)

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

    def _count(self, reads: Reads, search: Search, wanted: Slot, began: float) -> None:
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

    def _repair(self, search: Search) -> None:
        """Give each of the k closest what it did not have of what the others had."""
        newest = list(search.slots.values())
        for contact in search.lookup.closest_answered():
            behind = [slot for slot in newest if slot not in search.held.get(contact.node_id, ())]
            if behind:
                self.world.give(search.peer, contact, behind, lambda _: None)

    # What befalls them

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

        def live_on(peer: Peer) -> None:
            queue.after(self.chance.expovariate(math.log(2) / half_life), die, peer)

        def die(peer: Peer) -> None:
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

        def settle(peer: Peer, publishes: bool) -> None:
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
