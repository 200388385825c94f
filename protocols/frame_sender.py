"""One stream's outgoing frames: pushed by many tasks, sent by one, several frames to a send.

Tasks `push` whole frames without waiting; the task that runs `run` sends what has gathered as one
piece. Sixteen calls that start in one turn of the event loop thus cost one send, and no frame is
ever cut by somebody's cancellation, which would leave the stream out of step.

Promise: the queue is bounded as long as producers ask `congested` before a push and wait for
`room` when it is. A stream that takes nothing for `stall_seconds` ends `run` with
DeadlineExceeded.

All senders of a node count what they hold in one `QueuedBytes`. Peers that ask much and read
nothing would otherwise each be given a megabyte for every stream that they may open.

Easy to get wrong: a ticket tells only whether a frame was handed to the stream, not whether it
arrived. `was_sent` False is certain: the other side never saw it.
"""

from __future__ import annotations

from collections import deque

import trio

from protocols.errors import DeadlineExceeded
from protocols.network import Stream
from protocols.turnstile import Turnstile

BATCH_BYTES = 256 << 10  # one send; also the step in which a stalled stream is noticed
CONGESTED_BYTES = 1 << 20  # queued for one stream, above which producers wait
CROWDED_BYTES = 64 << 10  # the same while all streams together hold too much: a few answers


class QueuedBytes:
    """What all senders of a node have queued together, and from where on that is too much."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total = 0

    @property
    def is_crowded(self) -> bool:
        return self.total >= self.limit_bytes


class FrameSender:
    """The outgoing side of one stream of messages."""

    def __init__(self, stall_seconds: float, of_node: QueuedBytes) -> None:
        self._stall_seconds = stall_seconds
        self._of_node = of_node
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._ended = False
        self._pushed = 0
        self._taken = 0
        self._finishing = False
        self._abandoned = False
        self._work = Turnstile()
        self._room = trio.lowlevel.ParkingLot()

    @property
    def queued_bytes(self) -> int:
        """Bytes pushed that the stream has not taken yet."""
        return self._queued_bytes

    @property
    def congested(self) -> bool:
        if self._queued_bytes < CROWDED_BYTES:
            return False
        return self._queued_bytes >= CONGESTED_BYTES or self._of_node.is_crowded

    def push(self, frame: bytes) -> int:
        """Queue a frame; its ticket. After the end of `run` it goes nowhere."""
        self._pushed += 1
        if self._ended:
            return self._pushed
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._of_node.total += len(frame)
        self._work.open()
        return self._pushed

    def was_sent(self, ticket: int) -> bool:
        """Whether the frame with this ticket was handed to the stream, at least in part."""
        return ticket <= self._taken

    async def room(self) -> None:
        """Wait until the queue is short enough for another frame, or will never be sent."""
        while self.congested and not self._abandoned:
            await self._room.park()

    def abandon(self) -> None:
        """Nothing will be sent any more: let go those who wait for room."""
        self._abandoned = True
        self._room.unpark_all()

    def finish(self) -> None:
        """Let `run` end our side of the stream and return once all that is queued has been sent."""
        self._finishing = True
        self._work.open()

    async def run(self, stream: Stream) -> None:
        """Send until `finish`. Errors of the stream come out as they are."""
        try:
            await self._run(stream)
        finally:
            self._ended = True
            self._queue.clear()
            self._of_node.total -= self._queued_bytes
            self._queued_bytes = 0

    async def _run(self, stream: Stream) -> None:
        while True:
            while self._queue:
                await self._send(stream, self._next_batch())
                if not self.congested:
                    self._room.unpark_all()
            if self._finishing:
                await stream.send_eof()
                return
            await self._work.wait()

    def _next_batch(self) -> bytes:
        queue = self._queue
        if self._queued_bytes <= BATCH_BYTES:
            batch = queue[0] if len(queue) == 1 else b"".join(queue)
            self._taken += len(queue)
            queue.clear()
            return batch
        frames = [queue.popleft()]
        size = len(frames[0])
        while queue and size + len(queue[0]) <= BATCH_BYTES:
            size += len(queue[0])
            frames.append(queue.popleft())
        self._taken += len(frames)
        return b"".join(frames)

    async def _send(self, stream: Stream, batch: bytes) -> None:
        if len(batch) <= BATCH_BYTES:
            await self._send_slice(stream, batch)
        else:
            view = memoryview(batch)
            for start in range(0, len(batch), BATCH_BYTES):
                await self._send_slice(stream, view[start : start + BATCH_BYTES])

    async def _send_slice(self, stream: Stream, data: bytes | memoryview) -> None:
        with trio.move_on_after(self._stall_seconds) as scope:
            await stream.send_all(data)
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                f"The other side took none of {len(data):,} bytes "
                f"for {self._stall_seconds:g} seconds.",
                why="It has stopped reading, or the link carries nothing.",
            )
        self._queued_bytes -= len(data)
        self._of_node.total -= len(data)
