"""Peers that ask and answer, in a simulated world: the cast of the fault tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from protocols.guard import Caller
from protocols.rpc import BulkMethod, Empty, Message, Method, Rpc, Transfer, open_rpc
from protocols.rpc.ping import ECHO, EchoRequest, serve_ping
from protocols.rpc.rpc import RpcStatistics
from protocols.testing.world import SimulatedNetwork, SimulatedWorld
from tests.chunks import next_chunk

PROTOCOL: Final = "/potluck/faults/1.0.0"
CHUNK_BYTES: Final = 65_536
STALL_SECONDS: Final = 10.0  # shorter than the links' keep-alive, so that it is met first
CALL_SECONDS: Final = 5.0


class Pattern(Message, frozen=True):
    """How many chunks to send."""

    chunks: int


HANG: Final = Method(PROTOCOL, "hang", Empty, Empty)
BREAK: Final = Method(PROTOCOL, "break", Empty, Empty)
POUR: Final = BulkMethod(
    PROTOCOL, "pour", Pattern, Empty, Empty, Empty, CHUNK_BYTES, stall_seconds=STALL_SECONDS
)
SOAK_UP: Final = BulkMethod(
    PROTOCOL, "soak-up", Empty, Empty, Empty, Empty, CHUNK_BYTES, stall_seconds=STALL_SECONDS
)
LISTEN: Final = BulkMethod(
    PROTOCOL, "listen", Empty, Empty, Empty, Empty, CHUNK_BYTES, stall_seconds=STALL_SECONDS
)


def chunk(number: int) -> bytes:
    """The chunk of this number: every one differs from its neighbours."""
    return number.to_bytes(4, "big") * (CHUNK_BYTES // 4)


class Server:
    """A node that serves everything the fault tests ask for, and knows what it is doing."""

    def __init__(self, world: SimulatedWorld, network: SimulatedNetwork) -> None:
        self.network = network
        self.rpc: Rpc | None = None
        self.hanging = 0  # handlers of HANG that run now
        self.hung = 0  # and that ever ran
        self.chunks_taken = 0
        self.ready = trio.Event()
        world.start(network, self._run)

    @property
    def peer(self) -> str:
        return self.network.peer_id

    def statistics(self) -> RpcStatistics:
        assert self.rpc is not None
        return self.rpc.statistics()

    async def _run(self, network: SimulatedNetwork) -> None:
        async with open_rpc(network) as self.rpc:
            serve_ping(self.rpc)
            self.rpc.serve(HANG, self._hang)
            self.rpc.serve(BREAK, self._break)
            self.rpc.serve_bulk(POUR, self._pour)
            self.rpc.serve_bulk(SOAK_UP, self._soak_up)
            self.rpc.serve_bulk(LISTEN, self._listen)
            self.ready.set()
            await trio.sleep_forever()

    async def _hang(self, _caller: Caller, _request: Empty) -> Empty:
        self.hanging += 1
        self.hung += 1
        try:
            await trio.sleep_forever()
        finally:
            self.hanging -= 1
        return Empty()

    async def _break(self, _caller: Caller, _request: Empty) -> Empty:
        raise RuntimeError("a bug with a secret in it")

    async def _pour(
        self, _caller: Caller, transfer: Transfer[Empty, Empty, Empty], opening: Pattern
    ) -> None:
        await transfer.accept(Empty())
        for number in range(opening.chunks):
            await transfer.send_chunk(chunk(number))
        await transfer.finish(Empty())

    async def _soak_up(
        self, _caller: Caller, transfer: Transfer[Empty, Empty, Empty], _opening: Empty
    ) -> None:
        await transfer.accept(Empty())
        await self._take_all(transfer)

    async def _listen(
        self, _caller: Caller, transfer: Transfer[Empty, Empty, Empty], _opening: Empty
    ) -> None:
        await transfer.accept(Empty())
        await transfer.send_closing(Empty())  # nothing comes from here, and it is said at once
        await self._take_all(transfer)

    async def _take_all(self, transfer: Transfer[Empty, Empty, Empty]) -> None:
        while (taken := await next_chunk(transfer)) is not None:
            assert taken == chunk(self.chunks_taken)
            self.chunks_taken += 1
        await transfer.finish(Empty())


async def drain(transfer: Transfer[Any, Any, Any]) -> None:
    """Receive chunks to the last."""
    while await next_chunk(transfer) is not None:
        pass


async def send_chunks(transfer: Transfer[Any, Any, Any], count: int) -> None:
    for number in range(count):
        await transfer.send_chunk(chunk(number))


@asynccontextmanager
async def client_and_server(
    world: SimulatedWorld,
) -> AsyncIterator[tuple[SimulatedNetwork, Rpc, Server]]:
    """A client's network and rpc, and a running server that it knows."""
    client, server = world.add_node("client"), Server(world, world.add_node("server"))
    world.introduce(client, server.network)
    await server.ready.wait()
    async with open_rpc(client) as rpc:
        yield client, rpc, server


async def is_served(rpc: Rpc, server: Server) -> None:
    """Fail unless an honest customer gets an answer in time."""
    request = EchoRequest(b"still there?")
    response = await rpc.call(server.network.peer_id, ECHO, request, timeout=CALL_SECONDS)
    assert response.payload == request.payload


async def outcome_of(
    call: Callable[[], Awaitable[object]],
) -> tuple[type[BaseException] | None, float]:
    """Which error a call ended with, if any, and after how many virtual seconds."""
    started = trio.current_time()
    error: type[BaseException] | None = None
    try:
        await call()
    except Exception as caught:  # noqa: BLE001 - the tests compare it
        error = type(caught)
    return error, trio.current_time() - started
