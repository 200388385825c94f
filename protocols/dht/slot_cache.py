"""Copies of slots of hot keys, kept for a short while by a node on the way to their replicas.

They spare the replicas of a key that everybody reads at once. They are nobody's right: the area
is small, the least recently read key goes when it is full, and a copy lives for seconds, never
beyond its expiry, whatever its publisher asked for.

Easy to get wrong: a copy that is brought again does not live longer, or whoever keeps bringing an
old copy would keep an old value alive here. And copies of a key need not be all that its replicas
hold, so they may answer only a reader who asked for what is late enough, not for everything.
"""

from __future__ import annotations

from collections import OrderedDict

from protocols.dht.slots import Slot, supersedes


class _Copy:
    __slots__ = ("counted_bytes", "ends", "slot")

    def __init__(self, slot: Slot, counted_bytes: int, ends: int) -> None:
        self.slot = slot
        self.counted_bytes = counted_bytes
        self.ends = ends


class SlotCache:
    """Invariants: `total_bytes` is the sum over all copies and at most the limit.

    Takes slots as they come: whoever calls `keep` has checked them.
    """

    def __init__(self, limit_bytes: int, seconds: float) -> None:
        self.total_bytes = 0
        self._limit_bytes = limit_bytes
        self._milliseconds = int(seconds * 1000)
        self._keys: OrderedDict[str, dict[bytes, _Copy]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(copies) for copies in self._keys.values())

    def keep(self, slot: Slot, counted_bytes: int, now_ms: int) -> bool:
        """Keep a copy, unless it is here, older than what is here, or too large for the area."""
        self._drop_ended(slot.key, now_ms)
        known = self._keys.get(slot.key, {}).get(slot.publisher)
        if counted_bytes > self._limit_bytes or (
            known is not None and not supersedes(slot, known.slot)
        ):
            return False
        self.drop(slot.key, slot.publisher)
        while self.total_bytes + counted_bytes > self._limit_bytes:
            self._drop_key(next(iter(self._keys)))
        ends = min(slot.expires, now_ms + self._milliseconds)
        self._keys.setdefault(slot.key, {})[slot.publisher] = _Copy(slot, counted_bytes, ends)
        self._keys.move_to_end(slot.key)
        self.total_bytes += counted_bytes
        return True

    def get(self, key: str, now_ms: int) -> list[Slot]:
        """The copies of a key that are still good."""
        self._drop_ended(key, now_ms)
        copies = self._keys.get(key)
        if copies is None:
            return []
        self._keys.move_to_end(key)
        return [copy.slot for copy in copies.values()]

    def drop(self, key: str, publisher: bytes) -> None:
        copies = self._keys.get(key)
        if copies is None or publisher not in copies:
            return
        self.total_bytes -= copies.pop(publisher).counted_bytes
        if not copies:
            del self._keys[key]

    def expire(self, now_ms: int) -> None:
        """Let go of every copy that is over. `get` does so for its key by itself."""
        for key in list(self._keys):
            self._drop_ended(key, now_ms)

    def _drop_ended(self, key: str, now_ms: int) -> None:
        copies = self._keys.get(key)
        if copies is not None:
            # a copy with more than its time left was taken before the clock was put back
            latest_end = now_ms + self._milliseconds
            ended = [one for one, copy in copies.items() if not now_ms < copy.ends <= latest_end]
            for publisher in ended:
                self.drop(key, publisher)

    def _drop_key(self, key: str) -> None:
        for copy in self._keys.pop(key).values():
            self.total_bytes -= copy.counted_bytes
