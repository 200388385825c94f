"""The requests of tests to a foreign libp2p node, in whichever language it is written.

Each stranger is a process that gives us its libp2p streams as local sockets: a test speaks
through a plain `trio.SocketStream`, and every byte of it crosses the stranger's own Noise and
Yamux. The socket keeps the meaning of the stream: end of file is a half-close, a connection reset
is a stream reset.

Easy to get wrong: a socket has buffers of its own, some megabytes in all, so a test of
back-pressure must send far more than those hold.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from tests.waiting import PATIENCE_SECONDS

# One command, with a whole connection attempt inside it. Everything is on loopback.
COMMAND_SECONDS: Final = PATIENCE_SECONDS

StreamHandler = Callable[[trio.SocketStream], Awaitable[None]]


class StrangerRefused(Exception):
    """The stranger answered a command with an error; the message is its own."""


class StrangerMissing(Exception):
    """This machine cannot run that stranger, and the message says what it lacks."""


class Stranger(ABC):
    """A running foreign node. It outlives many tests, so a test leaves nothing behind in it."""

    peer: str
    address: str  # empty if it does not listen
    process_id: int

    # Whether its local socket keeps a half-close, so that an answer can still follow it.
    answers_after_half_close: bool

    @abstractmethod
    async def connect(self, address: str) -> None:
        """Dial the node at this address, which ends in its /p2p/<peer id>."""

    @abstractmethod
    async def disconnect(self, peer: str) -> None:
        """Close every connection with that peer."""

    @abstractmethod
    async def connected(self) -> tuple[str, ...]:
        """The peers it holds connections with now."""

    @abstractmethod
    async def ping(self, peer: str) -> float:
        """A round trip by libp2p's ping protocol, in seconds."""

    @abstractmethod
    def stop(self) -> None:
        """Kill the process."""

    @abstractmethod
    async def open(self, peer: str, protocol: str) -> trio.SocketStream:
        """A stream of the stranger's to a connected peer, or StrangerRefused."""

    @abstractmethod
    async def begin_serving(self, protocol: str, port: int) -> None:
        """Connect each stream that is opened for `protocol` to this local port."""

    @abstractmethod
    async def end_serving(self, protocol: str, port: int) -> None: ...

    @abstractmethod
    async def take_header(self, stream: trio.SocketStream) -> None:
        """Read what the stranger writes before the first byte of a stream that came in."""

    @asynccontextmanager
    async def serving(self, protocol: str, handler: StreamHandler) -> AsyncIterator[None]:
        """Answer the streams that others open to the stranger, until the block is left."""

        async def handle(stream: trio.SocketStream) -> None:
            async with stream:
                await self.take_header(stream)
                await handler(stream)

        async with trio.open_nursery() as nursery:
            listen = partial(trio.serve_tcp, handle, 0, host="127.0.0.1")
            listeners: list[trio.SocketListener] = await nursery.start(listen)
            port = listeners[0].socket.getsockname()[1]
            await self.begin_serving(protocol, port)
            try:
                yield
            finally:
                # A stranger that was killed in the meantime serves nothing any more.
                with (
                    trio.CancelScope(shield=True, deadline=trio.current_time() + COMMAND_SECONDS),
                    contextlib.suppress(OSError, trio.BrokenResourceError),
                ):
                    await self.end_serving(protocol, port)
                nursery.cancel_scope.cancel()


def reset_socket(stream: trio.SocketStream) -> None:
    """Close a local socket in the way that says "reset" and not "end"."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()
