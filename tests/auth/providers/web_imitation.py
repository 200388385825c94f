"""A web server of a few lines on loopback, which answers whatever a test wants it to answer.

It knows HTTP through h11 and nothing of providers. A handler gives a reply, or a function that
writes one piece by piece, so that answers can be endless or slow.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import parse_qsl, urlsplit

import h11
import trio

Write = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    form: dict[str, str]


@dataclass
class Reply:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Callable[[Write], Awaitable[None]] | None = None


Handler = Callable[[Asked], Reply]


@asynccontextmanager
async def serving(handler: Handler, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve until the block is left; gives the address, such as http://127.0.0.1:4711."""
    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, partial(_converse, handler, tls), 0, host="127.0.0.1")
        )
        port = listeners[0].socket.getsockname()[1]
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


async def _converse(
    handler: Handler, tls: ssl.SSLContext | None, stream: trio.SocketStream | trio.SSLStream
) -> None:
    if tls is not None:
        stream = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
        async with stream:
            connection = h11.Connection(h11.SERVER)
            while connection.states[h11.CLIENT] is h11.IDLE:
                asked = await _read(connection, stream)
                if asked is None:
                    return
                await _answer(connection, stream, handler(asked))
                if connection.our_state is h11.DONE and connection.their_state is h11.DONE:
                    connection.start_next_cycle()


async def _read(connection: h11.Connection, stream: trio.abc.Stream) -> Asked | None:
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(65_536))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            target = urlsplit(request.target.decode())
            return Asked(
                request.method.decode(),
                target.path,
                dict(parse_qsl(target.query)),
                {name.decode(): value.decode() for name, value in request.headers},
                dict(parse_qsl(body.decode())),
            )
        else:
            return None


async def _answer(connection: h11.Connection, stream: trio.abc.Stream, reply: Reply) -> None:
    headers = {"Content-Type": "application/json", **reply.headers}
    if reply.pieces is None:
        headers["Content-Length"] = str(len(reply.body))
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    head = h11.Response(status_code=reply.status, headers=raw)
    await stream.send_all(connection.send(head) or b"")

    async def write(data: bytes) -> None:
        await stream.send_all(connection.send(h11.Data(data=data)) or b"")

    if reply.pieces is None:
        await write(reply.body)
    else:
        await reply.pieces(write)
    await stream.send_all(connection.send(h11.EndOfMessage()) or b"")
