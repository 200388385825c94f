"""Background work that keeps the routing table correct and the slots at their replicas.

Parts of the id space without recent lookups are looked up. Lost peers are tried again, and when
some are back, their parts of the swarm are looked up. Silent peers are pinged. Links that were
opened for a lookup are closed when they are no longer needed. Expired slots are dropped. A newcomer
that is closer to a key than this node gets the key's slots.

Every replica notices a newcomer, and it is enough if one hands over. So only the few that are
closest to a key do, and a slot that the newcomer already has costs a message at most. A link that
we close looks to the other end as if we had left: if it has us in its table, it pings us, and so
opens the link again. So we only close links that we opened, to peers that are not in our table. A
link that the other side opens then stays.
"""

from __future__ import annotations

import math

import trio

from protocols.dht.acquaintances import Acquaintances
from protocols.dht.contacts import Contact
from protocols.dht.families import CLOCK_TOLERANCE_MS
from protocols.dht.ids import distance, node_id_of, position_of
from protocols.dht.publisher import batches
from protocols.dht.reader import SlotReader
from protocols.dht.requester import Requester
from protocols.dht.routing import REFRESH_WIDTH, REUNION_SECONDS
from protocols.dht.state import DhtState
from protocols.dht.storage import EXPIRED_AT_ONCE
from protocols.identity import PeerId

REFRESH_CHECK_SECONDS = 60.0  # between checks of the buckets; each is due once an hour
SETTLING_SECONDS = (1.0, 5.0, 30.0, 300.0)  # after joining; a lookup of our own id each
LOST_CHECK_SECONDS = 2.0  # between checks of lost peers, while there are any
LOST_AT_ONCE = 4
SEARCHES_AT_ONCE = 8  # in REUNION_SECONDS, for lost peers that are back
# A hundred contacts that are silent for a quarter of an hour are a ping every nine seconds.
LINK_CHECK_SECONDS = 15.0
PINGED_AT_ONCE = 4
CLOSED_AT_ONCE = 16
TIDY_SECONDS = 10.0
HANDOVER_SECONDS = 60.0
HANDOVER_REPLICAS = 3  # replicas of a key that hand over to a newcomer: one may be down, or lie
KEYS_PER_CHECKPOINT = 64  # some two milliseconds of table lookups
KEYS_SKIMMED_PER_CHECKPOINT = 1024  # half a millisecond of comparing distances
BATCH_PAUSE_SECONDS = 0.2  # a newcomer gets its share over seconds, not in one burst


