"""Frames: how messages and chunks are delimited on a stream. No I/O in this part.

A stream carries frames and nothing else:

    length  u32 big-endian   bytes of payload that follow the kind
    kind    u8               one of the nine below
    payload

The payload of CHUNK is raw bytes, that of ALIVE is empty. Every other payload is a *head* (what rpc
itself needs: ids, method, deadline, envelope) and a *body* (the method's own message), both
MessagePack:

    head length  u16 big-endian
    head         MessagePack array (protocols/rpc/messages.py)
    body         MessagePack, to the end of the payload; may be empty

The head comes first so that the limit of the *method* is known before its body is read.

Whatever the bytes, `FrameParser.feed` raises only MalformedMessage and LimitExceeded. It holds only
the received part of the current frame: memory grows with the bytes received, never with the length
declared.

`length` does not count the five bytes of the frame header itself.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

import trio

from protocols.errors import DeadlineExceeded, LimitExceeded, MalformedMessage
from protocols.identity import PeerId
from protocols.network import Stream

log = logging.getLogger("potluck.rpc")

REQUEST: Final = 1
RESPONSE: Final = 2
ERROR: Final = 3
CANCEL: Final = 4
OPEN: Final = 5
ACCEPT: Final = 6
CHUNK: Final = 7
CLOSE: Final = 8
ALIVE: Final = 9

KIND_NAMES: Final[Mapping[int, str]] = {
    REQUEST: "REQUEST",
    RESPONSE: "RESPONSE",
    ERROR: "ERROR",
    CANCEL: "CANCEL",
    OPEN: "OPEN",
    ACCEPT: "ACCEPT",
    CHUNK: "CHUNK",
    CLOSE: "CLOSE",
    ALIVE: "ALIVE",
}

FRAME_HEADER_BYTES: Final = 5
HEAD_LENGTH_BYTES: Final = 2

# a head is an id, a method name, a deadline and an envelope (token and signature: under 1 KiB)
HEAD_LIMIT_BYTES: Final = 4096

_FRAME_HEADER = struct.Struct(">IB")
_MESSAGE_HEADER = struct.Struct(">IBH")  # frame header and head length in one
_HEAD_LENGTH = struct.Struct(">H")

MOST_AT_ONCE = 512
"""Messages that are parsed or handled in one go, however little the guard's judgement costs. An
honest peer has a quarter as many calls in flight; another one may send thirty thousand in one
read."""

Head = TypeVar("Head")
ReadHead = Callable[[int, bytes, int], Head]
"""(kind, bytes of the head, bytes of body declared) -> decoded head; raises when too large."""


def name_of(kind: int) -> str:
    return KIND_NAMES.get(kind, f"unknown kind {kind}")


def message_frame(kind: int, head: bytes, body: bytes) -> bytes:
    """A whole frame around an encoded head and body."""
    length = HEAD_LENGTH_BYTES + len(head) + len(body)
    return _MESSAGE_HEADER.pack(length, kind, len(head)) + head + body


def chunk_header(length: int) -> bytes:
    """The five bytes before a chunk."""
    return _FRAME_HEADER.pack(length, CHUNK)


ALIVE_FRAME: Final = _FRAME_HEADER.pack(0, ALIVE)


def message_limit(body_limit: int) -> int:
    """The longest payload of a message with a body of at most `body_limit` bytes."""
    return HEAD_LENGTH_BYTES + HEAD_LIMIT_BYTES + body_limit


def read_frame_header(header: bytes | bytearray, limits: Mapping[int, int]) -> tuple[int, int]:
    """(kind, payload length) of a five-byte header, checked against the limit of its kind.

    A kind that is not in `limits` is not allowed here.
    """
    length, kind = _FRAME_HEADER.unpack(header)
    check_frame(kind, length, limits)
    return kind, length


def check_frame(kind: int, length: int, limits: Mapping[int, int]) -> None:
    limit = limits.get(kind)
    if limit is None:
        raise MalformedMessage(
            f"A frame of {name_of(kind)} came where only {_names(limits)} may come.",
            why="The other side speaks another protocol or another version, or sent garbage.",
        )
    if length > limit:
        raise LimitExceeded(
            f"A {name_of(kind)} frame declares {length:,} bytes; at most {limit:,} are allowed."
        )


def split_payload(kind: int, payload: bytes) -> tuple[bytes, bytes]:
    """(head, body) of a message's payload."""
    head_length = _head_length(kind, len(payload), payload)
    end = HEAD_LENGTH_BYTES + head_length
    return payload[HEAD_LENGTH_BYTES:end], payload[end:]


