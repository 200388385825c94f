"""Read keys: ask the replicas, merge what they hold, and mend those that were behind.

A full read asks all k replicas. The first few are asked for everything, the others only for what
the first did not have. A reader who is content with what is late enough has the newest of the
first few replicas. Either way the newest sequence of each publisher holds, whoever brought it,
because it is signed; and a replica that had less is sent what it lacked, in the background.

A key that was found only after some steps is copied to the last peer on the way that did not have
it, for a short while: so a rush for one key is answered before it reaches the replicas.

Easy to get wrong: a slot that was withdrawn is read, merged and repaired like any other, and only
left out of what the caller sees; else an older replica would bring it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import trio

from protocols.dht.asking import Asker
from protocols.dht.contacts import Contact
from protocols.dht.ids import ID_BYTES, position_of
from protocols.dht.messages import (
    HAVE_PER_QUERY,
    KNOWN_PER_QUERY,
    PREFIX_BYTES,
    QUERIES_PER_REQUEST,
    Found,
    Query,
    contact_from,
    prefix_of_id,
    prefix_of_slot,
)
from protocols.dht.neighbourhood import knows_well, lookup_from, own_radius, seeds_for
from protocols.dht.publishing import batches
from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.slots import Slot, supersedes
from protocols.dht.state import DhtState, is_dishonest, log
from protocols.dht.walking import ERRANDS_WITHOUT_A_PAUSE, Errand, Load, Walk
from protocols.errors import MalformedMessage
from protocols.identity import PeerId

REQUEST_BYTES = 64 << 10  # of queries in one message; half of what it may have
# What is younger may still be on its way from its writer. (A sequence is the time of writing, but
# for those who write more often than every millisecond.)
STILL_WRITTEN_MS = 5000

HOPELESS_REMEMBERED = 4096
COPIES_SPREAD = 32  # of a key with more publishers than that, a few copies serve as well
# Of SLOT_BYTES_PER_ANSWER each, at least half full: as many as a family may allow under one key.
PAGES_PER_KEY = 64

SLOTS_KEPT_WITHOUT_A_PAUSE = 128  # they are verified; a millisecond
SLOTS_WITHOUT_A_PAUSE = 8  # a millisecond of signatures; an answer can bring thousands of slots


@dataclass(frozen=True)
class Entry:
    """What one publisher says under a key. `expires` is in milliseconds of swarm time."""

    publisher: PeerId
    value: Any
    expires: int
    sequence: int


class Seeking(Errand):
    """An errand that asks for peers, and with a key for slots.

    Invariant: `merged` holds the newest slot of each publisher that was met; every slot in it has
    been checked.
    """

    def __init__(
        self,
        state: DhtState,
        target: int,
        key: str = "",
        *,
        content_with: int = 0,
        k: int | None = None,
        radius: int | None = None,
    ) -> None:
        seeds = seeds_for(state, target)
        super().__init__(lookup_from(state, target, seeds, k))
        self.key = key
        self.is_near = knows_well(state, target, own_radius(state) if radius is None else radius)
        self.merged: dict[bytes, Slot] = {}
        self.replicas: dict[int, tuple[Contact, dict[bytes, bytes]]] = {}
        """Of each peer that answered: by publisher, the prefix of the slot that it holds."""
        self._content_with = content_with
        self._satisfied = 0
        self._known = [prefix_of_id(one.node_id) for one in seeds]

    @property
    def is_done(self) -> bool:
        return self.has_enough or self.lookup.is_done

    @property
    def has_enough(self) -> bool:
        """Whether so many replicas have said what they hold that the reader wants no more."""
        return 0 < self._content_with <= self._satisfied

    def query(self, have: Sequence[Slot], after: bytes = b"") -> Query:
        return Query(
            self.lookup.target.to_bytes(ID_BYTES, "big"),
            self.key,
            b"".join(self._known[-KNOWN_PER_QUERY:]),
            b"".join(map(prefix_of_slot, have)),
            after,
            self._content_with > 0,
        )

    def have(self) -> list[Slot]:
        return list(islice(self.merged.values(), HAVE_PER_QUERY))

    def take(self, slot: Slot) -> None:
        held = self.merged.get(slot.publisher)
        if held is None or supersedes(slot, held):
            self.merged[slot.publisher] = slot

    def holds_ourselves(self, slots: Sequence[Slot]) -> None:
        """What this node, being a replica, holds."""
        for slot in slots:
            self.take(slot)
        if slots:
            self._satisfied += 1
        if self._content_with:
            self.lookup.alpha = max(1, self._content_with - self._satisfied)

    def heard(self, contact: Contact, held: dict[bytes, bytes], *, copied: bool) -> None:
        """A peer has said all that it holds under the key.

        Copies count as what one replica holds and no more: whoever brought them may have left
        out what he did not like, and so may anybody on the way.
        """
        if not copied:
            self.replicas[contact.node_id] = (contact, held)
        self._satisfied += bool(held)
        prefix = prefix_of_id(contact.node_id)
        if prefix not in self._known:
            self._known.append(prefix)
        if self._content_with and held:
            # each that has it leaves one fewer to be asked
            self.lookup.alpha = max(1, self._content_with - self._satisfied)
        elif self.is_near or held:
            # we are among those who should have it: ask all of them at once
            self.lookup.alpha = self.lookup.k


def _query_bytes(errand: Seeking) -> int:
    known_and_have = KNOWN_PER_QUERY + min(len(errand.merged), HAVE_PER_QUERY)
    return 64 + len(errand.key) * 4 + known_and_have * PREFIX_BYTES


LOAD = Load(QUERIES_PER_REQUEST, REQUEST_BYTES, _query_bytes)


class Reader:
    """Answers what is under keys, and who is close to positions."""

    def __init__(self, state: DhtState, asker: Asker) -> None:
        self._state = state
        self._asker = asker
        self._hopeless: set[tuple[int, bytes]] = set()
        """Slots that a replica would not take, so that not every read tries it again."""

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
            await self._mend(errand)
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
                    log.warning("%s passes on a slot that is not right: %s", contact.peer, refused)
                    state.table.failed(contact)
                    raise MalformedMessage(f"{contact.peer} sent a slot that is forged.") from None
            else:
                errand.take(slot)
                held[slot.publisher] = prefix_of_slot(slot)

    # What a read does for the next one

    async def _mend(self, errand: Seeking) -> None:
        if not errand.merged:
            return
        await self._keep_as_replica(errand)
        state = self._state
        newest = {slot.publisher: prefix_of_slot(slot) for slot in errand.merged.values()}
        settled_ms = state.now_ms() - STILL_WRITTEN_MS
        for replica in errand.lookup.closest_answered():
            _, held = errand.replicas.get(replica.node_id, (replica, newest))
            if held != newest:
                behind = [
                    slot
                    for publisher, slot in errand.merged.items()
                    if held.get(publisher) != newest[publisher]
                    and (replica.node_id, newest[publisher]) not in self._hopeless
                    and slot.sequence < settled_ms
                ]
                if behind and (errand.is_near or errand.lookup.is_done):
                    state.chore(self._repair, replica, behind)
        if not errand.is_near and errand.has_enough:
            self._copy_to_the_way(errand)

    async def _keep_as_replica(self, errand: Seeking) -> None:
        state = self._state
        if not state.is_replica_of(errand.lookup.target):
            return
        for place, slot in enumerate(errand.merged.values()):
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

    def _copy_to_the_way(self, errand: Seeking) -> None:
        for contact in errand.lookup.closest_answered(len(errand.replicas)):
            _, held = errand.replicas.get(contact.node_id, (contact, {b"": b""}))
            if not held:
                slots = list(islice(errand.merged.values(), COPIES_SPREAD))
                self._state.chore(self._copy, contact, slots)
                return

    async def _copy(self, contact: Contact, slots: list[Slot]) -> None:
        """One message of copies, and no more: they need not be all there is."""
        batch = next(batches([(slot, (contact.peer,)) for slot in slots]))
        await self._asker.store(contact, batch.slots, copies=True)
        self._state.counts.copies_spread += len(batch.slots)
