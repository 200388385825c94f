"""Lets the training thread wait for trio. trio never waits for the training thread.

    answer = Answer[Outcome]("the outcome of a round")
    ...                                  # trio: answer.give(outcome), or answer.fail(error)
    answer.wait()                        # training thread: the outcome, or the error

Promise: an answer is given once. It wakes the waiting thread at once, and so does the end of the
collaboration (`fail`). Giving an answer never waits.

Easy to get wrong: an error is raised in another thread than where it was made, perhaps twice.
`again` makes a fresh one, so that tracebacks do not grow into each other.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from protocols.errors import PotluckError
from protocols.rpc import again

Value = TypeVar("Value")


class LaterAnswer(Generic[Value]):
    """A value or an error from another thread. Invariant: once `done`, it never changes."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._given = threading.Event()
        self._lock = threading.Lock()
        self._value: tuple[Value] | None = None
        self._error: PotluckError | None = None

    @property
    def done(self) -> bool:
        return self._given.is_set()

    def give(self, value: Value) -> None:
        """Give the value, unless there is a value or an error already."""
        with self._lock:
            if not self.done:
                self._value = (value,)
                self._given.set()

    def fail(self, error: PotluckError) -> None:
        """Give an error, unless there is a value or an error already."""
        with self._lock:
            if not self.done:
                self._error = error
                self._given.set()

    def wait(self) -> Value:
        """Block this thread until the answer is there. Raises the error, if it is one."""
        self._given.wait()
        if self._error is not None:
            raise again(self._error)
        if self._value is None:
            raise AssertionError(f"{self._what} is there and is nothing")
        return self._value[0]
