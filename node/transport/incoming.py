"""What a connection does with each Yamux frame that arrives: a table in the form of methods.

The parser cuts plaintext into headers and pieces of payload; this module knows which stream a
frame is for and what its flags mean, in their order: a frame may open a stream (SYN), carry
credit or data, and end it (FIN, RST). Nothing in here waits, so the reader never does.

Easy to get wrong: the payload of a frame may arrive in many pieces, and its flags count only
when the last piece is there. Until then the stream may have ended for another reason; what is
left of the payload is then skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from node.transport.empty_frames import EmptyFrames
from node.transport.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    FrameHeader,
    FrameParser,
)

if TYPE_CHECKING:
    from node.transport.connection import YamuxConnection
    from node.transport.stream import YamuxStream
    from node.transport.stream_table import StreamTable


class Incoming:
    """The frames of one connection, handed to it and to its streams."""

    def __init__(self, connection: YamuxConnection, streams: StreamTable) -> None:
        self._connection = connection
        self._streams = streams
        self._parser = FrameParser(connection.settings.stream_window_limit_bytes)
        self._empty_frames = EmptyFrames(trio.current_time)
        self._payload_stream: YamuxStream | None = None
        self._payload_left = 0
        self._payload_flags = 0

    def feed(self, plaintext: bytes) -> None:
        """Act on all that one packet completes; MalformedMessage, LimitExceeded."""
        for event in self._parser.feed(plaintext):
            if isinstance(event, FrameHeader):
                self._on_header(event)
            else:
                self._on_payload(event)

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
        if stream is None or not length:
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
            budget = self._connection.settings.connection_window_budget_bytes
            if self._connection.unread_bytes > budget:
                stream.reset_now()
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
