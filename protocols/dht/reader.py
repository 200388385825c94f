"""Reading keys: ask the replicas, merge their slots, and repair replicas that were behind.

A full read asks all k replicas. The first few are asked for their slots, the others only for the
names of theirs; missing slots are then asked for by name. A reader that accepts slightly old slots
takes the newest of the first few replicas. Either way a slot with the newest sequence of its
publisher wins, from whichever replica, because it is signed. A replica that had less is sent what
it lacked (below).

A reader that reads a key repeatedly *looks*: it remembers the slots that it has read (below), and
asks a few of the known replicas only for changes. In addition, a full read, the *survey*, now and
then finds the replicas again and compares everything.

A withdrawn slot is read, merged and repaired like any other, and only hidden from the caller.
Otherwise an older replica would bring the withdrawn value back.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import trio

from auth.bounded_map import BoundedMap
from protocols.dht.contacts import Contact
from protocols.dht.ids import ID_BYTES, position_of
from protocols.dht.lookup import Lookup
from protocols.dht.messages import (
    CONTACTS_PER_ANSWER,
    KNOWN_PER_QUERY,
    PREFIX_BYTES,
    PROTOCOL,
    QUERIES_PER_REQUEST,
    WANTED_PER_QUERY,
    Found,
    Query,
    contact_from,
    prefix_of_id,
    prefix_of_slot,
    prefixes,
)
from protocols.dht.publisher import batches
from protocols.dht.requester import Requester
from protocols.dht.slots import Slot, SlotRefusal, SlotRefused, supersedes
from protocols.dht.state import DhtState, is_dishonest, log
from protocols.dht.storage import slot_bytes
from protocols.dht.walk import (
    OPERATIONS_PER_CHECKPOINT,
    MessageLimits,
    Operation,
    Walk,
    knows_well,
    lookup_from,
    own_radius,
    seeds_for,
)
from protocols.errors import MalformedMessage, PotluckError
from protocols.identity import PeerId

# Each has SLOT_BYTES_PER_ANSWER, at least half full: enough for the most that a family may allow
# under one key.
PAGES_PER_KEY = 64

CATCH_UP_SECONDS = 20.0  # for each peer; an answer of 64 KiB takes so long at 26 kbit/s

SLOTS_PER_CHECKPOINT = 8  # a millisecond of signatures; an answer can have thousands of slots

# A slot may be replaced between being named and being asked for; so may two or three. A peer that
# has none of this many is making names up.
NAMES_TO_BLAME = 8


class Breadth(enum.Enum):
    """Which replicas a look asks."""

    FEW = "few"
    """Two, chosen at random and changed every few seconds: one of those that a writer waits for,
    and one of all. A node that is a replica itself asks only the first.
    """

    FIRST = "first"
    """Enough for a writer: finds every slot that was written before the look began."""

    ALL = "all"


@dataclass(frozen=True)
class SlotEntry:
    """One publisher's value under a key. `expires` is in milliseconds of swarm time."""

    publisher: PeerId
    value: Any
    expires: int
    sequence: int


