"""One HTTP connection, with a deadline wherever a slow or silent client could hold something.

Hypercorn speaks HTTP; what is here closes the doors that it leaves open to strangers:

- It speaks HTTP/2 and WebSocket to whoever asks for them in a request, whatever was agreed in the
  handshake. Nothing of ours uses either, and both have limits of their own. Only HTTP/1.1 is
  spoken here.
- It writes for as long as the reader likes, shielded from cancellation. A client that sends
  requests and reads no answers would hold its connection, and our end, for ever. Each write has a
  deadline here.
- It waits where nobody will come: a connection whose client has left is kept until its idle time is
  over; one whose request was answered before all of it was read tries for ever to hand on the
  rest. Here each connection is one scope that ends as a whole, and what is handed on has a
  deadline.
- It writes the head, the body and the end of an answer one by one: three TLS records and three
  system calls. Here an answer leaves in one piece.

Deadlines: the handshake has HANDSHAKE_SECONDS; a request's head has IDLE_SECONDS from the moment
when the connection fell idle, however it trickles; what follows is the application's (app.py).

Easy to get wrong: Hypercorn's classes are not documented for this use. `TCPServer` and
`H11Protocol` are leant on, with the methods named below; tests/auth/web/ holds them to it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import h11
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

if TYPE_CHECKING:
    import ssl

    from hypercorn.config import Config
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import AppWrapper, H11SendableEvent

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
    """A TCP stream that hears its client out before it closes."""

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
        """Say that no more comes, hear out for a moment what is on its way, and close."""
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
        """Close without a word; whoever reads or writes here is told at once."""
        self.socket.close()


class PlainHttp(H11Protocol):
    """Hypercorn's HTTP/1.1, and nothing else that a request could turn it into."""

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

    It is idle while no request is being answered; only then may its time run out.
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
        """What Hypercorn's HTTP wants done: send, note that a request begins or ends, close."""
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Updated):
            now = trio.current_time()
            self.idle_since = now if event.idle else None
            self._idle.deadline = now + IDLE_SECONDS if event.idle else math.inf
        elif isinstance(event, Closed):
            self._all.cancel()

    async def _send(self, data: bytes) -> None:
        """Send, whatever is cancelled meanwhile, but not for longer than a write may take."""
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
        """Hand on what comes, until the client leaves. How long it may take is said elsewhere."""
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
