"""Read keys: ask the replicas, merge what they hold, and mend those that were behind.

A full read asks all k replicas. The first few are asked for everything, the others only for what
the first did not have. A reader who is content with what is late enough has the newest of the
first few replicas. Either way the newest sequence of each publisher holds, whoever brought it,
because it is signed; and a replica that had less is sent what it lacked (mending.py).

Easy to get wrong: a slot that was withdrawn is read, merged and repaired like any other, and only
left out of what the caller sees; else an older replica would bring it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from protocols.dht.asking import Asker
from protocols.dht.contacts import Contact
from protocols.dht.ids import position_of
from protocols.dht.mending import Mending
from protocols.dht.messages import PROTOCOL, Found, contact_from, prefix_of_slot
from protocols.dht.neighbourhood import own_radius
from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.seeking import LOAD, Seeking
from protocols.dht.slots import Slot
from protocols.dht.state import DhtState, is_dishonest
from protocols.dht.walking import ERRANDS_WITHOUT_A_PAUSE, Walk
from protocols.errors import MalformedMessage
from protocols.identity import PeerId

# Of SLOT_BYTES_PER_ANSWER each, at least half full: as many as a family may allow under one key.
PAGES_PER_KEY = 64

SLOTS_WITHOUT_A_PAUSE = 8  # a millisecond of signatures; an answer can bring thousands of slots


@dataclass(frozen=True)
class Entry:
    """What one publisher says under a key. `expires` is in milliseconds of swarm time."""

    publisher: PeerId
    value: Any
    expires: int
    sequence: int


class Reader:
    """Answers what is under keys, and who is close to positions."""

    def __init__(self, state: DhtState, asker: Asker) -> None:
        self._state = state
        self._asker = asker
        self._mending = Mending(state, asker)

    async def closest(self, targets: Sequence[int], k: int | None = None) -> list[list[Contact]]:
        """The live peers closest to each of these positions, from lookups that share messages."""
        errands = [Seeking(self._state, target, k=k) for target in targets]
        await Walk(self._state, errands, self.ask, LOAD).run()
        return [errand.lookup.closest_answered() for errand in errands]

    async def read(
        self, keys: Sequence[str], *, latest_enough: bool, known: Iterable[Slot] = ()
    ) -> dict[str, list[Slot]]:
        """The slots under each key, withdrawn ones among them.

        `known` were read before, and so need not be sent again.
        """
        state = self._state
        for key in keys:
            state.families.family_of(key)
        state.counts.gets += len(keys)
        content_with = state.settings.enough_replicas if latest_enough else 0
        errands = []
        radius = own_radius(state)
        for place, key in enumerate(dict.fromkeys(keys)):
            if place and place % ERRANDS_WITHOUT_A_PAUSE == 0:
                await trio.lowlevel.checkpoint()
            target = position_of(key)
            errand = Seeking(state, target, key, content_with=content_with, radius=radius)
            errand.holds_ourselves(state.storage.get(key, state.now_ms()))
            for slot in (*self._published(key), *known):
                if slot.key == key:
                    errand.take(slot)
            errands.append(errand)
        await Walk(state, errands, self.ask, LOAD).run()
        found = {}
        for place, errand in enumerate(errands):
            if place and place % ERRANDS_WITHOUT_A_PAUSE == 0:
                await trio.lowlevel.checkpoint()
            await self._mending.mend(errand)
            now_ms = state.now_ms()
            found[errand.key] = [s for s in errand.merged.values() if s.expires > now_ms]
        return found

    def own(self, key: str) -> list[Slot]:
        """What this node knows of a key without asking: as a replica, and as its publisher."""
        return [*self._state.storage.get(key, self._state.now_ms()), *self._published(key)]

    def _published(self, key: str) -> list[Slot]:
        published = self._state.publisher.slot_of(key)
        if published is None or published.expires <= self._state.now_ms():
            return []
        return [published]

    async def ask(
        self, contact: Contact, errands: Sequence[Seeking]
    ) -> Sequence[Iterable[Contact]]:
        """One message for all these errands; see `walking.Ask`."""
        haves = [errand.have() if errand.key else [] for errand in errands]
        queries = [errand.query(have) for errand, have in zip(errands, haves, strict=True)]
        response = await self._asker.find(contact, queries)
        for errand, have, found in zip(errands, haves, response.answers, strict=True):
            if errand.key:
                await self._take_all(contact, errand, have, found)
            else:
                errand.heard(contact, {}, copied=False)
        return [[contact_from(one) for one in found.contacts] for found in response.answers]

    async def _take_all(
        self, contact: Contact, errand: Seeking, have: Sequence[Slot], found: Found
    ) -> None:
        """What one peer holds under one key, page after page."""
        lacking = frozenset(found.lacking)
        held = {
            slot.publisher: prefix_of_slot(slot)
            for place, slot in enumerate(have)
            if place not in lacking
        }
        copied = found.copied
        after = b""
        most = self._state.families.family_of(errand.key).slots_per_key
        for page in range(PAGES_PER_KEY):
            await self._take(contact, errand, found.slots[:most], held)
            if not found.more or len(held) >= most:
                break  # nobody keeps more than that: what would come now is made up
            furthest = max((slot.publisher for slot in found.slots), default=after)
            if page and furthest <= after:
                break  # `more`, and then nothing
            after = furthest
            response = await self._asker.find(contact, [errand.query(have, after)])
            found = response.answers[0]
        errand.heard(contact, held, copied=copied)

    async def _take(
        self, contact: Contact, errand: Seeking, slots: Sequence[Slot], held: dict[bytes, bytes]
    ) -> None:
        state = self._state
        now_ms = state.now_ms()
        for place, slot in enumerate(slots):
            if place and place % SLOTS_WITHOUT_A_PAUSE == 0:
                await trio.lowlevel.checkpoint()
            try:
                state.check(slot, now_ms)
                if slot.key != errand.key:
                    raise SlotRefused(SlotRefusal.MALFORMED, "Nobody asked for that key.")
            except SlotRefused as refused:
                state.counts.bad_slots_read += 1
                if is_dishonest(refused):
                    state.table.failed(contact)
                    error = MalformedMessage(
                        f"{contact.peer} sent a slot that is forged: {refused}"
                    )
                    state.rpc.blame(contact.peer, PROTOCOL, error)
                    raise error from None
            else:
                errand.take(slot)
                held[slot.publisher] = prefix_of_slot(slot)
