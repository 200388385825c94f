"""Many streams over one secured connection: Yamux, as py-libp2p's hosts expect it.

Two tasks run in `start`, and none outlives it. The *reader* decrypts and parses what arrives and
passes it on (incoming.py). The *writer* takes batches from the send queue (writer.py). Once a beat,
with all connections of the node (keep_alive.py), the *keep-alive* pings and notices silence. The
reader never waits for the writer or for an application: its own answers are queued within limits
(outgoing.py), and windows limit what applications have not read (window.py). So neither a slow
reader nor a peer that floods us blocks others.

A peer that breaks the protocol is told so (GO_AWAY), and the connection ends.

An exception from `start` would end py-libp2p's whole host. So every error here ends this connection
and is logged; only cancellation passes through.
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

from node.net.transport.channel import ChannelEnding, YamuxChannel
from node.net.transport.frames import NORMAL_END, PROTOCOL_ERROR
from node.net.transport.incoming import Incoming
from node.net.transport.keep_alive import Beats, KeepAlive, LifeVerdict, beat_seconds
from node.net.transport.measurement import LinkRateMeter, RoundTrips
from node.net.transport.noise import NoiseSession
from node.net.transport.settings import YamuxSettings
from node.net.transport.stream import YamuxStream
from node.net.transport.stream_table import StreamTable
from node.net.transport.window import NodeBudget, WindowBudget
from node.net.transport.writer import ConnectionWriter
from protocols.errors import RemoteMisbehaviour

logger = logging.getLogger(__name__)

# Telling a peer why it is cut off is only a courtesy.
FAREWELL_SECONDS = 0.2

# Closing a socket takes no time, but closing a relayed connection must not delay a node's end.
CLOSE_SECONDS = 1.0

SILENT = "The other side has been silent, or has taken nothing, for too long."


def beats_for(settings: YamuxSettings) -> Beats:
    """The clock of connections with these settings. The caller has to run it."""
    return Beats(beat_seconds(settings.keep_alive_seconds, settings.keep_alive_deadline_seconds))


class YamuxConnection(IMuxedConn):  # type: ignore[misc]  # the library is untyped here
    """`start` runs the connection until it ends; everything else may be called meanwhile.

    `event_started` and `event_closed` are set once. After `event_closed` nothing of the connection
    runs, every stream has ended, and the socket is closed.
    """

    def __init__(
        self,
        secured_conn: NoiseSession,
        peer_id: ID,
        settings: YamuxSettings | None = None,
        beats: Beats | None = None,
        of_node: NodeBudget | None = None,
    ) -> None:
        """`beats` is the node's clock, which the node runs, and `of_node` its budget. Without them,
        this has its own."""
        self.secured_conn = secured_conn
        self.peer_id = peer_id
        self.settings = settings or YamuxSettings()
        self._beats = beats_for(self.settings) if beats is None else beats
        self._runs_beats = beats is None
        self.event_started = trio.Event()
        self.event_shutting_down = trio.Event()
        self.event_closed = trio.Event()
        self.of_node = of_node or NodeBudget(self.settings.node_unread_limit_bytes)
        self.window_budget = WindowBudget(
            self.settings.connection_window_budget_bytes, self.of_node
        )
        self._writer = ConnectionWriter(secured_conn, self.settings, self._nothing_will_be_sent)
        self.outgoing = self._writer.outgoing
        self.unread_bytes = 0
        self.read_bytes = 0
        self._streams = StreamTable(self)
        self._incoming = Incoming(self, self._streams)
        self._tasks_scope: trio.CancelScope | None = None
        self._reason = ""
        self._has_ended = False
        self._peer_is_leaving = False
        self._we_are_leaving = False
        self._round_trips = RoundTrips()
        self._received = LinkRateMeter()
        self._pings = Pings()
        self._bytes_sent_before = 0
        self._unacknowledged_seconds: float | None = None
        self._given_up_before = self._beats.given_up
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
    def was_cut_off(self) -> bool:
        """Whether it has ended although neither side closed it."""
        return self._has_ended and not (self._peer_is_leaving or self._we_are_leaving)

    @property
    def round_trip_seconds(self) -> float | None:
        """The shortest recent round trip; None before the first measurement."""
        return self._round_trips.shortest_seconds

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames given to the network: payload, and twelve for each frame."""
        return self._writer.sent.total_bytes

    @property
    def bytes_received(self) -> int:
        """Bytes of frames, and the received part of an unfinished packet.

        On one of many connections over a slow link a packet takes seconds, and only this shows that
        the other side is alive.
        """
        return self._received.total_bytes + self.secured_conn.partial_bytes

    @property
    def send_bytes_per_second(self) -> float | None:
        """The best recent rate of a busy link; None while it was never busy."""
        return self._writer.sent.bytes_per_second

    @property
    def receive_bytes_per_second(self) -> float | None:
        return self._received.bytes_per_second

    @property
    def open_stream_count(self) -> int:
        return len(self._streams)

    def why_ended(self, ending: ChannelEnding) -> str:
        """More about a lost connection, to append to a message."""
        return (
            f": {self._reason}" if ending is ChannelEnding.CONNECTION_LOST and self._reason else ""
        )

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()

    # ---- life

    async def start(self) -> None:
        """Run the connection until it ends, from either side, or this call is cancelled."""
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
                self.of_node.join(self)
                self.secured_conn.borrow_buffers_from(self.of_node)
                self._measure()
                self.event_started.set()
        finally:
            self._beats.leave(self._beat)
            self._end_everything("the connection was closed here")
            try:
                await self._close_session()
            finally:
                self.event_closed.set()

    async def close(self, error_code: int = NORMAL_END) -> None:
        """Flush the queue for a moment, say goodbye, and end. Returns when the connection has
        ended.

        Cancelling this skips the flush; the connection still ends.
        """
        self._we_are_leaving = self._we_are_leaving or not self._has_ended
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
        """The next stream that the peer opened; MuxedConnUnavailable if there will be no more."""
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

    def count_unread(self, more: int) -> None:
        """So many more bytes wait unread, or fewer."""
        self.unread_bytes += more
        self.of_node.unread_bytes += more

    def drop_fullest_stream(self) -> bool:
        fullest = self._streams.fullest()
        if fullest is None:
            return False
        logger.debug("%r is reset: too much is unread on this node", fullest)
        fullest.drop_now()
        return True

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
                for _ in self._incoming.feed(plaintext):
                    await trio.lowlevel.checkpoint()
            size = sum(map(len, plaintexts))
            self._received.received(size, trio.current_time(), self.round_trip_seconds)

    def on_go_away(self, code: int) -> None:
        if code != NORMAL_END:
            raise ConnectionClosedError(f"The other side gave the connection up (code {code}).")
        # Its streams may finish; the writer ends the connection when none is left.
        self._peer_is_leaving = True
        self.event_shutting_down.set()
        self._writer.wake()

    def refuse(self, stream_id: int) -> None:
        """Answer a frame for a stream that does not exist (any more) with a reset."""
        if not self.event_shutting_down.is_set():
            self.outgoing.refuse(stream_id)

    def _nothing_will_be_sent(self) -> bool:
        return self._peer_is_leaving and not self._streams

    # ---- the keep-alive

    def _beat(self) -> None:
        """Called once a beat. Never waits, never raises."""
        if self._has_ended:
            return
        try:
            self._streams.reset_abandoned()
            doubted = self._given_up_before != self._beats.given_up
            self._given_up_before = self._beats.given_up
            verdict = self._keep_alive.beat(
                self.bytes_received,
                self._round_trips.slowest_seconds,
                unacknowledged_seconds=self._unacknowledged_for(),
                slowest_elsewhere=self._beats.slowest_round_trip,
                doubted=doubted,
                delivered_while_sending=self.secured_conn.delivered_while_sending,
            )
            if verdict is LifeVerdict.PING:
                self._measure()
        except Exception:
            logger.exception("connection with %s ended by a fault of ours", self.peer_id)
            self._end_everything("a fault on this side, see the log")
        else:
            if verdict in (LifeVerdict.GONE, LifeVerdict.STUCK):
                self._beats.given_up += verdict is LifeVerdict.GONE
                logger.debug("connection with %s ended: %s", self.peer_id, SILENT)
                self._end_everything(SILENT)

    def _unacknowledged_for(self) -> float | None:
        """If something that was sent waits: how long ago the last acknowledgement came."""
        if self.bytes_sent != self._bytes_sent_before or self._unacknowledged_seconds is not None:
            self._bytes_sent_before = self.bytes_sent
            delivery = self.secured_conn.look_at_delivery()
            self._unacknowledged_seconds = delivery.unacknowledged_seconds
            self._beats.saw_round_trip(delivery.round_trip_seconds)
        return self._unacknowledged_seconds

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
        """Tell the peer that it broke the protocol, if it reads."""
        self.event_shutting_down.set()
        for stream in self._streams.every_stream():
            stream.on_connection_lost()
        self.outgoing.go_away(PROTOCOL_ERROR)
        with trio.move_on_after(FAREWELL_SECONDS):
            await self._writer.flush()

    def _end_everything(self, reason: str) -> None:
        """End every stream and wake every waiter. Never waits; may be called twice."""
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


