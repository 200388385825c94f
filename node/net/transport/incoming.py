"""The handling of each incoming Yamux frame.

The parser cuts plaintext into headers and pieces of payload. This module knows which stream a frame
is for and what its flags mean, in their order: a frame may open a stream (SYN), carry credit or
data, and end it (FIN, RST). Nothing here waits, so the reader never does.

The payload of a frame may arrive in many pieces, and its flags count only after the last piece. If
the stream ends for another reason before, the rest of the payload is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import trio

from node.net.transport.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    FrameHeader,
    YamuxFrameParser,
)
from protocols.errors import LimitExceeded

if TYPE_CHECKING:
    from node.net.transport.connection import YamuxConnection
    from node.net.transport.stream import YamuxStream
    from node.net.transport.stream_table import StreamTable


FRAMES_AT_ONCE: Final = 500
"""Frames, pieces and packets that are handled in one go: two milliseconds of this node's time. A
peer may send 50,000 in one read."""


class Incoming:
    """Passes the frames of one connection to it and to its streams."""

    def __init__(self, connection: YamuxConnection, streams: StreamTable) -> None:
        self._connection = connection
        self._streams = streams
        self._parser = YamuxFrameParser(connection.settings.stream_window_limit_bytes)
        self._empty_frames = EmptyFrames(trio.current_time)
        self._payload_stream: YamuxStream | None = None
        self._payload_left = 0
        self._payload_flags = 0
        self._at_once = 0

    def feed(self, plaintext: bytes) -> Iterator[None]:
        """Handle everything that one packet completes, and yield when others should have a turn.
        Raises MalformedMessage, LimitExceeded."""
        self._at_once += 1
        if len(plaintext) < LEAST_CONTENT_BYTES:
            self._empty_frames.another()
        for event in self._parser.feed(plaintext):
            if isinstance(event, FrameHeader):
                self._on_header(event)
            else:
                self._on_payload(event)
            self._at_once += 1
            if self._at_once >= FRAMES_AT_ONCE:
                self._at_once = 0
                yield

    def _on_header(self, header: FrameHeader) -> None:
        type, flags, stream_id, length = header
        if type == DATA:
            self._on_data_header(flags, stream_id, length)
            return
        self._empty_frames.another()
        if type == WINDOW_UPDATE:
            self._on_window_update(flags, stream_id, length)
        elif type == PING:
            if flags & SYN:
                self._connection.outgoing.answer_ping(length)
            elif flags & ACK:
                self._connection.on_pong(length)
        elif type == GO_AWAY:
            self._connection.on_go_away(length)

    def _on_data_header(self, flags: int, stream_id: int, length: int) -> None:
        stream = self._streams.for_frame(flags, stream_id)
        if stream is None and not flags & (SYN | FIN | RST):
            self._connection.refuse(stream_id)
        if stream is None or length < LEAST_CONTENT_BYTES:
            self._empty_frames.another()
        if stream is not None:
            stream.on_payload_declared(length)
        self._payload_stream, self._payload_left, self._payload_flags = stream, length, flags
        if not length:
            self._on_payload_end()

    def _on_payload(self, piece: memoryview) -> None:
        stream = self._payload_stream
        if stream is not None:
            stream.on_payload(piece)
            connection = self._connection
            budget = connection.settings.connection_window_budget_bytes
            if connection.unread_bytes > budget or not connection.of_node.keep_limit():
                stream.drop_now()
                self._payload_stream = None
        self._payload_left -= len(piece)
        if not self._payload_left:
            self._on_payload_end()

    def _on_payload_end(self) -> None:
        if self._payload_stream is not None:
            _apply_end_flags(self._payload_stream, self._payload_flags)
        self._payload_stream = None

    def _on_window_update(self, flags: int, stream_id: int, credit: int) -> None:
        stream = self._streams.for_frame(flags, stream_id)
        if stream is None:
            return
        if credit:
            stream.on_credit(credit)
        _apply_end_flags(stream, flags)


def _apply_end_flags(stream: YamuxStream, flags: int) -> None:
    if flags & RST:
        stream.on_peer_reset()
    elif flags & FIN:
        stream.on_peer_finished()


# The limit for frames without content that a peer may send. Pure.
#
# The threat: a frame of twelve bytes costs its sender almost nothing, and us a walk through parser
# and tables. Measured on two cores: a peer that sent pings at ten megabytes a second took a whole
# core of ours, and others waited over a second for an answer.
#
# So frames that bring no bytes to a stream, or hardly any (pings, window updates, beginnings and
# ends of streams, data for streams that are gone), are counted, and so are packets with hardly any
# content. Honest peers stay far below the limit: a stream costs them four such frames and us a
# millisecond, and credit is returned in thirds of a window of at least 256 KiB.
#
# The clock is read once for many frames, because this code runs for each.


# A tenth of a core's second. py-libp2p's own muxer, which returns credit after every read,
# reads some 4,000 messages in that time.
MOST_EMPTY_FRAMES_PER_SECOND: Final = 20_000

LEAST_CONTENT_BYTES: Final = 16  # of a frame or a packet; the smallest message has more


class EmptyFrames:
    """Counts them in groups of a fixed number; a group must take a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._count = 0

    def another(self) -> None:
        """Count one more; LimitExceeded if they are a flood."""
        self._count += 1
        if self._count < MOST_EMPTY_FRAMES_PER_SECOND:
            return
        now = self._clock()
        if now - self._began < 1.0:
            raise LimitExceeded(
                f"A peer sent {MOST_EMPTY_FRAMES_PER_SECOND:,} frames without content "
                "in less than a second."
            )
        self._began = now
        self._count = 0
