"""What the shells of the directory share on one node."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from protocols.dht.chores import Chores
from protocols.dht.dialability import Dialability
from protocols.dht.families import Families, check_time, check_value
from protocols.dht.ids import distance, node_id_of
from protocols.dht.lost_peers import LostPeers
from protocols.dht.publishing import Publisher
from protocols.dht.quotas import OURSELVES, Sender
from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.routing import RoutingTable
from protocols.dht.settings import DhtSettings
from protocols.dht.slots import Slot, check_form
from protocols.dht.statistics import DhtStatistics
from protocols.dht.storage import Storage, Stored
from protocols.dht.swarm_time import SwarmTime
from protocols.dht.unsaved import UnsavedSlots
from protocols.network import Network
from protocols.rpc import Rpc

log = logging.getLogger("potluck.dht")

CHORES_AT_ONCE = 8
CHORES_WAITING = 512
CHECKS_AT_ONCE = 4  # of others' addresses, each a few dials
CHECKS_WAITING = 128

# Interfaces come and go with cables and networks; asking for them takes the system a while.
ADDRESSES_LOOKED_AT_SECONDS = 10.0


def _nobody_cares(_key: str) -> None:
    """Stands in until somebody does."""


class DhtState:
    """Tables, stores and clocks; no rule of its own but what `now_ms` and `check` say."""

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
        self.table = RoutingTable(self.own_id, settings.k)
        # A clock tells the lives of a node apart, and chance those of a clock that was set back.
        life = (self.local_ms() % (1 << 32)).to_bytes(4, "big") + network.random.randbytes(4)
        self.storage = Storage(families, settings.storage, self.own_id, life=life)
        self.publisher = Publisher(network.identity, network.random, settings.publishing)
        self.swarm_time = SwarmTime()
        self.counts = DhtStatistics()
        self.lost = LostPeers(network.random)
        self.heard_at = float("-inf")
        """When somebody has answered last, whatever was asked."""
        self.unsaved: UnsavedSlots | None = None
        """Slots that a keeper has not been given yet; None where there is none."""
        self.was_kept: Callable[[str], None] = _nobody_cares
        """Told of each key under which this node has kept something new."""
        self._client_until = float("-inf")
        self._is_client = False
        self.dialability = Dialability()
        self.chores = Chores(nursery, CHORES_AT_ONCE, CHORES_WAITING)
        self.checks = Chores(nursery, CHECKS_AT_ONCE, CHECKS_WAITING)

    def local_ms(self) -> int:
        return int(self.network.wall_time() * 1000)

    def now_ms(self) -> int:
        """The swarm's time."""
        return self.swarm_time.now_ms(self.local_ms())

    @property
    def is_client(self) -> bool:
        """Whether this node keeps out of tables: by its settings, or for want of addresses."""
        now = trio.current_time()
        if now >= self._client_until:
            self._client_until = now + ADDRESSES_LOOKED_AT_SECONDS
            self._is_client = self.settings.client or not self.network.addresses()
        return self._is_client

    @property
    def is_alone(self) -> bool:
        """Whether nobody is known who answered when last asked."""
        return not self.table.closest(self.own_id, 1)

    def check_open(self) -> None:
        if self.nursery.cancel_scope.cancel_called:
            raise trio.ClosedResourceError("this node's directory has ended")

    def keep(self, slot: Slot, sender: Sender = OURSELVES) -> None:
        """Keep a slot as a replica; SlotRefused if it may not be."""
        if self.storage.store(slot, self.now_ms(), sender) is Stored.UNCHANGED:
            return
        if self.unsaved is not None:
            self.unsaved.add(slot)
        self.was_kept(slot.key)

    def is_replica_of(self, position: int) -> bool:
        """Whether this node is among those that keep what lies here, as far as it knows."""
        if self.is_client or not self.dialability.is_given:
            return False
        closest = self.table.closest(position)
        if len(closest) < self.settings.k:
            return True
        farthest = closest[-1].node_id
        return distance(self.own_id, position) < distance(farthest, position)

    def check(self, slot: Slot, now_ms: int) -> None:
        """SlotRefused unless this is what some publisher may say now under that key."""
        check_form(slot)
        family = self.families.family_of(slot.key)
        family.check_size(slot.value)
        check_time(family, slot, now_ms)
        check_value(family, slot)
        self.storage.verified.check(slot)

    def chore(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> bool:
        """Do this in the background, when its turn comes; False if too much waits already."""
        return self.chores.add(work, *arguments)


DISHONEST = frozenset({SlotRefusal.BAD_SIGNATURE, SlotRefusal.MALFORMED})
"""Reasons that say something against whoever passed a slot on, whatever its clock or version."""


def is_dishonest(refused: SlotRefused) -> bool:
    return refused.refusal in DISHONEST
