"""One end of a simulated stream: windows, half-closes and resets as in the contract.

Bytes wait in three places: `_queue` (accepted from the sender, not yet on the wire), the wire,
and `_chunks` at the receiver. All three together are bounded by the stream's window: `send_all`
accepts only what fits, and reading returns credit. So a reader that stops reading stops the
sender after one window, and memory is bounded by windows × open streams.

Messages of one stream keep their order on the wire. So the end of stream, and the reset that tells
a sender to stop, wait until the queue is empty. Our own `reset` drops the queue and does not wait.

A parked task that is woken must take its bytes without another checkpoint: a cancellation there
would lose them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import trio

from protocols.errors import ProtocolNotServed, Unreachable
from protocols.identity import PeerId
from protocols.network import FEW_BYTES, Reach, Stream
from protocols.testing.trace import TraceKind

if TYPE_CHECKING:
    from protocols.testing.link import LinkEnd

LARGEST_READ_BYTES = 1_048_576  # the most that `receive_some()` returns without a number


class SimulatedStream(Stream):
    """One end; see the module. Its `LinkEnd` makes it, on both sides under the same number."""

    def __init__(self, end: LinkEnd, number: int, protocol: str, *, inbound: bool) -> None:
        self._end = end
        self._number = number
        self._protocol = protocol
        self.inbound = inbound
        self._window_bytes = end.world.settings.window_bytes
        self._packet_bytes = end.world.settings.packet_bytes
        # sending
        self._queue: deque[bytes] = deque()
        self._unacknowledged_bytes = 0  # accepted, and not yet credited by the reader
        self._leaving = False  # a segment is on its way through the pipes
        self._end_asked = False
        self._end_sent = False
        self._stop_asked = False  # tell the other side by a reset that we read no more
        self._stop_sent = False
        self._sender: trio.lowlevel.Task | None = None
        self._sending = False
        # receiving
        self._chunks: deque[memoryview] = deque()
        self._packet: list[bytes] = []  # that has arrived so far
        self._unread_bytes = 0
        self._last_arrival = -math.inf
        self._uncredited_bytes = 0
        self._end_received = False
        self._receiver: trio.lowlevel.Task | None = None
        self._receiving = False
        # both
        self._closed = False  # by this side: aclose or reset
        self._broken: str | None = None  # by the other side or the link; how
        self._opened = trio.Event()
        self._not_served = False
        self._was_accepted = inbound

    def __repr__(self) -> str:
        return f"<stream {self._number} {self._protocol} {self._end}>"

    @property
    def remote_peer(self) -> PeerId:
        return self._end.peer

    @property
    def protocol(self) -> str:
        return self._protocol

    @property
    def last_arrival(self) -> float:
        return self._last_arrival

    @property
    def over_their_dial(self) -> bool:
        end = self._end
        return end.inbound and end.reach is Reach.DIRECT and not end.link.punched

    # -- sending ---------------------------------------------------------------------------

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            with memoryview(data).cast("B") as view:
                await self._accept(view)
        finally:
            self._sending = False

    async def _accept(self, view: memoryview) -> None:
        position = 0
        while True:
            self._check_sending()
            room = self._window_bytes - self._unacknowledged_bytes
            part = bytes(view[position : position + room])
            if part:
                position += len(part)
                self._unacknowledged_bytes += len(part)
                self._queue.extend(self._packets_of(part))
                self._end.on_their_way(len(part))
                self._hand_over()
            if position == len(view):
                return
            await self._park_sender()

    def _check_sending(self) -> None:
        if self._closed or self._end_asked:
            raise trio.ClosedResourceError("this stream was closed for sending")
        if self._broken is not None:
            raise trio.BrokenResourceError(self._broken)

    async def wait_send_all_might_not_block(self) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            self._check_sending()
            while self._unacknowledged_bytes >= self._window_bytes:
                await self._park_sender()
                self._check_sending()
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if self._end_asked:
            return
        if self._broken is not None:
            raise trio.BrokenResourceError(self._broken)
        self._end_asked = True
        self._hand_over()

    def _hand_over(self) -> None:
        """Put segments on the wire, one at a time if the wire takes time.

        Nothing follows a reset, not even the end of stream, which would look like a normal end.
        """
        if self._broken is not None:
            return
        end = self._end
        while self._queue and not self._leaving:
            segment, ends_packet = self._next_segment(end.segment_bytes())
            arguments = (end.other.on_data, self._number, segment, ends_packet)
            left = end.carry(TraceKind.DATA, len(segment), *arguments)
            if left > end.world.timeline.now():
                self._leaving = True
                end.world.timeline.at(left, self._segment_left)
        if self._queue or self._leaving:
            return
        if self._end_asked and not self._end_sent:
            self._end_sent = True
            end.carry(TraceKind.END, 0, end.other.on_end, self._number)
        if self._stop_asked and not self._stop_sent:
            self._stop_sent = True
            end.carry(TraceKind.RESET, 0, end.other.on_reset, self._number)
        self._forget_if_finished()

    def _packets_of(self, part: bytes) -> list[bytes]:
        size = self._packet_bytes or len(part)
        return [part[at : at + size] for at in range(0, len(part), size)]

    def _next_segment(self, limit: int | None) -> tuple[bytes, bool]:
        """It, and whether it ends a packet."""
        head = self._queue.popleft()
        if limit is None or len(head) <= limit:
            return head, True
        self._queue.appendleft(head[limit:])
        return head[:limit], False

    def _segment_left(self) -> None:
        self._leaving = False
        if self._end.alive:
            self._hand_over()

    # -- receiving -------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        await self._wait_for_bytes()
        if not self._chunks:
            return b""
        head = self._chunks.popleft()
        wanted = max_bytes or LARGEST_READ_BYTES
        if len(head) > wanted:
            self._chunks.appendleft(head[wanted:])
            head = head[:wanted]
        self._has_read(len(head))
        return bytes(head)

    async def receive_into(self, buffer: memoryview | bytearray) -> int:
        target = memoryview(buffer).cast("B")
        if not len(target):
            raise ValueError("the buffer must hold at least one byte")
        await self._wait_for_bytes()
        return self._take_into(target)

    async def _wait_for_bytes(self) -> None:
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            if self._has_news():
                await trio.lowlevel.checkpoint()
            while not self._has_news():
                await self._park_receiver()
            if self._closed:
                raise trio.ClosedResourceError("this stream was closed")
            if self._broken is not None and not self._end_received:
                raise trio.BrokenResourceError(self._broken)
        finally:
            self._receiving = False

    def _has_news(self) -> bool:
        return bool(self._chunks) or self._end_received or self._closed or self._broken is not None

    def _take_into(self, target: memoryview) -> int:
        position = 0
        while self._chunks and position < len(target):
            head = self._chunks.popleft()
            part = head[: len(target) - position]
            target[position : position + len(part)] = part
            position += len(part)
            if len(part) < len(head):
                self._chunks.appendleft(head[len(part) :])
        self._has_read(position)
        return position

    def _has_read(self, size: int) -> None:
        self._unread_bytes -= size
        self._uncredited_bytes += size
        # credit half a window at a time, as Yamux does, so that small messages need no credit
        # messages
        if self._uncredited_bytes * 2 >= self._window_bytes and self._end.alive:
            credit, self._uncredited_bytes = self._uncredited_bytes, 0
            if not self._end_received:
                self._end.carry(
                    TraceKind.CREDIT, 0, self._end.other.on_credit, self._number, credit
                )

    # -- closing ---------------------------------------------------------------------------

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            if self._broken is None:
                self._end_asked = True
                self._stop_asked = self._unread_bytes > 0
                self._hand_over()
            self._drop_unread()
            self._wake_both()
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        if self._closed and self._is_finished():
            return
        tell = self._broken is None and not self._stop_sent and self._end.alive
        self._closed = True
        self._break("this side reset the stream")
        if tell:
            self._stop_sent = True
            self._end.carry(TraceKind.RESET, 0, self._end.other.on_reset, self._number)
        self._end.forget_stream(self._number)

    def _drop_unread(self) -> None:
        self._chunks.clear()
        self._unread_bytes = 0

    def _is_finished(self) -> bool:
        if self._broken is not None:
            return True
        return self._end_sent and (self._end_received or self._stop_sent)

    def _forget_if_finished(self) -> None:
        if self._closed and self._is_finished():
            self._end.forget_stream(self._number)

    def _break(self, why: str) -> None:
        if self._broken is None:
            self._broken = why
        self._end.on_their_way(-sum(map(len, self._queue)))
        self._queue.clear()
        if self._closed or not self._end_received:
            self._drop_unread()
        self._wake_both()
        self._opened.set()

    # -- arriving messages -----------------------------------------------------------------

    def data_arrived(self, segment: bytes, *, ends_packet: bool) -> None:
        if self._closed:
            self._stop_asked = True
            self._hand_over()
            return
        if self._packet_bytes is not None:
            self._packet.append(segment)
            if not ends_packet:
                return
            segment = b"".join(self._packet)
            self._packet.clear()
        self._chunks.append(memoryview(segment))
        self._unread_bytes += len(segment)
        if len(segment) > FEW_BYTES:
            self._last_arrival = trio.current_time()
        self._wake_receiver()

    def end_arrived(self) -> None:
        self._end_received = True
        self._wake_receiver()
        self._forget_if_finished()

    def reset_arrived(self) -> None:
        self._break("the other side reset the stream")
        self._forget_if_finished()

    def credit_arrived(self, size: int) -> None:
        self._unacknowledged_bytes -= size
        self._wake_sender()

    def opened_arrived(self, *, served: bool) -> None:
        self._not_served = not served
        self._was_accepted = served
        if served:
            self._opened.set()
        else:
            self._break("the other side does not serve this protocol")
            self._end.forget_stream(self._number)

    def link_gone(self, why: str) -> None:
        self._break(why)

    async def wait_opened(self) -> None:
        """Wait for the other side's answer to the opening of this stream."""
        try:
            await self._opened.wait()
        except trio.Cancelled:
            self.reset()
            raise
        if self._not_served:
            raise ProtocolNotServed(
                f"{self.remote_peer} does not serve {self._protocol}.",
                why="It may run another version of potluck, or another role.",
            )
        if not self._was_accepted:
            raise Unreachable(
                f"{self.remote_peer} did not take a stream for {self._protocol}.",
                why=f"While it was opened: {self._broken}.",
                advice="Try again in a moment.",
            )

    # -- waiting tasks ---------------------------------------------------------------------

    async def _park_sender(self) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._sender = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._sender = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _park_receiver(self) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._receiver = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake_sender(self) -> None:
        if self._sender is not None:
            task, self._sender = self._sender, None
            trio.lowlevel.reschedule(task)

    def _wake_receiver(self) -> None:
        if self._receiver is not None:
            task, self._receiver = self._receiver, None
            trio.lowlevel.reschedule(task)

    def _wake_both(self) -> None:
        self._wake_sender()
        self._wake_receiver()
