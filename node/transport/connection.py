"""Many streams over one secured connection: Yamux, as py-libp2p's hosts expect it.

Two tasks live inside `start`, and none outlives it: the *reader* decrypts, parses and hands out
whatever has come (incoming.py); the *writer* takes batches from what waits to be sent (writer.py).
And once a beat, with all connections of the node (beats.py), the *keep-alive* pings and notices
silence. The reader never waits for the writer or for an application: what it causes to be sent is
queued within bounds (outgoing.py), what applications do not read is bounded by windows (window.py).
So neither a slow reader nor a peer that floods us stops anyone else.

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
from node.transport.channel import Ending, YamuxChannel
from node.transport.frames import NORMAL_END, PROTOCOL_ERROR
from node.transport.incoming import Incoming
from node.transport.keep_alive import KeepAlive, Verdict, beat_seconds
from node.transport.measurement import RateMeter, RoundTrips
from node.transport.noise import NoiseSession
from node.transport.pings import Pings
from node.transport.settings import YamuxSettings
from node.transport.stream import YamuxStream
from node.transport.stream_table import StreamTable
from node.transport.window import WindowBudget
from node.transport.writer import Writer
from protocols.errors import RemoteMisbehaviour

logger = logging.getLogger(__name__)

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
        self._writer = Writer(secured_conn, self.settings, self._nothing_will_be_sent)
        self.outgoing = self._writer.outgoing
        self.unread_bytes = 0
        self._streams = StreamTable(self)
        self._incoming = Incoming(self, self._streams)
        self._tasks_scope: trio.CancelScope | None = None
        self._reason = ""
        self._has_ended = False
        self._peer_is_leaving = False
        self._round_trips = RoundTrips()
        self._received = RateMeter()
        self._pings = Pings()
        self._bytes_sent_before = 0
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
        return self._writer.sent.total_bytes

    @property
    def bytes_received(self) -> int:
        """Of frames, and what has come of a packet that is not whole: over one of many connections
        on a slow link that takes seconds, and only this shows that the other side is alive."""
        return self._received.total_bytes + self.secured_conn.partial_bytes

    @property
    def send_bytes_per_second(self) -> float | None:
        """The best that a busy link carried of late; None while it was never busy."""
        return self._writer.sent.bytes_per_second

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
                nursery.start_soon(self._run_until_end, self._writer.run)
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
        for stream in self._streams.every_stream():
            stream.on_connection_closing()
        self.outgoing.go_away(error_code)
        try:
            with trio.move_on_after(self.settings.close_flush_seconds):
                await self._writer.flush()
        finally:
            self._end_everything("the connection was closed here")
        await self.event_closed.wait()

    # ---- streams

    async def open_stream(self) -> YamuxStream:
        """A new stream, usable at once: Yamux does not wait for the other side's answer."""
        await trio.lowlevel.checkpoint()
        if self.event_shutting_down.is_set() or self._has_ended:
            raise MuxedConnUnavailable(f"The connection has ended. {self._reason}".strip())
        return self._streams.open()

    async def accept_stream(self) -> YamuxStream:
        """The next stream that the peer opened; MuxedConnUnavailable once there is none to come."""
        try:
            return await self._streams.accept()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise MuxedConnUnavailable(f"The connection has ended. {self._reason}") from error

    def forget(self, stream: YamuxChannel) -> None:
        self._streams.forget(stream)
        if self._peer_is_leaving:
            self._writer.wake()

    def await_peer_close(self, stream: YamuxChannel) -> None:
        self._streams.await_peer_close(stream)

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
        self._writer.wake()

    def refuse(self, stream_id: int) -> None:
        """Answer a frame for a stream that is not (or no more) with a reset."""
        if not self.event_shutting_down.is_set():
            self.outgoing.refuse(stream_id)

    def _nothing_will_be_sent(self) -> bool:
        return self._peer_is_leaving and not self._streams

    # ---- the keep-alive

    def _beat(self) -> None:
        """Once a beat, whatever happens. Never waits, never raises."""
        if self._has_ended:
            return
        try:
            self._streams.reset_abandoned()
            if self.bytes_sent != self._bytes_sent_before:
                self._bytes_sent_before = self.bytes_sent
                self.secured_conn.count_resent()
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
        for stream in self._streams.every_stream():
            stream.on_connection_lost()
        self.outgoing.go_away(PROTOCOL_ERROR)
        with trio.move_on_after(FAREWELL_SECONDS):
            await self._writer.flush()

    def _end_everything(self, reason: str) -> None:
        """End every stream and wake every waiter. Never waits; safe to call twice."""
        if self._has_ended:
            return
        self._has_ended = True
        self._reason = self._reason or reason
        self.event_shutting_down.set()
        self._streams.accept_no_more()
        for stream in self._streams.every_stream():
            stream.on_connection_lost()
        self._pings.end_all()
        self._writer.end()
        if self._tasks_scope is not None:
            self._tasks_scope.cancel()

    async def _close_session(self) -> None:
        with trio.CancelScope(deadline=trio.current_time() + CLOSE_SECONDS, shield=True):
            try:
                await self.secured_conn.close()
            except (BaseLibp2pError, OSError, trio.BrokenResourceError) as error:
                logger.debug("closing the session with %s: %s", self.peer_id, error)
