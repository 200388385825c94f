"""One connection to a peer: accept its streams, answer each in a guarded task, end cleanly.

A subclass of the library's SwarmConn, so that the library's own protocols (identify, relay, hole
punching) find what they expect, with every entry that a stranger can reach written anew:

- A stream handler that raises takes the whole host down in the library: the exception climbs from
  `SwarmConn._handle_muxed_stream` through the connection's nursery into the swarm's
  (libp2p/network/connection/swarm_connection.py:224-315). Here a stream's failure ends at the
  stream: it is reset, and one line is logged.
- So does a protocol name that is not UTF-8 (see `negotiation`).
- Closing sleeps for a tenth of a second (swarm_connection.py:218), once per connection.

Promises: `run` ends with the connection, whoever ended it, and when it has ended the socket is
closed and the swarm has forgotten the connection. Handlers run in the network's nursery: they
outlive a link that dies only until they next touch their stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import trio
from libp2p.abc import ConnectionType, IMuxedStream
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.rcmgr import Direction
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError

from node.libp2p import negotiation
from node.libp2p.stream import Libp2pStream
from node.transport import YamuxConnection, YamuxStream
from protocols.errors import RemoteMisbehaviour
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach

if TYPE_CHECKING:
    from node.libp2p.swarm import NodeSwarm

log = logging.getLogger(__name__)

# Saying goodbye is one small packet; a peer that does not take it in this time is not waited for.
GOODBYE_SECONDS = 0.5


class PeerConnection(SwarmConn):  # type: ignore[misc]  # the library is untyped for mypy
    """A SwarmConn whose life is the task that runs `run`."""

    muxed_conn: YamuxConnection
    swarm: NodeSwarm

    def __init__(
        self,
        muxed: YamuxConnection,
        swarm: NodeSwarm,
        *,
        inbound: bool,
        tcp: trio.SocketStream | None,
    ) -> None:
        super().__init__(muxed, swarm, Direction.INBOUND if inbound else Direction.OUTBOUND)
        self.peer = PeerId(muxed.peer_id.to_base58())
        self.inbound = inbound
        self.connected_at = trio.current_time()
        self.alive = True
        self.is_up = False
        self.up_or_ended = trio.Event()
        self._tcp = tcp
        self.ended = trio.Event()
        self._scope = trio.CancelScope()
        self._answering = 0
        self._own_streams = 0
        addresses = muxed.get_transport_addresses()
        self.set_transport_info(addresses, muxed.get_connection_type())
        self.remote_address = str(addresses[0]) if addresses else ""

    def __repr__(self) -> str:
        way = "from" if self.inbound else "to"
        return f"<PeerConnection {way} {self.peer} at {self.remote_address}>"

    @property
    def reach(self) -> Reach:
        relayed = self.get_connection_type() == ConnectionType.RELAYED
        return Reach.RELAYED if relayed else Reach.DIRECT

    @property
    def open_stream_count(self) -> int:
        """Streams of protocols; those of the network's own (identify) are not counted."""
        return max(0, self.muxed_conn.open_stream_count - self._own_streams)

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """Within this one stream more is the network's own."""
        self._own_streams += 1
        try:
            yield
        finally:
            self._own_streams -= 1

    async def open_muxed(self) -> YamuxStream:
        """A new stream, before any negotiation; BrokenResourceError when there can be none."""
        try:
            return await self.muxed_conn.open_stream()
        except (MuxedConnError, MuxedStreamError) as error:
            raise trio.BrokenResourceError("no stream can be opened") from error

    async def ping(self) -> float:
        """The round trip in seconds; BrokenResourceError when the connection is lost meanwhile."""
        try:
            return await self.muxed_conn.ping()
        except trio.ClosedResourceError:
            raise trio.BrokenResourceError("the connection was lost") from None

    def facts(self) -> LinkFacts:
        muxed = self.muxed_conn
        return LinkFacts(
            peer=self.peer,
            reach=self.reach,
            inbound=self.inbound,
            remote_address=self.remote_address,
            connected_at=self.connected_at,
            round_trip_seconds=muxed.round_trip_seconds,
            send_bytes_per_second=muxed.send_bytes_per_second,
            receive_bytes_per_second=muxed.receive_bytes_per_second,
            bytes_sent=muxed.bytes_sent,
            bytes_received=muxed.bytes_received,
            open_streams=self.open_stream_count,
        )

    async def run(self) -> None:
        """Live until the connection ends, from whichever side; then everything of it is closed."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._run_muxer, nursery.cancel_scope)
                    await self.muxed_conn.event_started.wait()
                    self.event_started.set()
                    self.is_up = True
                    self.swarm.connection_up(self)
                    self.up_or_ended.set()
                    await self._accept_streams()
                    nursery.cancel_scope.cancel()
        finally:
            self.event_closed.set()
            if self.is_up:
                self.swarm.connection_down(self)
            await self.close_everything()
            self.up_or_ended.set()
            self.ended.set()

    async def _run_muxer(self, life: trio.CancelScope) -> None:
        try:
            await self.muxed_conn.start()
        except Exception as error:  # noqa: BLE001  the muxer means to raise nothing; see its page
            log.warning("The muxer of %r failed: %r", self, error)
        life.cancel()

    async def close_everything(self) -> None:
        """Muxer and socket. For `run`, and for when `run` never came to run."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(GOODBYE_SECONDS):
                await self.muxed_conn.close()
            if self._tcp is not None:
                await trio.aclose_forcefully(self._tcp)

    async def _accept_streams(self) -> None:
        while True:
            try:
                muxed_stream = await self.muxed_conn.accept_stream()
            except Exception as error:  # noqa: BLE001  any error of the muxer ends the link
                log.debug("Link with %s ended: %r", self.peer, error)
                return
            if self._answering >= self.swarm.settings.inbound_streams_per_connection:
                muxed_stream.reset_now()
                continue
            self._answering += 1
            self.swarm.nursery.start_soon(self._answer, muxed_stream)

    async def _answer(self, muxed_stream: YamuxStream) -> None:
        """Agree on a protocol and run its handler; nothing that happens here leaves the stream."""
        protocol = b""
        try:
            with trio.fail_after(self.swarm.settings.negotiation_seconds):
                chosen = await negotiation.answer(muxed_stream, self.swarm.served)
            if chosen is None:
                muxed_stream.reset_now()
                return
            # A handler may reset the stream at once, which drops what is queued; the other side
            # must learn of the agreement all the same.
            await muxed_stream.wait_until_sent()
            protocol = chosen
            await self._handle(muxed_stream, protocol.decode())
        except (trio.BrokenResourceError, RemoteMisbehaviour, trio.TooSlowError) as error:
            # The other side's doing: it hung up, sent nonsense, or nothing at all.
            level = logging.INFO if protocol else logging.DEBUG  # without one it is mere curiosity
            log.log(level, "Stream %s of %s was reset: %r", protocol.decode(), self.peer, error)
            muxed_stream.reset_now()
        except Exception as error:  # noqa: BLE001  whatever a handler raises ends here
            log.warning("Handler of %s for %s failed: %r", protocol.decode(), self.peer, error)
            muxed_stream.reset_now()
        except BaseException:
            muxed_stream.reset_now()
            raise
        finally:
            self._answering -= 1

    async def _handle(self, muxed_stream: YamuxStream, protocol: str) -> None:
        handler = self.swarm.handler_of(protocol)
        if handler is not None:
            stream = Libp2pStream(muxed_stream, self.peer, protocol)
            with self.own_stream() if protocol in self.swarm.own_handlers else nullcontext():
                await handler(stream)
                await stream.aclose()
            return
        if protocol not in self.swarm.library_handlers:
            muxed_stream.reset_now()  # it was served when they asked, and no longer is
            return
        library_handler = self.swarm.library_handler_of(protocol)
        net_stream = await self._add_stream(muxed_stream)
        net_stream.set_protocol(protocol)
        try:
            await library_handler(net_stream)
        finally:
            self.remove_stream(net_stream)

    # What the library calls.

    async def start(self) -> None:
        """The library starts connections; ours are started by `NodeSwarm.add_conn`."""

    async def close(self) -> None:
        """End the connection and wait until it has ended. Safe to call twice, and at any time."""
        with trio.move_on_after(GOODBYE_SECONDS):
            await self.muxed_conn.close()
        self._scope.cancel()
        await self.ended.wait()

    def abort(self) -> None:
        """End the connection without a flush. Never blocks; `ended` is set soon after."""
        self._scope.cancel()

    async def _on_muxed_conn_closed(self) -> None:
        """The muxer says that it has closed; `run` notices by itself."""

    async def _handle_muxed_stream(self, muxed_stream: IMuxedStream) -> None:
        raise NotImplementedError("streams are answered by `_answer`")
