"""Read keys: ask the replicas, merge what they hold, and mend those that were behind.

A full read asks all k replicas. The first few are asked for everything, the others only to name
what they hold; what is missing then is asked for by name. A reader who is content with what is late
enough has the newest of the first few replicas. Either way the newest sequence of each publisher
holds, whoever brought it, because it is signed; and a replica that had less is sent what it lacked
(mending.py).

A reader who comes again and again *looks*: what it has read is remembered (views.py), and a few of
the replicas that are known already say only what is new. Now and then a full read beside it, the
*survey*, finds the replicas anew and compares everything.

Easy to get wrong: a slot that was withdrawn is read, merged and repaired like any other, and only
left out of what the caller sees; else an older replica would bring it back.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from protocols.dht.asking import Asker
from protocols.dht.contacts import Contact
from protocols.dht.ids import position_of
from protocols.dht.mending import Mending
from protocols.dht.messages import (
    PREFIX_BYTES,
    PROTOCOL,
    QUERIES_PER_REQUEST,
    WANTED_PER_QUERY,
    Found,
    Query,
    contact_from,
    prefix_of_slot,
    prefixes,
)
from protocols.dht.neighbourhood import knows_well, own_radius
from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.seeking import LOAD, REQUEST_BYTES, Looking, Reading, Seeking, Told
from protocols.dht.slots import Slot
from protocols.dht.state import DhtState, is_dishonest, log
from protocols.dht.views import View, Views
from protocols.dht.walking import ERRANDS_WITHOUT_A_PAUSE, Walk
from protocols.errors import MalformedMessage, PotluckError
from protocols.identity import PeerId

# Of SLOT_BYTES_PER_ANSWER each, at least half full: as many as a family may allow under one key.
PAGES_PER_KEY = 64

SLOTS_WITHOUT_A_PAUSE = 8  # a millisecond of signatures; an answer can bring thousands of slots

# A slot may be replaced between being named and being asked for, and so may two or three. A peer
# that has none of so many is making names up.
NAMED_IN_VAIN = 8


class Breadth(enum.Enum):
    """Which replicas a look asks."""

    FEW = "few"
    """Two, drawn by chance and changed every few seconds: one of those that a writer waits for, and
    one of all. A replica itself asks the first of them."""

    FIRST = "first"
    """All that a writer waits for: whatever was written before the look began is found."""

    ALL = "all"


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
        self._views = Views()

    async def closest(self, targets: Sequence[int], k: int | None = None) -> list[list[Contact]]:
        """The live peers closest to each of these positions, from lookups that share messages."""
        errands = [Seeking(self._state, target, k=k) for target in targets]
        await Walk(self._state, errands, self.ask, LOAD).run()
        return [errand.lookup.closest_answered() for errand in errands]

    async def read(self, keys: Sequence[str], *, latest_enough: bool) -> dict[str, list[Slot]]:
        """The slots under each key, withdrawn ones among them."""
        state = self._state
        for key in keys:
            state.families.family_of(key)
        state.counts.gets += len(keys)
        content_with = state.settings.enough_replicas if latest_enough else 0
        errands = []
        radius = own_radius(state)
        keys = list(dict.fromkeys(keys))
        for place, key in enumerate(keys):
            if place and place % ERRANDS_WITHOUT_A_PAUSE == 0:
                await trio.lowlevel.checkpoint()
            # Many keys are read once; one key alone may well be read again.
            view = self._views.of(key) if len(keys) == 1 else View()
            view.expire(state.now_ms())
            target = position_of(key)
            errand = Seeking(
                state, target, key, view=view, content_with=content_with, radius=radius
            )
            errand.holds_ourselves(state.storage.get(key, state.now_ms()))
            for slot in self._published(key):
                errand.take(slot)
            errands.append(errand)
        await Walk(state, errands, self.ask, LOAD).run()
        await self._fetch_missing(errands)
        found = {}
        for place, errand in enumerate(errands):
            if place and place % ERRANDS_WITHOUT_A_PAUSE == 0:
                await trio.lowlevel.checkpoint()
            errand.end()
            if not latest_enough:
                errand.view.surveyed(errand.lookup.closest_answered(), trio.current_time())
            await self._mending.mend(errand)
            found[errand.key] = self._in(errand.view)
        return found

    async def look(self, key: str, breadth: Breadth) -> list[Slot]:
        """The slots under a key that is read again and again: see the beginning."""
        state, now = self._state, trio.current_time()
        view = self._views.of(key)
        target = position_of(key)
        view.expire(state.now_ms())
        replicas = self._replicas(view, target)
        strangers = view.strangers_among(replicas)
        if not replicas or not view.slots or 2 * strangers > len(replicas):
            # there is nothing to go on from; or a swarm is forming, and no two hold the same
            return (await self.read([key], latest_enough=False))[key]
        state.counts.gets += 1
        is_replica = self._take_own(key, target, view)
        in_turn = view.turn(replicas, state.settings.enough_written, now, state.network.random)
        source = view.bringing_source
        match breadth:
            case Breadth.FEW:
                order, enough = in_turn, max(1, state.settings.enough_replicas - is_replica)
            case Breadth.FIRST:
                order, enough = replicas, state.settings.enough_written
            case Breadth.ALL:
                order, enough = replicas, len(replicas)
        errand = Looking(target, key, view, order, enough, source)
        await Walk(state, [errand], self.ask, LOAD).run()
        for contact in (*errand.lookup.failed_ones, *errand.lookup.slow_ones.values()):
            view.failed(contact)
        if not errand.lookup.answers and not is_replica:
            return (await self.read([key], latest_enough=False))[key]
        self._take_own(key, target, view)  # what came meanwhile need not be fetched
        await self._fetch_missing([errand])
        errand.end()
        if view.wants_survey(strangers > 0, now, state.network.random):
            state.chore(self._survey, key)
        return self._in(view)

    def own(self, key: str) -> list[Slot]:
        """What this node knows of a key without asking: as a replica, and as its publisher."""
        return [*self._state.storage.get(key, self._state.now_ms()), *self._published(key)]

    async def _survey(self, key: str) -> None:
        try:
            await self.read([key], latest_enough=False)
        except PotluckError as error:
            log.debug("the replicas of %s could not be compared: %s", key, error)

    def _replicas(self, view: View, target: int) -> list[Contact]:
        """Of a key, closest first: as the table knows them, or else the last survey."""
        state = self._state
        if knows_well(state, target, own_radius(state)):
            return state.table.closest(target)
        return view.replicas

    def _take_own(self, key: str, target: int, view: View) -> bool:
        """Take what came to this node itself; whether it is a replica of the key."""
        state = self._state
        for slot in self._published(key):
            view.take(slot)
        for slot in state.storage.since(key, view.own_change, state.now_ms()):
            view.take(slot)
        view.own_change = state.storage.changes
        return state.is_replica_of(target)

    def _in(self, view: View) -> list[Slot]:
        now_ms = self._state.now_ms()
        return [slot for slot in view.slots.values() if slot.expires > now_ms]

    def _published(self, key: str) -> list[Slot]:
        published = self._state.publisher.slot_of(key)
        if published is None or published.expires <= self._state.now_ms():
            return []
        return [published]

    async def ask(
        self, contact: Contact, errands: Sequence[Reading]
    ) -> Sequence[Iterable[Contact]]:
        """One message for all these errands; see `walking.Ask`."""
        queries = [errand.query(contact) for errand in errands]
        response = await self._asker.find(contact, queries)
        for errand, query, found in zip(errands, queries, response.answers, strict=True):
            await self._take_all(contact, errand, query, found)
        return [[contact_from(one) for one in found.contacts] for found in response.answers]

    async def _take_all(
        self, contact: Contact, errand: Reading, query: Query, found: Found
    ) -> None:
        """What one peer tells of one key, page after page."""
        names: dict[bytes, None] = {}
        copied, cursor = found.copied, found.cursor
        if errand.key:
            most = self._state.families.family_of(errand.key).slots_per_key
            for _page in range(PAGES_PER_KEY):
                names.update(await self._take(contact, errand, found.slots[:most]))
                names.update(dict.fromkeys(prefixes(found.names)[:most]))
                cursor = found.cursor
                if not found.more or copied or len(names) >= most or not cursor:
                    break  # nobody keeps more than that: what would come now is made up
                following = msgspec.structs.replace(query, known=b"", since=cursor)
                found = (await self._asker.find(contact, [following])).answers[0]
                if found.more and found.cursor == cursor:
                    break  # `more`, and then nothing
        told = Told(contact, tuple(names), cursor, whole=not query.since)
        errand.heard(told, copied=copied)

    async def _fetch_missing(self, errands: Sequence[Reading]) -> None:
        """Ask for the slots that were named and that nobody has brought, one peer after the other:
        most of the time the first has all of them."""
        contacts = {
            node_id: told.contact for errand in errands for node_id, told in errand.told.items()
        }
        in_any_order = list(contacts.values())
        self._state.network.random.shuffle(in_any_order)  # or all readers would ask the same
        for contact in in_any_order:
            wanted = []
            for errand in errands:
                told = errand.told.get(contact.node_id)
                missing = errand.missing_at(told) if told is not None else []
                for start in range(0, len(missing), WANTED_PER_QUERY):
                    wanted.append((errand, missing[start : start + WANTED_PER_QUERY]))
            if not wanted:
                continue
            try:
                with trio.move_on_after(self._state.settings.slow_seconds):
                    await self._fetch(contact, wanted)
            except PotluckError as error:
                log.debug("%s did not bring what it had named: %s", contact.peer, error)

    async def _fetch(
        self, contact: Contact, wanted: Sequence[tuple[Reading, Sequence[bytes]]]
    ) -> None:
        """Slots by their names, as many messages as they need."""
        while wanted:
            some: list[tuple[Reading, Sequence[bytes]]] = []
            size = 0
            for errand, names in wanted[:QUERIES_PER_REQUEST]:
                size += 64 + 4 * len(errand.key) + len(names) * PREFIX_BYTES
                if some and size > REQUEST_BYTES:
                    break
                some.append((errand, names))
            queries = [errand.query_for(names) for errand, names in some]
            answers = (await self._asker.find(contact, queries)).answers
            rest, brought = [], 0
            for (errand, names), found in zip(some, answers, strict=True):
                await self._take(contact, errand, found.slots[: len(names)])
                missing = errand.view.missing(names)
                brought += len(names) - len(missing)
                if found.more and missing:
                    rest.append((errand, missing))
            if not brought:
                if sum(len(names) for _, names in some) >= NAMED_IN_VAIN:
                    self._state.table.failed(contact)
                    raise MalformedMessage(f"{contact.peer} names slots that it does not have.")
                rest = []
            wanted = [*rest, *wanted[len(some) :]]

    async def _take(
        self, contact: Contact, errand: Reading, slots: Sequence[Slot]
    ) -> dict[bytes, None]:
        """Check what a peer brought, and take it; the names of what was right."""
        state = self._state
        now_ms = state.now_ms()
        taken: dict[bytes, None] = {}
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
                taken[prefix_of_slot(slot)] = None
        return taken
