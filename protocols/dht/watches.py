"""Watching a key: read it repeatedly, and report changes.

After a change a key is read often, and ever more rarely while nothing changes. All watchers of a
key on this node share one reader. Slots that they know already are not sent again. Slots that this
node keeps as a replica are seen as soon as they arrive, without a request.

A slow watcher sees the latest value, not every step: of two changes of one slot between two reads
only the second is reported.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

import trio

from protocols.dht.reader import Breadth, SlotEntry, SlotReader
from protocols.dht.slots import Slot, supersedes
from protocols.dht.state import DhtState, log
from protocols.errors import PotluckError
from protocols.identity import PeerId

SLOWER_EACH_TIME = 1.5
FULL_READ_EVERY = 5  # reads; the others ask only the first few replicas


def newest_of_each(slots: Iterable[Slot]) -> list[Slot]:
    """The winning slot of each publisher."""
    newest: dict[bytes, Slot] = {}
    for slot in slots:
        held = newest.get(slot.publisher)
        if held is None or supersedes(slot, held):
            newest[slot.publisher] = slot
    return list(newest.values())


@dataclass(frozen=True)
class Change:
    """A publisher's current value; None if there is none any more (withdrawn or expired)."""

    publisher: PeerId
    entry: SlotEntry | None


class _Watched:
    def __init__(self) -> None:
        self.watchers = 0
        self.slots: dict[bytes, Slot] = {}
        self.changed = trio.Event()
        self.read_now = trio.Event()
        self.scope = trio.CancelScope()


class Watches:
    """Invariant: a key has a reader exactly while it has a watcher."""

    def __init__(self, state: DhtState, reader: SlotReader) -> None:
        self._state = state
        self._reader = reader
        self._watched: dict[str, _Watched] = {}
        state.on_new_slot = self._on_new_slot

    def __len__(self) -> int:
        return len(self._watched)

    async def watch(self, key: str) -> AsyncGenerator[Change, None]:
        self._state.families.family_of(key)
        watched = self._enter(key)
        try:
            reported: dict[bytes, Slot] = {}
            while True:
                changed = watched.changed
                for change in self._changes(reported, dict(watched.slots)):
                    yield change
                if changed is watched.changed:
                    await changed.wait()
        finally:
            self._leave(key, watched)

    def _changes(self, reported: dict[bytes, Slot], now: dict[bytes, Slot]) -> list[Change]:
        changes = []
        for publisher, slot in now.items():
            if reported.get(publisher) != slot:
                reported[publisher] = slot
                value = self._state.families.decode(slot)
                peer = slot.publisher_peer
                changes.append(Change(peer, SlotEntry(peer, value, slot.expires, slot.sequence)))
        for publisher in [one for one in reported if one not in now]:
            changes.append(Change(reported.pop(publisher).publisher_peer, None))
        return changes

    def _enter(self, key: str) -> _Watched:
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _Watched()
            self._state.nursery.start_soon(self._poll, key, watched)
        watched.watchers += 1
        return watched

    def _leave(self, key: str, watched: _Watched) -> None:
        watched.watchers -= 1
        if not watched.watchers:
            del self._watched[key]
            watched.scope.cancel()

    def _on_new_slot(self, key: str) -> None:
        watched = self._watched.get(key)
        if watched is not None:
            watched.read_now.set()

    async def _poll(self, key: str, watched: _Watched) -> None:
        settings = self._state.settings
        seconds = settings.watch_seconds
        known: list[Slot] = []
        reads = 0
        with watched.scope:
            while True:
                breadth = Breadth.ALL if reads % FULL_READ_EVERY == 0 else Breadth.FEW
                known, is_new = await self._read(key, watched, known, breadth)
                reads += 1
                slower = min(settings.longest_watch_seconds, seconds * SLOWER_EACH_TIME)
                seconds = settings.watch_seconds if is_new else slower
                jitter = 0.75 + 0.5 * self._state.network.random.random()
                known, is_new = await self._wait(key, watched, known, seconds * jitter)
                if is_new:
                    seconds = settings.watch_seconds

    async def _read(
        self, key: str, watched: _Watched, known: list[Slot], breadth: Breadth
    ) -> tuple[list[Slot], bool]:
        """Read the key; return its slots, and whether they are new."""
        try:
            known = await self._reader.look(key, breadth)
        except PotluckError as error:
            log.debug("a watched key could not be read: %s", error)
        return known, self._note(watched, known)

    async def _wait(
        self, key: str, watched: _Watched, known: list[Slot], seconds: float
    ) -> tuple[list[Slot], bool]:
        """Wait until the next read is due; return the slots, and whether any are new.

        A slot that arrives at this node itself, or expires, is seen at once, without a request.
        """
        is_new = False
        due = trio.current_time() + seconds
        while trio.current_time() < due:
            with trio.move_on_at(min(due, trio.current_time() + self._until_expiry(watched))):
                await watched.read_now.wait()
            if watched.read_now.is_set():
                watched.read_now = trio.Event()
                known = newest_of_each((*known, *self._reader.own(key)))
            if self._note(watched, known):
                is_new = True
                due = min(due, trio.current_time() + self._state.settings.watch_seconds)
        return known, is_new

    def _note(self, watched: _Watched, slots: list[Slot]) -> bool:
        """Take what was read; return whether it is new."""
        now_ms = self._state.now_ms()
        current = {
            slot.publisher: slot for slot in slots if not slot.withdrawn and slot.expires > now_ms
        }
        if current == watched.slots:
            return False
        watched.slots = current
        watched.changed.set()
        watched.changed = trio.Event()
        return True

    def _until_expiry(self, watched: _Watched) -> float:
        now_ms = self._state.now_ms()
        ends = (slot.expires - now_ms for slot in watched.slots.values())
        return max(0.1, min(ends, default=3_600_000) / 1000)