class SlotReader:
    """Finds slots under keys, and the peers closest to positions."""

    def __init__(self, state: DhtState, requester: Requester) -> None:
        self._state = state
        self._requester = requester
        self._repairs = Repairs(state, requester)
        self._views = Views()

    async def closest(self, targets: Sequence[int], k: int | None = None) -> list[list[Contact]]:
        """The live peers closest to each of these positions, by lookups that share messages."""
        operations = [FullRead(self._state, target, k=k) for target in targets]
        await Walk(self._state, operations, self.ask, MESSAGE_LIMITS).run()
        return [operation.lookup.closest_answered() for operation in operations]

    async def read(self, keys: Sequence[str], *, latest_enough: bool) -> dict[str, list[Slot]]:
        """The slots under each key, with withdrawn ones."""
        state = self._state
        for key in keys:
            state.families.family_of(key)
        state.counts.gets += len(keys)
        replicas_wanted = state.settings.enough_replicas if latest_enough else 0
        operations = []
        radius = own_radius(state)
        keys = list(dict.fromkeys(keys))
        room = ReadRoom(len(keys))
        for place, key in enumerate(keys):
            if place and place % OPERATIONS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            # Many keys are read once; a single key may be read again.
            most = state.families.family_of(key).slots_per_key
            view = self._views.of(key, most) if len(keys) == 1 else View(most, room)
            view.expire(state.now_ms())
            target = position_of(key)
            operation = FullRead(
                state, target, key, view=view, replicas_wanted=replicas_wanted, radius=radius
            )
            operation.take_own(state.storage.get(key, state.now_ms()))
            for slot in self._published(key):
                operation.take(slot)
            operations.append(operation)
        await Walk(state, operations, self.ask, MESSAGE_LIMITS).run()
        await self._fetch_missing(operations)
        found = {}
        for place, operation in enumerate(operations):
            if place and place % OPERATIONS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            operation.end()
            if not latest_enough:
                operation.view.surveyed(operation.lookup.closest_answered(), trio.current_time())
            await self._repairs.repair(operation)
            found[operation.key] = self._in(operation.view)
        return found

    async def look(self, key: str, breadth: Breadth) -> list[Slot]:
        """The slots under a key that is read repeatedly: see the module."""
        state, now = self._state, trio.current_time()
        view = self._views.of(key, self._state.families.family_of(key).slots_per_key)
        target = position_of(key)
        view.expire(state.now_ms())
        replicas = self._replicas(key, view, target)
        unsurveyed = view.unsurveyed_among(replicas)
        if not replicas or view.is_blank or 2 * unsurveyed > len(replicas):
            # either nothing was ever found, or the swarm is still forming and no two replicas hold
            # the same
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
        operation = NewsRead(target, key, view, order, enough, source)
        await Walk(state, [operation], self.ask, MESSAGE_LIMITS).run()
        for contact in (*operation.lookup.failed_ones, *operation.lookup.slow_ones.values()):
            view.failed(contact)
        if not operation.lookup.answers and not is_replica:
            return (await self.read([key], latest_enough=False))[key]
        self._take_own(key, target, view)  # slots that have arrived meanwhile need no fetch
        await self._fetch_missing([operation])
        operation.end()
        if not view.slots:  # or those that were its replicas are none now
            return (await self.read([key], latest_enough=False))[key]
        if view.wants_survey(unsurveyed > 0, now, state.network.random):
            state.chore(self._survey, key)
        return self._in(view)

    def own(self, key: str) -> list[Slot]:
        """The slots that this node itself has under a key, as a replica and as a publisher."""
        return [*self._state.storage.get(key, self._state.now_ms()), *self._published(key)]

    async def _survey(self, key: str) -> None:
        try:
            await self.read([key], latest_enough=False)
        except PotluckError as error:
            log.debug("the replicas of %s could not be compared: %s", key, error)

    def _replicas(self, key: str, view: View, target: int) -> list[Contact]:
        """The replicas of a key, closest first: those that the last survey found, and peers in the
        table that are closer."""
        state = self._state
        wanted = state.replicas_of(key)
        near = state.table.closest(target, wanted)
        if not (view.replicas or knows_well(state, target, own_radius(state))):
            return []
        known = {one.node_id: one for one in (*view.replicas, *near)}
        return [known[node_id] for node_id in sorted(known, key=target.__xor__)[:wanted]]

    def _take_own(self, key: str, target: int, view: View) -> bool:
        """Take what this node stores itself; return whether it is a replica of the key."""
        state = self._state
        for slot in self._published(key):
            view.take(slot)
        for slot in state.storage.since(key, view.own_change, state.now_ms()):
            view.take(slot)
        view.own_change = state.storage.changes
        return state.is_replica_of(key, target)

    def _in(self, view: View) -> list[Slot]:
        """Those that count now. A publisher may have been revoked since its slot was read."""
        now_ms, may_publish = self._state.now_ms(), self._state.may_publish
        return [
            slot
            for slot in view.slots.values()
            if slot.expires > now_ms and may_publish(slot.publisher)
        ]

    def _published(self, key: str) -> list[Slot]:
        published = self._state.publisher.slot_of(key)
        if published is None or published.expires <= self._state.now_ms():
            return []
        return [published]

    async def ask(
        self, contact: Contact, operations: Sequence[SlotRead]
    ) -> Sequence[Iterable[Contact]]:
        """Send one message for all these operations; see `walk.Ask`."""
        queries = [operation.query(contact) for operation in operations]
        response = await self._requester.find(contact, queries)
        for operation, query, found in zip(operations, queries, response.answers, strict=True):
            await self._take_all(contact, operation, query, found)
        return [[contact_from(one) for one in found.contacts] for found in response.answers]

    async def _take_all(
        self, contact: Contact, operation: SlotRead, query: Query, found: Found
    ) -> None:
        """Take all slots that one peer has under one key, page after page."""
        names: dict[bytes, None] = {}
        copied, cursor = found.copied, found.cursor
        if operation.key:
            most = self._state.families.family_of(operation.key).slots_per_key
            for _page in range(PAGES_PER_KEY):
                names.update(await self._take(contact, operation, found.slots[:most]))
                names.update(dict.fromkeys(prefixes(found.names)[:most]))
                cursor = found.cursor
                if not found.more or copied or len(names) >= most or not cursor:
                    break  # no node keeps more under a key: the rest would be made up
                following = msgspec.structs.replace(query, known=b"", since=cursor)
                found = (await self._requester.find(contact, [following])).answers[0]
                if found.more and found.cursor == cursor:
                    break  # it promised more and sent nothing
        reply = ReplicaReply(contact, tuple(names), cursor, whole=not query.since)
        operation.heard(reply, copied=copied)

    async def _fetch_missing(self, operations: Sequence[SlotRead]) -> None:
        """Ask for slots that were named and not sent, one peer after the other.

        Mostly the first peer has all of them. If nobody sends in time what one key needs, our own
        line may be the slow one, and would be so the next time, too: then they are fetched in the
        background, in more time, for the next look.
        """
        if any(operation.view.catching_up for operation in operations):
            return
        contacts = {
            node_id: reply.contact
            for operation in operations
            for node_id, reply in operation.replies.items()
        }
        in_any_order = list(contacts.values())
        self._state.network.random.shuffle(in_any_order)  # else all readers ask the same one
        slow: list[Contact] = []
        some_were_quick = False
        for contact in in_any_order:
            wanted = _wanted_from(contact, operations)
            if not wanted:
                continue
            try:
                with trio.move_on_after(self._state.settings.slow_seconds) as patience:
                    await self._fetch_from(contact, wanted, operations)
                if patience.cancelled_caught:
                    slow.append(contact)
                else:
                    some_were_quick = True
            except PotluckError as error:
                _could_not_send(contact, operations, error)
        if slow and not some_were_quick and len(operations) == 1:
            view = operations[0].view
            view.catching_up = self._state.chore(self._catch_up, slow, operations[0])
            return
        for contact in slow:
            for operation in operations:
                operation.view.failed(contact)

    async def _catch_up(self, contacts: Sequence[Contact], operation: SlotRead) -> None:
        try:
            for contact in contacts:
                wanted = _wanted_from(contact, [operation])
                if not wanted:
                    return
                try:
                    with trio.move_on_after(CATCH_UP_SECONDS) as patience:
                        await self._fetch(contact, wanted)
                    if patience.cancelled_caught:
                        operation.view.failed(contact)
                except PotluckError as error:
                    _could_not_send(contact, [operation], error)
        finally:
            operation.view.catching_up = False

    async def _fetch_from(
        self, contact: Contact, wanted: Wanted, operations: Sequence[SlotRead]
    ) -> None:
        await self._fetch(contact, wanted)
        await self._fetch_replaced(contact, operations)

    async def _fetch(self, contact: Contact, wanted: Wanted) -> None:
        """Fetch slots by their names, in as many messages as necessary."""
        while wanted:
            some: list[tuple[SlotRead, Sequence[bytes]]] = []
            size = 0
            for operation, names in wanted[:QUERIES_PER_REQUEST]:
                size += 64 + 4 * len(operation.key) + len(names) * PREFIX_BYTES
                if some and size > REQUEST_BYTES:
                    break
                some.append((operation, names))
            queries = [operation.query_for(names) for operation, names in some]
            answers = (await self._requester.find(contact, queries)).answers
            rest, brought = [], 0
            for (operation, names), found in zip(some, answers, strict=True):
                await self._take(contact, operation, found.slots[: len(names)])
                missing = operation.view.missing(names, contact)
                brought += len(names) - len(missing)
                if found.more and missing:
                    rest.append((operation, missing))
            if not brought:
                if sum(len(names) for _, names in some) >= NAMES_TO_BLAME:
                    self._state.table.failed(contact)
                    raise MalformedMessage(f"{contact.peer} names slots that it does not have.")
                rest = []
            wanted = [*rest, *wanted[len(some) :]]

    async def _fetch_replaced(self, contact: Contact, operations: Sequence[SlotRead]) -> None:
        """Fetch the slots that have taken the place of named ones before those were asked for.

        They came to the peer after the end of its answer. Without them a reader would miss a
        publisher that happens to write at this moment.
        """
        replaced = []
        for operation in operations:
            reply = operation.replies.get(contact.node_id)
            if reply is not None and reply.cursor and operation.missing_at(reply):
                replaced.append((operation, operation.query_since(reply.cursor)))
        for start in range(0, len(replaced), QUERIES_PER_REQUEST):
            some = replaced[start : start + QUERIES_PER_REQUEST]
            response = await self._requester.find(contact, [query for _, query in some])
            for (operation, _), found in zip(some, response.answers, strict=True):
                most = self._state.families.family_of(operation.key).slots_per_key
                await self._take(contact, operation, found.slots[:most])

    async def _take(
        self, contact: Contact, operation: SlotRead, slots: Sequence[Slot]
    ) -> dict[bytes, None]:
        """Check and take the slots that a peer sent; return the names of the valid ones, and of
        those of strangers, which another peer may vouch for."""
        state = self._state
        taken: dict[bytes, None] = {}
        without = await self._have_vouched(contact, slots)
        now_ms = state.now_ms()
        for place, slot in enumerate(slots):
            if place and place % SLOTS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            if not state.may_publish(slot.publisher):
                state.counts.strangers_slots_read += 1
                taken[prefix_of_slot(slot)] = None
                if slot.publisher in without:
                    operation.view.pass_over(contact, slot)
                continue
            try:
                state.check(slot, now_ms)
                if slot.key != operation.key:
                    raise SlotRefused(SlotRefusal.MALFORMED, "This key was not asked for.")
            except SlotRefused as refused:
                state.counts.bad_slots_read += 1
                if is_dishonest(refused):
                    state.table.failed(contact)
                    error = MalformedMessage(f"{contact.peer} sent a forged slot: {refused}")
                    state.rpc.blame(contact.peer, PROTOCOL, error)
                    raise error from None
            else:
                operation.take(slot)
                taken[prefix_of_slot(slot)] = None
        return taken

    async def _have_vouched(self, contact: Contact, slots: Sequence[Slot]) -> Collection[bytes]:
        """Ask a peer to show that strangers of whom it has sent slots may take part. Returns those
        for whom it has answered that it cannot."""
        publishers = sorted({one.publisher for one in slots})
        strangers = [one for one in publishers if not self._state.may_publish(one)]
        if not strangers:
            return ()
        try:
            return frozenset(await self._requester.vouch(contact, strangers))
        except PotluckError as error:
            log.debug("%s vouches for nobody: %s", contact.peer, error)
            return ()


