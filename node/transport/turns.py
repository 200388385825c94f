"""What a connection may send next, where all connections of the node share an upload limit.

    frames = await turns.next_frames(batch_bytes)
    ... send them ...
    turns.sent()

Something small and some bulk may wait at the same time, each for its own turn; what is granted
first is sent first. So a sign of life goes out while this connection's bulk stands in its line, and
does not lose the bulk its place there.

Easy to get wrong: a turn that was granted and is not used must be given back (`end`).
"""

from __future__ import annotations

import trio

from node.transport.outgoing import Outgoing
from node.transport.throttle import Throttle, Ticket


class Turns:
    """Of one connection. Invariant: every ticket in here is waiting or granted, none is done."""

    def __init__(self, throttle: Throttle, outgoing: Outgoing) -> None:
        self._throttle = throttle
        self._outgoing = outgoing
        self._small: Ticket | None = None
        self._bulk: Ticket | None = None
        self._used: Ticket | None = None
        self._changed = trio.Event()

    def wake(self) -> None:
        """Something was queued, or granted."""
        self._changed.set()

    async def next_frames(self, batch_bytes: int) -> list[bytes]:
        """Wait for a turn; what to send in it. Empty if there is nothing to send any more."""
        self.sent()
        while self._outgoing:
            self._changed = trio.Event()
            if self._outgoing.has_small and self._small is None:
                self._small = self._throttle.ask_small(self.wake)
            if self._outgoing.has_bulk and self._bulk is None:
                self._bulk = self._throttle.ask(batch_bytes, self.wake)
            if self._small is not None and self._small.is_granted:
                self._used, self._small = self._small, None
                return self._outgoing.take_small()
            if self._bulk is not None and self._bulk.is_granted:
                self._used, self._bulk = self._bulk, None
                return self._outgoing.take_batch(batch_bytes)
            await self._changed.wait()
        self.end()
        return []

    def sent(self) -> None:
        """What `next_frames` returned has left, and was charged."""
        if self._used is not None:
            self._throttle.done(self._used)
            self._used = None

    def end(self) -> None:
        """There is nothing to send, for now or for ever."""
        for ticket in (self._small, self._bulk, self._used):
            if ticket is not None:
                self._throttle.done(ticket)
        self._small = self._bulk = self._used = None
