"""How much of a node everybody may take who has something kept there.

Nothing that was stored is dropped for something new, so whoever is first could take everything.
Four limits keep room for the others. A key has so many publishers and bytes, by its family. A
publisher has so many keys and bytes at one node. And since keys cost nothing, and a thousand
throw-away publishers can be brought by one peer, what one *sender* has brought is limited as well:
whoever brings slots from one network of the public internet has a quarter of the node for slots
of his own, and a quarter for those of others (as a replica hands them over), and can fill no node
alone. Senders that are not on the public internet count each for itself.

Easy to get wrong: a slot that takes the place of another may belong to another sender than that
one. It is counted for the new sender where there is room, else it stays counted for the old one:
nobody's renewal fails because a neighbour's share is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.slots import Slot

# What keeping one slot costs beside its value: objects, index and hash table entries, rounded up
# from what was measured, so that `total_bytes` is close to the memory really taken.
SLOT_OVERHEAD_BYTES = 1024

Counted = TypeVar("Counted", bytes, str)

NOBODY = ""


@dataclass(frozen=True)
class Sender:
    """Who brings slots: its key, and the name of what it has its share with: its network on the
    public internet, or else only itself."""

    public_key: bytes
    share: str

    def share_of(self, publisher: bytes) -> str:
        """For what a slot of this publisher is counted."""
        if self.share == NOBODY or publisher == self.public_key:
            return self.share
        return f"{self.share}, of others"


OURSELVES = Sender(b"", NOBODY)
"""The sender of what this node has from itself: its own slots, and those that it read or loaded."""


@dataclass(frozen=True)
class StorageLimits:
    """How much a node keeps for others."""

    total_bytes: int = 64 << 20
    """Of all slots together, SLOT_OVERHEAD_BYTES each included. About 60,000 small ones."""

    keys_per_publisher: int = 512
    """An expert server announces hundreds; in a swarm of at most 20 nodes all lie on each."""

    bytes_per_publisher: int = 4 << 20
    """All those keys with values of 4 KiB, and some over; a sixteenth of the node."""

    bytes_per_sender: int = 16 << 20
    """Of what one sender brought; see above. A quarter of the node."""

    cached_bytes: int = 4 << 20
    """Of cached copies together, counted in the same way, beside `total_bytes`."""

    cached_seconds: float = 30.0
    """How long a cached copy lives: long enough to carry a rush, short enough to be nearly true."""


def slot_bytes(slot: Slot) -> int:
    """What a slot counts for against limits of memory."""
    return SLOT_OVERHEAD_BYTES + len(slot.value)


class Quotas:
    """What everybody has here. Invariant: the sums are those of what was taken and not given back,
    and nobody who has nothing is remembered."""

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
        """SlotRefused if its publisher, or this node, has no room for so many bytes more."""
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
                advice="Publish where the things can be had, not the things.",
            )
        if self.total_bytes + growth > limits.total_bytes:
            raise SlotRefused(
                SlotRefusal.MEMORY,
                f"This node keeps {self.total_bytes:,} bytes of slots.",
                why=f"It allows itself {limits.total_bytes:,}.",
                advice="Other nodes may have room; this one will as slots expire.",
            )

    def share_for(self, share: str, size: int, before: str | None, size_before: int) -> str:
        """For which share to count a slot of this size that is to be counted for this one;
        SlotRefused if there is no room for it. `before` is that of the slot in its place."""
        growth = size - size_before
        if self.has_room(share, growth if share == before else size):
            return share
        if before is not None and share != before and self.has_room(before, growth):
            return before
        raise SlotRefused(
            SlotRefusal.BYTES_PER_SENDER,
            "Who brought this slot has brought as much as this node takes from one sender.",
            why=f"It keeps {self.limits.bytes_per_sender:,} bytes of what one network brings.",
            advice="This node will have room as slots expire; others have room now.",
        )

    def add(self, publisher: bytes, share: str, size: int) -> None:
        """Count so many bytes more; fewer if they are negative."""
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