# A node's memory of a key that it reads repeatedly. Pure: no I/O.
#
#     view = views.of(key)
#     view.take(slot)                                  # it has been checked
#     view.turn(replicas, 5, now, chance)              # the order in which to ask the replicas
#     view.missing(names, contact)                     # of what a replica has named
#
# Reading a key again should cost only what has changed under it. So a view keeps the slots that
# were read and, for each replica, the cursor up to which its changes are known. A look asks two
# replicas of the key. The *source* sends the slots that it got since the last look; the *witness*
# only names them. The source is one of those that writers wait for, so a look finds what was
# written before it. The other replicas get a slot later, and one at the edge, which not every
# writer takes for a replica, may never get it. The witness is any replica. Each reader chooses both
# at random, so the replicas of a popular key share the work. Both are chosen again every
# `TURN_SECONDS`: two that hide a slot together do so for one turn, and one alone cannot hide any.
#
# A cursor may only advance when every slot up to it has been received. A slot that a replica has
# named and no replica has sent is named again at the next look.


TURN_SECONDS = 5.0
"""Two turns are shorter than the silence after which a slot's publisher is missed."""

SURVEY_SECONDS = 30.0
"""For how long the replicas that a survey found count as the key's replicas."""

VIEWS_KEPT = 16
"""A family allows at most 4 MiB under a key; a run has a handful of keys that are read often."""

