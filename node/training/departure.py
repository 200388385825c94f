"""Leaving the run: after the current round, or at once.

Ctrl-C, SIGTERM, `potluck leave`, or a cap that cannot be kept otherwise, ask for it. From any
thread:

    departure.leave()                # after the current round, within ROUND_PATIENCE_SECONDS
    departure.leave(at_once=True)    # now

Leaving takes at most five seconds from the first Ctrl-C to the shell's prompt, whatever the round
does. So waiting for the round has a timeout.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import trio

from protocols.errors import PotluckError

ROUND_PATIENCE_SECONDS: Final = 2.5
"""The part of those five seconds for the current round; the rest is for the batch that is being
computed, and for closing connections and files."""


class Departure:
    """Invariant: it only ever becomes more urgent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = False
        self._at_once = False
        self._error: PotluckError | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def wanted(self) -> bool:
        return self._wanted

    @property
    def at_once(self) -> bool:
        return self._at_once

    @property
    def error(self) -> PotluckError | None:
        """The error that forced this peer to leave, if nobody asked it to."""
        return self._error

    def leave(self, *, at_once: bool = False, error: PotluckError | None = None) -> None:
        """Any thread; never waits."""
        with self._lock:
            changed = not self._wanted or (at_once and not self._at_once)
            if not self._wanted:
                self._error = error
            self._wanted = True
            self._at_once = self._at_once or at_once
        if changed:
            for watcher in tuple(self._watchers):
                watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after every change, in the thread that made it. It must not wait."""
        self._watchers.append(watcher)

    async def until_wanted(self) -> None:
        await self._until(lambda: self._wanted)

    async def until_at_once(self) -> None:
        await self._until(lambda: self._at_once)

    @asynccontextmanager
    async def cuts_short(self, told: Callable[[], None] | None = None) -> AsyncIterator[None]:
        """Cancel the block, without an error, as soon as somebody wants to leave. `told` is called
        just before."""

        async def cancel() -> None:
            await self.until_wanted()
            if told is not None:
                told()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            yield
            nursery.cancel_scope.cancel()

    async def _until(self, condition: Callable[[], bool]) -> None:
        token, changed = trio.lowlevel.current_trio_token(), trio.Event()

        def wake() -> None:
            with suppress(trio.RunFinishedError):  # the waiting block's loop has ended
                token.run_sync_soon(lambda: changed.set())

        self.watch(wake)
        try:
            while not condition():
                await changed.wait()
                changed = trio.Event()
        finally:
            self._watchers.remove(wake)
