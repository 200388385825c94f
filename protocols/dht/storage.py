"""The slots that this node keeps for the swarm, within limits that hold against everybody.

`store` takes a slot that is well-formed, signed by its publisher, of a declared family and type,
newer than the one here, and within every limit. Anything else is a `SlotRefused` with the reason.
No slot is evicted for a new one: a slot stays until it expires or its publisher replaces it. (A
family may make an exception for what outranks another slot, as the newest revocations do.)
(Cached copies are separate, in `SlotCache`, and follow the opposite rule.)

A replaced slot cannot come back. A publisher may replace a slot that lives for a day by one that
lives for a minute. After that minute, the old one would still be validly signed. So the sequence
stays here, as a *floor* without a value, until the last slot that it blocks has expired. A floor
counts for every limit like a slot, and is kept over a restart.

Cheap checks come before expensive ones (the signature last), and nothing changes before all have
passed.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from protocols.dht.due_index import DueIndex
from protocols.dht.families import (
    CLOCK_TOLERANCE_MS,
    Families,
    Family,
    check_time,
    check_value,
)
from protocols.dht.ids import distance, position_of
from protocols.dht.slots import (
    Slot,
    SlotRefusal,
    SlotRefused,
    VerifiedSlots,
    check_form,
    supersedes,
)

# How much of a node each peer may use.
#
# A stored slot is never dropped for a new one, so the first comer could take everything. Four
# limits keep room for others. A key has a limit of publishers and bytes, by its family. A publisher
# has a limit of keys and bytes at one node. Keys cost nothing, and one peer can send the slots of
# a thousand throw-away publishers. So there is also a limit on what one *sender* has sent: a
# network of the public internet gets a quarter of the node for its own slots, and a quarter for
# those of others (as a replica hands them over). It cannot fill any node alone. Senders that are
# not on the public internet count separately.
#
# A slot may replace one of another sender. It counts for the new sender if there is room, and for
# the old one otherwise, so that no renewal fails because a neighbour's share is full.


# The cost of one slot beside its value: objects, index and hash table entries, rounded up from
# measurements, so that `total_bytes` is close to the real memory use.
SLOT_OVERHEAD_BYTES = 1024

Counted = TypeVar("Counted", bytes, str)

NOBODY = ""


@dataclass(frozen=True)
class Sender:
    """The sender of slots: its key, and the name of the network that shares its limit.

    That is its network on the public internet, or otherwise only the sender itself.
    """

    public_key: bytes
    share: str

    def share_of(self, publisher: bytes) -> str:
        """The share that a slot of this publisher counts for."""
        if self.share == NOBODY or publisher == self.public_key:
            return self.share
        return f"{self.share}, of others"


OURSELVES = Sender(b"", NOBODY)
"""The sender of this node's own slots, and of those that it read or loaded."""


@dataclass(frozen=True)
class StorageLimits:
    """How much a node keeps for others."""

    total_bytes: int = 64 << 20
    """Of all slots together, with SLOT_OVERHEAD_BYTES each. About 60,000 small ones."""

    keys_per_publisher: int = 512
    """An expert server announces hundreds; in a swarm of at most 20 nodes each has all of them."""

    bytes_per_publisher: int = 4 << 20
    """For all those keys with values of 4 KiB, and more; a sixteenth of the node."""

    bytes_per_sender: int = 16 << 20
    """Of the slots from one sender; see above. A quarter of the node."""

    cached_bytes: int = 4 << 20
    """Of all cached copies, counted in the same way, beside `total_bytes`."""

    cached_seconds: float = 30.0
    """How long a cached copy lives: long enough for a rush, short enough to be nearly current."""


def slot_bytes(slot: Slot) -> int:
    """The size of a slot as counted against the limits."""
    return SLOT_OVERHEAD_BYTES + len(slot.value)