FULL_REPLICAS = 4  # a view has as many slots as so many full replicas that differ in all of them

OLD_NAMES_KEPT = 4096
"""Kept beside the names of a view's slots.

So a replica that is behind does not send slots that were replaced long ago. Half a megabyte, for
the key that changes most.
"""


READ_BYTES = 64 << 20
"""Of the slots of one reading of many keys, counted as in storage.py: as much as a node stores."""


class ReadRoom:
    """The memory for one reading of many keys. When `READ_BYTES` are taken, a key gets no more than
    its equal share: one that somebody has filled takes nothing from the others."""

    def __init__(self, keys: int) -> None:
        self._share_bytes = READ_BYTES // max(1, keys)
        self._taken_bytes = 0

    def take(self, growth: int, of_key: int) -> bool:
        """Take so many bytes more for a key that has so many, if there is room."""
        is_full = self._taken_bytes + growth > READ_BYTES
        if growth > 0 and is_full and of_key + growth > self._share_bytes:
            return False
        self._taken_bytes += growth
        return True


class View:
    """Invariants: `slots` has the newest slot of each known publisher, all of them checked;
    `_names` has all their names. They are no more than a few replicas have, each with `most`, and
    than there is `room` for.
    """

    def __init__(self, most: int, room: ReadRoom | None = None) -> None:
        self._most = FULL_REPLICAS * most
        self._room, self._bytes = room, 0
        self.slots: dict[bytes, Slot] = {}
        self.cursors: dict[int, bytes] = {}
        """By each replica's node id."""
        self.own_change = 0
        """How far this node's own storage was read, if it is a replica itself."""
        self._surveyed: dict[int, Contact] = {}
        self._failed: set[int] = set()
        """Replicas that have failed or were slow since the last survey."""
        self._surveyed_at = float("-inf")
        self._names: set[bytes] = set()
        self._unvouched: set[tuple[int, bytes]] = set()
        """Replicas, with slots of publishers for whom they cannot vouch."""
        self._source: int | None = None
        self._witness: int | None = None
        self._source_is_new = True
        self._turn_ends = float("-inf")
        self.catching_up = False
        """Whether slots that were named are being fetched in the background."""

    @property
    def is_blank(self) -> bool:
        """Whether no slot was ever found. One whose slots have all expired is not blank: a key that
        is read more rarely than its slots live would be searched for at each look.
        """
        return not self._names

    @property
    def bringing_source(self) -> int | None:
        """The source, unless it is asked for the first time in its turn.

        The first time it only names its slots. Otherwise it would send again all that has changed
        since it was last asked, long ago.
        """
        return None if self._source_is_new else self._source

    def take(self, slot: Slot) -> None:
        held = self.slots.get(slot.publisher)
        if held is None and len(self.slots) >= self._most:
            return
        if (held is None or supersedes(slot, held)) and self._has_room(slot, held):
            self.slots[slot.publisher] = slot
        self._names.add(prefix_of_slot(slot))
        if len(self._names) > len(self.slots) + OLD_NAMES_KEPT:
            self._names = set(map(prefix_of_slot, self.slots.values()))

    def _has_room(self, slot: Slot, held: Slot | None) -> bool:
        if self._room is None:
            return True
        growth = slot_bytes(slot) - (slot_bytes(held) if held else 0)
        if not self._room.take(growth, self._bytes):
            return False
        self._bytes += growth
        return True

    def pass_over(self, contact: Contact, slot: Slot) -> None:
        """This replica cannot show that the publisher may take part: do not ask it for this slot
        again before the next survey. Others are asked."""
        if len(self._unvouched) >= OLD_NAMES_KEPT:
            self._unvouched.clear()
        self._unvouched.add((contact.node_id, prefix_of_slot(slot)))

    def expire(self, now_ms: int) -> None:
        for publisher in [one.publisher for one in self.slots.values() if one.expires <= now_ms]:
            del self.slots[publisher]

    def missing(self, names: Iterable[bytes], contact: Contact) -> list[bytes]:
        """The names of slots that this node has never had, and may have from this replica."""
        passed = self._unvouched
        return [
            name
            for name in names
            if name not in self._names and not (passed and (contact.node_id, name) in passed)
        ]

    def surveyed(self, replicas: Sequence[Contact], now: float) -> None:
        """A survey has found these replicas."""
        self._surveyed, self._surveyed_at = {one.node_id: one for one in replicas}, now
        self._failed = set()
        self._unvouched.clear()
        self.cursors = {one: at for one, at in self.cursors.items() if one in self._surveyed}

    @property
    def replicas(self) -> list[Contact]:
        """Those of the last survey that have not failed since."""
        return [one for node_id, one in self._surveyed.items() if node_id not in self._failed]

    def unsurveyed_among(self, replicas: Iterable[Contact]) -> int:
        """How many of these replicas the last survey did not reach."""
        return sum(one.node_id not in self._surveyed for one in replicas)

    def wants_survey(self, has_unsurveyed: bool, now: float, chance: Random) -> bool:
        """Whether to begin the next survey now; if so, it counts as begun.

        The time is random, so that the readers of a key do not all survey at once.
        """
        seconds = TURN_SECONDS if has_unsurveyed else SURVEY_SECONDS
        if now - self._surveyed_at < seconds * (0.75 + 0.5 * chance.random()):
            return False
        self._surveyed_at = now
        return True

    def turn(
        self, replicas: Sequence[Contact], first: int, now: float, chance: Random
    ) -> list[Contact]:
        """The order in which to ask these replicas, which come closest first.

        First the source, which is among the first `first` replicas, then the witness, then others.
        """
        if now >= self._turn_ends:
            self._turn_ends = now + TURN_SECONDS * (0.75 + 0.5 * chance.random())
            self._source = self._witness = None
        source = next((one for one in replicas if one.node_id == self._source), None)
        self._source_is_new = source is None
        if source is None:
            source = chance.choice(replicas[:first])
            self._source = source.node_id
        others = [one for one in replicas if one is not source]
        chance.shuffle(others)
        if others and all(one.node_id != self._witness for one in others):
            self._witness = others[0].node_id
        others.sort(key=lambda one: one.node_id != self._witness)
        return [source, *others]

    def failed(self, contact: Contact) -> None:
        """This replica failed or did not answer in time: others take its turn."""
        if contact.node_id == self._source:
            self._source = None
        if contact.node_id == self._witness:
            self._witness = None
        self._failed.add(contact.node_id)


