"""The shared state of the directory on one node."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import trio

from protocols.dht.contacts import Contact, contact_of
from protocols.dht.dialability import Dialability
from protocols.dht.families import Families, check_time, check_value
from protocols.dht.ids import distance, node_id_of
from protocols.dht.keeper import UnsavedSlots
from protocols.dht.publisher import Publisher
from protocols.dht.routing import LostPeers, RoutingTable
from protocols.dht.settings import DhtSettings
from protocols.dht.slots import Slot, SlotRefusal, SlotRefused, check_form
from protocols.dht.storage import OURSELVES, Sender, Storage, Stored
from protocols.dht.swarm_time import SwarmTime
from protocols.errors import MalformedMessage, PotluckError
from protocols.identity import peer_id_of
from protocols.network import Network
from protocols.rpc import Rpc

log = logging.getLogger("potluck.dht")

CHORES_AT_ONCE = 8
CHORES_WAITING = 512
HANDOVERS_AT_ONCE = 2  # to newcomers, each for up to a minute: other work must not wait for it
HANDOVERS_WAITING = 128
CHECKS_AT_ONCE = 4  # checks of others' addresses, each a few dials
CHECKS_WAITING = 128

# Interfaces come and go with cables and networks; asking the system for them takes a while.
ADDRESSES_LOOKED_AT_SECONDS = 10.0


def _ignore(_key: str) -> None:
    """Does nothing: the default while nothing listens."""


class DhtState:
    """Tables, stores and clocks. Its only rules are in `now_ms` and `check`."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        families: Families,
        settings: DhtSettings,
        nursery: trio.Nursery,
    ) -> None:
        self.network = network
        self.rpc = rpc
        self.families = families
        self.settings = settings
        self.nursery = nursery
        self.peer_id = network.peer_id
        self.own_id = node_id_of(network.peer_id)
        self.own_key = network.identity.public_key
        self.table = RoutingTable(self.own_id, settings.k)
        # The clock tells this node's lives apart; the random part does if the clock was set back.
        life = (self.local_ms() % (1 << 32)).to_bytes(4, "big") + network.random.randbytes(4)
        self.storage = Storage(families, settings.storage, self.own_id, life=life)
        self.publisher = Publisher(network.identity, network.random, settings.publishing)
        self.swarm_time = SwarmTime()
        self.counts = DhtStatistics()
        self.lost = LostPeers(network.random)
        self.heard_at = float("-inf")
        """When any peer last answered any request."""
        self.unsaved: UnsavedSlots | None = None
        """Slots that the keeper has not been given yet; None without a keeper."""
        self.on_new_slot: Callable[[str], None] = _ignore
        """Called with each key under which this node has kept something new."""
        self._client_until = float("-inf")
        self._is_client = False
        self.dialability = Dialability()
        self.chores = Chores(nursery, CHORES_AT_ONCE, CHORES_WAITING)
        self.handovers = Chores(nursery, HANDOVERS_AT_ONCE, HANDOVERS_WAITING)
        self.checks = Chores(nursery, CHECKS_AT_ONCE, CHECKS_WAITING)

    def local_ms(self) -> int:
        return int(self.network.wall_time() * 1000)

    def now_ms(self) -> int:
        """Swarm time."""
        return self.swarm_time.now_ms(self.local_ms())

    @property
    def is_client(self) -> bool:
        """Whether this node stays out of tables: by its settings, or for lack of addresses."""
        now = trio.current_time()
        if now >= self._client_until:
            self._client_until = now + ADDRESSES_LOOKED_AT_SECONDS
            self._is_client = self.settings.client or not self.network.addresses()
        return self._is_client

    @property
    def is_alone(self) -> bool:
        """Whether no known peer answered when last asked."""
        return not self.table.closest(self.own_id, 1)

    def stand_ins(self, target: int) -> list[Contact]:
        """Peers to ask while no contact answers, the closest to this target first.

        Nobody can dial the peers behind routers, so they are in no table, and keep their slots at
        peers that can be dialled. If all of those are away, the links that were punched before
        still work: their peers keep the slots meanwhile.
        """
        contacts: list[Contact] = []
        for link in self.network.links():
            if link.punched:
                with suppress(MalformedMessage):  # a stranger with a key of another kind
                    contacts.append(contact_of(link.peer, ()))
        contacts.sort(key=lambda one: distance(one.node_id, target))
        return contacts[: self.settings.k]

    def check_open(self) -> None:
        if self.nursery.cancel_scope.cancel_called:
            raise trio.ClosedResourceError("this node's directory has ended")

    def keep(self, slot: Slot, sender: Sender = OURSELVES) -> None:
        """Keep a slot as a replica; SlotRefused if it may not be kept."""
        if self.storage.store(slot, self.now_ms(), sender) is Stored.UNCHANGED:
            return
        if self.unsaved is not None:
            self.unsaved.add(slot)
        self.on_new_slot(slot.key)

    def replicas_of(self, key: str) -> int:
        """How many peers keep the slots under this key."""
        fewer = self.families.replicas_of(key)
        return self.settings.k if fewer is None else min(fewer, self.settings.k)

    def is_replica_of(self, key: str, position: int) -> bool:
        """Whether this node should keep the slots under this key, as far as it knows. `position` is
        the key's."""
        if self.is_client or not self.dialability.is_dialable:
            return False
        replicas = self.replicas_of(key)
        closest = self.table.closest(position, replicas)
        if len(closest) < replicas:
            return True
        farthest = closest[-1].node_id
        return distance(self.own_id, position) < distance(farthest, position)

    def may_publish(self, publisher: bytes) -> bool:
        """Whether it is known that the owner of this key may write."""
        if publisher == self.own_key:
            return True
        return self.rpc.guard.may_publish(peer_id_of(publisher))

    def check_publisher(self, slot: Slot) -> None:
        """SlotRefused if it is not known that the publisher may write."""
        if not self.may_publish(slot.publisher):
            raise SlotRefused(
                SlotRefusal.STRANGER,
                f"Nobody has shown that {slot.publisher_peer} may take part in this run.",
                why="It has no access token that counts here, or has not shown it yet.",
            )

    def check(self, slot: Slot, now_ms: int) -> None:
        """SlotRefused unless some publisher may have this slot under that key now."""
        check_form(slot)
        family = self.families.family_of(slot.key)
        family.check_size(slot.value)
        check_time(family, slot, now_ms)
        check_value(family, slot)
        self.storage.verified.check(slot)

    def chore(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> bool:
        """Do this in the background later; False if too much is waiting already."""
        return self.chores.add(work, *arguments)


DISHONEST = frozenset({SlotRefusal.BAD_SIGNATURE, SlotRefusal.MALFORMED})
"""Reasons that blame the peer that passed on a slot, whatever its clock or version."""


def is_dishonest(refused: SlotRefused) -> bool:
    return refused.refusal in DISHONEST


# Optional work, a few pieces at a time in the background.
#
# Repairs, copies and pings share one pool; checks of strangers' addresses have another. So a
# stranger that makes us dial dead addresses delays only other strangers, not our own work.
#
# A failing chore must not end the node.


class Chores:
    """At most `at_once` run, and at most `waiting` wait or run; more are not accepted."""

    def __init__(self, nursery: trio.Nursery, at_once: int, waiting: int) -> None:
        self._nursery = nursery
        self._limiter = trio.CapacityLimiter(at_once)
        self._most = waiting
        self._unfinished = 0
        self.dropped = 0

    def add(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> bool:
        """Do this when its turn comes; False if too much is waiting already."""
        if self._unfinished >= self._most:
            self.dropped += 1
            return False
        self._unfinished += 1
        self._nursery.start_soon(self._run, work, arguments)
        return True

    async def _run(
        self, work: Callable[..., Awaitable[None]], arguments: tuple[object, ...]
    ) -> None:
        try:
            async with self._limiter:
                await work(*arguments)
        except PotluckError as error:
            log.debug("%s failed: %s", getattr(work, "__name__", work), error)
        except Exception:  # a bug in a chore must not end the node
            log.exception("a chore of the directory ended by an error of our own")
        finally:
            self._unfinished -= 1


# Statistics of the directory on this node.


@dataclass
class DhtStatistics:
    """Counts start when the directory is opened."""

    # now
    peers_in_table: int = 0
    peers_lost: int = 0
    buckets: tuple[int, ...] = ()
    slots_stored: int = 0
    keys_stored: int = 0
    bytes_stored: int = 0
    bytes_stored_limit: int = 0
    copies_cached: int = 0
    slots_published: int = 0
    clock_offset_ms: int = 0
    clock_peers: int = 0
    watched_keys: int = 0
    can_be_dialled: bool = True
    """As far as this node knows; see dialability.py."""

    # so far
    puts: int = 0
    gets: int = 0
    lookups: int = 0
    finds_sent: int = 0
    stores_sent: int = 0
    greets_sent: int = 0
    slots_sent: int = 0
    calls_failed: int = 0
    finds_served: int = 0
    stores_served: int = 0
    greets_served: int = 0
    slots_taken: int = 0
    slots_refused: dict[str, int] = field(default_factory=dict)
    """Slots of others that this node refused, by reason."""
    own_slots_refused: dict[str, int] = field(default_factory=dict)
    """Slots of this node that others refused, by reason."""
    bad_slots_read: int = 0
    strangers_slots_read: int = 0
    slots_repaired: int = 0
    slots_handed_over: int = 0
    copies_spread: int = 0
    republished: int = 0
    peers_found_dialable: int = 0
    peers_not_dialable: int = 0
    chores_dropped: int = 0
    idle_links_closed: int = 0


def count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1