class Quotas:
    """The use of this node by each publisher and sender.

    Invariant: the sums are those of the slots that were added and not removed, and there are no
    entries of zero.
    """

    def __init__(self, limits: StorageLimits) -> None:
        self.limits = limits
        self.total_bytes = 0
        self._keys_of: dict[bytes, int] = {}
        self._bytes_of: dict[bytes, int] = {}
        self._bytes_from: dict[str, int] = {}

    @property
    def publisher_count(self) -> int:
        return len(self._keys_of)

    @property
    def share_count(self) -> int:
        return len(self._bytes_from)

    def check(self, slot: Slot, growth: int, *, is_new: bool) -> None:
        """SlotRefused if its publisher, or this node, has no room for so many more bytes."""
        limits = self.limits
        if is_new and self._keys_of.get(slot.publisher, 0) >= limits.keys_per_publisher:
            raise SlotRefused(
                SlotRefusal.KEYS_PER_PUBLISHER,
                f"{slot.publisher_peer} has {limits.keys_per_publisher} slots here already.",
                why="A node keeps no more for one publisher.",
                advice="Put several things into one value, or wait until some have expired.",
            )
        if growth <= 0:
            return
        publishers = self._bytes_of.get(slot.publisher, 0)
        if publishers + growth > limits.bytes_per_publisher:
            raise SlotRefused(
                SlotRefusal.BYTES_PER_PUBLISHER,
                f"{slot.publisher_peer} has {publishers:,} bytes here already.",
                why=f"A node keeps {limits.bytes_per_publisher:,} for one publisher.",
                advice="Publish where the data can be fetched, not the data.",
            )
        if self.total_bytes + growth > limits.total_bytes:
            raise SlotRefused(
                SlotRefusal.MEMORY,
                f"This node keeps {self.total_bytes:,} bytes of slots.",
                why=f"It allows itself {limits.total_bytes:,}.",
                advice="Other nodes may have room; this one will as slots expire.",
            )

    def share_for(self, share: str, size: int, before: str | None, size_before: int) -> str:
        """The share to count a slot for, which should be `share`; SlotRefused without room.

        `before` is the share of the slot that it replaces.
        """
        growth = size - size_before
        if self.has_room(share, growth if share == before else size):
            return share
        if before is not None and share != before and self.has_room(before, growth):
            return before
        raise SlotRefused(
            SlotRefusal.BYTES_PER_SENDER,
            "The sender of this slot has sent as much as this node takes from one sender.",
            why=f"It keeps at most {self.limits.bytes_per_sender:,} bytes from one network.",
            advice="This node will have room as slots expire; others have room now.",
        )

    def add(self, publisher: bytes, share: str, size: int) -> None:
        """Count so many more bytes; fewer if negative."""
        self.total_bytes += size
        _add(self._bytes_of, publisher, size)
        if share != NOBODY:
            _add(self._bytes_from, share, size)

    def key_added(self, publisher: bytes) -> None:
        _add(self._keys_of, publisher, 1)

    def key_gone(self, publisher: bytes) -> None:
        _add(self._keys_of, publisher, -1)

    def has_room(self, share: str, size: int) -> bool:
        if size <= 0 or share == NOBODY:
            return True
        return self._bytes_from.get(share, 0) + size <= self.limits.bytes_per_sender


def _add(sums: dict[Counted, int], what: Counted, number: int) -> None:
    left = sums.get(what, 0) + number
    if left:
        sums[what] = left
    else:
        sums.pop(what, None)


# A node's record of one publisher under one key, and of all publishers under one key.
#
# A record is a slot or only its sequence, a *floor*: after the slot expired, if it replaced one
# that would have lived longer. Each record has the number of its last change, so that a reader can
# get what is new since its last look.
#
# A floor has less information than a slot. Of equal sequences the lower digest wins, but a floor
# has no digest, so it blocks every slot of an equal sequence.


class Record:
    """The record of one publisher under one key.

    `slot` is None when only the floor is left; `share` is the share that it counts for (below).
    """

    __slots__ = ("change", "forget_at", "key", "publisher", "sequence", "share", "slot")

    def __init__(self, slot: Slot, share: str) -> None:
        self.key = slot.key
        self.publisher = slot.publisher
        self.sequence = slot.sequence
        self.slot: Slot | None = slot
        self.forget_at = slot.expires
        self.share = share
        self.change = 0

    @property
    def size(self) -> int:
        return SLOT_OVERHEAD_BYTES if self.slot is None else slot_bytes(self.slot)


class UnderKey:
    """Invariant: `records` are in the order of their last changes."""

    __slots__ = ("position", "records", "size")

    def __init__(self, key: str) -> None:
        self.position = position_of(key)
        self.records: dict[bytes, Record] = {}
        self.size = 0

    def changed(self, record: Record, change: int) -> None:
        """This publisher's slot is new here: it becomes the newest change."""
        self.records.pop(record.publisher, None)
        record.change = change
        self.records[record.publisher] = record

    def since(self, change: int, now_ms: int) -> list[Slot]:
        """The slots that came after this change, in order; all of them after change 0."""
        newest_first = []
        for record in reversed(self.records.values()):
            if record.change <= change:
                break
            if record.slot is not None and record.slot.expires > now_ms:
                newest_first.append(record.slot)
        return newest_first[::-1]


def check_room_under_key(
    slot: Slot, family: Family, under_key: UnderKey, growth: int, *, is_new: bool
) -> None:
    if is_new and len(under_key.records) >= family.slots_per_key:
        raise SlotRefused(
            SlotRefusal.SLOTS_PER_KEY,
            f"{len(under_key.records)} publishers have slots under {slot.key!r} already.",
            why=f"The family {family.name} allows {family.slots_per_key} under one key.",
            advice="Wait until some have expired, or spread over several keys.",
        )
    if growth > 0 and under_key.size + growth > family.bytes_per_key:
        raise SlotRefused(
            SlotRefusal.BYTES_PER_KEY,
            f"The slots under {slot.key!r} have {under_key.size:,} bytes together.",
            why=f"The family {family.name} allows {family.bytes_per_key:,} under one key.",
            advice="Wait until some have expired, or spread over several keys.",
        )


