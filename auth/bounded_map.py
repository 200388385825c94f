"""A map that forgets its oldest entry when it is full.

    offences: BoundedMap[PeerId, int] = BoundedMap(4096)
    offences[peer] = 1            # the newest entry now; the oldest goes if there are too many

Data that peers can make us remember is kept in such maps, so that nobody can fill our memory.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(OrderedDict[K, V]):
    """Invariant: at most `most` entries, in the order in which they were last set."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.most:
            self.popitem(last=False)
