"""Two nodes that know each other, with an Rpc each, in a simulated world."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from protocols.guard import Guard
from protocols.identity import PeerId
from protocols.rpc import Message, Method, Rpc, open_rpc
from protocols.rpc.state import RpcLimits
from protocols.testing.world import (
    LinkSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)

LATENCY_SECONDS = 0.05
ROUND_TRIP = 2 * LATENCY_SECONDS
FIRST_CALL_SECONDS = 8 * ROUND_TRIP  # five for connecting, two for the stream, one for the call

PROTOCOL = "/potluck/test/1.0.0"

Result = TypeVar("Result")


class Number(Message, frozen=True):
    value: int = 0


class Text(Message, frozen=True):
    text: str = ""


class Blob(Message, frozen=True):
    data: bytes = b""


DOUBLE = Method(PROTOCOL, "double", Number, Number)
SLEEP = Method(PROTOCOL, "sleep", Number, Number)
BLOB = Method(PROTOCOL, "blob", Blob, Blob, 70_000, 70_000)


@dataclass
class Pair:
    """Alice asks, Bob answers; each other way round works too."""

    world: SimulatedWorld
    alice: SimulatedNetwork
    bob: SimulatedNetwork
    asking: Rpc  # Alice's
    answering: Rpc  # Bob's

    @property
    def bob_id(self) -> PeerId:
        return self.bob.peer_id

    async def settle(self) -> None:
        """Let what is under way arrive."""
        await trio.sleep(4 * ROUND_TRIP)


def between_two(
    scenario: Callable[[Pair], Awaitable[Result]],
    *,
    limits: RpcLimits | None = None,
    bobs_limits: RpcLimits | None = None,
    guards: tuple[Callable[[SimulatedNetwork], Guard], Callable[[SimulatedNetwork], Guard]]
    | None = None,
    seed: int = 0,
) -> Result:
    """Run a scenario between Alice and Bob, under a virtual clock."""

    async def main(world: SimulatedWorld) -> Result:
        alice, bob = world.add_node("alice"), world.add_node("bob")
        world.introduce(alice, bob)
        guard_of = guards or ((lambda _: None), (lambda _: None))
        async with (
            open_rpc(alice, guard_of[0](alice), limits) as asking,
            open_rpc(bob, guard_of[1](bob), bobs_limits or limits) as answering,
        ):
            return await scenario(Pair(world, alice, bob, asking, answering))

    settings = WorldSettings(link=LinkSettings(latency_seconds=LATENCY_SECONDS))
    return run_simulation(main, seed=seed, settings=settings)
