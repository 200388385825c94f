"""One direction of a node's traffic, kept to so many bytes a second over all its connections.

    ticket = throttle.ask(size, wake)      # bulk; `wake` is called when it is granted
    ticket = throttle.ask_small(wake)      # goes first, and may borrow
    throttle.done(ticket)                  # sent, and charged to the traffic meanwhile; or not sent

Who asks stands in one of two lines, first come, first served, the small ones before the bulk. A
granted ticket holds its bytes back for its owner until it is done; what really went over the wire
is charged by traffic.py. Somebody has to run `run`.

Promises: asking never waits. A ticket that is done twice, or never granted, costs nothing.

Easy to get wrong: every ticket must be done, or its bytes are lost for as long as the node lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from node.transport.token_bucket import TokenBucket

BATCH_SECONDS = 0.02
"""What bulk takes at once, so that little waits behind it."""

LEAST_BATCH_BYTES = 4096
"""Smaller ones would pay a tenth for headers, and count as small themselves."""

SMALL_BYTES = 2048 + 152
"""What a small ticket holds back: the largest small frame, with a packet and headers around it."""

BUFFERED_SECONDS = 0.15
"""What may have come and not been read, in all connections' buffers together."""

READ_SECONDS = 0.05
"""What all connections together read ahead of their turn."""

LEAST_WAIT_SECONDS = 0.001
"""Shorter sleeps would come back before a clock has moved."""

BUSY_SECONDS = 1.0
"""Who carried bulk within this shares the buffers."""


class Ticket:
    """One turn. `is_granted` until it is done."""

    __slots__ = ("is_granted", "on_granted", "size")

    def __init__(self, size: float, on_granted: Callable[[], None]) -> None:
        self.size = size
        self.on_granted = on_granted
        self.is_granted = False


class Throttle:
    """Invariant: a ticket is in one line, granted, or done."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.batch_bytes = max(LEAST_BATCH_BYTES, int(BATCH_SECONDS * bytes_per_second))
        self._bucket = TokenBucket(bytes_per_second, now)
        self._small: deque[Ticket] = deque()
        self._bulk: deque[Ticket] = deque()
        self._asked = trio.Event()
        self._busy: dict[object, float] = {}

    # ---- turns

    def ask(self, size: int, on_granted: Callable[[], None]) -> Ticket:
        """A turn for so much bulk, 0 for what has been charged already."""
        return self._line_up(Ticket(size, on_granted), self._bulk)

    def ask_small(self, on_granted: Callable[[], None]) -> Ticket:
        """A turn for something small."""
        return self._line_up(Ticket(SMALL_BYTES, on_granted), self._small)

    def done(self, ticket: Ticket) -> None:
        """It has been sent, or will not be."""
        if ticket.is_granted:
            ticket.is_granted = False
            self._bucket.take(-ticket.size, trio.current_time())
            return
        for line in (self._small, self._bulk):
            if ticket in line:
                line.remove(ticket)

    async def turn(self, *, is_small: bool) -> None:
        """Wait until nothing is owed (a small one may owe a little). Cancelling gives it up."""
        granted = trio.Event()
        ticket = self.ask_small(granted.set) if is_small else self.ask(0, granted.set)
        try:
            if not ticket.is_granted:
                await granted.wait()
        finally:
            self.done(ticket)

    def charge(self, size: float) -> None:
        """So much was carried."""
        self._bucket.take(size, trio.current_time())

    async def run(self) -> None:
        """Grant turns, for ever."""
        while True:
            seconds = self._grant()
            if seconds is None:
                self._asked = trio.Event()
                await self._asked.wait()
            else:
                # A small one may come while bulk is waited for
                self._asked = trio.Event()
                with trio.move_on_after(max(seconds, LEAST_WAIT_SECONDS)):
                    await self._asked.wait()

    def _line_up(self, ticket: Ticket, line: deque[Ticket]) -> Ticket:
        line.append(ticket)
        if not (len(self._small) + len(self._bulk) == 1 and self._waits() <= 0):
            self._asked.set()
        else:
            line.clear()
            self._give(ticket)
        return ticket

    def _grant(self) -> float | None:
        """Grant all that may go now; seconds until the next one may, None if nobody waits."""
        while (seconds := self._waits()) <= 0:
            ticket = (self._small or self._bulk).popleft()
            self._give(ticket)
            ticket.on_granted()
        return None if seconds == float("inf") else seconds

    def _give(self, ticket: Ticket) -> None:
        ticket.is_granted = True
        self._bucket.take(ticket.size, trio.current_time())

    def _waits(self) -> float:
        now = trio.current_time()
        if self._small:
            return self._bucket.small_waits(now)
        if self._bulk:
            return self._bucket.bulk_waits(self._bulk[0].size, now)
        return float("inf")

    # ---- what those who receive may hold

    def busy_with(self, who: object) -> int:
        """Somebody carries bulk now; how many do, or did a moment ago."""
        now = trio.current_time()
        self._busy.pop(who, None)
        self._busy[who] = now
        for one, at in list(self._busy.items()):
            if now - at <= BUSY_SECONDS:
                break
            del self._busy[one]
        return len(self._busy)

    def buffer_bytes(self, busy: int) -> int:
        """What the kernel may hold unread of one connection of so many that carry bulk."""
        return int(BUFFERED_SECONDS * self.bytes_per_second / max(1, busy))

    def read_bytes(self, busy: int) -> int:
        """What one connection of so many reads at once."""
        return max(LEAST_BATCH_BYTES, int(READ_SECONDS * self.bytes_per_second / max(1, busy)))
