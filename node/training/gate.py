"""A gate for the training loop: closed while there is any reason not to train.

    gate.close("pause", "paused by you until 14:30")     # any thread; never waits
    gate.open("pause")
    gate.wait()                                          # the training thread, between two batches

Each reason has a name: `pause` is the command, `schedule`, `quota` and `idle` are the caps. The
gate opens when no reason is left. The owner is shown the reasons' words, the oldest first.

Promises: closing and opening never wait, and may be repeated. `wait` returns at once if the gate is
open, and otherwise as soon as it opens or `end` is called.

A closed gate only stops computing. trainer.py watches the gate and decides which traffic goes on;
it tells the peers that this one is away, so that nobody waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Closed:
    """Why the gate is closed: the reason's name, words for the owner, and its end if that is known
    (seconds since 1970)."""

    name: str
    words: str
    until: float | None = None


class Gate:
    """Any thread may call any method. Invariant: the gate is open if there is no reason."""

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
        """Remove the reason of this name, if there is one."""
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
        """Wait until it is open, or `end` has been called."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._closed)

    def wait_for_change(self, seen: tuple[Closed, ...]) -> None:
        """Wait until it is open, or closed for other reasons than `seen`, or `end` has been
        called."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or not self._closed or tuple(self._closed.values()) != seen
            )

    def end(self) -> None:
        """Let everybody through from now on: the trainer leaves."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after every change, in the thread that made it. It must not wait."""
        self._watchers.append(watcher)

    def _tell(self) -> None:
        for watcher in tuple(self._watchers):
            watcher()
