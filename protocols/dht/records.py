"""What a node holds of one publisher under one key, and of all publishers under one key.

A record is a slot, or, when that has expired and stood in the way of one that was to live longer,
only its sequence: a *floor*. Each has the number of the change that made it what it is, so that
a reader can be told what is new since it looked last.

Easy to get wrong: a floor says less than a slot did. Of equal sequences the lower digest holds,
but of the slot that is gone nobody knows the digest any more; so nothing equal is taken.
"""

from __future__ import annotations

from protocols.dht.families import Family
from protocols.dht.ids import position_of
from protocols.dht.quotas import SLOT_OVERHEAD_BYTES, slot_bytes
from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.slots import Slot, supersedes


class Record:
    """What is kept of one publisher under one key. `slot` is None when only the floor is left;
    `share` is what it is counted for (quotas.py)."""

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
        """A slot of this publisher is here that was not: it is the newest change of all."""
        self.records.pop(record.publisher, None)
        record.change = change
        self.records[record.publisher] = record

    def since(self, change: int, now_ms: int) -> list[Slot]:
        """The slots that came after this change, in their order; all of them after change 0."""
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
