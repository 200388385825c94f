"""Resting as the owner wants: by a pause, the schedule, the quota, or as the machine is in use.

    resting = Resting(session)
    resting.is_wanted()                # any thread
    resting.see_out()                  # the training thread: tells of it, and waits
    with resting.told() as is_rest:    # the same, where there is more to do in it

Easy to get wrong: a network that is gone closes the same gate, and is no rest: it comes back at any
moment, and is no reason to give anything back, or to leave what is being fetched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from node.trainer.giving_back import give_back_memory
from node.trainer.happenings import Paused, Resumed
from node.trainer.phases import NETWORK
from node.trainer.session import Session


class Resting:
    """The bridge's `Rest`, of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def is_wanted(self) -> bool:
        return bool(self.reasons())

    def reasons(self) -> tuple[str, ...]:
        """In words, the oldest first."""
        closed = self._session.gate.reasons()
        return tuple(one.words for one in closed if one.name != NETWORK)

    def see_out(self) -> None:
        with self.told() as is_rest:
            if is_rest:
                give_back_memory()
            self._session.gate.wait()

    @contextmanager
    def told(self) -> Iterator[bool]:
        """Tells when the block begins and ends, unless only the network is gone: whether it is a
        rest."""
        reasons, began = self.reasons(), time.monotonic()
        if reasons:
            self._session.happened(Paused(reasons))
        yield bool(reasons)
        if reasons:
            self._session.happened(Resumed(round(time.monotonic() - began, 3)))
