"""Listening: TLS handshakes with the newest certificate, a bounded number of connections, and a
clean end.

`serve` runs until it is cancelled. Then it accepts no new connection, closes those that are idle,
and gives requests in flight GRACE_SECONDS to be answered; after that every socket is closed.

A stranger cannot hold connections forever: when there is no room, the one that has been idle for
longest is closed. Handshakes cost us more than the client, so each address may begin only a limited
number.

Requests in flight must not be cancelled with the rest, so they are shielded. Every shield needs a
timeout of its own, or Ctrl-C hangs.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from auth.server.certificates import Certificate
from auth.server.rate_limits import AllowedRate, Network, RateLimit, is_within, site_of

if TYPE_CHECKING:
    import ssl

    from hypercorn.config import Config
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import AppWrapper, H11SendableEvent
    from starlette.types import ASGIApp
    from trio_typing import TaskStatus

# From Ctrl-C to the prompt there are 1.5 seconds, for everything.
GRACE_SECONDS = 1.0
LARGEST_HEAD_BYTES = 16 * 1024  # ours have some hundred; a browser's cookies some thousand
REQUESTS_PER_CONNECTION = 1000  # then it is opened anew, and gets the newest certificate
BACKLOG = 512  # connections that the kernel holds while we are busy with others

_log = logging.getLogger("potluck.auth.serving")


class HttpServer:
    """Serves an application on some sockets, over TLS if it is given a certificate."""

    def __init__(
        self,
        app: ASGIApp,
        certificate: Certificate | None,
        *,
        most_connections: int,
        most_connections_per_address: int,
        handshakes: AllowedRate,
        proxies: tuple[Network, ...] = (),
        on_refused_connection: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._app = wrap_app(app, 0, "asgi")  # type: ignore[arg-type]
        self._certificate = certificate
        self._most_connections = most_connections
        self._most_ending = most_connections // 4 + 1
        self._most_per_address = most_connections_per_address
        self._handshakes = RateLimit(handshakes)
        self._proxies = proxies
        self._on_refused = on_refused_connection
        self._open: set[Connection] = set()
        self._sites: Counter[str] = Counter()
        self._somebody_left = trio.lowlevel.ParkingLot()
        self._context = WorkerContext(None)
        self._config = Config()
        self._config.accesslog = None
        self._config.errorlog = _log
        self._config.keep_alive_max_requests = REQUESTS_PER_CONNECTION
        self._config.h11_max_incomplete_size = LARGEST_HEAD_BYTES
        self._config.include_server_header = False

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def open(self) -> frozenset[Connection]:
        """The connections at this moment."""
        return frozenset(self._open)

    async def serve(
        self,
        listeners: Sequence[trio.SocketListener],
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled. The listeners are closed at the end."""
        ending = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_until, ending, listeners)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                ending.set()

    async def _serve_until(
        self, ending: trio.Event, listeners: Sequence[trio.SocketListener]
    ) -> None:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as in_flight:
                async with trio.open_nursery() as accepting:
                    accepting.start_soon(self._accept, listeners, in_flight)
                    await ending.wait()
                    accepting.cancel_scope.cancel()
                await self._context.terminated.set()
                for connection in self._open:
                    connection.end_if_idle()
                in_flight.start_soon(self._end_the_rest, in_flight.cancel_scope)

    async def _accept(
        self, listeners: Sequence[trio.SocketListener], in_flight: trio.Nursery
    ) -> None:
        await trio.serve_listeners(self._meet, listeners, handler_nursery=in_flight)

    async def _end_the_rest(self, scope: trio.CancelScope) -> None:
        """Wait for requests in flight, with a timeout; then close every socket below it."""
        with trio.move_on_after(GRACE_SECONDS):
            while self._open:
                await self._somebody_left.park()
        if self._open:
            _log.warning("%d requests were cut off in their middle", len(self._open))
        for connection in self._open:
            connection.transport.close_now()
        scope.cancel()

    async def _meet(self, client: trio.SocketStream) -> None:
        """One client. Never raises."""
        stream = LingeringSocket(client)
        try:
            address = client.socket.getpeername()[0]
        except OSError:
            client.socket.close()
            return
        site = site_of(address)
        refusal = self._refusal(address, site)
        if refusal is not None:
            _log.warning("%s was turned away: limit %s", site, refusal)
            self._on_refused(refusal)
            client.socket.close()
            return
        tls = None if self._certificate is None else self._certificate.context
        connection = Connection(self._app, self._config, self._context, stream, tls)
        with self._counted(connection, site):
            try:
                await connection.run()
            except Exception as error:  # noqa: BLE001 - one client must not end the server
                _log.exception("a connection from %s failed: %r", site, error)
            finally:
                stream.close_now()

    def _refusal(self, address: str, site: str) -> str | None:
        """The limit that keeps this client out, if there is one. May close another that is idle."""
        if not is_within(address, self._proxies):
            if self._sites[site] >= self._most_per_address:
                return "connections_per_address"
            if self._handshakes.wait_seconds(site, trio.current_time()):
                return "handshakes"
        if len(self._open) >= self._most_connections and not self._make_room():
            return "connections"
        return None

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest. Whether there is or will be room."""
        if len(self._open) >= self._most_connections + self._most_ending:
            return False
        idle = [each for each in self._open if each.idle_since is not None]
        if not idle:
            return False
        min(idle, key=lambda each: each.idle_since or 0.0).end_if_idle()
        self._on_refused("idle")
        return True

    @contextlib.contextmanager
    def _counted(self, connection: Connection, site: str) -> Iterator[None]:
        self._open.add(connection)
        self._sites[site] += 1
        try:
            yield
        finally:
            self._open.discard(connection)
            self._somebody_left.unpark_all()
            self._sites[site] -= 1
            if not self._sites[site]:
                del self._sites[site]


# One HTTP connection, with a deadline wherever a slow or silent client could hold something.
#
# Hypercorn speaks HTTP; this module fixes what it leaves open to strangers:
#
# - It speaks HTTP/2 and WebSocket to any client that asks for them in a request, whatever was
#   agreed in the handshake. Nothing of ours uses either, and both have limits of their own. Here
#   only HTTP/1.1 is spoken.
# - It writes without a timeout, shielded from cancellation. A client that sends requests and reads
#   no answers would hold its connection, and our shutdown, forever. Here each write has a deadline.
# - It waits in vain: a connection whose client has left is kept until its idle time is over, and
#   one whose request was answered before all of it was read tries forever to pass on the rest. Here
#   each connection is one scope that ends as a whole, and passing on data has a deadline.
# - It writes the head, the body and the end of an answer one by one: three TLS records and three
#   system calls. Here an answer leaves in one piece.
#
# Deadlines: the handshake has HANDSHAKE_SECONDS; a request's head has IDLE_SECONDS from the moment
# when the connection became idle, however slowly it arrives; later ones are the application's
# (app.py).
#
# Easy to get wrong: Hypercorn's classes are not documented for this use. This module relies on
# `TCPServer` and `H11Protocol`, with the methods named below; tests/auth/web/ checks them.


HANDSHAKE_SECONDS = 10.0  # three round trips over the worst of links, and our own queue
IDLE_SECONDS = 10.0  # waiting for a request, until its head is whole
# An answer has some kilobytes and fits into the socket's buffer: only a client that reads none of
# many answers makes a write wait at all.
WRITE_SECONDS = 10.0
# A client that is still sending when it has been answered (a body that is too large) would lose
# the answer to a reset of the connection, if we closed at once.
LINGER_SECONDS = 0.5
LINGER_BYTES = 1 << 20
CLOSE_SECONDS = 2 * LINGER_SECONDS  # that, and TLS's own farewell
READ_BYTES = 1 << 16  # what is read at once; a request has a kilobyte
# An application that has answered does not listen any more; one that does has heard at once.
TELL_SECONDS = 0.5


class LingeringSocket(trio.abc.HalfCloseableStream):
    """A TCP stream that reads what its client still sends before it closes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket

    async def send_all(self, data: bytes | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Send the end, read for a moment what is still on its way, and close."""
        try:
            with trio.move_on_after(LINGER_SECONDS):
                await self._stream.send_eof()
                heard = 0
                while heard < LINGER_BYTES and (some := await self._stream.receive_some()):
                    heard += len(some)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass  # nobody is there, or somebody else is reading: there is nothing to wait for
        finally:
            self.socket.close()

    def close_now(self) -> None:
        """Close at once; anybody who reads or writes here is told at once."""
        self.socket.close()


class PlainHttp(H11Protocol):
    """Hypercorn's HTTP/1.1, without any of its upgrades."""

    _unsent = b""

    async def _check_protocol(self, _event: h11.Request) -> None:
        """A request for HTTP/2 is answered in HTTP/1.1, as a server may."""

    async def _create_stream(self, request: h11.Request) -> None:
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _close_stream(self) -> None:
        """Tell the application that its request is over, if it still listens."""
        with trio.move_on_after(TELL_SECONDS):
            await super()._close_stream()
        self.stream = None

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        """Hold an answer back until its end."""
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        self._unsent += data or b""
        if isinstance(event, h11.EndOfMessage | h11.InformationalResponse):
            unsent, self._unsent = self._unsent, b""
            await self.send(RawData(data=unsent))


class Connection(TCPServer):
    """One client, from its handshake until it leaves or is dropped.

    It is idle while no request is being answered; only then can it time out.
    """

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        transport: LingeringSocket,
        tls: ssl.SSLContext | None,
    ) -> None:
        stream: trio.abc.Stream = transport
        if tls is not None:
            stream = trio.SSLStream(transport, tls, server_side=True, https_compatible=True)
        # Hypercorn's annotation knows only trio's own streams
        super().__init__(app, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]
        self.transport = transport
        self._over_tls = tls is not None
        self._idle = trio.CancelScope()
        self._all = trio.CancelScope()
        self.idle_since: float | None = trio.current_time()
        """Since when no request is being answered; None while one is, and once it is ending."""

    def end_if_idle(self) -> None:
        """Drop it, unless a request is being answered: then it ends after the answer."""
        if self.idle_since is not None:
            self.idle_since = None
            self._idle.cancel()

    async def run(self) -> None:
        """Serve it. Never raises because of what the client does."""
        try:
            if not self._over_tls or await self._shake_hands():
                with self._all:
                    await self._talk()
        except OSError:  # gone before we could ask for its address
            pass
        finally:
            with trio.move_on_after(CLOSE_SECONDS):
                await self._close()

    async def protocol_send(self, event: Event) -> None:
        """Perform what Hypercorn's HTTP asks: send, note that a request begins or ends, close."""
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Updated):
            now = trio.current_time()
            self.idle_since = now if event.idle else None
            self._idle.deadline = now + IDLE_SECONDS if event.idle else math.inf
        elif isinstance(event, Closed):
            self._all.cancel()

    async def _send(self, data: bytes) -> None:
        """Send, even when cancelled, with the timeout of a write."""
        sent = False
        deadline = trio.current_time() + WRITE_SECONDS
        with trio.CancelScope(deadline=deadline, shield=True):
            try:
                await self.stream.send_all(data)
                sent = True
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client has left
        if not sent:
            self._all.cancel()

    async def _read_data(self) -> None:
        """Pass on received data until the client leaves. The timeouts are elsewhere."""
        data: bytes = b"-"
        while data:
            try:
                data = await self.stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                break
            await self.protocol.handle(RawData(data))
        await self.protocol.handle(Closed())

    async def _shake_hands(self) -> bool:
        self._idle.deadline = trio.current_time() + HANDSHAKE_SECONDS
        shaken = False
        with self._idle:
            try:
                await self.stream.do_handshake()
                shaken = True
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # a stranger who speaks something else, or left
        self._idle = trio.CancelScope()
        return shaken

    async def _talk(self) -> None:
        socket = self.transport.socket
        async with TaskGroup() as task_group:
            self.protocol = PlainHttp(  # type: ignore[assignment]
                self.app,
                self.config,
                self.context,
                task_group,
                ConnectionState({}),
                self._over_tls,
                parse_socket_addr(socket.family, socket.getpeername()),
                parse_socket_addr(socket.family, socket.getsockname()),
                self.protocol_send,
            )
            self._idle.deadline = trio.current_time() + IDLE_SECONDS
            with self._idle:
                await self._read_data()
