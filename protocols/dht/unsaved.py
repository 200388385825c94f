"""Slots that were taken and not yet given to the keeper, within bounds.

Easy to get wrong: what is here is not what is stored. A slot may expire and leave its place to
others before it is saved, so the limits of the storage do not bound this; strangers who bring
short-lived slots all the time could fill the memory with them.
"""

from __future__ import annotations

import trio

from protocols.dht.quotas import slot_bytes
from protocols.dht.slots import Slot

# More than that is saved at once, without waiting for the usual time: half a minute of storing as
# fast as signatures can be checked is 250 MiB.
SAVED_AT_ONCE_BYTES = 8 << 20
# Twice as much is only here when the disk is too slow; then what comes is not saved. It comes
# again: publishers repeat what they say.
LARGEST_BYTES = 2 * SAVED_AT_ONCE_BYTES


class UnsavedSlots:
    """Invariant: `_bytes` is what the slots count for, and at most LARGEST_BYTES."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, bytes], Slot] = {}
        self._bytes = 0
        self.are_many = trio.Event()
        """Set when they should be saved now."""

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: Slot) -> None:
        name = (slot.key, slot.publisher)
        before = self._slots.get(name)
        growth = slot_bytes(slot) - (slot_bytes(before) if before is not None else 0)
        if self._bytes + growth > LARGEST_BYTES:
            return
        self._slots[name] = slot
        self._bytes += growth
        if self._bytes >= SAVED_AT_ONCE_BYTES:
            self.are_many.set()

    def take(self) -> list[Slot]:
        """All of them, which then are no longer here."""
        taken = list(self._slots.values())
        self._slots = {}
        self._bytes = 0
        self.are_many = trio.Event()
        return taken