class Views:
    """The views of the keys that were read last. Invariant: at most `VIEWS_KEPT`."""

    def __init__(self) -> None:
        self._views = BoundedMap[str, View](VIEWS_KEPT)

    def of(self, key: str, most: int) -> View:
        """The view of this key; a new one, of so many slots at most, if there is none."""
        view = self._views[key] = self._views.get(key) or View(most)
        return view


class ReplicaQueue:
    """The replicas that one look asks: `enough` of them, in this order.

    For each one that fails or is slow, the next is asked. Invariant: each is in `_waiting`, `_open`
    or `slow_ones`, or has answered or failed.
    """

    def __init__(self, order: Iterable[Contact], enough: int) -> None:
        self._waiting = deque(order)
        self._open: set[int] = set()
        self._enough = enough
        self.answers = 0
        self.slow_ones: dict[int, Contact] = {}
        self.failed_ones: list[Contact] = []

    def next_queries(self) -> list[Contact]:
        chosen = []
        while self._waiting and self.answers + len(self._open) < self._enough:
            contact = self._waiting.popleft()
            self._open.add(contact.node_id)
            chosen.append(contact)
        return chosen

    def answered(self, contact: Contact, _closer: Iterable[Contact]) -> None:
        self._leave(contact)
        self.answers += 1

    def failed(self, contact: Contact) -> None:
        self._leave(contact)
        self.failed_ones.append(contact)

    def slow(self, contact: Contact) -> None:
        if contact.node_id in self._open:
            self._leave(contact)
            self.slow_ones[contact.node_id] = contact

    @property
    def is_done(self) -> bool:
        if self.answers >= self._enough:
            return True
        return not (self._waiting or self._open or self.slow_ones)

    @property
    def waits_for_slow_only(self) -> bool:
        return bool(self.slow_ones and self.answers) and not (self._waiting or self._open)

    def _leave(self, contact: Contact) -> None:
        self._open.discard(contact.node_id)
        self.slow_ones.pop(contact.node_id, None)


