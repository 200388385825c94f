"""One direction of a link that is worse than loopback: slower, further away, or broken.

`LinkSchedule` is the arithmetic: when do so many bytes, handed in now, come out at the far end?
`LinkDirection` carries bytes from one trio stream to another by that schedule, and can be told to
stall (hold everything back, in order) or to swallow (take everything, deliver nothing).

What it promises: bytes are never reordered or changed; memory is bounded: when the queue before
the bottleneck is full, it stops reading, and TCP's own back-pressure tells the sender.

Easy to get wrong: only bytes that *wait* for the bottleneck count against the queue. Those that
are past it and on their way are what a long fat pipe holds, and must not be throttled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import trio
from trio.abc import HalfCloseableStream

READ_BYTES = 16 * 1024  # one piece of the schedule: 1.3 ms of a 100 Mbit/s link
DEFAULT_QUEUE_BYTES = 256 * 1024  # what a home router holds: 20 ms at 100 Mbit/s
MOST_UNDERWAY_BYTES = 64 * 1024 * 1024  # memory for one direction, whatever its rate and delay


@dataclass(frozen=True)
class LinkConditions:
    """How one direction of a link behaves. The default is a wire that costs nothing.

    `delay_seconds` is one way; a round trip costs both directions' delays. Without
    `bytes_per_second` there is no bottleneck and no queue. `burst_bytes` may pass at once after
    a pause, as through a token bucket. `queue_bytes` is how much may wait for the bottleneck.
    """

    delay_seconds: float = 0.0
    bytes_per_second: float | None = None
    burst_bytes: int = 0
    queue_bytes: int = DEFAULT_QUEUE_BYTES


class LinkSchedule:
    """When bytes arrive. Times only grow: what was handed in first arrives first."""

    def __init__(self, conditions: LinkConditions) -> None:
        self._conditions = conditions
        self._bottleneck_free_at = float("-inf")

    def arrival(self, now: float, size: int) -> float:
        """Hand in `size` bytes at `now`; the moment at which the last of them has arrived."""
        conditions = self._conditions
        if conditions.bytes_per_second is None:
            return now + conditions.delay_seconds
        credit = conditions.burst_bytes / conditions.bytes_per_second
        begin = max(self._bottleneck_free_at, now - credit)
        self._bottleneck_free_at = begin + size / conditions.bytes_per_second
        return max(now, self._bottleneck_free_at) + conditions.delay_seconds

    def room_at(self) -> float:
        """The moment from which the queue before the bottleneck has room again."""
        if self._conditions.bytes_per_second is None:
            return float("-inf")
        drain = self._conditions.queue_bytes / self._conditions.bytes_per_second
        return self._bottleneck_free_at - drain


class LinkDirection:
    """Carries one direction of one connection. `run` returns when the source's end has arrived."""

    def __init__(self, conditions: LinkConditions) -> None:
        self.bytes_taken = 0
        self.bytes_delivered = 0
        self._schedule = LinkSchedule(conditions)
        self._underway: deque[tuple[float, bytes]] = deque()  # b"" is the end
        self._underway_bytes = 0
        self._changed = trio.Event()
        self._stalled = False
        self._swallowing = False

    def stall(self) -> None:
        """Deliver nothing from now on, but lose nothing either."""
        self._stalled = True

    def swallow(self) -> None:
        """Take everything and deliver nothing: a cable was pulled, and nobody was told."""
        self._swallowing = True

    def resume(self) -> None:
        """Be a link again. What was held back goes out now; what was swallowed is gone."""
        self._stalled = self._swallowing = False
        self._wake()

    async def run(self, source: HalfCloseableStream, sink: HalfCloseableStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_from, source)
            await self._deliver_to(sink)

    async def _take_from(self, source: HalfCloseableStream) -> None:
        while True:
            await trio.sleep_until(max(trio.current_time(), self._schedule.room_at()))
            while self._underway_bytes >= MOST_UNDERWAY_BYTES:
                await self._changed.wait()
            data = bytes(await source.receive_some(READ_BYTES))
            self.bytes_taken += len(data)
            if not self._swallowing:
                self._put(data)
            if not data:
                return

    def _put(self, data: bytes) -> None:
        due = self._schedule.arrival(trio.current_time(), len(data))
        self._underway.append((due, data))
        self._underway_bytes += len(data)
        self._wake()

    async def _deliver_to(self, sink: HalfCloseableStream) -> None:
        while True:
            while not self._has_something_to_deliver():
                await self._changed.wait()
            due, data = self._underway[0]
            await trio.sleep_until(due)
            if not self._has_something_to_deliver():
                continue  # it stalled meanwhile
            self._underway.popleft()
            self._underway_bytes -= len(data)
            self._wake()
            if self._swallowing:
                continue
            if not data:
                await sink.send_eof()
                return
            await sink.send_all(data)
            self.bytes_delivered += len(data)

    def _has_something_to_deliver(self) -> bool:
        return bool(self._underway) and not self._stalled

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
