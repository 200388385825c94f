"""What was read of the others' slots, and for how long this node has looked. Pure.

    is_full = seen.begins()
    seen.took(found, gone, clock, is_full=is_full)      # a reading has ended
    seen.slots, seen.now(clock), seen.number

Time is counted in seconds that this node has looked for: while its loop stalls, its machine sleeps
or nothing can be read, nobody else grows old. So a peer that wakes does not take those for gone who
have only not been heard of by it.

Easy to get wrong: a reading that is content with the latest may miss a slot that is there. Whoever
is missing for the first time is looked for once by a full reading.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

from protocols.accumulation.progress import LONGEST_READ_SECONDS, Seen
from protocols.accumulation.progress_slot import SLOT_SECONDS
from protocols.dht import Entry
from protocols.identity import PeerId

READ_SECONDS: Final = 3.0
"""What a reading may take: as long as the rarest one waits for the next one."""

LONGEST_UNSEEN_SECONDS: Final = LONGEST_READ_SECONDS + READ_SECONDS
"""Between two readings no more than this counts as time: a node that is well reads so often."""


class SlotsSeen:
    """Of others. Invariant: of each peer the newest slot that was read, until it is withdrawn or
    over. `clock` is always that which nobody sets."""

    def __init__(self) -> None:
        self.slots: dict[PeerId, Seen] = {}
        self.number = 0
        """Of readings that have come to an end."""
        self.begun = 0
        self.whole = 0
        """Which of those that have begun is the last that came to an end."""
        self._sequences: dict[PeerId, int] = {}
        self._missing: set[PeerId] = set()
        self._wants_full = True
        self._looked_for, self._read_at = 0.0, 0.0

    def begins(self) -> bool:
        """A reading begins; whether it has to be full."""
        self.begun += 1
        return self._wants_full

    def took(
        self,
        found: Mapping[PeerId, Entry],
        gone: Container[PeerId],
        clock: float,
        *,
        is_full: bool,
    ) -> list[PeerId]:
        """It has found these; `gone` have taken back what they said. Who says something new."""
        before, now = self._looked_for, self.now(clock)
        written_at = (before + now) / 2  # between the last reading and this one
        news = [peer for peer, one in found.items() if one.sequence > self._sequences.get(peer, -1)]
        for peer in news:
            self._sequences[peer] = found[peer].sequence
            self.slots[peer] = Seen(found[peer].value, written_at)
        missing = {peer for peer in self.slots if peer not in found}
        for peer in tuple(missing):
            if peer in gone or now - self.slots[peer].at > SLOT_SECONDS:
                missing.discard(peer)
                del self.slots[peer]
                del self._sequences[peer]
        self._wants_full = not is_full and not missing <= self._missing
        self._missing = missing
        self._looked_for, self._read_at = now, clock
        self.number += 1
        self.whole = self.begun
        return news

    def now(self, clock: float) -> float:
        """Seconds that this node has looked for."""
        if not self.number:
            return 0.0
        return self._looked_for + min(clock - self._read_at, LONGEST_UNSEEN_SECONDS)
