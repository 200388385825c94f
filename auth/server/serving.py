"""Listening: TLS handshakes with the newest certificate, a bounded number of connections, and a
clean end.

`serve` runs until it is cancelled. Then it accepts no new connection, closes those that are idle,
and gives requests that have come whole GRACE_SECONDS to be answered; after that every socket is
closed.

A stranger cannot hold connections forever: when there is no room, the one is closed whose client
has been waited for longest, for a request or for the rest of its body. Handshakes cost us more than
the client, so each address may begin only a limited number.

Requests in flight must not be cancelled with the rest, so they are shielded. Every shield needs a
timeout of its own, or Ctrl-C hangs.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote

import h11
import trio

from auth.server.certificates import Certificate
from auth.server.rate_limits import AllowedRate, Network, RateLimit, is_within, site_of

if TYPE_CHECKING:
    import ssl

    from starlette.types import ASGIApp, Message, Scope
    from trio_typing import TaskStatus

# From Ctrl-C to the prompt there are 1.5 seconds, for everything.
GRACE_SECONDS = 1.0
LARGEST_HEAD_BYTES = 16 * 1024  # ours have some hundred; a browser's cookies some thousand
REQUESTS_PER_CONNECTION = 1000  # then it is opened anew, and gets the newest certificate
BACKLOG = 512  # connections that the kernel holds while we are busy with others

_log = logging.getLogger("potluck.auth.serving")


class ClientGone(OSError):
    """For an application that answers in pieces: nobody reads them any more."""


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
        self._app = app
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
        connection = Connection(self._app, stream, tls)
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
        idle = [each for each in self._open if each.waits_since() is not None]
        if not idle:
            return False
        min(idle, key=lambda each: each.waits_since() or 0.0).make_way()
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
# h11 is the state machine of HTTP/1.1; `Connection` moves its bytes and calls the application, one
# request after the other, in one task. There is no HTTP/2 and no WebSocket: a request that asks for
# them is answered in HTTP/1.1, as a server may. While a request is answered, nothing is read but
# its body, when the application asks for it; more than that waits in the kernel.
#
# Deadlines: the handshake has HANDSHAKE_SECONDS; a request's head has IDLE_SECONDS from the moment
# when the connection became idle, however slowly it arrives; an answer has WRITE_SECONDS to leave;
# the rest are the application's (boundary.py).


HANDSHAKE_SECONDS = 10.0  # three round trips over the worst of links, and our own queue
IDLE_SECONDS = 10.0  # waiting for a request, until its head is whole
# An answer has some kilobytes and fits into the socket's buffer: only a client that reads none of
# many answers makes a write wait at all.
WRITE_SECONDS = 10.0
STUCK_SECONDS = 1.0  # a client that takes nothing for so long makes way for others
# A client that is still sending when it has been answered (a body that is too large) would lose
# the answer to a reset of the connection, if we closed at once.
LINGER_SECONDS = 0.5
LINGER_BYTES = 1 << 20
CLOSE_SECONDS = 2 * LINGER_SECONDS  # that, and TLS's own farewell
READ_BYTES = 1 << 16  # what is read at once; a request has a kilobyte


class LingeringSocket(trio.abc.Stream):
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


class Connection:
    """One client, from its handshake until it leaves or is dropped.

    It is idle while we wait for the client: for a request, or for the rest of its body. Only then
    can it be dropped. A body is timed by the application, a request's head here.
    """

    def __init__(
        self, app: ASGIApp, transport: LingeringSocket, tls: ssl.SSLContext | None
    ) -> None:
        self.transport = transport
        self._app = app
        self._tls: trio.SSLStream | None = None
        if tls is not None:
            self._tls = trio.SSLStream(transport, tls, server_side=True, https_compatible=True)
        self._stream: trio.abc.Stream = self._tls or transport
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=LARGEST_HEAD_BYTES)
        self._unsent = b""
        self._idle = trio.CancelScope()
        self._writing = trio.CancelScope()
        self._writing_since: float | None = None
        self._is_ending = False
        self._head_came = 0.0
        self.idle_since: float | None = trio.current_time()
        """Since when the client is waited for: for a request, or for the rest of one whose head
        came then. None while a request is being answered, and once the connection is ending."""

    def waits_since(self) -> float | None:
        """Since when nothing comes from the client, or it takes nothing; None if it does."""
        if self.idle_since is not None:
            return self.idle_since
        since = self._writing_since
        is_stuck = since is not None and trio.current_time() - since >= STUCK_SECONDS
        return since if is_stuck else None

    def make_way(self) -> None:
        """Drop it, because others want its place."""
        self.end_if_idle()
        if self._writing_since is not None:
            self._writing.cancel()

    def end_if_idle(self) -> None:
        """Drop it, unless a request is being answered: then it ends after the answer."""
        self._is_ending = True
        if self.idle_since is not None:
            self.idle_since = None
            self._idle.cancel()

    async def run(self) -> None:
        """Serve it. Never raises because of what the client does."""
        try:
            if self._tls is None or await self._shake_hands(self._tls):
                await self._talk()
        except OSError:  # gone before we could ask for its address
            pass
        finally:
            with trio.move_on_after(CLOSE_SECONDS):
                await self._stream.aclose()

    async def _shake_hands(self, stream: trio.SSLStream) -> bool:
        shaken = False
        self._idle.deadline = trio.current_time() + HANDSHAKE_SECONDS
        with self._idle:
            try:
                await stream.do_handshake()
                shaken = True
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # a stranger who speaks something else, or left
        return shaken

    async def _talk(self) -> None:
        socket = self.transport.socket
        connection = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "scheme": "http" if self._tls is None else "https",
            "client": socket.getpeername()[:2],
            "server": socket.getsockname()[:2],
        }
        for number in range(1, REQUESTS_PER_CONNECTION + 1):
            request = await self._next_request()
            if request is None:
                break
            await self._answer(request, connection, is_last=number == REQUESTS_PER_CONNECTION)
            if not self._begin_next():
                break

    async def _next_request(self) -> h11.Request | None:
        """The head of the next request; None if the connection ends before it is whole."""
        event: object = None
        if not self._is_ending:
            self.idle_since = trio.current_time()
            with trio.move_on_after(IDLE_SECONDS) as self._idle:
                try:
                    event = await self._next_event()
                except h11.RemoteProtocolError as error:
                    await self._send_status(error.error_status_hint)
            self.idle_since = None
            self._head_came = trio.current_time()
        return event if isinstance(event, h11.Request) else None

    async def _answer(self, request: h11.Request, connection: Scope, *, is_last: bool) -> None:
        path, _, query = request.target.partition(b"?")
        scope = {
            **connection,
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii").upper(),
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers),
        }
        try:
            await self._app(scope, self._receive, partial(self._send, request, is_last))
        except ClientGone:
            pass
        except Exception as error:  # noqa: BLE001 - as one that answered nothing
            _log.exception("the application failed: %r", error)
        if self._http.our_state is h11.SEND_RESPONSE and not self._idle.cancelled_caught:
            await self._send_status(400 if self._http.their_state is h11.ERROR else 500)

    async def _receive(self) -> Message:
        """The next piece of the request's body, for the application. A client that is slow with it
        makes way for others, like one that is slow with its head."""
        event: object = h11.ConnectionClosed()
        if not self._is_ending:
            self.idle_since = self._head_came
        try:
            with trio.CancelScope() as self._idle:
                event = await self._next_event()
        except h11.RemoteProtocolError:
            pass
        finally:
            self.idle_since = None
        if isinstance(event, h11.Data):
            return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        if isinstance(event, h11.EndOfMessage):
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}

    async def _send(self, request: h11.Request, is_last: bool, message: Message) -> None:
        """A piece of the application's answer. The head is held back until the first piece of the
        body: one record of TLS and one system call, and not three. ClientGone if it has left before
        the last piece, or reads nothing."""
        if message["type"] == "http.response.start":
            # after a refusal by rate none of the requests that are here already is worth an answer
            ends = is_last or message["status"] == HTTPStatus.TOO_MANY_REQUESTS
            last = [(b"connection", b"close")] if ends else []
            headers = [*message["headers"], _date(), *last]
            self._hold(h11.Response(status_code=message["status"], headers=headers))
            return
        if message["body"] and request.method != b"HEAD":
            self._hold(h11.Data(data=message["body"]))
        if not message.get("more_body", False):
            self._hold(h11.EndOfMessage())
            await self._write()
        elif not await self._write():
            raise ClientGone

    async def _send_status(self, status: int) -> None:
        """An answer of ours to something that is no request, or that the application left."""
        headers = [(b"content-length", b"0"), (b"connection", b"close"), _date()]
        self._hold(h11.Response(status_code=status, headers=headers))
        self._hold(h11.EndOfMessage())
        await self._write()

    def _begin_next(self) -> bool:
        """Whether another request may follow. A body that the application did not read ends the
        connection, unless all of it is here in one piece."""
        with contextlib.suppress(h11.RemoteProtocolError):
            for _ in range(2):  # the piece, and the end of the request
                if self._http.their_state is h11.SEND_BODY:
                    self._http.next_event()
        if (self._http.our_state, self._http.their_state) != (h11.DONE, h11.DONE):
            return False
        self._http.start_next_cycle()
        return True

    async def _next_event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self._hold(h11.InformationalResponse(status_code=100, headers=[_date()]))
                await self._write()
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            self._http.receive_data(data)
        return event

    def _hold(self, event: h11.Event) -> None:
        self._unsent += self._http.send(event) or b""

    async def _write(self) -> bool:
        """Send what was held back, even when cancelled, with the timeout of a write. Whether all of
        it was sent; else the connection is ending."""
        unsent, self._unsent = self._unsent, b""
        now = trio.current_time()
        with trio.CancelScope(deadline=now + WRITE_SECONDS, shield=True) as self._writing:
            self._writing_since = now
            try:
                await self._stream.send_all(unsent)
                return True
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client has left
            finally:
                self._writing_since = None
        self._is_ending = True
        return False


def _date() -> tuple[bytes, bytes]:
    return b"date", formatdate(usegmt=True).encode("ascii")
