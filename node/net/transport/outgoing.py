"""The send queue of a connection, and the order in which it leaves. No I/O.

There are three kinds of frames. A batch has them in this order:

1. session frames: answers to pings, our own pings, resets for unknown streams, GO_AWAY;
2. control frames: at most one per stream, which merges everything since the last one (SYN,
   ACK, window credit, RST);
3. data: small frames of streams that had nothing queued; then one frame from each stream with
   data, in turn, until the batch is full. So a small message waits only for the batch that is
   being sent, however much bulk is queued.

Everything is bounded: answers and refusals by count, control frames by the number of streams, data
by bytes. If a peer makes us answer faster than it reads, it is cut off or not answered. The size of
frames, and of each stream's queue, follows the batches that the link takes (writer.py).

Data in a stream's queue has already been taken from its send window. So it can always leave, even
after the stream was closed and forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from node.net.transport.frames import (
    ACK,
    FIN,
    GO_AWAY,
    HEADER_BYTES,
    PING,
    RST,
    SESSION_STREAM_ID,
    SYN,
    WINDOW_UPDATE,
    encode_header,
)
from node.net.transport.packets import PLAINTEXT_LIMIT_BYTES
from node.net.transport.settings import YamuxSettings
from protocols.errors import LimitExceeded

# One DATA frame fills one Noise packet exactly.
FRAME_PAYLOAD_BYTES = PLAINTEXT_LIMIT_BYTES - HEADER_BYTES

# A stream of small messages goes before bulk. A message of an averaging's agreement, a signed
# request for a slot and a sign of life are smaller than this; a chunk's frame is larger.
SMALL_FRAME_BYTES = 2048

# How many batches a stream may queue: while one is sent, the next is ready.
BATCHES_QUEUED = 2

# The cost of a queued frame beside its bytes (object and queue slot), so that a queue of one-byte
# frames is bounded in memory too.
FRAME_COST_BYTES = 64

# A sender that waits for room is woken when this part of its queue is left, so that it is woken
# once for many frames.
WAKE_BELOW_FRACTION = 1 / 2

# A peer that measures us has one or two pings in flight. Older ones are dropped unanswered.
PINGS_ANSWERED_AT_ONCE = 64

# A peer with more refused streams in the queue opens them faster than it reads the refusals.
REFUSALS_AT_ONCE = 1024


class StreamQueue:
    """The frames that one stream wants to send. The stream owns it, Outgoing drains it."""

    def __init__(self, stream_id: int, on_room: Callable[[], None]) -> None:
        self.stream_id = stream_id
        self.frames: deque[bytes] = deque()
        self.queued_bytes = 0
        self.flags = 0
        self.credit = 0
        self.in_control = False
        self.in_ring = False
        self.on_room = on_room

    @property
    def is_queued(self) -> bool:
        """Whether something of it still waits to be sent."""
        return bool(self.frames) or self.in_control


class Outgoing:
    def __init__(self, settings: YamuxSettings, on_work: Callable[[], None]) -> None:
        self._most_of_stream = settings.stream_send_limit_bytes
        self._connection_limit = settings.connection_send_limit_bytes
        self._on_work = on_work
        self._ring: deque[StreamQueue] = deque()
        self._small: deque[StreamQueue] = deque()  # not in the ring: they go before it, once
        self._control: deque[StreamQueue] = deque()
        self._pongs: deque[int] = deque(maxlen=PINGS_ANSWERED_AT_ONCE)
        self._pings: deque[int] = deque()
        self._refusals: dict[int, None] = {}
        self._go_away: int | None = None
        self.queued_bytes = 0
        self.expect_batches(self._most_of_stream)

    def expect_batches(self, batch_bytes: int) -> None:
        """Batches have this size from now on: limit frames to it, and queues to about it."""
        self.frame_bytes = min(FRAME_PAYLOAD_BYTES, batch_bytes)
        self._stream_limit = min(self._most_of_stream, BATCHES_QUEUED * batch_bytes)
        self._wake_below = int(self._stream_limit * WAKE_BELOW_FRACTION)

    def __bool__(self) -> bool:
        return bool(
            self._ring
            or self._small
            or self._control
            or self._pongs
            or self._pings
            or self._refusals
            or self._go_away is not None
        )

    @property
    def has_small(self) -> bool:
        """Whether `take_small` has something that should not wait for bulk."""
        return bool(
            self._small
            or self._control
            or self._pongs
            or self._pings
            or self._refusals
            or (self._go_away is not None and not self._ring)
        )

    @property
    def has_bulk(self) -> bool:
        return bool(self._ring)

    # ---- session frames

    def answer_ping(self, value: int) -> None:
        self._pongs.append(value)
        self._on_work()

    def ping(self, value: int) -> None:
        self._pings.append(value)
        self._on_work()

    def refuse(self, stream_id: int) -> None:
        """Tell the peer that there is no such stream (any more)."""
        if len(self._refusals) >= REFUSALS_AT_ONCE and stream_id not in self._refusals:
            raise LimitExceeded(
                f"A peer used {REFUSALS_AT_ONCE} streams that do not exist without reading "
                "what it was told about them."
            )
        self._refusals[stream_id] = None
        self._on_work()

    def go_away(self, code: int) -> None:
        self._go_away = code
        self._on_work()

    # ---- one stream's frames

    def add_control(self, queue: StreamQueue, flags: int = 0, credit: int = 0) -> None:
        queue.flags |= flags
        queue.credit += credit
        if not queue.in_control:
            queue.in_control = True
            self._control.append(queue)
        self._on_work()

    def allowance(self, queue: StreamQueue) -> int:
        """How many more bytes of data this stream may queue now; 0 or less: wait."""
        share = self.frame_bytes  # every stream has this, however many there are
        if self.queued_bytes < self._connection_limit:
            streams = len(self._ring) + len(self._small) + (not queue.in_ring)
            share = max(share, min(self._stream_limit, self._connection_limit // streams))
        return share - queue.queued_bytes

    def add_data(self, queue: StreamQueue, frame: bytes) -> None:
        """Queue one whole frame: DATA, or the FIN that must come after all data."""
        queue.frames.append(frame)
        cost = len(frame) + FRAME_COST_BYTES
        queue.queued_bytes += cost
        self.queued_bytes += cost
        if not queue.in_ring:
            queue.in_ring = True
            (self._small if cost < SMALL_FRAME_BYTES else self._ring).append(queue)
        self._on_work()

    def add_end(self, queue: StreamQueue) -> None:
        self.add_data(queue, encode_header(WINDOW_UPDATE, FIN, queue.stream_id, 0))

    def abandon(self, queue: StreamQueue) -> None:
        """Drop the stream's queue and send RST, if the peer ever heard of the stream."""
        self.queued_bytes -= queue.queued_bytes
        queue.queued_bytes = 0
        queue.frames.clear()
        if queue.in_control and queue.flags & SYN:
            queue.flags = 0
            queue.credit = 0
            return
        self.add_control(queue, flags=RST)

    def drop(self, queue: StreamQueue) -> None:
        """Drop the stream's queue without a message: the peer reset it."""
        self.queued_bytes -= queue.queued_bytes
        queue.queued_bytes = 0
        queue.frames.clear()
        queue.flags = 0
        queue.credit = 0

    # ---- the writer's side

    def take_small(self) -> list[bytes]:
        """Everything that goes before bulk: session and control frames, and one small frame."""
        return self.take_batch(1, with_bulk=False)

    def take_batch(self, limit_bytes: int, *, with_bulk: bool = True) -> list[bytes]:
        """The next frames to send: at least one if there are any, otherwise about `limit_bytes`."""
        frames: list[bytes] = []
        if self._control or self._pongs or self._pings or self._refusals:
            self._take_control(frames)
        ring, small = self._ring, self._small
        taken = 0
        made_room: list[StreamQueue] = []
        while (small or (ring and with_bulk)) and taken < limit_bytes:
            queue = (small or ring).popleft()
            if queue.frames:
                frame = queue.frames.popleft()
                frames.append(frame)
                taken += len(frame)
                cost = len(frame) + FRAME_COST_BYTES
                queue.queued_bytes -= cost
                self.queued_bytes -= cost
                made_room.append(queue)
            if queue.frames:
                ring.append(queue)
            else:
                queue.in_ring = False
        for queue in made_room:
            if queue.queued_bytes <= self._wake_below:
                queue.on_room()
        if self._go_away is not None and not ring and not small:
            frames.append(encode_header(GO_AWAY, 0, SESSION_STREAM_ID, self._go_away))
            self._go_away = None
        return frames

    def _take_control(self, frames: list[bytes]) -> None:
        for value in self._pongs:
            frames.append(encode_header(PING, ACK, SESSION_STREAM_ID, value))
        self._pongs.clear()
        for value in self._pings:
            frames.append(encode_header(PING, SYN, SESSION_STREAM_ID, value))
        self._pings.clear()
        for stream_id in self._refusals:
            frames.append(encode_header(WINDOW_UPDATE, RST, stream_id, 0))
        self._refusals.clear()
        for queue in self._control:
            queue.in_control = False
            if queue.flags & RST:
                frames.append(encode_header(WINDOW_UPDATE, RST, queue.stream_id, 0))
            elif queue.flags or queue.credit:
                frames.append(
                    encode_header(WINDOW_UPDATE, queue.flags, queue.stream_id, queue.credit)
                )
            queue.flags = 0
            queue.credit = 0
        self._control.clear()
