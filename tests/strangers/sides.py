"""The two sides of a link between our node and a stranger, under one set of words.

So a test says "whoever opens" once, and runs with us and with the stranger in that place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import trio
from trio.abc import HalfCloseableStream

from node.net.libp2p.settings import Libp2pSettings
from node.net.network import open_libp2p_network
from node.net.transport import YamuxSettings
from protocols.identity import Identity, PeerId
from protocols.network import Network, Stream, TraversableNetwork
from tests.strangers.stranger import Stranger, reset_socket
from tests.waiting import PATIENCE_SECONDS, until

Who = Literal["we", "they"]
Handler = Callable[[HalfCloseableStream], Awaitable[None]]


class Side(ABC):
    """One end of the link."""

    @abstractmethod
    async def open(self, protocol: str) -> HalfCloseableStream:
        """Open a stream to the other side."""

    @abstractmethod
    def serving(self, protocol: str, handler: Handler) -> AbstractAsyncContextManager[None]:
        """Answer the other side's streams until the block is left."""

    @abstractmethod
    def reset(self, stream: HalfCloseableStream) -> None:
        """Reset a stream that this side opened or serves."""


@dataclass
class OurSide(Side):
    network: Network
    other: PeerId

    async def open(self, protocol: str) -> HalfCloseableStream:
        return await self.network.open(self.other, protocol)

    @asynccontextmanager
    async def serving(self, protocol: str, handler: Handler) -> AsyncIterator[None]:
        self.network.serve(protocol, handler)
        try:
            yield
        finally:
            self.network.stop_serving(protocol)

    def reset(self, stream: HalfCloseableStream) -> None:
        assert isinstance(stream, Stream)
        stream.reset()


@dataclass
class TheirSide(Side):
    stranger: Stranger
    other: PeerId

    async def open(self, protocol: str) -> HalfCloseableStream:
        return await self.stranger.open(self.other, protocol)

    def serving(self, protocol: str, handler: Handler) -> AbstractAsyncContextManager[None]:
        return self.stranger.serving(protocol, handler)

    def reset(self, stream: HalfCloseableStream) -> None:
        assert isinstance(stream, trio.SocketStream)
        reset_socket(stream)


@dataclass
class Link:
    """A live connection, and both of its sides."""

    network: Network
    stranger: Stranger
    ours: OurSide
    theirs: TheirSide

    def sides(self, opener: Who) -> tuple[Side, Side]:
        """The side that opens streams in this test, and the side that serves them."""
        return (self.ours, self.theirs) if opener == "we" else (self.theirs, self.ours)


@asynccontextmanager
async def our_node(
    yamux: YamuxSettings | None = None, *, listens: bool = True
) -> AsyncIterator[TraversableNetwork]:
    """A node of ours on loopback, with a new identity."""
    settings = Libp2pSettings(
        listen_addresses=("/ip4/127.0.0.1/tcp/0",) if listens else (),
        yamux=yamux if yamux is not None else YamuxSettings(),
    )
    async with open_libp2p_network(Identity.generate(), settings) as network:
        yield network


@asynccontextmanager
async def linked(
    stranger: Stranger, dialler: Who, yamux: YamuxSettings | None = None
) -> AsyncIterator[Link]:
    """Our node and the stranger, connected by the side that is to dial, and each knows it.

    The side that dialled is connected first. If the other were asked at once, it could say that it
    has no connection to close.
    """
    them = PeerId(stranger.peer)
    async with our_node(yamux) as network:
        if dialler == "we":
            network.learn_addresses(them, [stranger.address])
            await network.connect(them)
        else:
            await stranger.connect(network.addresses()[0])

        async def known() -> bool:
            return network.link(them) is not None and network.peer_id in await stranger.connected()

        await until(known, PATIENCE_SECONDS)
        yield Link(network, stranger, OurSide(network, them), TheirSide(stranger, network.peer_id))
        await stranger.disconnect(network.peer_id)