class Upkeep:
    """Tasks that run as long as the directory."""

    def __init__(
        self,
        state: DhtState,
        acquaintances: Acquaintances,
        requester: Requester,
        reader: SlotReader,
    ) -> None:
        self._state = state
        self._acquaintances = acquaintances
        self._requester = requester
        self._reader = reader
        self._lost_may_be_back = trio.Event()
        self._reunion_began, self._searches = -math.inf, 0
        self._more_are_back = trio.Event()
        self._returned: dict[int, int] = {}
        """The id of the last of these, by its bucket."""

    async def refresh(self) -> None:
        """Keep looking up the parts without recent lookups, a bucket at a time."""
        state = self._state
        while True:
            chance = state.network.random
            await trio.sleep(REFRESH_CHECK_SECONDS * (0.5 + chance.random()))
            now = trio.current_time()
            due = state.table.buckets_to_refresh(now, state.settings.refresh_seconds)
            if due and len(state.table):
                target = state.table.target_in(due[0], chance)
                await self._reader.closest([target], REFRESH_WIDTH)

    async def settle(self, joined: trio.Event) -> None:
        """Look around again some times after joining.

        Nodes that start together may all meet a first peer that knows nobody yet.
        """
        state = self._state
        await joined.wait()
        for seconds in SETTLING_SECONDS:
            await trio.sleep(seconds * (0.5 + state.network.random.random()))
            await self._look_up(state.own_id)

    async def find_lost_peers(self) -> None:
        """Keep trying peers that no longer answer."""
        state = self._state
        while True:
            self._lost_may_be_back = trio.Event()
            with trio.move_on_after(LOST_CHECK_SECONDS):
                await self._lost_may_be_back.wait()
            for contact in state.lost.due(trio.current_time(), LOST_AT_ONCE):
                state.chore(self._requester.probe, contact)

    async def look_around(self) -> None:
        """Keep looking up the parts of the swarm from which more lost peers have come back than
        `SEARCHES_AT_ONCE`, each part once."""
        while True:
            await self._more_are_back.wait()
            await trio.sleep(REUNION_SECONDS)
            self._more_are_back = trio.Event()
            returned, self._returned = self._returned, {}
            for node_id in returned.values():
                self._state.chore(self._look_up, node_id)

    def _is_back(self, contact: Contact) -> None:
        """Look up the part of the swarm in which a lost peer is back: at once if it is one of few.
        When a cut heals, hundreds come back, and a search for each would cost slow uplinks more
        than their training."""
        now = trio.current_time()
        if now - self._reunion_began >= REUNION_SECONDS:
            self._reunion_began, self._searches = now, 0
        if self._searches < SEARCHES_AT_ONCE:
            self._searches += 1
            self._state.chore(self._look_up, contact.node_id)
        else:
            self._returned[self._state.table.bucket_of(contact.node_id)] = contact.node_id
            self._more_are_back.set()

    def try_lost_peers_now(self) -> None:
        """Try lost peers now, because something has changed."""
        self._state.lost.all_may_be_back(trio.current_time())
        self._lost_may_be_back.set()

    def linked(self, peer: PeerId) -> None:
        """There is a link to this peer, after there was none."""
        if self._state.lost.reached(node_id_of(peer), trio.current_time()):
            self._lost_may_be_back.set()

    async def check_links(self) -> None:
        """Keep pinging silent peers of the table and closing unneeded links."""
        state = self._state
        while True:
            await trio.sleep(LINK_CHECK_SECONDS * (0.5 + state.network.random.random()))
            now = trio.current_time()
            for contact in state.table.quiet(now, at_most=PINGED_AT_ONCE):
                state.chore(self._requester.probe, contact)
            for peer in self._acquaintances.idle_links(now)[:CLOSED_AT_ONCE]:
                link = state.network.link(peer)
                if link is not None and not link.open_streams:
                    state.counts.idle_links_closed += 1
                    await state.network.disconnect(peer)

    async def tidy(self) -> None:
        """Keep dropping expired slots, a few at a time."""
        state = self._state
        latest_ms = state.now_ms()
        while True:
            await trio.sleep(TIDY_SECONDS)
            now_ms = state.now_ms()
            if now_ms < latest_ms - CLOCK_TOLERANCE_MS:
                state.storage.clock_went_back(now_ms)
            latest_ms = now_ms
            while (due := state.storage.next_expiry()) is not None and due <= now_ms:
                state.storage.expire(now_ms, EXPIRED_AT_ONCE)
                await trio.lowlevel.checkpoint()
            state.storage.cache.expire(now_ms)

    def contact_added(self, contact: Contact) -> None:
        """A new contact is in the table."""
        state = self._state
        if state.lost.found(contact, trio.current_time()):
            self._is_back(contact)
        if len(state.storage):
            state.handovers.add(self._hand_over, contact)

    async def _look_up(self, target: int) -> None:
        await self._reader.closest([target])

    async def _hand_over(self, newcomer: Contact) -> None:
        """Send a newcomer the slots of the keys that it is closer to than we are, as many as it
        takes in `HANDOVER_SECONDS`: others do so, too."""
        with trio.move_on_after(HANDOVER_SECONDS):
            await self._hand_over_all(newcomer)

    async def _hand_over_all(self, newcomer: Contact) -> None:
        state = self._state
        keys = await self._keys_for(newcomer)
        for start in range(0, len(keys), KEYS_PER_CHECKPOINT):
            now_ms = state.now_ms()
            some = keys[start : start + KEYS_PER_CHECKPOINT]
            slots = [slot for key in some for slot in state.storage.get(key, now_ms)]
            for batch in batches([(slot, (newcomer.peer,)) for slot in slots]):
                response = await self._requester.store(newcomer, batch.slots)
                state.counts.slots_handed_over += response.refusals.count(0)
                await trio.sleep(BATCH_PAUSE_SECONDS)

    async def _keys_for(self, newcomer: Contact) -> list[str]:
        storage = self._state.storage
        keys: list[str] = []
        looked_at = 0
        for place, key in enumerate(storage.all_keys()):
            if place % KEYS_SKIMMED_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            if not storage.is_closer(key, newcomer.node_id):
                continue
            looked_at += 1
            if looked_at % KEYS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            if self._hands_over(key, newcomer):
                keys.append(key)
        return keys

    def _hands_over(self, key: str, newcomer: Contact) -> bool:
        state = self._state
        position = position_of(key)
        closest = state.table.closest(position, state.replicas_of(key))
        if newcomer not in closest:
            return False
        own_distance = distance(state.own_id, position)
        closer = sum(
            one.node_id != newcomer.node_id and distance(one.node_id, position) < own_distance
            for one in closest
        )
        return closer < HANDOVER_REPLICAS
