"""Running a test inside a simulated world."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from protocols.network import Stream
from protocols.testing.world import (
    LinkSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)

PROTOCOL: Final = "/potluck/simulated/1.0.0"
LATENCY_SECONDS: Final = 0.05
ROUND_TRIP_SECONDS: Final = 2 * LATENCY_SECONDS
LONGEST_TEST_SECONDS: Final = 24 * 3600.0  # of virtual time: a longer wait would never end

SETTINGS: Final = WorldSettings(link=LinkSettings(latency_seconds=LATENCY_SECONDS))


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn `async def test(world, ...)` into a test that runs in a world of its own, in virtual
    time. Further arguments are the test's own."""

    async def scenario(world: SimulatedWorld, arguments: dict[str, Any]) -> None:
        with trio.fail_after(LONGEST_TEST_SECONDS):
            await test(world, **arguments)

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_simulation(scenario, arguments, seed=0, settings=SETTINGS)

    _, *others = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


def pair(world: SimulatedWorld) -> tuple[SimulatedNetwork, SimulatedNetwork]:
    """Two nodes that know each other."""
    first, second = world.add_node("first"), world.add_node("second")
    world.introduce(first, second)
    return first, second


async def joined(
    opener: SimulatedNetwork, acceptor: SimulatedNetwork, protocol: str = PROTOCOL
) -> tuple[Stream, Stream]:
    """Open a stream and hold on to both ends of it."""
    send, receive = trio.open_memory_channel[Stream](1)

    async def keep(stream: Stream) -> None:
        await send.send(stream)
        await trio.sleep_forever()

    acceptor.serve(protocol, keep)
    try:
        near = await opener.open(acceptor.peer_id, protocol)
        return near, await receive.receive()
    finally:
        acceptor.stop_serving(protocol)


async def echo(stream: Stream) -> None:
    """Send back whatever comes."""
    while part := await stream.receive_some():
        await stream.send_all(part)


async def read_exactly(stream: Stream, size: int) -> bytes:
    received = bytearray()
    while len(received) < size and (part := await stream.receive_some(size - len(received))):
        received += part
    return bytes(received)


async def time_of(awaitable: Awaitable[object]) -> float:
    """How many virtual seconds this takes."""
    started = trio.current_time()
    await awaitable
    return trio.current_time() - started


async def time_until_broken(stream: Stream) -> float:
    """How many virtual seconds pass until reading fails."""
    started = trio.current_time()
    try:
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        return trio.current_time() - started
    raise AssertionError("the stream ended politely instead of breaking")
