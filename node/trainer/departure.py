"""Leaving: after the round that is under way, or at once. Said once by whoever wants it, in any
thread: Ctrl-C, SIGTERM, `potluck leave`, or the run's own end.

    departure.leave()                # after the current round, within ROUND_PATIENCE_SECONDS
    departure.leave(at_once=True)    # now

Easy to get wrong: "after the round" has an end of its own. Five seconds from the first Ctrl-C to
the shell's prompt are promised, whatever the round does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

ROUND_PATIENCE_SECONDS: Final = 3.0
"""For the round that is under way, of the five seconds that leaving may take; the rest is for
closing connections and files."""


class Departure:
    """Invariant: it only ever becomes more urgent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = False
        self._at_once = False
        self._watchers: list[Callable[[], None]] = []

    @property
    def wanted(self) -> bool:
        return self._wanted

    @property
    def at_once(self) -> bool:
        return self._at_once

    def leave(self, *, at_once: bool = False) -> None:
        """Any thread; never waits."""
        with self._lock:
            changed = not self._wanted or (at_once and not self._at_once)
            self._wanted = True
            self._at_once = self._at_once or at_once
        if changed:
            for watcher in tuple(self._watchers):
                watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this after every change, in the thread that made it. It must not wait."""
        self._watchers.append(watcher)
