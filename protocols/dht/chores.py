"""What may as well be left undone, a few at a time in the background.

Repairs, copies and pings are one pool, checks of strangers' addresses another: whoever makes us
dial where nobody answers keeps other strangers waiting, and none of our own work.

Easy to get wrong: a chore that breaks must not end the node.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from protocols.errors import PotluckError

log = logging.getLogger("potluck.dht")


class Chores:
    """At most `at_once` run, and at most `waiting` wait or run; what is more is not done."""

    def __init__(self, nursery: trio.Nursery, at_once: int, waiting: int) -> None:
        self._nursery = nursery
        self._limiter = trio.CapacityLimiter(at_once)
        self._most = waiting
        self._unfinished = 0
        self.dropped = 0

    def add(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> bool:
        """Do this when its turn comes; False if too much waits already."""
        if self._unfinished >= self._most:
            self.dropped += 1
            return False
        self._unfinished += 1
        self._nursery.start_soon(self._run, work, arguments)
        return True

    async def _run(
        self, work: Callable[..., Awaitable[None]], arguments: tuple[object, ...]
    ) -> None:
        try:
            async with self._limiter:
                await work(*arguments)
        except PotluckError as error:
            log.debug("%s came to nothing: %s", getattr(work, "__name__", work), error)
        except Exception:  # a bug in a chore must not end the node
            log.exception("a chore of the directory broke")
        finally:
            self._unfinished -= 1
