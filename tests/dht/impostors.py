"""Nodes that answer the directory's questions wrongly, late, or not at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from protocols.dht import Slot
from protocols.dht.messages import (
    FIND,
    GREET,
    PROTOCOL,
    STORE,
    FindRequest,
    FindResponse,
    Found,
    GreetRequest,
    GreetResponse,
    Introduction,
    Query,
    StoreRequest,
    StoreResponse,
    without_peer,
)
from protocols.guard import Caller
from protocols.network import Stream
from protocols.rpc import Rpc, open_rpc
from protocols.testing.world import SimulatedNetwork, SimulatedWorld


class Impostor:
    """A node of the swarm that can be told how to answer."""

    def __init__(
        self, world: SimulatedWorld, name: str, answer: Callable[[Impostor], Awaitable[None]]
    ) -> None:
        self.world = world
        self.network = world.add_node(name)
        self.questions = 0
        self._answer = answer
        self.ready = trio.Event()
        self._rpc: Rpc | None = None
        world.start(self.network, self._run)

    @property
    def rpc(self) -> Rpc:
        assert self._rpc is not None
        return self._rpc

    @property
    def introduction(self) -> Introduction:
        network = self.network
        return Introduction(without_peer(network.peer_id, network.addresses()))

    def time_ms(self) -> int:
        return int(self.network.wall_time() * 1000)

    async def _run(self, network: SimulatedNetwork) -> None:
        async with open_rpc(network) as self._rpc:
            await self._answer(self)
            self.ready.set()
            await trio.sleep_forever()


def that_greets(
    slots: tuple[Slot, ...] = (),
    wait_seconds: float = 0.0,
    answer: Callable[[Query], Found] | None = None,
) -> Callable[..., Any]:
    """Answers greetings properly, and finds with these slots, or by `answer`, after this long;
    stores nothing."""

    def with_the_slots(query: Query) -> Found:
        return Found(slots=slots if query.key else ())

    async def serve(node: Impostor) -> None:
        def greet(_caller: Caller, _request: GreetRequest) -> GreetResponse:
            return GreetResponse(node.time_ms(), node.introduction)

        async def find(_caller: Caller, request: FindRequest) -> FindResponse:
            node.questions += 1
            await trio.sleep(wait_seconds)
            answers = tuple(map(answer or with_the_slots, request.queries))
            return FindResponse(node.time_ms(), answers, node.introduction)

        async def store(_caller: Caller, request: StoreRequest) -> StoreResponse:
            node.questions += 1
            await trio.sleep(wait_seconds)
            return StoreResponse(node.time_ms(), bytes(len(request.slots)), (), (), ())

        node.rpc.serve(GREET, greet)
        node.rpc.serve(FIND, find)
        node.rpc.serve(STORE, store)

    return serve


async def that_answers_with_garbage(node: Impostor) -> None:
    async def babble(stream: Stream) -> None:
        node.questions += 1
        await stream.receive_some()
        await stream.send_all(b"\xff" * 100)

    node.network.serve(PROTOCOL, babble)


async def that_never_answers(node: Impostor) -> None:
    async def listen(stream: Stream) -> None:
        node.questions += 1
        while await stream.receive_some():
            pass

    node.network.serve(PROTOCOL, listen)
