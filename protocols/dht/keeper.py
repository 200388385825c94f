"""The interface to the store that keeps contacts and slots over a restart, usually on a disk.

The directory works without a keeper. If it has one, it saves there, regularly and at its end, the
contacts to ask first after a restart and the slots that it keeps for the swarm. At its start it
loads them.

All methods are plain functions and are called one at a time: in a thread if the keeper `blocks`, or
in the event loop if it answers from memory (a simulation's virtual clock waits for no thread). They
may raise `KeepingFailed`, which is logged and survived: a node with a full disk stays in the swarm.

Data from a disk is as untrusted as data from the network: a disk can be damaged, restored from last
month, or edited. So contacts have to answer before they count, and slots pass the usual checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from protocols.dht.contacts import Contact
from protocols.dht.slots import Slot
from protocols.dht.storage import slot_bytes
from protocols.errors import PotluckError


class KeepingFailed(PotluckError):
    """Something could not be written to the disk."""


@dataclass(frozen=True)
class KeptSlot:
    """A slot, and until when its sequence blocks older ones.

    That is not before it expires, and later if it replaced a slot that would have lived longer. It
    is kept for that long, because it proves the sequence.
    """

    slot: Slot
    forget_at: int


class Keeper(Protocol):
    """Keeps what the directory knows across a restart."""

    @property
    def blocks(self) -> bool:
        """Whether calls wait for a disk and so belong in a thread."""

    def load_contacts(self) -> Sequence[Contact]:
        """The contacts to ask first, those most likely to be there first. Bounded."""

    def save_contacts(self, contacts: Sequence[Contact]) -> None:
        """Save these contacts, those most likely to be there first.

        Earlier ones stay after them while there is room: a node that comes back to an empty network
        must still know tomorrow the peers of yesterday.
        """

    def load_slots(self) -> Sequence[KeptSlot]:
        """Every slot that was saved and not forgotten, without checks of form and signature."""

    def save_slots(self, slots: Sequence[KeptSlot], now_ms: int) -> None:
        """Save these in place of earlier ones of the same key and publisher.

        Slots that were to be forgotten by `now_ms`, in swarm time, are forgotten.
        """


# Slots that were stored and not yet given to the keeper, within limits.
#
# The storage's limits do not bound this. A slot may expire and make room for others before it is
# saved, so strangers that send short-lived slots all the time could fill the memory with them.


# More than this is saved at once, without waiting for the usual time. Storing for half a minute as
# fast as signatures can be checked gives 250 MiB.
SAVED_AT_ONCE_BYTES = 8 << 20
# Twice as much collects only if the disk is too slow. Then further slots are not saved. They come
# again, because publishers repeat theirs.
LARGEST_BYTES = 2 * SAVED_AT_ONCE_BYTES


class UnsavedSlots:
    """Invariant: `_bytes` is the counted size of the slots, and at most LARGEST_BYTES."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, bytes], Slot] = {}
        self._bytes = 0
        self.are_many = trio.Event()
        """Set when there are so many that they should be saved now."""

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
        """Take all of them out."""
        taken = list(self._slots.values())
        self._slots = {}
        self._bytes = 0
        self.are_many = trio.Event()
        return taken
