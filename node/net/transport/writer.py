"""The task that sends a connection's queue, batch by batch.

Small streams wait for a batch of bulk. So a batch begins as one packet. Each batch that left
quickly doubles the next, up to the half megabyte that a fast link needs; each that waited long for
room in the kernel halves it. The queue behind it and the unsent bytes in the kernel are limited
accordingly: if a message waits in the kernel behind a second of bulk, no order here can help.

Only the wait for room counts. On a busy machine a batch takes long because the processor does
something else: of the batches that took more than 20 ms between four peers on one core, 19 of 20
had not waited at all. Smaller ones would only cost more of that processor.

After a pause the kernel takes much at once, however slow the link is. So a batch is also not
larger than what the link carries, as measured, in the time that a batch may take. (Bulk that comes
in pieces had grown batches to half a megabyte on links of 1.5 MB/s, and credit for the other
direction waited behind that for half a second.)

If the node has an upload limit, a batch is small and waits for its turn among those of all
connections (below).

Frames taken from the queue have not left yet. `flush` returns when the last batch was given to the
network.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from libp2p.io.exceptions import ConnectionClosedError

from node.net.transport.measurement import LinkRateMeter
from node.net.transport.noise import SEND_BATCH_BYTES, NoiseSession
from node.net.transport.outgoing import FRAME_PAYLOAD_BYTES, Outgoing
from node.net.transport.settings import YamuxSettings
from node.net.transport.traffic import Throttle, Ticket

FIRST_BATCH_BYTES = FRAME_PAYLOAD_BYTES
SMALLEST_BATCH_BYTES = FRAME_PAYLOAD_BYTES // 4
"""A fifth of a second if fifteen of these share a home connection of 10 Mb/s."""

QUICK_BATCH_SECONDS = 0.005
SLOW_BATCH_SECONDS = 0.02


class ConnectionWriter:
    """YamuxConnection makes this; `is_over` tells whether nothing will ever be queued again."""

    def __init__(
        self, session: NoiseSession, settings: YamuxSettings, is_over: Callable[[], bool]
    ) -> None:
        self.outgoing = Outgoing(settings, self.wake)
        self.sent = LinkRateMeter()
        self._session = session
        throttle = session.traffic.up
        self._turns = None if throttle is None else Turns(throttle, self.outgoing)
        self._largest_batch = SEND_BATCH_BYTES
        self.outgoing.expect_batches(FIRST_BATCH_BYTES)
        if throttle is not None:
            self._largest_batch = min(FIRST_BATCH_BYTES, throttle.batch_bytes)
            self._expect(self._largest_batch)
        self._is_over = is_over
        self._waits: trio.Event | None = None
        self._idle = trio.Event()
        self._has_ended = False

    async def run(self) -> None:
        """Send until cancelled; ConnectionClosedError when the queue is empty and the connection is
        over.
        """
        try:
            await self._run()
        finally:
            if self._turns is not None:
                self._turns.end()

    async def _run(self) -> None:
        batch_bytes = min(FIRST_BATCH_BYTES, self._largest_batch)
        while True:
            if not self.outgoing:
                await self._wait_for_work()
            if self._turns is None:
                frames = self.outgoing.take_batch(batch_bytes)
            else:
                frames = await self._turns.next_frames(batch_bytes)
            if not frames:
                continue
            waited = await self._session.send_frames(frames)
            if self._turns is not None:
                self._turns.sent()
            now = trio.current_time()
            size = sum(map(len, frames))
            self.sent.sent(size, now - waited, now)
            most = self._most_bytes()
            if waited > SLOW_BATCH_SECONDS or batch_bytes > 2 * most:
                self._session.pace()
                if batch_bytes > SMALLEST_BATCH_BYTES:
                    batch_bytes = max(batch_bytes // 2, SMALLEST_BATCH_BYTES)
                    self._expect(batch_bytes)
            elif waited < QUICK_BATCH_SECONDS and size >= batch_bytes < most:
                batch_bytes = min(batch_bytes * 2, most)
                self._expect(batch_bytes)

    def _most_bytes(self) -> int:
        """The largest batch that this link sends in time, as far as its rate is known."""
        rate = self.sent.bytes_per_second
        if rate is None:
            return self._largest_batch
        timely = max(SMALLEST_BATCH_BYTES, int(rate * SLOW_BATCH_SECONDS))
        return min(self._largest_batch, timely)

    def _expect(self, batch_bytes: int) -> None:
        self.outgoing.expect_batches(batch_bytes)
        is_fast = batch_bytes >= SEND_BATCH_BYTES
        self._session.limit_unsent(None if is_fast else batch_bytes)

    def wake(self) -> None:
        """Something was queued, or the connection may be over. Never waits."""
        if self._waits is not None:
            self._waits.set()
            self._waits = None
        if self._turns is not None:
            self._turns.wake()

    async def flush(self) -> None:
        """Wait until the queue is empty, or the connection has ended."""
        while (self.outgoing or not self._idle.is_set()) and not self._has_ended:
            await self._idle.wait()

    def end(self) -> None:
        """The connection has ended: wake those that wait for a flush."""
        self._has_ended = True
        self._idle.set()

    async def _wait_for_work(self) -> None:
        self._idle.set()
        if self._turns is not None:
            self._turns.end()
        while not self.outgoing:
            if self._is_over():
                raise ConnectionClosedError("The other side closed the connection.")
            self._waits = trio.Event()
            await self._waits.wait()
        self._idle = trio.Event()


# The frames that a connection may send next, if all connections of the node share an upload limit.
#
#     frames = await turns.next_frames(batch_bytes)
#     ... send them ...
#     turns.sent()
#
# A small message and some bulk may wait at the same time, each for its own turn; the first that is
# granted is sent first. So a sign of life leaves while this connection's bulk waits, and the bulk
# keeps its place in the line.
#
# A turn that was granted and is not used must be given back (`end`).


class Turns:
    """The turns of one connection. Invariant: every ticket here is waiting or granted, none is
    done.
    """

    def __init__(self, throttle: Throttle, outgoing: Outgoing) -> None:
        self._throttle = throttle
        self._outgoing = outgoing
        self._small: Ticket | None = None
        self._bulk: Ticket | None = None
        self._used: Ticket | None = None
        self._changed = trio.Event()

    def wake(self) -> None:
        """Something was queued, or a turn was granted."""
        self._changed.set()

    async def next_frames(self, batch_bytes: int) -> list[bytes]:
        """Wait for a turn; return the frames to send in it. Empty if nothing is left to send."""
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
        """The frames of `next_frames` have left, and were charged."""
        if self._used is not None:
            self._throttle.done(self._used)
            self._used = None

    def end(self) -> None:
        """There is nothing to send, for now or for ever."""
        for ticket in (self._small, self._bulk, self._used):
            if ticket is not None:
                self._throttle.done(ticket)
        self._small = self._bulk = self._used = None
