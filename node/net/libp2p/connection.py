"""One connection to a peer: accept its streams, answer each in a guarded task, end cleanly.

This is a subclass of the library's SwarmConn, so that the library's own protocols (identify, relay,
hole punching) find what they expect. Every entry that a stranger can reach is replaced:

- A stream handler that raises ends the whole host in the library: the exception climbs from
  `SwarmConn._handle_muxed_stream` through the connection's nursery into the swarm's
  (libp2p/network/connection/swarm_connection.py:224-315). Here the stream is reset, one line is
  logged, and nothing else fails.
- A protocol name that is not UTF-8 does the same there (see `negotiation`).
- Closing sleeps for a tenth of a second for each connection (swarm_connection.py:218).

`Libp2pStream` is the contract's stream, a thin layer over our muxer's. The library would put its
NetStream between them (libp2p/network/stream/net_stream.py:195-300). That takes a lock for each
read and write and has states of its own, and its `read` raises StreamEOF at the other side's
half-close, where the contract (and trio) return b"". Only the muxer counts a stream, and forgets it
when both directions are done.

`run` ends with the connection, whichever side ended it. The socket is then closed, and the swarm
has forgotten the connection. Handlers run in the network's nursery. After their link is lost they
run only until they next use their stream.
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
from trio.abc import AsyncResource

from node.net.libp2p import negotiation
from node.net.transport import YamuxConnection, YamuxStream
from protocols.errors import RemoteMisbehaviour
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach, Stream

if TYPE_CHECKING:
    from node.net.libp2p.swarm import NodeSwarm


class Libp2pStream(Stream):
    """One negotiated stream."""

    def __init__(
        self,
        muxed: YamuxStream,
        remote_peer: PeerId,
        protocol: str,
        *,
        over_their_dial: bool = False,
    ) -> None:
        self._muxed = muxed
        self._remote_peer = remote_peer
        self._protocol = protocol
        self._over_their_dial = over_their_dial

    def __repr__(self) -> str:
        return f"<Libp2pStream {self._protocol} with {self._remote_peer}>"

    @property
    def remote_peer(self) -> PeerId:
        return self._remote_peer

    @property
    def protocol(self) -> str:
        return self._protocol

    @property
    def last_arrival(self) -> float:
        return self._muxed.last_arrival

    @property
    def over_their_dial(self) -> bool:
        return self._over_their_dial

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("receiving at most no bytes could not be told from the end")
        # No copy if it is bytes already. Bulk data is read with `receive_into`.
        return bytes(await self._muxed.receive_some(max_bytes))

    async def receive_into(self, buffer: memoryview | bytearray) -> int:
        return await self._muxed.receive_into(buffer)

    def receive_now(self, buffer: memoryview | bytearray) -> int:
        return self._muxed.receive_now(buffer)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._muxed.send_all(data)

    async def send_parts(self, start: bytes, rest: memoryview) -> None:
        await self._muxed.send_all(start, rest)

    async def wait_send_all_might_not_block(self) -> None:
        """Return at once, as trio allows; nothing of ours relies on this method."""
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await self._muxed.send_eof()

    async def aclose(self) -> None:
        await self._muxed.aclose()

    def reset(self) -> None:
        self._muxed.reset_now()


log = logging.getLogger(__name__)

# A goodbye is one small packet; this is how long a peer may take to accept it.
GOODBYE_SECONDS = 0.5


class PeerConnection(SwarmConn):  # type: ignore[misc]  # the library is untyped for mypy
    """A SwarmConn that lives as long as its task `run`."""

    muxed_conn: YamuxConnection
    swarm: NodeSwarm

    def __init__(
        self,
        muxed: YamuxConnection,
        swarm: NodeSwarm,
        *,
        inbound: bool,
        below: AsyncResource | None,
        punched: bool = False,
    ) -> None:
        super().__init__(muxed, swarm, Direction.INBOUND if inbound else Direction.OUTBOUND)
        self.peer = PeerId(muxed.peer_id.to_base58())
        self.inbound = inbound
        self.connected_at = trio.current_time()
        self.alive = True
        self.is_up = False
        self.up_or_ended = trio.Event()
        self._below = below
        self.punched = punched
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
        """Streams of protocols, without the network's own (identify)."""
        return max(0, self.muxed_conn.open_stream_count - self._own_streams)

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """In this block one stream more is the network's own."""
        self._own_streams += 1
        try:
            yield
        finally:
            self._own_streams -= 1

    async def open_muxed(self) -> YamuxStream:
        """A new stream, before negotiation; BrokenResourceError if there can be none."""
        try:
            return await self.muxed_conn.open_stream()
        except (MuxedConnError, MuxedStreamError) as error:
            raise trio.BrokenResourceError("no stream can be opened") from error

    async def ping(self) -> float:
        """The round trip in seconds; BrokenResourceError if the connection is lost meanwhile."""
        try:
            return await self.muxed_conn.ping()
        except trio.ClosedResourceError:
            raise trio.BrokenResourceError("the connection was lost") from None

    def stream_of(self, muxed: YamuxStream, protocol: str) -> Libp2pStream:
        """A stream of this connection whose protocol is agreed."""
        unhelped = self.reach is Reach.DIRECT and not self.punched
        return Libp2pStream(muxed, self.peer, protocol, over_their_dial=self.inbound and unhelped)

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
            punched=self.punched,
        )

    async def run(self) -> None:
        """Run until the connection ends, from either side; then close everything of it."""
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
        """Close muxer and socket. For `run`, and for a connection that never ran."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(GOODBYE_SECONDS):
                await self.muxed_conn.close()
            if self._below is not None:
                await trio.aclose_forcefully(self._below)

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
        """Agree on a protocol and run its handler; no error leaves the stream."""
        protocol = b""
        try:
            with trio.fail_after(self.swarm.settings.negotiation_seconds):
                chosen = await negotiation.answer(muxed_stream, self.swarm.served)
                # A handler may reset the stream at once, which drops what is queued. The other side
                # must still learn of the agreement.
                if chosen is not None:
                    await muxed_stream.wait_until_sent()
            if chosen is None:
                muxed_stream.reset_now()
                return
            protocol = chosen
            await self._handle(muxed_stream, protocol.decode())
        except (trio.BrokenResourceError, RemoteMisbehaviour, trio.TooSlowError) as error:
            # The other side's fault: it disconnected, sent nonsense, or nothing at all.
            level = logging.INFO if protocol else logging.DEBUG  # without one it was a mere try
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
            stream = self.stream_of(muxed_stream, protocol)
            with self.own_stream() if protocol in self.swarm.own_handlers else nullcontext():
                await handler(stream)
                await stream.aclose()
            return
        if protocol not in self.swarm.library_handlers:
            muxed_stream.reset_now()  # it was served at the time of the request, and no longer is
            return
        library_handler = self.swarm.library_handler_of(protocol)
        net_stream = await self._add_stream(muxed_stream)
        net_stream.set_protocol(protocol)
        try:
            await library_handler(net_stream)
        finally:
            self.remove_stream(net_stream)

    # The library calls these.

    async def start(self) -> None:
        """Does nothing: `NodeSwarm.add_conn` starts our connections."""

    async def close(self) -> None:
        """End the connection and wait for its end. May be called twice, and at any time."""
        with trio.move_on_after(GOODBYE_SECONDS):
            await self.muxed_conn.close()
        self._scope.cancel()
        await self.ended.wait()

    def abort(self) -> None:
        """End the connection without a flush. Never blocks; `ended` is set soon after."""
        self._scope.cancel()

    async def _on_muxed_conn_closed(self) -> None:
        """The muxer reports that it has closed; `run` notices by itself."""

    async def _handle_muxed_stream(self, muxed_stream: IMuxedStream) -> None:
        raise NotImplementedError("streams are answered by `_answer`")
