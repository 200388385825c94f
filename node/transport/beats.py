"""One clock for the keep-alives of all connections of a node.

A node has hundreds of connections, and most of them are idle. A task each that sleeps for a
second is what such a node does most: some fifty microseconds a wake-up. One task that calls them
all in turn does it in two.

A beat has a few parts, and each connection belongs to one of them: so a node with thousands of
connections never holds its loop for all of them at once. A part that nobody belongs to costs no
wake-up.

Easy to get wrong: between two calls of a member there is at least most of a beat in which the
loop has run, however late this task is woken. The keep-alive counts on that.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

PARTS = 4  # of 4,096 connections a quarter is called in two milliseconds

Member = Callable[[], None]


class Beats:
    """Calls each member once a beat, while `run` runs. A member must not raise, and may leave.

    Invariant: a member is in one part; `_somebody` is set while there are members.
    """

    def __init__(self, beat_seconds: float) -> None:
        self.beat_seconds = beat_seconds
        self._parts: list[dict[Member, None]] = [{} for _ in range(PARTS)]
        self._part_of: dict[Member, int] = {}
        self._somebody = trio.Event()

    def join(self, member: Member) -> None:
        """Call this from now on; for the first time in about a beat."""
        part = min(range(PARTS), key=lambda one: len(self._parts[one]))
        self._part_of[member] = part
        self._parts[part][member] = None
        self._somebody.set()

    def leave(self, member: Member) -> None:
        part = self._part_of.pop(member, None)
        if part is not None:
            del self._parts[part][member]

    async def run(self) -> None:
        """For ever."""
        now = 0
        while True:
            if not self._part_of:
                self._somebody = trio.Event()
                await self._somebody.wait()
            steps = self._steps_from(now)
            await trio.sleep(steps * self.beat_seconds / PARTS)
            now = (now + steps) % PARTS
            for member in tuple(self._parts[now]):
                member()

    def _steps_from(self, now: int) -> int:
        """How many parts it is to the next one that has members; once around is to itself."""
        for steps in range(1, PARTS):
            if self._parts[(now + steps) % PARTS]:
                return steps
        return PARTS
