"""The task that sends what a connection has queued, batch by batch.

A batch is what bulk makes a small stream wait for. It begins as one packet; each batch that left
quickly doubles the next, up to the half megabyte that a fast link needs, and each that took long
halves it. What may be queued behind it and what the kernel may hold unsent follow: a message that
waits in the kernel behind a second of bulk cannot be helped by any order here.

Where the node's owner limits what is sent, a batch is small and waits for its turn among those of
all connections (turns.py).

Easy to get wrong: what was taken from the queue has not left yet. `flush` returns when the last
batch was handed to the network.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from libp2p.io.exceptions import ConnectionClosedError

from node.transport.measurement import RateMeter
from node.transport.noise import SEND_BATCH_BYTES, NoiseSession
from node.transport.outgoing import FRAME_PAYLOAD_BYTES, Outgoing
from node.transport.settings import YamuxSettings
from node.transport.turns import Turns

FIRST_BATCH_BYTES = FRAME_PAYLOAD_BYTES
SMALLEST_BATCH_BYTES = FRAME_PAYLOAD_BYTES // 4
"""A fifth of a second where a home connection of 10 Mb/s is shared by fifteen of these."""

QUICK_BATCH_SECONDS = 0.005
SLOW_BATCH_SECONDS = 0.02


class Writer:
    """Made by YamuxConnection; `is_over` says whether nothing will ever be queued again."""

    def __init__(
        self, session: NoiseSession, settings: YamuxSettings, is_over: Callable[[], bool]
    ) -> None:
        self.outgoing = Outgoing(settings, self.wake)
        self.sent = RateMeter()
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
        """Send until cancelled; ConnectionClosedError when nothing is left and it is over."""
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
            began = trio.current_time()
            await self._session.send_frames(frames)
            if self._turns is not None:
                self._turns.sent()
            now = trio.current_time()
            size = sum(map(len, frames))
            self.sent.sent(size, began, now)
            if now - began > SLOW_BATCH_SECONDS:
                if batch_bytes > SMALLEST_BATCH_BYTES:
                    batch_bytes = max(batch_bytes // 2, SMALLEST_BATCH_BYTES)
                    self._expect(batch_bytes)
            elif now - began < QUICK_BATCH_SECONDS and size >= batch_bytes < self._largest_batch:
                batch_bytes = min(batch_bytes * 2, self._largest_batch)
                self._expect(batch_bytes)

    def _expect(self, batch_bytes: int) -> None:
        self.outgoing.expect_batches(batch_bytes)
        is_slow = batch_bytes <= FRAME_PAYLOAD_BYTES
        self._session.limit_unsent(batch_bytes if is_slow else None)

    def wake(self) -> None:
        """Something was queued, or it may be over. Never waits."""
        if self._waits is not None:
            self._waits.set()
            self._waits = None
        if self._turns is not None:
            self._turns.wake()

    async def flush(self) -> None:
        """Wait until nothing is queued any more, or the connection has ended."""
        while (self.outgoing or not self._idle.is_set()) and not self._has_ended:
            await self._idle.wait()

    def end(self) -> None:
        """The connection has ended: nobody need wait for a flush."""
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
