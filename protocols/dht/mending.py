"""What a read does for the next one: replicas that were behind are mended, hot keys copied.

Whoever has read a key knows which of its replicas hold less than others, and sends them what they
lack; and if this node is one of them, it keeps what it has read. A key that was found only after
some steps is copied to the last peer on the way that did not have it, for a short while: so a rush
for one key is answered before it reaches the replicas.

Easy to get wrong: nobody waits for any of this, and a replica may refuse what it is sent, again
and again; so what was refused is not sent by the next read as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import trio

from protocols.dht.asking import Asker
from protocols.dht.contacts import Contact
from protocols.dht.messages import prefix_of_slot
from protocols.dht.publishing import batches
from protocols.dht.refusals import SlotRefused
from protocols.dht.seeking import Seeking
from protocols.dht.slots import Slot
from protocols.dht.state import DhtState

# What is younger may still be on its way from its writer. (A sequence is the time of writing, but
# for those who write more often than every millisecond.)
STILL_WRITTEN_MS = 5000

HOPELESS_REMEMBERED = 4096
COPIES_SPREAD = 32  # of a key with more publishers than that, a few copies serve as well
SLOTS_KEPT_WITHOUT_A_PAUSE = 128  # they are verified; a millisecond


class Mending:
    """Sends what was missing, in the background."""

    def __init__(self, state: DhtState, asker: Asker) -> None:
        self._state = state
        self._asker = asker
        self._hopeless: set[tuple[int, bytes]] = set()
        """Slots that a replica would not take, so that not every read tries it again."""

    async def mend(self, errand: Seeking) -> None:
        """Do for the next reader what this reading has shown to be missing."""
        slots = tuple(errand.view.slots.values())
        if not slots:
            return
        await self._keep_as_replica(errand.target, slots)
        state = self._state
        settled_ms = state.now_ms() - STILL_WRITTEN_MS
        settled = {prefix_of_slot(one): one for one in slots if one.sequence < settled_ms}
        for replica in errand.lookup.closest_answered():
            told = errand.told.get(replica.node_id)
            if told is None or not told.whole:
                continue
            behind = [
                settled[name]
                for name in settled.keys() - told.names
                if (replica.node_id, name) not in self._hopeless
            ]
            if behind and (errand.is_near or errand.lookup.is_done):
                state.chore(self._repair, replica, behind)
        if not errand.is_near and errand.has_enough:
            self._copy_to_the_way(errand, slots)

    async def _keep_as_replica(self, position: int, slots: Sequence[Slot]) -> None:
        state = self._state
        if not state.is_replica_of(position):
            return
        for place, slot in enumerate(slots):
            if place and place % SLOTS_KEPT_WITHOUT_A_PAUSE == 0:
                await trio.lowlevel.checkpoint()
            with suppress(SlotRefused):  # nobody asked us to keep it, so nobody is to be told
                state.keep(slot)

    async def _repair(self, contact: Contact, slots: list[Slot]) -> None:
        for batch in batches([(slot, (contact.peer,)) for slot in slots]):
            response = await self._asker.store(contact, batch.slots)
            for slot, refusal in zip(batch.slots, response.refusals, strict=True):
                if refusal:
                    if len(self._hopeless) >= HOPELESS_REMEMBERED:
                        self._hopeless.clear()
                    self._hopeless.add((contact.node_id, prefix_of_slot(slot)))
                else:
                    self._state.counts.slots_repaired += 1

    def _copy_to_the_way(self, errand: Seeking, slots: Sequence[Slot]) -> None:
        for contact in errand.lookup.closest_answered(len(errand.told)):
            told = errand.told.get(contact.node_id)
            if told is not None and not told.names:
                self._state.chore(self._copy, contact, slots[:COPIES_SPREAD])
                return

    async def _copy(self, contact: Contact, slots: Sequence[Slot]) -> None:
        """One message of copies, and no more: they need not be all there is."""
        batch = next(batches([(slot, (contact.peer,)) for slot in slots]))
        await self._asker.store(contact, batch.slots, copies=True)
        self._state.counts.copies_spread += len(batch.slots)
