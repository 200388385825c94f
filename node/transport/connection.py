"""Many streams over one secured connection: Yamux, as py-libp2p's hosts expect it.

Two tasks live inside `start`, and none outlives it: the *reader* decrypts, parses and hands out
whatever has come; the *writer* takes batches from what waits to be sent. And once a beat, with all
connections of the node (beats.py), the *keep-alive* pings and notices silence. The reader never
waits for the writer or for an application: what it causes to be sent is queued within bounds
(outgoing.py), what applications do not read is bounded by windows (window.py). So neither a slow
reader nor a peer that floods us stops anyone else.

A peer that breaks the protocol is told so (GO_AWAY), and the connection ends.

Easy to get wrong: an exception that leaves `start` ends py-libp2p's whole host. Whatever happens
here ends this connection and is logged; only cancellation passes through.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio
from libp2p.abc import IMuxedConn
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr

from node.transport.beats import Beats
from node.transport.frames import (
    ACK,
    LARGEST_STREAM_ID,
    NORMAL_END,
    PROTOCOL_ERROR,
    SYN,
)
from node.transport.incoming import Incoming
from node.transport.keep_alive import KeepAlive, Verdict, beat_seconds
from node.transport.measurement import RateMeter, RoundTrips
from node.transport.noise import SEND_BATCH_BYTES, NoiseSession
from node.transport.outgoing import FRAME_PAYLOAD_BYTES, Outgoing
from node.transport.pings import Pings
from node.transport.settings import YamuxSettings
from node.transport.stream import Ending, YamuxStream
from node.transport.window import WindowBudget
from protocols.errors import MalformedMessage, RemoteMisbehaviour

logger = logging.getLogger(__name__)

# A batch is what bulk makes a small stream wait for. On a slow link it is one packet; each batch
# that left quickly doubles the next, up to the half megabyte that a fast link needs.
SMALLEST_BATCH_BYTES = FRAME_PAYLOAD_BYTES
QUICK_BATCH_SECONDS = 0.005
SLOW_BATCH_SECONDS = 0.02

# Telling a peer why it is cut off is a courtesy with a short deadline.
FAREWELL_SECONDS = 0.2

# Closing a socket takes no time; closing a relayed connection must not hold up a node that ends.
CLOSE_SECONDS = 1.0

SILENT = "The other side has been silent for too long."


def beats_for(settings: YamuxSettings) -> Beats:
    """The clock of connections with these settings; somebody has to run it."""
    return Beats(beat_seconds(settings.keep_alive_seconds, settings.keep_alive_deadline_seconds))


class YamuxConnection(IMuxedConn):  # type: ignore[misc]  # the library is untyped here
    """`start` runs the connection until it ends; everything else may be called meanwhile.

    `event_started` and `event_closed` are set once; after `event_closed` nothing of the
    connection runs, every stream has ended, and the socket is closed.
    """

    def __init__(
        self,
        secured_conn: NoiseSession,
        peer_id: ID,
        settings: YamuxSettings | None = None,
        beats: Beats | None = None,
    ) -> None:
        """`beats` is the node's, which somebody runs; without it, this runs one of its own."""
        self.secured_conn = secured_conn
        self.peer_id = peer_id
        self.settings = settings or YamuxSettings()
        self._beats = beats_for(self.settings) if beats is None else beats
        self._runs_beats = beats is None
        self.event_started = trio.Event()
        self.event_shutting_down = trio.Event()
        self.event_closed = trio.Event()
        self.window_budget = WindowBudget(self.settings.connection_window_budget_bytes)
        self.outgoing = Outgoing(self.settings, self._wake_writer)
        self.unread_bytes = 0
        self._streams: dict[int, YamuxStream] = {}
        self._inbound_count = 0
        self._next_stream_id = 1 if self.is_initiator else 2
        self._accept_sender, self._accept_receiver = trio.open_memory_channel[YamuxStream](
            self.settings.accept_backlog
        )
        self._awaiting_peer_close: dict[YamuxStream, float] = {}
        self._incoming = Incoming(self)
        self._writer_waits: trio.Event | None = None
        self._writer_idle = trio.Event()
        self._tasks_scope: trio.CancelScope | None = None
        self._reason = ""
        self._has_ended = False
        self._peer_is_leaving = False
        self._round_trips = RoundTrips()
        self._sent = RateMeter()
        self._received = RateMeter()
        self._pings = Pings()
        self._keep_alive = KeepAlive(
            self.settings.keep_alive_seconds,
            self.settings.keep_alive_deadline_seconds,
            leads=self.is_initiator,
        )

    def __repr__(self) -> str:
        return f"<YamuxConnection with {self.peer_id}, {len(self._streams)} streams>"

    # ---- facts

    @property
    def is_initiator(self) -> bool:
        return bool(self.secured_conn.is_initiator)

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self.event_shutting_down.is_set()

    @property
    def is_closed(self) -> bool:
        return self._has_ended

    @property
    def round_trip_seconds(self) -> float | None:
        """The shortest round trip of late, or None before the first was measured."""
        return self._round_trips.shortest_seconds

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames handed to the network: payload, and twelve for each frame."""
        return self._sent.total_bytes

    @property
    def bytes_received(self) -> int:
        return self._received.total_bytes

    @property
    def send_bytes_per_second(self) -> float | None:
        """The best that a busy link carried of late; None while it was never busy."""
        return self._sent.bytes_per_second

    @property
    def receive_bytes_per_second(self) -> float | None:
        return self._received.bytes_per_second

    @property
    def open_stream_count(self) -> int:
        return len(self._streams)

    def why_ended(self, ending: Ending) -> str:
        """More about a lost connection, to go behind a message."""
        return f": {self._reason}" if ending is Ending.CONNECTION_LOST and self._reason else ""

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()

    # ---- life

    async def start(self) -> None:
        """Run the connection until it ends, from whichever side, or this call is cancelled."""
        if self.event_started.is_set():
            return
        try:
            async with trio.open_nursery() as nursery:
                self._tasks_scope = nursery.cancel_scope
                if self._has_ended:
                    nursery.cancel_scope.cancel()
                nursery.start_soon(self._run_until_end, self._read)
                nursery.start_soon(self._run_until_end, self._write)
                if self._runs_beats:
                    nursery.start_soon(self._beats.run)
                self._beats.join(self._beat)
                self._measure()
                self.event_started.set()
        finally:
            self._beats.leave(self._beat)
            self._end_everything("the connection was closed here")
            await self._close_session()
            self.event_closed.set()

    async def close(self, error_code: int = NORMAL_END) -> None:
        """Flush what is queued for a moment, say goodbye, and end. Returns when it has ended.

        Cancelling it skips the flush; the connection ends all the same.
        """
        if self._has_ended or not self.event_started.is_set():
            self._end_everything("the connection was closed here")
            if self._tasks_scope is None:
                self.event_started.set()
                await self._close_session()
                self.event_closed.set()
            await self.event_closed.wait()
            return
        self.event_shutting_down.set()
        for stream in list(self._streams.values()):
            stream.on_connection_closing()
        self.outgoing.go_away(error_code)
        try:
            with trio.move_on_after(self.settings.close_flush_seconds):
                await self._flush()
        finally:
            self._end_everything("the connection was closed here")
        await self.event_closed.wait()

    # ---- streams

    async def open_stream(self) -> YamuxStream:
        """A new stream, usable at once: Yamux does not wait for the other side's answer."""
        await trio.lowlevel.checkpoint()
        if self.event_shutting_down.is_set() or self._has_ended:
            raise MuxedConnUnavailable(f"The connection has ended. {self._reason}".strip())
        outbound = len(self._streams) - self._inbound_count
        if outbound >= self.settings.outbound_stream_limit:
            raise MuxedConnUnavailable(f"{outbound} streams are open to this peer already.")
        if self._next_stream_id > LARGEST_STREAM_ID:
            raise MuxedConnUnavailable("This connection has used up its stream numbers.")
        stream = YamuxStream(self._next_stream_id, self, is_initiator=True)
        self._next_stream_id += 2
        self._streams[stream.stream_id] = stream
        self.outgoing.add_control(stream._queue, flags=SYN)
        return stream

    async def accept_stream(self) -> YamuxStream:
        """The next stream that the peer opened; MuxedConnUnavailable once there is none to come."""
        try:
            return await self._accept_receiver.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise MuxedConnUnavailable(f"The connection has ended. {self._reason}") from error

    def forget(self, stream: YamuxStream) -> None:
        if self._streams.pop(stream.stream_id, None) is not None and not stream.is_initiator:
            self._inbound_count -= 1
        self._awaiting_peer_close.pop(stream, None)
        if self._peer_is_leaving:
            self._wake_writer()

    def await_peer_close(self, stream: YamuxStream) -> None:
        if stream.stream_id in self._streams:
            self._awaiting_peer_close[stream] = (
                trio.current_time() + self.settings.half_closed_seconds
            )

    # ---- pings

    async def ping(self) -> float:
        """Measure one round trip, in seconds; trio.BrokenResourceError if the connection ends."""
        if self._has_ended:
            raise trio.BrokenResourceError(f"the connection is gone: {self._reason}")
        ping = self._pings.begin(trio.current_time())
        self.outgoing.ping(ping.value)
        try:
            await ping.is_over.wait()
        finally:
            self._pings.forget(ping)
        if ping.seconds is None:
            raise trio.BrokenResourceError(f"the connection is gone: {self._reason}")
        return ping.seconds

    def _measure(self) -> None:
        self.outgoing.ping(self._pings.begin_measurement(trio.current_time()).value)

    def on_pong(self, value: int) -> None:
        seconds = self._pings.answered(value, trio.current_time())
        if seconds is not None:
            self._round_trips.add(seconds)

    # ---- the reader

    async def _read(self) -> None:
        while True:
            plaintexts = await self.secured_conn.receive()
            for plaintext in plaintexts:
                self._incoming.feed(plaintext)
            size = sum(map(len, plaintexts))
            self._received.received(size, trio.current_time(), self.round_trip_seconds)

    def on_go_away(self, code: int) -> None:
        if code != NORMAL_END:
            raise ConnectionClosedError(f"The other side gave the connection up (code {code}).")
        # Its streams may end in peace; the writer ends the connection when none is left.
        self._peer_is_leaving = True
        self.event_shutting_down.set()
        self._wake_writer()

    def stream_for(self, flags: int, stream_id: int) -> YamuxStream | None:
        """The stream a frame is for, made if the frame opens it; None if there is none."""
        stream = self._streams.get(stream_id)
        if not flags & SYN:
            return stream
        if stream is not None or stream_id % 2 == self._next_stream_id % 2:
            raise MalformedMessage(
                f"A peer opened stream {stream_id}, which is open or not its to open."
            )
        if self._inbound_count >= self.settings.inbound_stream_limit:
            self.refuse(stream_id)
            return None
        if self.event_shutting_down.is_set():
            return None
        stream = YamuxStream(stream_id, self, is_initiator=False)
        try:
            self._accept_sender.send_nowait(stream)
        except trio.WouldBlock:
            stream.on_refused()
            self.refuse(stream_id)
            return None
        self._streams[stream_id] = stream
        self._inbound_count += 1
        self.outgoing.add_control(stream._queue, flags=ACK)
        return stream

    def refuse(self, stream_id: int) -> None:
        """Answer a frame for a stream that is not (or no more) with a reset."""
        if not self.event_shutting_down.is_set():
            self.outgoing.refuse(stream_id)

    # ---- the writer

    async def _write(self) -> None:
        batch_bytes = SMALLEST_BATCH_BYTES
        while True:
            if not self.outgoing:
                await self._wait_for_work()
            frames = self.outgoing.take_batch(batch_bytes)
            if not frames:
                continue
            began = trio.current_time()
            await self.secured_conn.send_frames(frames)
            now = trio.current_time()
            size = sum(map(len, frames))
            self._sent.sent(size, began, now)
            if now - began > SLOW_BATCH_SECONDS:
                batch_bytes = max(batch_bytes // 2, SMALLEST_BATCH_BYTES)
            elif now - began < QUICK_BATCH_SECONDS and size >= batch_bytes:
                batch_bytes = min(batch_bytes * 2, SEND_BATCH_BYTES)

    async def _wait_for_work(self) -> None:
        self._writer_idle.set()
        while not self.outgoing:
            if self._peer_is_leaving and not self._streams:
                raise ConnectionClosedError("The other side closed the connection.")
            self._writer_waits = trio.Event()
            await self._writer_waits.wait()
        self._writer_idle = trio.Event()

    def _wake_writer(self) -> None:
        if self._writer_waits is not None:
            self._writer_waits.set()
            self._writer_waits = None

    # ---- the keep-alive

    def _beat(self) -> None:
        """Once a beat, whatever happens. Never waits, never raises."""
        if self._has_ended:
            return
        try:
            self._reset_abandoned_streams()
            slowest = self._round_trips.slowest_seconds
            verdict = self._keep_alive.beat(self.bytes_received, slowest)
            if verdict is Verdict.PING:
                self._measure()
        except Exception:
            logger.exception("connection with %s ended by a fault of ours", self.peer_id)
            self._end_everything("a fault on this side, see the log")
        else:
            if verdict is Verdict.GONE:
                logger.debug("connection with %s ended: %s", self.peer_id, SILENT)
                self._end_everything(SILENT)

    def _reset_abandoned_streams(self) -> None:
        now = trio.current_time()
        while self._awaiting_peer_close:
            stream, deadline = next(iter(self._awaiting_peer_close.items()))
            if deadline > now:
                return
            del self._awaiting_peer_close[stream]
            stream.reset_now()

    # ---- ending

    async def _run_until_end(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except ConnectionClosedError as error:
            logger.debug("connection with %s ended: %s", self.peer_id, error)
            self._end_everything(str(error))
        except RemoteMisbehaviour as error:
            logger.warning("connection with %s ended, it misbehaved: %s", self.peer_id, error)
            self._reason = str(error)
            await self._say_farewell()
            self._end_everything(str(error))
        except Exception:
            logger.exception("connection with %s ended by a fault of ours", self.peer_id)
            self._end_everything("a fault on this side, see the log")

    async def _say_farewell(self) -> None:
        """Tell the peer that it broke the protocol, if it listens."""
        self.event_shutting_down.set()
        for stream in list(self._streams.values()):
            stream.on_connection_lost()
        self.outgoing.go_away(PROTOCOL_ERROR)
        with trio.move_on_after(FAREWELL_SECONDS):
            await self._flush()

    async def _flush(self) -> None:
        """Wait until nothing is queued any more, or the connection has ended."""
        while (self.outgoing or not self._writer_idle.is_set()) and not self._has_ended:
            await self._writer_idle.wait()

    def _end_everything(self, reason: str) -> None:
        """End every stream and wake every waiter. Never waits; safe to call twice."""
        if self._has_ended:
            return
        self._has_ended = True
        self._reason = self._reason or reason
        self.event_shutting_down.set()
        self._accept_sender.close()
        for stream in list(self._streams.values()):
            stream.on_connection_lost()
        self._pings.end_all()
        self._writer_idle.set()
        if self._tasks_scope is not None:
            self._tasks_scope.cancel()

    async def _close_session(self) -> None:
        with trio.CancelScope(deadline=trio.current_time() + CLOSE_SECONDS, shield=True):
            try:
                await self.secured_conn.close()
            except (BaseLibp2pError, OSError, trio.BrokenResourceError) as error:
                logger.debug("closing the session with %s: %s", self.peer_id, error)