def _head_length(kind: int, payload_length: int, start_of_payload: bytes | memoryview) -> int:
    if payload_length < HEAD_LENGTH_BYTES:
        raise MalformedMessage(f"A {name_of(kind)} frame is too short to hold a head.")
    (head_length,) = _HEAD_LENGTH.unpack_from(start_of_payload)
    if head_length > HEAD_LIMIT_BYTES:
        raise LimitExceeded(
            f"A {name_of(kind)} frame declares a head of {head_length:,} bytes; "
            f"at most {HEAD_LIMIT_BYTES:,} are allowed."
        )
    if HEAD_LENGTH_BYTES + head_length > payload_length:
        raise MalformedMessage(f"A {name_of(kind)} frame is shorter than the head it declares.")
    return int(head_length)


def _names(limits: Mapping[int, int]) -> str:
    return ", ".join(KIND_NAMES[kind] for kind in sorted(limits)) or "nothing"


class FrameParser(Generic[Head]):
    """Turns the bytes of a stream, cut anywhere, into messages.

    `limits` names the allowed kinds and the longest payload of each; the owner may raise a limit
    while the parser runs. `read_head` decodes the head of a message as soon as it is there, and is
    told the length of the body, so it can refuse before the body is read. It is called once for
    each message.

    After an error the parser cannot be used further: it has lost its place in the stream.
    """

    def __init__(self, limits: Mapping[int, int], read_head: ReadHead[Head]) -> None:
        self._limits = limits
        self._read_head = read_head
        self._partial = bytearray()
        self._wanted = 0  # with fewer bytes in _partial there is nothing new to parse
        self._head: tuple[Head] | None = None  # of the current frame, once decoded

    @property
    def held_bytes(self) -> int:
        """Bytes of the unfinished frame, and of messages that were too many for one `feed`."""
        return len(self._partial)

    @property
    def holds_messages(self) -> bool:
        """Whether `feed` has left whole messages for the next one."""
        return bool(self._partial) and len(self._partial) >= self._wanted

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[int, Head, bytes]]:
        """Take the bytes that arrived; return the messages (kind, head, body) completed by them, at
        most MOST_AT_ONCE."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return []
            data = self._partial
        elif not data:
            return []
        with memoryview(data) as view:
            messages, used = self._parse(view)
            left = len(view) - used
            if data is not self._partial:
                if left:
                    self._partial += view[used:]
                return messages
        del self._partial[:used]
        return messages

    def _parse(self, view: memoryview) -> tuple[list[tuple[int, Head, bytes]], int]:
        messages: list[tuple[int, Head, bytes]] = []
        start, end = 0, len(view)
        limits, read_head = self._limits, self._read_head
        while True:
            if len(messages) == MOST_AT_ONCE:
                self._wanted = 0
                return messages, start
            here = end - start
            if here < FRAME_HEADER_BYTES:
                self._wanted = FRAME_HEADER_BYTES
                return messages, start
            length, kind = _FRAME_HEADER.unpack_from(view, start)
            if self._head is None:
                check_frame(kind, length, limits)
                if here < FRAME_HEADER_BYTES + HEAD_LENGTH_BYTES and length >= HEAD_LENGTH_BYTES:
                    self._wanted = FRAME_HEADER_BYTES + HEAD_LENGTH_BYTES
                    return messages, start
            head_start = start + FRAME_HEADER_BYTES + HEAD_LENGTH_BYTES
            head_length = _head_length(kind, length, view[start + FRAME_HEADER_BYTES : head_start])
            body_start = head_start + head_length
            if self._head is None:
                if end < body_start:
                    self._wanted = body_start - start
                    return messages, start
                head = read_head(
                    kind,
                    bytes(view[head_start:body_start]),
                    length - HEAD_LENGTH_BYTES - head_length,
                )
            else:
                (head,) = self._head
            frame_end = start + FRAME_HEADER_BYTES + length
            if end < frame_end:
                self._head = (head,)
                self._wanted = frame_end - start
                return messages, start
            self._head = None
            messages.append((kind, head, bytes(view[body_start:frame_end])))
            start = frame_end


# Reading frames from a stream: a thin layer around the parser that also watches the time.
#
# An idle stream may be silent for any time. A stream that stops *inside* a frame holds memory of
# ours, so it must make progress: `PROGRESS_BYTES` in every `stall_seconds`, or the rest of the
# frame.
#
# Deadlines are set only while a frame is unfinished. Setting one for every read would cost as much
# as everything else in a small call.


READ_BYTES = 64 << 10  # one read: a Yamux frame is just under 64 KiB
PROGRESS_BYTES = 4 << 10  # per stall period: 140 bytes a second at 30 s, below any modem

_HERE_ALREADY = bytearray(256 << 10)  # one for all readers: none waits while it is in use


class UnfinishedMessages:
    """What has come of messages that are not whole, on all streams of a node, within a limit.

    The threat: an unfinished message holds up to 4 MiB of ours for as long as a little of it comes
    now and then, and strangers may have thousands of streams. Beyond the limit the peer with most
    loses all streams with unfinished messages; one that `knows` does not vouch for goes first.
    """

    def __init__(self, limit_bytes: int, knows: Callable[[PeerId], bool]) -> None:
        self._limit = limit_bytes
        self._knows = knows
        self._of_peer: dict[PeerId, dict[Stream, int]] = {}
        self._sums: Counter[PeerId] = Counter()

    def holds(self, stream: Stream, size: int) -> None:
        """So much is held for this stream now. At its end that is 0."""
        peer = stream.remote_peer
        streams = self._of_peer.get(peer, {})
        before = streams.pop(stream, 0)
        if size:
            self._of_peer.setdefault(peer, streams)[stream] = size
        elif not streams:
            self._of_peer.pop(peer, None)
        self._sums[peer] += size - before
        if not self._sums[peer]:
            del self._sums[peer]
        if size > before:
            self._keep_limit()

    def _keep_limit(self) -> None:
        while self._sums.total() > self._limit:
            peer = max(self._sums, key=lambda one: (not self._knows(one), self._sums[one]))
            log.info("%s loses streams: too much of unfinished messages is held", peer)
            del self._sums[peer]
            for stream in self._of_peer.pop(peer):
                stream.reset()


class MessageReader(Generic[Head]):
    """The messages of one stream, in batches of those that arrived together.

    What it holds counts in `unfinished` until `end`.
    """

    def __init__(
        self,
        stream: Stream,
        parser: FrameParser[Head],
        stall_seconds: float,
        unfinished: UnfinishedMessages,
    ) -> None:
        self._stream = stream
        self._parser = parser
        self._stall_seconds = stall_seconds
        self._unfinished = unfinished
        self._counted_bytes = 0
        self._deadline = 0.0
        self._since_progress = 0

    async def next_batch(self, already_read: bytes = b"") -> list[tuple[int, Head, bytes]] | None:
        """Wait for at least one message; None at the end of the stream.

        MalformedMessage if the stream ends inside a message, DeadlineExceeded if it stalls there.
        """
        data: bytes | bytearray = already_read
        while True:
            if data or self._parser.holds_messages:
                batch = self._take(data)
                if batch:
                    return batch
            data = await self._receive()
            if not data:
                if self._parser.held_bytes:
                    raise MalformedMessage("The stream ended in the middle of a message.")
                return None

    def _take(self, data: bytes | bytearray) -> list[tuple[int, Head, bytes]]:
        """The messages that this completes, with what else of a large message is here already: its
        pieces would take a turn of the event loop each."""
        batch, size = self._parser.feed(data), len(data)
        if self._parser.held_bytes:
            while not batch and (more := self._stream.receive_now(_HERE_ALREADY)):
                with memoryview(_HERE_ALREADY) as view, view[:more] as piece:
                    batch = self._parser.feed(piece)
                size += more
        if self._parser.held_bytes:
            self._note_progress(size, bool(batch))
        else:
            self._deadline = 0.0
        self._count(self._parser.held_bytes)
        return batch

    def end(self) -> None:
        """Nothing is held any more."""
        self._count(0)

    def _count(self, size: int) -> None:
        if size != self._counted_bytes:
            self._counted_bytes = size
            self._unfinished.holds(self._stream, size)

    def _note_progress(self, received: int, finished_a_message: bool) -> None:
        self._since_progress += received
        if finished_a_message or not self._deadline or self._since_progress >= PROGRESS_BYTES:
            self._deadline = trio.current_time() + self._stall_seconds
            self._since_progress = 0

    async def _receive(self) -> bytes | bytearray:
        if not self._deadline:
            return await self._stream.receive_some(READ_BYTES)
        data: bytes | bytearray = b""
        with trio.move_on_at(self._deadline) as patience:
            data = await self._stream.receive_some(READ_BYTES)
        if patience.cancelled_caught:
            raise stalled(self._stall_seconds)
        return data


async def receive_frame_header(stream: Stream) -> bytes | None:
    """The next five bytes, or None if the stream ends before them."""
    header = bytearray(FRAME_HEADER_BYTES)
    received = await stream.receive_into(header)
    if received == 0:
        return None
    while received < FRAME_HEADER_BYTES:
        with memoryview(header) as view, view[received:] as rest:
            more = await stream.receive_into(rest)
        if more == 0:
            raise MalformedMessage("The stream ended in the middle of a frame's header.")
        received += more
    return bytes(header)


def stalled(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"Less than {PROGRESS_BYTES:,} bytes came in {seconds:g} seconds, inside a message.",
        why="The other side has stopped, or the link carries next to nothing.",
        advice="Try again; the connection is reopened by itself.",
    )


# A turnstile lets one waiting task through each time it is opened.
#
# It is like a `trio.Event` for a single waiter, but reusable without a new object, at a third of
# the cost. Each call passes through one on each side.
#
# If it is opened twice before a task waits, it lets one task through once, not twice. After `wait`
# the task must check again for what it waits for.


class Turnstile:
    """For at most one waiter. Opening it never blocks, and is remembered."""

    def __init__(self) -> None:
        self._open = False
        self._waiter: trio.lowlevel.Task | None = None

    def open(self) -> None:
        if self._waiter is not None:
            trio.lowlevel.reschedule(self._waiter)
            self._waiter = None
        else:
            self._open = True

    async def wait(self) -> None:
        """Return at once if it was opened since the last wait, else when it is opened."""
        if self._open:
            self._open = False
            await trio.lowlevel.checkpoint()
            return
        if self._waiter is not None:
            raise trio.BusyResourceError("another task is waiting at this turnstile")
        self._waiter = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._give_up)

    def _give_up(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED


# The outgoing frames of one stream: many tasks push them, one sends them in batches.
#
# Tasks `push` whole frames without waiting. The task in `run` sends all queued frames as one piece,
# so sixteen calls that start in one turn of the event loop cost one send. Cancelling a task that
# pushed never cuts a frame, which would break the framing of the stream.
#
# The queue is bounded if producers check `congested` before a push and wait for `room` if it is
# True.
#
# A batch is sent in slices. If the stream does not take one in `stall_seconds`, `run` ends with
# DeadlineExceeded. Slices are small at first, and as large as the stream takes in a second later:
# a slow line that many streams share is no stall.
#
# All senders of a node count their queues in one `QueuedBytes`. Otherwise a peer that asks much and
# reads nothing would get a megabyte for each stream that it may open.
#
# A ticket only tells whether a frame was handed to the stream, not whether it arrived. If
# `was_sent` is False, the other side certainly never saw it.


BATCH_BYTES = 256 << 10  # the largest slice
LEAST_SLICE_BYTES = 16 << 10  # in a stall period of 30 s: 4 kbit/s
QUICK_SECONDS = 1.0  # for a slice; the next one after a slower one is half as large
CONGESTED_BYTES = 1 << 20  # queued for one stream; above it producers wait
CROWDED_BYTES = 64 << 10  # instead, while all streams together hold too much: a few answers


class QueuedBytes:
    """The bytes queued by all senders of a node, and the limit for them."""

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
        self._slice_bytes = LEAST_SLICE_BYTES
        self._finishing = False
        self.finished = False
        """Whether all was sent, and our side of the stream has ended between two frames."""
        self._abandoned = False
        self._work = Turnstile()
        self._room = trio.lowlevel.ParkingLot()

    @property
    def queued_bytes(self) -> int:
        """Bytes that were pushed and that the stream has not taken yet."""
        return self._queued_bytes

    @property
    def congested(self) -> bool:
        if self._queued_bytes < CROWDED_BYTES:
            return False
        return self._queued_bytes >= CONGESTED_BYTES or self._of_node.is_crowded

    def push(self, frame: bytes) -> int:
        """Queue a frame and return its ticket. After the end of `run` the frame is dropped."""
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
        """Give up sending: wake the tasks that wait for room."""
        self._abandoned = True
        self._room.unpark_all()

    def finish(self) -> None:
        """Let `run` send all that is queued, end our side of the stream, and return."""
        self._finishing = True
        self._work.open()

    async def run(self, stream: Stream) -> None:
        """Send until `finish`. Errors of the stream are raised as they are."""
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
                self.finished = True
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
        if len(batch) <= self._slice_bytes:
            await self._send_slice(stream, batch)
            return
        view, start = memoryview(batch), 0
        while start < len(view):
            end = start + self._slice_bytes
            if len(view) - end < self._slice_bytes // 4:  # a short rest would wake the reader again
                end = len(view)
            await self._send_slice(stream, view[start:end])
            start = end

    async def _send_slice(self, stream: Stream, data: bytes | memoryview) -> None:
        began = trio.current_time()
        with trio.move_on_after(self._stall_seconds) as scope:
            await stream.send_all(data)
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                f"The other side took none of {len(data):,} bytes "
                f"for {self._stall_seconds:g} seconds.",
                why="It has stopped reading, or the link carries nothing.",
            )
        if trio.current_time() - began > QUICK_SECONDS:
            self._slice_bytes = max(LEAST_SLICE_BYTES, self._slice_bytes // 2)
        elif self._slice_bytes < BATCH_BYTES and len(data) >= self._slice_bytes:
            self._slice_bytes *= 2
        self._queued_bytes -= len(data)
        self._of_node.total -= len(data)
