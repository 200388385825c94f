"""How the training thread waits for trio, and trio never for the training thread.

    answer = Answer[Outcome]("the outcome of a round")
    ...                                  # trio: answer.give(outcome), or answer.fail(error)
    answer.wait()                        # training thread: the outcome, or the error

Promise: an answer is given once; whoever waits is woken at once, also by the end (`fail`). Giving
one never waits.

Easy to get wrong: an error is raised in another thread than where it was made, perhaps twice;
`again` makes a fresh one, so that tracebacks do not grow into each other.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from protocols.errors import PotluckError
from protocols.remote_errors import again

Value = TypeVar("Value")


class Answer(Generic[Value]):
    """What another thread will say. Invariant: once `done`, nothing changes any more."""

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
        """Say it, unless it was said (or has failed) before."""
        with self._lock:
            if not self.done:
                self._value = (value,)
                self._given.set()

    def fail(self, error: PotluckError) -> None:
        """Say that there will be no answer, unless there was one."""
        with self._lock:
            if not self.done:
                self._error = error
                self._given.set()

    def wait(self) -> Value:
        """Block this thread until it is there. Raises what it failed with."""
        self._given.wait()
        if self._error is not None:
            raise again(self._error)
        if self._value is None:
            raise AssertionError(f"{self._what} is there and is nothing")
        return self._value[0]
