"""Provides the networks for the contract tests: a simulated world, or loopback.

A test is written once against `Neighbourhood` and knows nothing of the layers below. `@on_both`
runs it in virtual time on the simulated network and in real time on the libp2p one.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from node.net.network import Libp2pSettings, open_libp2p_network
from protocols.blocking import do_at_once
from protocols.identity import Identity
from protocols.network import Network, Stream
from protocols.testing.timeline import deterministic_scheduling
from protocols.testing.world import SimulatedNetwork, SimulatedWorld
from tests.waiting import PATIENCE_SECONDS

PROTOCOL: Final = "/potluck/contract/1.0.0"

# No test reads this much and no window allows it: a sender that gets here was never held back.
MOST_SENT_BYTES: Final = 256 << 20
PIECE_BYTES: Final = 65_536

VIRTUAL_SECONDS: Final = 3600.0


class Neighbourhood(ABC):
    """Networks that are near enough to reach each other."""

    @abstractmethod
    async def network(self) -> Network:
        """A new network, listening, that knows nobody."""

    @abstractmethod
    async def end(self, network: Network) -> None:
        """End a network politely; it is over when this returns."""

    @abstractmethod
    def dead_address(self) -> str:
        """A well-formed address at which no node listens."""

    @abstractmethod
    async def settle(self) -> None:
        """Let what is under way come as far as it does. No test may depend on how far that is."""

    async def pair(self) -> tuple[Network, Network]:
        """Two networks that know each other's addresses and have no link yet."""
        first, second = await self.network(), await self.network()
        introduce(first, second)
        return first, second

    async def joined(self) -> tuple[Stream, Stream]:
        """The two ends of one stream, the opener's first."""
        opener, acceptor = await self.pair()
        return await joined(opener, acceptor)


def introduce(first: Network, second: Network) -> None:
    first.learn_addresses(second.peer_id, second.addresses())
    second.learn_addresses(first.peer_id, first.addresses())


async def joined(
    opener: Network, acceptor: Network, protocol: str = PROTOCOL
) -> tuple[Stream, Stream]:
    """Open a stream and hold on to the other end of it as well, until it is closed."""
    send, receive = trio.open_memory_channel[Stream](1)

    async def keep(stream: Stream) -> None:
        await send.send(stream)
        await trio.sleep_forever()  # returning would close it; the network's end cancels this

    acceptor.serve(protocol, keep)
    try:
        near = await opener.open(acceptor.peer_id, protocol)
        return near, await receive.receive()
    finally:
        acceptor.stop_serving(protocol)


class SimulatedNeighbourhood(Neighbourhood):
    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world

    async def network(self) -> Network:
        return self.world.add_node()

    async def end(self, network: Network) -> None:
        assert isinstance(network, SimulatedNetwork)
        await network.aclose()

    def dead_address(self) -> str:
        return self.world.place_of(60_000)

    async def settle(self) -> None:
        await trio.sleep(1)


class LoopbackNeighbourhood(Neighbourhood):
    """Real networks, each run by a task of its own so that they can end in any order."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._endings: dict[str, tuple[trio.Event, trio.Event]] = {}

    async def network(self) -> Network:
        network: Network = await self._nursery.start(self._run)
        return network

    async def _run(self, *, task_status: trio.TaskStatus[Network]) -> None:
        settings = Libp2pSettings(listen_addresses=("/ip4/127.0.0.1/tcp/0",))
        ask, ended = trio.Event(), trio.Event()
        async with open_libp2p_network(Identity.generate(), settings) as network:
            self._endings[network.peer_id] = (ask, ended)
            task_status.started(network)
            await ask.wait()
        ended.set()

    async def end(self, network: Network) -> None:
        ask, ended = self._endings[network.peer_id]
        ask.set()
        await ended.wait()

    def dead_address(self) -> str:
        return "/ip4/127.0.0.1/tcp/1"  # privileged, and tcpmux has died out

    async def settle(self) -> None:
        await trio.sleep(0.05)
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def _simulated() -> AsyncIterator[Neighbourhood]:
    do_at_once()
    async with SimulatedWorld(seed=0) as world:
        yield SimulatedNeighbourhood(world)


@asynccontextmanager
async def _loopback() -> AsyncIterator[Neighbourhood]:
    async with trio.open_nursery() as nursery:
        yield LoopbackNeighbourhood(nursery)
        nursery.cancel_scope.cancel()


def on_both(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn `async def test(place, ...)` into one test for each network; fixtures pass through."""

    @functools.wraps(test)
    def run(kind: str, **fixtures: Any) -> None:
        simulated = kind == "simulated"

        async def main() -> None:
            with trio.fail_after(VIRTUAL_SECONDS if simulated else PATIENCE_SECONDS):
                async with _simulated() if simulated else _loopback() as place:
                    await test(place, **fixtures)

        if simulated:
            with deterministic_scheduling(seed=0):
                trio.run(main, clock=MockClock(autojump_threshold=0))
        else:
            trio.run(main)

    parameters = list(inspect.signature(test).parameters.values())
    kind = inspect.Parameter("kind", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would look through it
    run.__signature__ = inspect.Signature([kind, *parameters[1:]])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("kind", ["simulated", "libp2p"])(run)


async def read_to_end(stream: Stream) -> bytes:
    """Everything until the end of the stream."""
    received = bytearray()
    while part := await stream.receive_some():
        received += part
    return bytes(received)


async def read_exactly(stream: Stream, size: int) -> bytes:
    """This many bytes; fewer only if the stream ends."""
    received = bytearray()
    while len(received) < size and (part := await stream.receive_some(size - len(received))):
        received += part
    return bytes(received)


async def send_for_ever(stream: Stream) -> NoReturn:
    """Send zeros until something stops it; the reader's pace has to, before memory runs out."""
    for _ in range(MOST_SENT_BYTES // PIECE_BYTES):
        await stream.send_all(bytes(PIECE_BYTES))
    pytest.fail(f"{MOST_SENT_BYTES:,} bytes went to a reader that did not read them")


async def reading_breaks(stream: Stream) -> None:
    """Read on until the stream breaks; bytes under way may still come before that."""
    with pytest.raises(trio.BrokenResourceError):
        await read_to_end(stream)


async def sending_breaks(stream: Stream) -> None:
    """Send on until the stream breaks."""
    with pytest.raises(trio.BrokenResourceError):
        await send_for_ever(stream)
