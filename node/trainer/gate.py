"""Whether the training loop may go on: a gate that stands closed as long as anybody has a reason.

    gate.close("pause", "paused by you until 14:30")     # any thread; never waits
    gate.open("pause")
    gate.wait()                                          # the training thread, between two batches

Whoever has a reason closes the gate under a name of its own: `pause` the command, `schedule`,
`quota`, `idle` the caps. It opens when all of them have opened theirs. What is shown to the owner
are the reasons' words, the oldest first.

Promises: closing and opening never wait, and may be done twice. `wait` returns at once where the
gate is open, and as soon as it opens or `end` is called.

Easy to get wrong: a closed gate stops computing and nothing else. What peers see of it, and what
traffic goes on, is decided by who watches the gate (trainer.py): it tells them that this peer is
away, so that nobody waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Closed:
    """Why the gate is closed: by whom (`name`), in words for the owner, and until when if that is
    known (seconds since 1970)."""

    name: str
    words: str
    until: float | None = None


class Gate:
    """Any thread may call any method. Invariant: open exactly when nobody has a reason."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed: dict[str, Closed] = {}
        self._ended = False
        self._watchers: list[Callable[[], None]] = []

    def close(self, name: str, words: str, *, until: float | None = None) -> None:
        """Let nothing through. Closing again under the same name replaces the words."""
        with self._changed:
            told = Closed(name, words, until)
            if self._closed.get(name) == told:
                return
            self._closed[name] = told
            self._changed.notify_all()
        self._tell()

    def open(self, name: str) -> None:
        """Take back the reason of this name, if there is one."""
        with self._changed:
            if self._closed.pop(name, None) is None:
                return
            self._changed.notify_all()
        self._tell()

    def reasons(self) -> tuple[Closed, ...]:
        """Why it is closed, the oldest reason first; empty when it is open."""
        with self._changed:
            return tuple(self._closed.values())

    @property
    def is_open(self) -> bool:
        return not self.reasons()

    def wait(self) -> None:
        """Until it is open, or `end` has been called."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._closed)

    def end(self) -> None:
        """Let everybody through from now on: the trainer leaves."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this after every change, in the thread that made it. It must not wait."""
        self._watchers.append(watcher)

    def _tell(self) -> None:
        for watcher in tuple(self._watchers):
            watcher()
