"""The copy of the state that is being served, made when somebody asks for it.

    async with snapshots.use(digest) as state: ...      # StateGone if this peer is elsewhere by now

Between steps nothing changes, so a state that was named by its digest after a step can be copied
at any time before the next one. The copy outlives the step for as long as somebody downloads it,
and a short while after: a newcomer is never left with half of an epoch that nobody has any more.

Promise: one copy at most, a second only while the first is in use. Both are made in a worker
thread under the lock for reading; their memory is used again. Beside them are the small ones that
were kept when they were named (state_recent.py).

Easy to get wrong: what is copied may differ from what was hashed, if a buffer changed outside of a
step. A copy that does not have the digest it was made for is thrown away, and said to be gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from torch import Tensor

from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_messages import StateGone
from protocols.accumulation.state_recent import RecentStates
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.blocking import in_thread
from protocols.errors import Busy

MOST_COPIES = 2
KEPT_SECONDS = 15.0  # a copy that nobody uses, for those who lost their link or are about to begin


class _Snapshot:
    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.users = 0
        self.last_used = trio.current_time()


class Snapshots:
    """Copies by digest. `look` is called in a worker thread, with the lock held for reading."""

    def __init__(self, look: Callable[[], LiveState], lock: StateLock) -> None:
        self._look, self._lock = look, lock
        self._copies: dict[bytes, _Snapshot] = {}
        self._spare: Tensor | None = None
        self._copying = trio.Lock()
        self.recent = RecentStates(trio.current_time)

    def __len__(self) -> int:
        return len(self._copies)

    def states(self) -> list[TrainingState]:
        return [one.state for one in self._copies.values()] + self.recent.states()

    def has(self, digest: bytes) -> bool:
        return digest in self._copies or self.recent.get(digest) is not None

    @asynccontextmanager
    async def use(self, digest: bytes) -> AsyncIterator[TrainingState]:
        """The state of this digest; it stays while the block lasts.

        StateGone if this peer is at another one; Busy if two others are being downloaded.
        """
        recent = self.recent.get(digest)
        if recent is not None:
            self.recent.keep(recent)  # its manifest was asked for, and its pieces will be
            yield recent
            return
        snapshot = await self._snapshot(digest)
        snapshot.users += 1
        try:
            yield snapshot.state
        finally:
            snapshot.users -= 1
            snapshot.last_used = trio.current_time()

    def forget_unused(self, *, after_seconds: float = KEPT_SECONDS) -> None:
        """Let go of copies that nobody has used for so long."""
        self.recent.forget_unwanted()
        now = trio.current_time()
        for digest, one in list(self._copies.items()):
            if not one.users and now - one.last_used >= after_seconds:
                del self._copies[digest]
        if not self._copies:
            self._spare = None

    async def _snapshot(self, digest: bytes) -> _Snapshot:
        async with self._copying:
            known = self._copies.get(digest)
            if known is None:
                self._make_room()
                memory, self._spare = self._spare, None
                state = await in_thread(self._copy, memory, digest)
                known = self._copies[digest] = _Snapshot(state)
            return known

    def _make_room(self) -> None:
        """Let the unused copies go; their memory serves the next one."""
        for digest, one in list(self._copies.items()):
            if not one.users:
                self._spare = one.state.memory
                del self._copies[digest]
        if len(self._copies) >= MOST_COPIES:
            raise Busy("Two older states are being downloaded from this peer.")

    def _copy(self, memory: Tensor | None, digest: bytes) -> TrainingState:
        """In a worker thread."""
        with self._lock.reading():
            live = self._look()
            state = live.copy(memory)
        if state.digest != digest:
            raise StateGone(
                f"This peer is at epoch {state.epoch} now, which is another state.",
                why="It has stepped since it named that state.",
                advice="Look at the progress of the peers again.",
            )
        return state