# Pings in flight. No I/O.
#
# A ping carries a number, and its answer carries the same. Unknown numbers are ignored, because a
# peer may make them up. Only the pings of waiting callers and the last one of the keep-alive are
# remembered, so a silent peer cannot make us hold more.


# A ping carries any 32-bit number; ours count from 1.
LARGEST_PING = 2**32 - 1


class PendingPing:
    """A ping in flight. `seconds` is its round trip once it is back; None if it never was."""

    def __init__(self, value: int, sent_at: float) -> None:
        self.value = value
        self.sent_at = sent_at
        self.seconds: float | None = None
        self.is_over = trio.Event()


class Pings:
    def __init__(self) -> None:
        self._pending: dict[int, PendingPing] = {}
        self._next_value = 1
        self._last_measurement = 0

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, now: float) -> PendingPing:
        """A new ping, to be sent now. Its caller has to forget it."""
        ping = PendingPing(self._next_value, now)
        self._pending[ping.value] = ping
        self._next_value = ping.value % LARGEST_PING + 1
        return ping

    def begin_measurement(self, now: float) -> PendingPing:
        """A new ping without a waiting caller. It replaces the one before it."""
        self._pending.pop(self._last_measurement, None)
        ping = self.begin(now)
        self._last_measurement = ping.value
        return ping

    def forget(self, ping: PendingPing) -> None:
        self._pending.pop(ping.value, None)

    def answered(self, value: int, now: float) -> float | None:
        """The round trip of the ping with this number; None if there is no such ping."""
        ping = self._pending.pop(value, None)
        if ping is None:
            return None
        ping.seconds = now - ping.sent_at
        ping.is_over.set()
        return ping.seconds

    def end_all(self) -> None:
        """The connection has ended: wake all waiters."""
        for ping in self._pending.values():
            ping.is_over.set()
        self._pending.clear()