def check_newer(slot: Slot, record: Record) -> None:
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


# Copies of slots of popular keys, kept for a short while by nodes on the way to the replicas.
#
# They relieve the replicas of a key that everybody reads at once. No peer has a right to them: the
# area is small, the least recently read key goes when it is full, and a copy lives for seconds,
# never beyond its slot's expiry.
#
# A copy that is sent again does not live longer: otherwise a peer that keeps sending an old
# copy would keep an old value alive here. Copies of a key may be incomplete, so they may only
# answer a reader that accepts slightly old slots.


class _Copy:
    __slots__ = ("counted_bytes", "ends", "slot")

    def __init__(self, slot: Slot, counted_bytes: int, ends: int) -> None:
        self.slot = slot
        self.counted_bytes = counted_bytes
        self.ends = ends


MOST_COPIES_OF_A_KEY: Final = 128  # each read goes through all; honest nodes spread 32 of a key


class SlotCache:
    """Invariant: `total_bytes` is the sum over all copies, and at most the limit.

    The caller of `keep` must have checked the slot.
    """

    def __init__(self, limit_bytes: int, seconds: float) -> None:
        self.total_bytes = 0
        self._limit_bytes = limit_bytes
        self._milliseconds = int(seconds * 1000)
        self._keys: OrderedDict[str, dict[bytes, _Copy]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(copies) for copies in self._keys.values())

    def keep(self, slot: Slot, counted_bytes: int, now_ms: int) -> bool:
        """Keep a copy, unless it is here already, older than the one here, or too large."""
        self._drop_ended(slot.key, now_ms)
        known = self._keys.get(slot.key, {}).get(slot.publisher)
        if counted_bytes > self._limit_bytes or (
            known is not None and not supersedes(slot, known.slot)
        ):
            return False
        if known is None and len(self._keys.get(slot.key, ())) >= MOST_COPIES_OF_A_KEY:
            return False
        self.drop(slot.key, slot.publisher)
        while self.total_bytes + counted_bytes > self._limit_bytes:
            self._drop_key(next(iter(self._keys)))
        ends = min(slot.expires, now_ms + self._milliseconds)
        self._keys.setdefault(slot.key, {})[slot.publisher] = _Copy(slot, counted_bytes, ends)
        self._keys.move_to_end(slot.key)
        self.total_bytes += counted_bytes
        return True

    def get(self, key: str, now_ms: int) -> list[Slot]:
        """The valid copies of a key."""
        self._drop_ended(key, now_ms)
        copies = self._keys.get(key)
        if copies is None:
            return []
        self._keys.move_to_end(key)
        return [copy.slot for copy in copies.values()]

    def drop(self, key: str, publisher: bytes) -> None:
        copies = self._keys.get(key)
        if copies is None or publisher not in copies:
            return
        self.total_bytes -= copies.pop(publisher).counted_bytes
        if not copies:
            del self._keys[key]

    def expire(self, now_ms: int) -> None:
        """Drop every expired copy. `get` does so for its own key."""
        for key in list(self._keys):
            self._drop_ended(key, now_ms)

    def _drop_ended(self, key: str, now_ms: int) -> None:
        copies = self._keys.get(key)
        if copies is not None:
            # a copy with more time left than this was taken before the clock was set back
            latest_end = now_ms + self._milliseconds
            ended = [one for one, copy in copies.items() if not now_ms < copy.ends <= latest_end]
            for publisher in ended:
                self.drop(key, publisher)

    def _drop_key(self, key: str) -> None:
        for copy in self._keys.pop(key).values():
            self.total_bytes -= copy.counted_bytes


# Slots that `store` drops before it takes one: under a millisecond. If thousands expire at the same
# moment, that must not block everything.
EXPIRED_AT_ONCE = 128

FULL_KEY = frozenset({SlotRefusal.SLOTS_PER_KEY, SlotRefusal.BYTES_PER_KEY})


class Stored(enum.Enum):
    """The effect of `store`."""

    NEW = "new"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    """Exactly this slot was already here."""


