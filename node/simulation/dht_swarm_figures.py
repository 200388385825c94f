"""What became of the reads of a simulated directory, in figures.

Two rates: *found* means that a slot of the publisher was there; *success* that it was the newest
that its publisher had finished publishing when the read began. A read counts if the slot was live
all the while, whether or not its publisher was.

*Hops* are how many nodes had to be asked one after the other until the reader reached the node
closest to the key, of all that answered; that node included, so 1 is one of the reader's table.

Easy to get wrong: a percentile here is a value that occurred, never one between two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reads:
    """What became of a series of reads."""

    hops: list[int] = field(default_factory=list)
    hops_to_first_slot: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    milliseconds: list[int] = field(default_factory=list)
    found: int = 0
    newest: int = 0

    @property
    def counted(self) -> int:
        return len(self.messages)

    @property
    def found_rate(self) -> float:
        return self.found / max(1, self.counted)

    @property
    def success_rate(self) -> float:
        return self.newest / max(1, self.counted)

    def figures(self) -> dict[str, Any]:
        return {
            "hops_p50": percentile(self.hops, 50),
            "hops_p99": percentile(self.hops, 99),
            "hops_to_first_slot_p50": percentile(self.hops_to_first_slot, 50),
            "hops_to_first_slot_p99": percentile(self.hops_to_first_slot, 99),
            "messages_per_get_p50": percentile(self.messages, 50),
            "messages_per_get_p99": percentile(self.messages, 99),
            "get_virtual_ms_p50": percentile(self.milliseconds, 50),
            "reads": self.counted,
            "found_rate": round(self.found_rate, 6),
            "success_rate": round(self.success_rate, 6),
        }


def percentile(values: list[int], percent: int) -> int | None:
    """The smallest value that so many percent do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
