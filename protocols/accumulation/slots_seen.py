"""Keeps the others' slots as they were read, and measures how long this node has looked. Pure.

    is_full = seen.begins()
    seen.took(found, gone, clock, is_full=is_full, left=dht.seconds_left)  # a reading has ended
    seen.link_lost(peer, clock)                         # and seen.linked(peer), when it is back
    seen.slots, seen.lost(), seen.now(clock), seen.number

Time counts only while this node looks: while its loop stalls, its machine sleeps or nothing can be
read, no slot grows old. So a node that wakes up does not take others for gone because it has not
read their slots.

Easy to get wrong: a reading that is not full may miss a slot that is there. When a peer is missing
for the first time, one full reading looks for it. And the age of a slot comes from its publisher's
clock, which may be wrong: it is no more than what the readings allow.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Final

from auth.bounded_map import BoundedMap
from protocols.accumulation.known import LONGEST_READ_SECONDS, Seen
from protocols.accumulation.progress_slot import (
    SAY_AGAIN_SECONDS,
    SLOT_SECONDS,
    is_sum,
    name_of_sum,
)
from protocols.dht import SlotEntry
from protocols.identity import PeerId

READ_SECONDS: Final = 3.0
"""The longest time for a reading: as long as the longest pause between two readings."""

LONGEST_UNSEEN_SECONDS: Final = LONGEST_READ_SECONDS + READ_SECONDS
"""No more than this counts as time between two readings: a healthy node reads at least this often.
"""

MOST_KEEPERS: Final = 8  # a run has one or two; any peer may claim to be one

MOST_UNLINKED: Final = 64
WRITE_SECONDS: Final = 1.0  # until a slot is at all its replicas
LAST_WORD_SECONDS: Final = 2.0
"""A slot that is first read so soon after its publisher's link was lost may be older than that: it
is read once in a second or two."""


class SlotsSeen:
    """The slots of the others. Invariant: the newest slot that was read of each peer, until it is
    withdrawn or expires. `clock` is always a monotonic clock."""

    def __init__(self) -> None:
        self.slots: dict[PeerId, Seen] = {}
        self.keepers: BoundedMap[PeerId, None] = BoundedMap(MOST_KEEPERS)
        """Peers that keep the run's checkpoints and have not left, also when their slots have
        expired."""
        self.number = 0
        """How many readings have ended."""
        self.begun = 0
        self.whole = 0
        """The number of the last reading that has ended, among those that have begun."""
        self._unlinked = BoundedMap[PeerId, float](MOST_UNLINKED)
        """When the link to each of these peers was lost. It is not back."""
        self._sequences: dict[PeerId, int] = {}
        self._missing: set[PeerId] = set()
        self._wants_full = True
        self._looked_for, self._read_at = 0.0, 0.0

    def begins(self) -> bool:
        """A reading begins. Returns whether it must be full."""
        self.begun += 1
        return self._wants_full

    def took(
        self,
        found: Mapping[PeerId, SlotEntry],
        gone: Container[PeerId],
        clock: float,
        *,
        is_full: bool,
        left: Callable[[SlotEntry], float],
    ) -> list[PeerId]:
        """A reading has found these slots, which live for so much longer; the peers in `gone` have
        withdrawn theirs. Returns the peers with a new slot."""
        before, now = self._looked_for, self.now(clock)
        news = [peer for peer, one in found.items() if one.sequence > self._sequences.get(peer, -1)]
        for peer in news:
            longest = SAY_AGAIN_SECONDS
            if peer in self._sequences and not is_sum(peer):  # sums are not in every reading
                longest = min(longest, now - before + WRITE_SECONDS)
            age = min(max(SLOT_SECONDS - left(found[peer]), 0.0), longest)
            self._sequences[peer] = found[peer].sequence
            self.slots[peer] = Seen(found[peer].value, now - age)
            if found[peer].value.keeps:
                self.keepers[peer] = None
        missing = {peer for peer in self.slots if peer not in found}
        for peer in tuple(missing):
            if peer in gone or now - self.slots[peer].at > SLOT_SECONDS:
                missing.discard(peer)
                del self.slots[peer]
                del self._sequences[peer]
        for keeper in [peer for peer in self.keepers if peer in gone]:
            del self.keepers[keeper]
        self._wants_full = not is_full and not missing <= self._missing
        self._missing = missing
        self._looked_for, self._read_at = now, clock
        self.number += 1
        self.whole = self.begun
        return news

    def link_lost(self, peer: PeerId, clock: float) -> None:
        self._unlinked[peer] = self.now(clock)

    def linked(self, peer: PeerId) -> bool:
        """There is a link to this peer. Returns whether one was lost."""
        return self._unlinked.pop(peer, None) is not None

    def lost(self) -> frozenset[PeerId]:
        """The peers whose link was lost and that have published nothing since, not even a sum."""
        for peer, lost_at in list(self._unlinked.items()):
            said = [self.slots.get(one) for one in (peer, name_of_sum(peer))]
            if any(one is not None and one.at > lost_at + LAST_WORD_SECONDS for one in said):
                del self._unlinked[peer]
        return frozenset(peer for peer, _ in self._unlinked.items())

    def now(self, clock: float) -> float:
        """How many seconds this node has looked."""
        if not self.number:
            return 0.0
        return self._looked_for + min(clock - self._read_at, LONGEST_UNSEEN_SECONDS)