class Storage:
    """The slots that a node keeps for others.

    Invariants: the quotas, and the size under each key, are sums over all records. Every record is
    in the index. There is no entry for a key or a publisher without a record.
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
        """The id of this storage's life. Changes of another life mean nothing here."""
        self.cache = SlotCache(self.limits.cached_bytes, self.limits.cached_seconds)
        self._own_id = own_id
        self._changes = 0
        self._quotas = Quotas(self.limits)
        self._keys: dict[str, UnderKey] = {}
        self._index: DueIndex[Record] = DueIndex()

    def __len__(self) -> int:
        """The number of records: slots, withdrawn ones, and floors."""
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
        """Keep this slot, or raise SlotRefused and change nothing. `Sender` explains `sender`."""
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
        try:
            counted_for = self._check_room(slot, family, under_key, record, sender)
        except SlotRefused as refused:
            if refused.refusal not in FULL_KEY or family.outranks is None:
                raise
            counted_for = self._room_elsewhere(slot, record, sender)
            if not self._take_a_place(slot, family, record):
                raise
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
        """Take back a slot, or the floor of an expired one, that was kept over a restart.

        It is kept until `forget_at`. SlotRefused if it is invalid or expired.
        """
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
        """Keep copies of a popular key for a short while; SlotRefused at the first invalid one.

        Each is checked as if it were to be stored. One that is older than the stored slot is left
        out. Returns how many were taken.
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
        """The slots under a key, the last changed one at the end, without cached copies.

        Withdrawn ones are included: they have to reach replicas with older ones.
        """
        return self.since(key, 0, now_ms)

    def since(self, key: str, change: int, now_ms: int) -> list[Slot]:
        """The slots of a key that came after this change. The cost is by their number."""
        under_key = self._keys.get(key)
        return [] if under_key is None else under_key.since(change, now_ms)

    def change_of(self, slot: Slot) -> int:
        """The number of the change by which this slot came. The slot must be here."""
        return self._keys[slot.key].records[slot.publisher].change

    @property
    def changes(self) -> int:
        """The number of changes in this life."""
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
        """All keys, including those with only floors."""
        return list(self._keys)

    def is_closer(self, key: str, node_id: int) -> bool:
        """Whether a key that is here lies closer to another node than to this one."""
        under_key = self._keys.get(key)
        if under_key is None:
            return False
        position = under_key.position
        return distance(position, node_id) < distance(position, self._own_id)

    def expire(self, now_ms: int, at_most: int | None = None) -> int:
        """Drop what has expired, or part of it; return the number of expired slots."""
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
        """Drop slots that could no longer be stored because they would live too long.

        They were taken when swarm time was thought to be later.
        """
        for under_key in list(self._keys.values()):
            for record in list(under_key.records.values()):
                family = self.families.family_of(record.key)
                latest = now_ms + family.longest_ttl_ms + CLOCK_TOLERANCE_MS
                record.forget_at = min(record.forget_at, latest)
                ends = record.forget_at if record.slot is None else record.slot.expires
                if ends > latest:
                    self._drop(record)

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
        """The share that the slot will count for; SlotRefused if there is no room for it."""
        if under_key is not None:
            growth = slot_bytes(slot) - (0 if record is None else record.size)
            check_room_under_key(slot, family, under_key, growth, is_new=record is None)
        return self._room_elsewhere(slot, record, sender)

    def _room_elsewhere(self, slot: Slot, record: Record | None, sender: Sender) -> str:
        """The same, however full its key is."""
        size_before = 0 if record is None else record.size
        growth = slot_bytes(slot) - size_before
        self._quotas.check(slot, growth, is_new=record is None)
        before = None if record is None else record.share
        share = sender.share_of(slot.publisher)
        return self._quotas.share_for(share, slot_bytes(slot), before, size_before)

    def _brought_again(self, record: Record, sender: Sender) -> None:
        """Count a slot for its publisher, which now sends it itself."""
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
        """Drop a record that no longer counts and is not in the index."""
        records = self._keys[record.key].records
        del records[record.publisher]
        if not records:
            del self._keys[record.key]
        self._quotas.key_gone(record.publisher)

    def _count(self, record: Record, sign: int = 1) -> None:
        size = sign * record.size
        self._keys[record.key].size += size
        self._quotas.add(record.publisher, record.share, size)

    def _take_a_place(self, slot: Slot, family: Family, record: Record | None) -> bool:
        """Whether a slot of another publisher, which this one outranks, was dropped from its full
        key. SlotRefused, and nothing is dropped, if it is not a valid one."""
        if family.outranks is None or slot.withdrawn:
            return False
        check_value(family, slot)
        self.verified.check(slot)
        growth = slot_bytes(slot) - (0 if record is None else record.size)
        value, under_key = family.decode(slot.value), self._keys[slot.key]
        for one in under_key.records.values():
            if one is record or under_key.size - one.size + growth > family.bytes_per_key:
                continue
            other = one.slot
            held = None if other is None or other.withdrawn else family.decode(other.value)
            if family.outranks(value, held):
                self._drop(one)
                return True
        return False

    def _drop(self, record: Record) -> None:
        self._discount(record)
        self._index.discard(record)
        self._forget(record)

    def _discount(self, record: Record) -> None:
        self._count(record, -1)