# One read: the peers that it has heard, what they have, and whether that is enough.
#
# `FullRead` finds the replicas of a key by a lookup. It asks the first few for slots, and the
# others only for names. A reader may stop as soon as a few replicas have answered. `NewsRead` asks
# some known replicas for what is new.
#
# The caller of `take` must have checked the slot. A name from a replica is only a claim.


REQUEST_BYTES = 64 << 10  # of queries in one message: half of the limit


@dataclass(frozen=True)
class ReplicaReply:
    """A replica's answer about a key: the names of its slots, and its cursor.

    All its slots if it is `whole`, else those since it was last asked.
    """

    contact: Contact
    names: Sequence[bytes]
    cursor: bytes
    whole: bool


class SlotRead(Operation):
    """An operation that reads a key, and takes the slots into a view."""

    def __init__(self, lookup: Lookup | ReplicaQueue, target: int, key: str, view: View) -> None:
        super().__init__(lookup)
        self.target = target
        self.key = key
        self.view = view
        self.replies: dict[int, ReplicaReply] = {}
        """By the node id of each replica that answered, without copies."""
        self._known: list[bytes] = []

    def query(self, contact: Contact) -> Query:
        """The first query for this peer."""
        raise NotImplementedError

    def query_for(self, names: Sequence[bytes]) -> Query:
        """The query for slots that were named."""
        position = self.target.to_bytes(ID_BYTES, "big")
        return Query(position, self.key, wanted=b"".join(names), contacts=0, packs=True)

    def query_since(self, cursor: bytes) -> Query:
        """The query for the slots that came to a peer after it gave this cursor."""
        return self._query(cursor, named=False)

    @property
    def contacts_wanted(self) -> int:
        """How many of the peers in an answer are of use at most."""
        return 0

    def take(self, slot: Slot) -> None:
        self.view.take(slot)

    def heard(self, reply: ReplicaReply, *, copied: bool) -> None:
        """A peer has said which slots it has under the key."""
        if not copied:
            self.replies[reply.contact.node_id] = reply

    def missing_at(self, reply: ReplicaReply) -> list[bytes]:
        """The slots that this replica has named and no replica has sent."""
        return self.view.missing(reply.names, reply.contact)

    def end(self) -> None:
        """Store the cursors of the replicas whose slots are all here."""
        for node_id, reply in self.replies.items():
            if reply.cursor and not self.missing_at(reply):
                self.view.cursors[node_id] = reply.cursor

    def _query(self, since: bytes = b"", *, named: bool, copies: bool = False) -> Query:
        return Query(
            self.target.to_bytes(ID_BYTES, "big"),
            self.key,
            b"" if since else b"".join(self._known[-KNOWN_PER_QUERY:]),
            since,
            named=named,
            copies=copies,
            contacts=self.contacts_wanted,
            packs=True,
        )


