"""The slots that this node keeps for the swarm, within limits that nobody can push others over.

`store` takes a slot that is well-formed, signed by its publisher, of a declared family and type,
newer than what is here, and within every limit; anything else is a `SlotRefused` with the reason.
Nothing is ever evicted for a newcomer: what was stored stays until it expires or its publisher
replaces it. (Cached copies are another area, `slot_cache`, which lives by the opposite rule.)

What was replaced cannot come back. A publisher may replace a slot that lives for a day by one
that lives for a minute; after that minute, the old one would still be validly signed. So the
sequence stays here, as a *floor* without a value, until the last slot that it stands against has
expired; it counts for every limit as a slot does.

Easy to get wrong: cheap checks come before dear ones (the signature last), and nothing changes
before all have passed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from protocols.dht.due_index import DueIndex
from protocols.dht.families import Families, Family, check_time, check_value
from protocols.dht.ids import distance, position_of
from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.slot_cache import SlotCache
from protocols.dht.slots import Slot, check_form, supersedes
from protocols.dht.verified import VerifiedSlots

# What keeping one slot costs beside its value: objects, index and hash table entries, rounded up
# from what was measured, so that `total_bytes` is close to the memory really taken.
SLOT_OVERHEAD_BYTES = 1024


@dataclass(frozen=True)
class StorageLimits:
    """How much a node keeps for others."""

    total_bytes: int = 64 << 20
    """Of all slots together, SLOT_OVERHEAD_BYTES each included. About 60,000 small ones."""

    keys_per_publisher: int = 512
    """An expert server announces hundreds; in a swarm of at most 20 nodes all lie on each."""

    cached_bytes: int = 4 << 20
    """Of cached copies together, counted in the same way, beside `total_bytes`."""

    cached_seconds: float = 30.0
    """How long a cached copy lives: long enough to carry a rush, short enough to be nearly true."""


class Stored(enum.Enum):
    """What storing a slot did."""

    NEW = "new"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    """Exactly this slot was here already."""


class _Record:
    """What is kept of one publisher under one key. `slot` is None when only the floor is left."""

    __slots__ = ("forget_at", "key", "publisher", "sequence", "slot")

    def __init__(self, slot: Slot, forget_at: int) -> None:
        self.key = slot.key
        self.publisher = slot.publisher
        self.sequence = slot.sequence
        self.slot: Slot | None = slot
        self.forget_at = forget_at


@dataclass
class _UnderKey:
    position: int
    records: dict[bytes, _Record]


def slot_bytes(slot: Slot) -> int:
    """What a slot counts for against limits of memory."""
    return SLOT_OVERHEAD_BYTES + len(slot.value)


def _record_bytes(record: _Record) -> int:
    return SLOT_OVERHEAD_BYTES if record.slot is None else slot_bytes(record.slot)


class Storage:
    """Invariants: `total_bytes` is the sum over all records; `_keys_of` counts them by publisher;
    every record has its place in the index; no key and no publisher is there without a record.
    """

    def __init__(
        self,
        families: Families,
        limits: StorageLimits | None = None,
        own_id: int = 0,
        verified: VerifiedSlots | None = None,
    ) -> None:
        self.families = families
        self.limits = limits or StorageLimits()
        self.verified = verified if verified is not None else VerifiedSlots()
        self.cache = SlotCache(self.limits.cached_bytes, self.limits.cached_seconds)
        self.total_bytes = 0
        self._own_id = own_id
        self._keys: dict[str, _UnderKey] = {}
        self._keys_of: dict[bytes, int] = {}
        self._index: DueIndex[_Record] = DueIndex()

    def __len__(self) -> int:
        """How many records there are: slots, withdrawn ones, and floors."""
        return len(self._index)

    @property
    def key_count(self) -> int:
        return len(self._keys)

    @property
    def publisher_count(self) -> int:
        return len(self._keys_of)

    def store(self, slot: Slot, now_ms: int) -> Stored:
        """Keep this slot, or raise SlotRefused and change nothing."""
        self.expire(now_ms)
        check_form(slot)
        family = self.families.family_of(slot.key)
        family.check_size(slot.value)
        check_time(family, slot, now_ms)
        under_key = self._keys.get(slot.key)
        record = under_key.records.get(slot.publisher) if under_key else None
        if record is None:
            self._check_room_for_one_more(family, slot, under_key)
        elif record.slot == slot:
            return Stored.UNCHANGED
        else:
            _check_newer(slot, record)
        growth = slot_bytes(slot) - (_record_bytes(record) if record else 0)
        self._check_memory(growth)
        check_value(family, slot)
        self.verified.check(slot)
        self.cache.drop(slot.key, slot.publisher)
        self.total_bytes += growth
        if record is None:
            self._add(slot, under_key)
            return Stored.NEW
        was_there = record.slot is not None
        record.slot = slot
        record.sequence = slot.sequence
        record.forget_at = max(record.forget_at, slot.expires)
        self._index.set(record, slot.expires)
        return Stored.REPLACED if was_there else Stored.NEW

    def cache_copies(self, slots: list[Slot], now_ms: int) -> int:
        """Keep copies of a hot key for a short while; SlotRefused at the first that is not right.

        Each is checked as if it were to be stored. One that is older than what is stored here is
        left out. Returns how many were taken.
        """
        self.expire(now_ms)
        taken = []
        for slot in slots:
            check_form(slot)
            family = self.families.family_of(slot.key)
            check_time(family, slot, now_ms)
            check_value(family, slot)
            self.verified.check(slot)
            record = self._record(slot.key, slot.publisher)
            if record is None or slot.sequence > record.sequence:
                taken.append(slot)
        return sum(self.cache.keep(slot, slot_bytes(slot), now_ms) for slot in taken)

    def get(self, key: str, now_ms: int) -> list[Slot]:
        """The slots under a key, in the order of their publishers' arrival; without cached copies.

        Withdrawn ones are among them: they have to reach replicas that hold older ones.
        """
        under_key = self._keys.get(key)
        if under_key is None:
            return []
        return [
            record.slot
            for record in under_key.records.values()
            if record.slot is not None and record.slot.expires > now_ms
        ]

    def slot_of(self, key: str, publisher: bytes, now_ms: int) -> Slot | None:
        record = self._record(key, publisher)
        if record is None or record.slot is None or record.slot.expires <= now_ms:
            return None
        return record.slot

    def slots(self, now_ms: int) -> Iterator[Slot]:
        """All slots, key by key. Nothing may be stored while this runs."""
        for key in self._keys:
            yield from self.get(key, now_ms)

    def keys_closer_to(self, node_id: int) -> list[str]:
        """The keys that lie closer to another node than to this: what a newcomer should have."""
        return [
            key
            for key, under_key in self._keys.items()
            if distance(under_key.position, node_id) < distance(under_key.position, self._own_id)
        ]

    def expire(self, now_ms: int) -> int:
        """Let go of what is over; how many slots expired."""
        next_due = self._index.next_due()
        if next_due is None or next_due > now_ms:
            return 0
        expired = 0
        for record in self._index.pop_due(now_ms):
            expired += record.slot is not None
            self.total_bytes -= _record_bytes(record)
            record.slot = None
            if record.forget_at > now_ms:
                self.total_bytes += _record_bytes(record)
                self._index.set(record, record.forget_at)
            else:
                self._forget(record)
        return expired

    def next_expiry(self) -> int | None:
        """When `expire` will next have something to do, in milliseconds of swarm time."""
        return self._index.next_due()

    def _record(self, key: str, publisher: bytes) -> _Record | None:
        under_key = self._keys.get(key)
        return under_key.records.get(publisher) if under_key else None

    def _add(self, slot: Slot, under_key: _UnderKey | None) -> None:
        if under_key is None:
            under_key = self._keys[slot.key] = _UnderKey(position_of(slot.key), {})
        record = _Record(slot, slot.expires)
        under_key.records[slot.publisher] = record
        self._keys_of[slot.publisher] = self._keys_of.get(slot.publisher, 0) + 1
        self._index.set(record, slot.expires)

    def _forget(self, record: _Record) -> None:
        records = self._keys[record.key].records
        del records[record.publisher]
        if not records:
            del self._keys[record.key]
        self._keys_of[record.publisher] -= 1
        if not self._keys_of[record.publisher]:
            del self._keys_of[record.publisher]

    def _check_room_for_one_more(
        self, family: Family, slot: Slot, under_key: _UnderKey | None
    ) -> None:
        if under_key and len(under_key.records) >= family.slots_per_key:
            raise SlotRefused(
                SlotRefusal.SLOTS_PER_KEY,
                f"{len(under_key.records)} publishers have slots under {slot.key!r} already.",
                why=f"The family {family.name} allows {family.slots_per_key} under one key.",
                advice="Wait until some have expired, or spread over several keys.",
            )
        if self._keys_of.get(slot.publisher, 0) >= self.limits.keys_per_publisher:
            raise SlotRefused(
                SlotRefusal.KEYS_PER_PUBLISHER,
                f"{slot.publisher_peer} has {self.limits.keys_per_publisher} slots here already.",
                why="A node keeps no more for one publisher.",
                advice="Put several things into one value, or wait until some have expired.",
            )

    def _check_memory(self, growth: int) -> None:
        if self.total_bytes + growth > self.limits.total_bytes:
            raise SlotRefused(
                SlotRefusal.MEMORY,
                f"This node keeps {self.total_bytes:,} bytes of slots.",
                why=f"It allows itself {self.limits.total_bytes:,}.",
                advice="Other nodes may have room; this one will as slots expire.",
            )


def _check_newer(slot: Slot, record: _Record) -> None:
    if record.slot is None:
        is_newer = slot.sequence > record.sequence
    else:
        is_newer = supersedes(slot, record.slot)
    if not is_newer:
        raise SlotRefused(
            SlotRefusal.OLDER_SEQUENCE,
            f"Sequence {slot.sequence} of {slot.publisher_peer} under {slot.key!r} is not new.",
            why=f"Sequence {record.sequence} is here, or was.",
            advice="If it is your own: another node runs with your key, or your clock went back.",
        )
