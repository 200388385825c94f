"""Listening: TLS handshakes with the newest certificate, so many connections, and a clean end.

`serve` runs until it is cancelled. Then it takes no new connection, closes those that are idle,
and gives requests in flight GRACE_SECONDS to be answered; after that every socket is closed.

A stranger can hold connections only against time: when there is no room, the one that has been idle
for longest makes way. Handshakes cost us more than them, so each address may begin only so many.

Easy to get wrong: what is in flight must not be cancelled with the rest, so it is shielded; and
whatever is shielded must have an end of its own, or Ctrl-C hangs.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app

from auth.server.certificates import Certificate
from auth.server.connections import Connection, LingeringSocket
from auth.server.rate_limits import Network, Rate, RateLimit, is_within, site_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from trio_typing import TaskStatus

# From Ctrl-C to the prompt there are 1.5 seconds, for everything.
GRACE_SECONDS = 1.0
LARGEST_HEAD_BYTES = 16 * 1024  # ours have some hundred; a browser's cookies some thousand
REQUESTS_PER_CONNECTION = 1000  # then it is opened anew, and meets the newest certificate
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
        handshakes: Rate,
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
        """The connections of this moment."""
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
        """Wait for what is in flight, not for ever; then close every socket under it."""
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
        """Which limit keeps this client out, if one does. May end another that is idle."""
        if not is_within(address, self._proxies):
            if self._sites[site] >= self._most_per_address:
                return "connections_per_address"
            if self._handshakes.wait_seconds(site, trio.current_time()):
                return "handshakes"
        if len(self._open) >= self._most_connections and not self._make_room():
            return "connections"
        return None

    def _make_room(self) -> bool:
        """Send away who has been idle for longest. Whether there is, or soon will be, room."""
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
