"""How many samples at once, while training goes on: what the benchmark found may not last. Pure.

The benchmark is made in the first seconds, when the machine may be busy with anything else. So the
size follows what batches really take: after `STEADY` in a row that were too quick it doubles, and
after as many that took too long it is halved.

A size that memory had no room for is not tried again: half of it is the most from then on.

Easy to get wrong: a size that goes up and down all the time costs more than either. What makes it
double (`QUICK_SECONDS`) is far below what would halve it again.
"""

from __future__ import annotations

from typing import Final

from node.trainer.benchmark import LONGEST_SECONDS

QUICK_SECONDS: Final = 0.1
SLOW_SECONDS: Final = 2.0 * LONGEST_SECONDS
STEADY: Final = 8


class BatchSize:
    """Invariant: 1 <= size <= limit."""

    def __init__(self, size: int, limit: int) -> None:
        self.size = max(1, min(size, limit))
        self._limit = max(1, limit)
        self._quick = self._slow = 0

    def took(self, seconds: float) -> None:
        """A batch of this size took so long."""
        self._quick = self._quick + 1 if seconds < QUICK_SECONDS else 0
        self._slow = self._slow + 1 if seconds > SLOW_SECONDS else 0
        if self._quick >= STEADY and self.size < self._limit:
            self._become(min(self._limit, 2 * self.size))
        elif self._slow >= STEADY and self.size > 1:
            self._become(self.size // 2)

    def did_not_fit(self, size: int) -> None:
        """Memory had no room for so many at once."""
        self._limit = max(1, size // 2)
        self._become(min(self.size, self._limit))

    def _become(self, size: int) -> None:
        self.size = size
        self._quick = self._slow = 0
