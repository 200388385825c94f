"""Which ways are cut: the pure part of partitions.

A cut is one-way: nothing that one of `sources` sends gets to one of `targets`. A symmetric
partition is two cuts. Cuts may overlap; a way is open when no cut lies across it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Cut:
    """Nothing gets from `sources` to `targets`; both are sets of node numbers.

    Two cuts with the same sets are still two: healing one leaves the other.
    """

    sources: frozenset[int]
    targets: frozenset[int]

    def lies_between(self, source: int, target: int) -> bool:
        return source in self.sources and target in self.targets


def cuts_between(groups: Iterable[Iterable[int]]) -> tuple[Cut, ...]:
    """The cuts that keep each of these groups from all the others, both ways."""
    sets = [frozenset(group) for group in groups]
    return tuple(
        Cut(group, frozenset().union(*(other for other in sets if other is not group)))
        for group in sets
    )