class FullRead(SlotRead):
    """Finds the peers closest to a position and, with a key, its slots."""

    lookup: Lookup

    def __init__(
        self,
        state: DhtState,
        target: int,
        key: str = "",
        *,
        view: View | None = None,
        replicas_wanted: int = 0,
        k: int | None = None,
        radius: int | None = None,
    ) -> None:
        k = state.replicas_of(key) if k is None else k
        seeds = seeds_for(state, target, k)
        super().__init__(lookup_from(state, target, seeds, k), target, key, view or View(0))
        self.is_near = knows_well(state, target, own_radius(state) if radius is None else radius)
        self._replicas_wanted = replicas_wanted
        self._replicas_heard = 0
        self._has_copies = False
        self._known = [prefix_of_id(one.node_id) for one in seeds]

    @property
    def is_done(self) -> bool:
        return self.has_enough or self.lookup.is_done

    @property
    def has_enough(self) -> bool:
        """Whether enough replicas have answered for this reader."""
        return 0 < self._replicas_wanted <= self._replicas_heard

    @property
    def contacts_wanted(self) -> int:
        return min(self.lookup.k, CONTACTS_PER_ANSWER)

    def query(self, contact: Contact) -> Query:
        # Copies are for a reader that will not ask all replicas, and wants new slots at once. A
        # reader that compares all replicas gets names first, which costs one more round trip.
        if self._replicas_wanted:
            since = self.view.cursors.get(contact.node_id, b"")
            return self._query(since, named=bool(self.view.slots and not since), copies=True)
        return self._query(named=bool(self.view.slots))

    def take_own(self, slots: Sequence[Slot]) -> None:
        """Add the slots that this node itself has as a replica."""
        for slot in slots:
            self.take(slot)
        if slots:
            self._replicas_heard += 1
        if self._replicas_wanted:
            self.lookup.alpha = max(1, self._replicas_wanted - self._replicas_heard)

    def heard(self, reply: ReplicaReply, *, copied: bool) -> None:
        """Take a peer's answer, as above.

        All copies together count as one replica. The peer that sent them may have left some out,
        and so may any other on the way.
        """
        super().heard(reply, copied=copied)
        contact = reply.contact
        holds_some = (
            bool(reply.names) or not reply.whole
        )  # if not whole, we have what it had before
        self._replicas_heard += holds_some and not (copied and self._has_copies)
        self._has_copies |= copied
        prefix = prefix_of_id(contact.node_id)
        if prefix not in self._known:
            self._known.append(prefix)
        if self._replicas_wanted and holds_some:
            # each replica that has it leaves one fewer to ask
            self.lookup.alpha = max(1, self._replicas_wanted - self._replicas_heard)
        elif self.is_near or holds_some:
            # we should have it ourselves: ask all of them at once
            self.lookup.alpha = self.lookup.k


class NewsRead(SlotRead):
    """Asks some of `replicas` for the slots that are new since they were last asked.

    Only the `source` sends slots; the others name them.
    """

    lookup: ReplicaQueue

    def __init__(
        self,
        target: int,
        key: str,
        view: View,
        replicas: Sequence[Contact],
        enough: int,
        source: int | None,
    ) -> None:
        super().__init__(ReplicaQueue(replicas, enough), target, key, view)
        self._known = [prefix_of_id(one.node_id) for one in replicas]
        self._source = source

    def query(self, contact: Contact) -> Query:
        since = self.view.cursors.get(contact.node_id, b"")
        brings = bool(since) and contact.node_id == self._source
        return self._query(since, named=not brings)


Wanted = Sequence[tuple[SlotRead, Sequence[bytes]]]
"""Operations, with names of slots; one may come several times."""


