"""The streams of one connection by number, their limits, and those that wait to be accepted.

The side that dialled gives odd numbers to the streams that it opens, the other side even ones. A
stream is in the table from its first frame until it can do nothing more (`forget`). A frame for a
stream that is not there is answered with a reset.

A stream that was closed may be forgotten while its last bytes still wait to be sent. It counts
against the peer's limit until they have left, so that a peer that reads nothing cannot have us
queue the answers to any number of streams.

py-libp2p closes its half of a stream and never uses it again. Such a stream is reset if the peer
does not close its half in time (`reset_abandoned`).
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakSet

import trio
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from node.net.transport.frames import ACK, LARGEST_STREAM_ID, SYN
from node.net.transport.stream import YamuxStream
from protocols.errors import MalformedMessage

if TYPE_CHECKING:
    from node.net.transport.channel import YamuxChannel
    from node.net.transport.connection import YamuxConnection
    from node.net.transport.outgoing import StreamQueue


class StreamTable:
    """YamuxConnection makes this. Only `accept` waits."""

    def __init__(self, connection: YamuxConnection) -> None:
        self._connection = connection
        self._settings = connection.settings
        self._streams: dict[int, YamuxStream] = {}
        self._inbound_count = 0
        self._ended_unread: WeakSet[YamuxChannel] = WeakSet()  # some may be read by now
        self._leaving: deque[StreamQueue] = deque()  # of streams of the peer, already forgotten
        self._next_stream_id = 1 if connection.is_initiator else 2
        self._accept_sender, self._accept_receiver = trio.open_memory_channel[YamuxStream](
            connection.settings.accept_backlog
        )
        self._awaiting_peer_close: dict[YamuxChannel, float] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def every_stream(self) -> tuple[YamuxStream, ...]:
        return tuple(self._streams.values())

    def fullest(self) -> YamuxChannel | None:
        """The one with the most unread bytes, also among those that the peer has ended."""
        every = chain(self._streams.values(), self._ended_unread)
        found = max(every, key=lambda one: one.unread_bytes, default=None)
        return found if found is not None and found.unread_bytes else None

    def open(self) -> YamuxStream:
        """A stream of ours; MuxedConnUnavailable if this connection can have no more."""
        outbound = len(self._streams) - self._inbound_count
        if outbound >= self._settings.outbound_stream_limit:
            raise MuxedConnUnavailable(f"{outbound} streams are open to this peer already.")
        if self._next_stream_id > LARGEST_STREAM_ID:
            raise MuxedConnUnavailable("This connection has used up its stream numbers.")
        stream = YamuxStream(self._next_stream_id, self._connection, is_initiator=True)
        self._next_stream_id += 2
        self._streams[stream.stream_id] = stream
        self._connection.outgoing.add_control(stream.queue, flags=SYN)
        return stream

    async def accept(self) -> YamuxStream:
        """The next stream that the peer opened; trio.EndOfChannel if there will be no more."""
        return await self._accept_receiver.receive()

    def for_frame(self, flags: int, stream_id: int) -> YamuxStream | None:
        """The stream of a frame, made if the frame opens it; None if there is none."""
        stream = self._streams.get(stream_id)
        if not flags & SYN:
            return stream
        if stream is not None or stream_id % 2 == self._next_stream_id % 2:
            raise MalformedMessage(
                f"A peer opened stream {stream_id}, which is open or not its to open."
            )
        while self._leaving and not self._leaving[0].is_queued:
            self._leaving.popleft()
        if self._inbound_count + len(self._leaving) >= self._settings.inbound_stream_limit:
            self._connection.refuse(stream_id)
            return None
        if self._connection.event_shutting_down.is_set():
            return None
        stream = YamuxStream(stream_id, self._connection, is_initiator=False)
        try:
            self._accept_sender.send_nowait(stream)
        except trio.WouldBlock:
            stream.on_refused()
            self._connection.refuse(stream_id)
            return None
        self._streams[stream_id] = stream
        self._inbound_count += 1
        self._connection.outgoing.add_control(stream.queue, flags=ACK)
        return stream

    def forget(self, stream: YamuxChannel) -> None:
        """Remove a stream that can do nothing more. May be called twice."""
        if self._streams.pop(stream.stream_id, None) is not None:
            if stream.unread_bytes:
                self._ended_unread.add(stream)
            if not stream.is_initiator:
                self._inbound_count -= 1
                if stream.queue.is_queued:
                    self._leaving.append(stream.queue)
        self._awaiting_peer_close.pop(stream, None)

    def await_peer_close(self, stream: YamuxChannel) -> None:
        """This stream may not be used again: reset it if the peer does not close its half."""
        if stream.stream_id in self._streams:
            self._awaiting_peer_close[stream] = (
                trio.current_time() + self._settings.half_closed_seconds
            )

    def reset_abandoned(self) -> None:
        """Reset the abandoned streams that are due. Call it now and then."""
        now = trio.current_time()
        while self._awaiting_peer_close:
            stream, deadline = next(iter(self._awaiting_peer_close.items()))
            if deadline > now:
                return
            del self._awaiting_peer_close[stream]
            stream.reset_now()

    def accept_no_more(self) -> None:
        """Streams that exist may still be accepted; after them `accept` reports the end."""
        self._accept_sender.close()
