"""The slots that this node keeps for the swarm, within limits that nobody can push others over.

`store` takes a slot that is well-formed, signed by its publisher, of a declared family and type,
newer than what is here, and within every limit; anything else is a `SlotRefused` with the reason.
Nothing is ever evicted for a newcomer: what was stored stays until it expires or its publisher
replaces it. (Cached copies are another area, `slot_cache`, which lives by the opposite rule.)

What was replaced cannot come back. A publisher may replace a slot that lives for a day by one
that lives for a minute; after that minute, the old one would still be validly signed. So the
sequence stays here, as a *floor* without a value, until the last slot that it stands against has
expired; it counts for every limit as a slot does, and is kept over a restart as slots are.

Easy to get wrong: cheap checks come before dear ones (the signature last), and nothing changes
before all have passed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from protocols.dht.due_index import DueIndex
from protocols.dht.families import (
    CLOCK_TOLERANCE_MS,
    Families,
    Family,
    check_time,
    check_value,
)
from protocols.dht.ids import distance
from protocols.dht.quotas import NOBODY, OURSELVES, Quotas, Sender, StorageLimits, slot_bytes
from protocols.dht.records import Record, UnderKey, check_newer, check_room_under_key
from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.slot_cache import SlotCache
from protocols.dht.slots import Slot, check_form
from protocols.dht.verified import VerifiedSlots

# Slots that `store` lets go of before it takes one; under a millisecond. Whoever made thousands
# expire in one instant must not hold up everything then.
EXPIRED_AT_ONCE = 128


class Stored(enum.Enum):
    """What storing a slot did."""

    NEW = "new"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    """Exactly this slot was here already."""


class Storage:
    """Invariants: the quotas, and the size under each key, are sums over all records; every record
    has its place in the index; no key and no publisher is there without a record.
    """

    def __init__(
        self,
        families: Families,
        limits: StorageLimits | None = None,
        own_id: int = 0,
        verified: VerifiedSlots | None = None,
        life: bytes = b"",
    ) -> None:
        self.families = families
        self.limits = limits or StorageLimits()
        self.verified = verified if verified is not None else VerifiedSlots()
        self.life = life
        """Of this storage: changes that were counted in another life say nothing here."""
        self.cache = SlotCache(self.limits.cached_bytes, self.limits.cached_seconds)
        self._own_id = own_id
        self._changes = 0
        self._quotas = Quotas(self.limits)
        self._keys: dict[str, UnderKey] = {}
        self._index: DueIndex[Record] = DueIndex()

    def __len__(self) -> int:
        """How many records there are: slots, withdrawn ones, and floors."""
        return len(self._index)

    @property
    def key_count(self) -> int:
        return len(self._keys)

    @property
    def publisher_count(self) -> int:
        return self._quotas.publisher_count

    @property
    def share_count(self) -> int:
        return self._quotas.share_count

    @property
    def total_bytes(self) -> int:
        return self._quotas.total_bytes

    def store(self, slot: Slot, now_ms: int, sender: Sender = OURSELVES) -> Stored:
        """Keep this slot, or raise SlotRefused and change nothing. See quotas.py for `sender`."""
        self.expire(now_ms, EXPIRED_AT_ONCE)
        check_form(slot)
        family = self.families.family_of(slot.key)
        family.check_size(slot.value)
        check_time(family, slot, now_ms)
        under_key = self._keys.get(slot.key)
        record = under_key.records.get(slot.publisher) if under_key else None
        if record is not None:
            if record.slot == slot:
                self._brought_again(record, sender)
                return Stored.UNCHANGED
            check_newer(slot, record)
        counted_for = self._check_room(slot, family, under_key, record, sender)
        check_value(family, slot)
        self.verified.check(slot)
        self.cache.drop(slot.key, slot.publisher)
        if record is None:
            self._add(Record(slot, counted_for), slot.expires)
            return Stored.NEW
        was_there = record.slot is not None
        self._discount(record)
        record.slot = slot
        record.sequence = slot.sequence
        record.forget_at = max(record.forget_at, slot.expires)
        record.share = counted_for
        self._count(record)
        self._changed(record)
        self._index.set(record, slot.expires)
        return Stored.REPLACED if was_there else Stored.NEW

    def restore(self, slot: Slot, forget_at: int, now_ms: int) -> None:
        """Take back what was kept over a restart: a slot, or the floor that it left when it
        expired, until `forget_at`. SlotRefused if it is not right, or over."""
        family = self.families.family_of(slot.key)
        latest = now_ms + family.longest_ttl_ms + CLOCK_TOLERANCE_MS
        if slot.expires > now_ms:
            try:
                self.store(slot, now_ms)
            except SlotRefused as refused:
                if refused.refusal is not SlotRefusal.OLDER_SEQUENCE:
                    raise
        elif now_ms < forget_at and self._record(slot.key, slot.publisher) is None:
            check_form(slot)
            under_key = self._keys.get(slot.key)
            self._check_room(slot, family, under_key, None, OURSELVES)
            self.verified.check(slot)
            record = Record(slot, NOBODY)
            record.slot = None
            self._add(record, min(forget_at, latest))
        restored = self._record(slot.key, slot.publisher)
        if restored is not None:
            restored.forget_at = max(restored.forget_at, min(forget_at, latest))

    def forget_at(self, key: str, publisher: bytes) -> int:
        """Until when a sequence is remembered here; 0 if there is none."""
        record = self._record(key, publisher)
        return 0 if record is None else record.forget_at

    def cache_copies(self, slots: list[Slot], now_ms: int) -> int:
        """Keep copies of a hot key for a short while; SlotRefused at the first that is not right.

        Each is checked as if it were to be stored. One that is older than what is stored here is
        left out. Returns how many were taken.
        """
        self.expire(now_ms, EXPIRED_AT_ONCE)
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
        """The slots under a key, the one that changed last at the end; without cached copies.

        Withdrawn ones are among them: they have to reach replicas that hold older ones.
        """
        return self.since(key, 0, now_ms)

    def since(self, key: str, change: int, now_ms: int) -> list[Slot]:
        """Those of them that came here after this change: it costs as much as they are many."""
        under_key = self._keys.get(key)
        return [] if under_key is None else under_key.since(change, now_ms)

    def change_of(self, slot: Slot) -> int:
        """The number of the change by which this slot came, which is here."""
        return self._keys[slot.key].records[slot.publisher].change

    @property
    def changes(self) -> int:
        """How many there were in this life: what is here now came by these."""
        return self._changes

    def slot_of(self, key: str, publisher: bytes, now_ms: int) -> Slot | None:
        record = self._record(key, publisher)
        if record is None or record.slot is None or record.slot.expires <= now_ms:
            return None
        return record.slot

    def slots(self, now_ms: int) -> Iterator[Slot]:
        """All slots, key by key. Nothing may be stored while this runs."""
        for key in self._keys:
            yield from self.get(key, now_ms)

    def all_keys(self) -> list[str]:
        """All keys, those of floors among them."""
        return list(self._keys)

    def is_closer(self, key: str, node_id: int) -> bool:
        """Whether a key that is here lies closer to another node than to this."""
        under_key = self._keys.get(key)
        if under_key is None:
            return False
        position = under_key.position
        return distance(position, node_id) < distance(position, self._own_id)

    def expire(self, now_ms: int, at_most: int | None = None) -> int:
        """Let go of what is over, or of so much of it; how many slots expired."""
        next_due = self._index.next_due()
        if next_due is None or next_due > now_ms:
            return 0
        expired = 0
        for record in self._index.pop_due(now_ms, at_most):
            self._discount(record)
            expired += record.slot is not None
            record.slot = None
            if record.forget_at > now_ms:
                self._count(record)
                self._index.set(record, record.forget_at)
            else:
                self._forget(record)
        return expired

    def clock_went_back(self, now_ms: int) -> None:
        """Let go of what nobody could store any more, for it would live too long: the swarm's
        time was thought to be later when it was taken."""
        for under_key in list(self._keys.values()):
            for record in list(under_key.records.values()):
                family = self.families.family_of(record.key)
                latest = now_ms + family.longest_ttl_ms + CLOCK_TOLERANCE_MS
                record.forget_at = min(record.forget_at, latest)
                ends = record.forget_at if record.slot is None else record.slot.expires
                if ends > latest:
                    self._discount(record)
                    self._index.discard(record)
                    self._forget(record)

    def next_expiry(self) -> int | None:
        """When `expire` will next have something to do, in milliseconds of swarm time."""
        return self._index.next_due()

    def _record(self, key: str, publisher: bytes) -> Record | None:
        under_key = self._keys.get(key)
        return under_key.records.get(publisher) if under_key else None

    def _check_room(
        self,
        slot: Slot,
        family: Family,
        under_key: UnderKey | None,
        record: Record | None,
        sender: Sender,
    ) -> str:
        """For whose share the slot is to be counted; SlotRefused if there is no room for it."""
        size_before = 0 if record is None else record.size
        growth = slot_bytes(slot) - size_before
        if under_key is not None:
            check_room_under_key(slot, family, under_key, growth, is_new=record is None)
        self._quotas.check(slot, growth, is_new=record is None)
        before = None if record is None else record.share
        share = sender.share_of(slot.publisher)
        return self._quotas.share_for(share, slot_bytes(slot), before, size_before)

    def _brought_again(self, record: Record, sender: Sender) -> None:
        """Count for its publisher what others had handed over."""
        share = sender.share_of(record.publisher)
        if (
            sender.public_key == record.publisher
            and record.share != share
            and self._quotas.has_room(share, record.size)
        ):
            self._discount(record)
            record.share = share
            self._count(record)

    def _add(self, record: Record, due: int) -> None:
        under_key = self._keys.get(record.key)
        if under_key is None:
            under_key = self._keys[record.key] = UnderKey(record.key)
        self._changed(record)
        self._quotas.key_added(record.publisher)
        self._count(record)
        self._index.set(record, due)

    def _changed(self, record: Record) -> None:
        self._changes += 1
        self._keys[record.key].changed(record, self._changes)

    def _forget(self, record: Record) -> None:
        """A record that is not counted any more, and has no place in the index."""
        records = self._keys[record.key].records
        del records[record.publisher]
        if not records:
            del self._keys[record.key]
        self._quotas.key_gone(record.publisher)

    def _count(self, record: Record, sign: int = 1) -> None:
        size = sign * record.size
        self._keys[record.key].size += size
        self._quotas.add(record.publisher, record.share, size)

    def _discount(self, record: Record) -> None:
        self._count(record, -1)