def _wanted_from(contact: Contact, operations: Sequence[SlotRead]) -> Wanted:
    """What this peer has named and nobody has sent."""
    wanted = []
    for operation in operations:
        reply = operation.replies.get(contact.node_id)
        missing = operation.missing_at(reply) if reply is not None else []
        for start in range(0, len(missing), WANTED_PER_QUERY):
            wanted.append((operation, missing[start : start + WANTED_PER_QUERY]))
    return wanted


def _could_not_send(contact: Contact, operations: Sequence[SlotRead], error: PotluckError) -> None:
    log.debug("%s did not send slots that it had named: %s", contact.peer, error)
    for operation in operations:
        operation.view.failed(contact)


def _query_bytes(operation: SlotRead) -> int:
    return 128 + len(operation.key) * 4 + KNOWN_PER_QUERY * PREFIX_BYTES


MESSAGE_LIMITS = MessageLimits(QUERIES_PER_REQUEST, REQUEST_BYTES, _query_bytes)


# After a read: repair replicas that were behind, and copy popular keys.
#
# A node that has read a key knows which replicas have less than others, and sends them what they
# lack. If it is a replica itself, it stores what it has read. If it took several steps to find a
# key, the key is copied for a short while to the last peer on the way that did not have it. So a
# rush for one key is answered before it reaches the replicas.
#
# No caller waits for this. A replica may refuse a slot again and again, so a refused slot is not
# sent after the next read.


# A younger slot may still be on its way from its writer. (The sequence is the time of writing,
# unless its publisher writes more than once a millisecond.)
WRITE_IN_PROGRESS_MS = 5000

SENT_REMEMBERED = 4096
COPIES_SPREAD = 32  # of a key with more publishers; a few copies are enough
SLOTS_KEPT_PER_CHECKPOINT = 128  # already verified; a millisecond


class Repairs:
    """Sends missing slots in the background."""

    def __init__(self, state: DhtState, requester: Requester) -> None:
        self._state = state
        self._requester = requester
        self._sent = BoundedMap[tuple[int, bytes], None](SENT_REMEMBERED)
        """Slots that a replica was sent, so that not every read sends again what it refuses, or
        takes and does not keep."""

    async def repair(self, operation: FullRead) -> None:
        """Send replicas the slots that this read has shown them to lack."""
        slots = tuple(operation.view.slots.values())
        if not slots:
            return
        await self._keep_as_replica(operation, slots)
        state = self._state
        settled_ms = state.now_ms() - WRITE_IN_PROGRESS_MS
        settled = {prefix_of_slot(one): one for one in slots if one.sequence < settled_ms}
        for replica in operation.lookup.closest_answered():
            reply = operation.replies.get(replica.node_id)
            if reply is None or not reply.whole:
                continue
            behind = [
                settled[name]
                for name in settled.keys() - reply.names
                if (replica.node_id, name) not in self._sent
            ]
            if behind and (operation.is_near or operation.lookup.is_done):
                state.chore(self._send_missing, replica, behind)
        if not operation.is_near and operation.has_enough:
            self._copy_to_last_on_path(operation, slots)

    async def _keep_as_replica(self, operation: FullRead, slots: Sequence[Slot]) -> None:
        state = self._state
        if not state.is_replica_of(operation.key, operation.target):
            return
        for place, slot in enumerate(slots):
            if place and place % SLOTS_KEPT_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            with suppress(SlotRefused):  # nobody asked us to keep it, so nobody is told
                state.keep(slot)

    async def _send_missing(self, contact: Contact, slots: list[Slot]) -> None:
        for batch in batches([(slot, (contact.peer,)) for slot in slots]):
            response = await self._requester.store(contact, batch.slots)
            for slot, refusal in zip(batch.slots, response.refusals, strict=True):
                self._sent[contact.node_id, prefix_of_slot(slot)] = None
                self._state.counts.slots_repaired += not refusal

    def _copy_to_last_on_path(self, operation: FullRead, slots: Sequence[Slot]) -> None:
        for contact in operation.lookup.closest_answered(len(operation.replies)):
            reply = operation.replies.get(contact.node_id)
            if reply is not None and not reply.names:
                self._state.chore(self._copy, contact, slots[:COPIES_SPREAD])
                return

    async def _copy(self, contact: Contact, slots: Sequence[Slot]) -> None:
        """Send copies in one message, as many as fit: they need not be complete."""
        batch = next(batches([(slot, (contact.peer,)) for slot in slots]))
        await self._requester.store(contact, batch.slots, copies=True)
        self._state.counts.copies_spread += len(batch.slots)
