"""Swarms of the whole directory in a simulated world: the cast of the service's tests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable

import trio

from protocols.dht import Dht, DhtSettings, Family, Keeper, open_dht
from protocols.guard import Guard
from protocols.network import Network
from protocols.rpc import Rpc, open_rpc
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)

LATENCY_SECONDS = 0.01
LONGEST_TEST_SECONDS = 48 * 3600.0  # of virtual time: a longer wait would never end
SETTINGS = WorldSettings(link=LinkSettings(latency_seconds=LATENCY_SECONDS))


def simulated(test: Callable[[SimulatedWorld], Awaitable[None]]) -> Callable[[], None]:
    """Turn `async def test(world)` into a test that runs in a world of its own, in virtual time."""

    async def scenario(world: SimulatedWorld) -> None:
        with trio.fail_after(LONGEST_TEST_SECONDS):
            await test(world)

    @functools.wraps(test)
    def run() -> None:
        run_simulation(scenario, seed=0, settings=SETTINGS)

    run.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


class Member:
    """A node of the swarm: it runs until the world ends, crashes, or is told to leave."""

    def __init__(
        self,
        world: SimulatedWorld,
        network: SimulatedNetwork,
        settings: DhtSettings,
        families: Iterable[Family] = (),
        keeper: Keeper | None = None,
        guard: Callable[[Network], Guard] | None = None,
    ) -> None:
        self.world = world
        self.network = network
        self.settings = settings
        self.families = tuple(families)
        self.keeper = keeper
        self.guard = guard
        self.ready = trio.Event()
        self.ended = trio.Event()
        self._leave = trio.Event()
        self._dht: Dht | None = None
        self._rpc: Rpc | None = None
        world.start(network, self._run)

    @property
    def dht(self) -> Dht:
        assert self._dht is not None
        return self._dht

    @property
    def rpc(self) -> Rpc:
        assert self._rpc is not None
        return self._rpc

    @property
    def peer(self) -> str:
        return self.network.peer_id

    @property
    def address(self) -> str:
        return self.network.address

    async def leave(self) -> None:
        """End politely."""
        self._leave.set()
        await self.ended.wait()
        await self.network.aclose()

    def crash(self) -> None:
        self.world.crash(self.network)

    def restart(self, settings: DhtSettings | None = None) -> Member:
        """The same node again, with what its keeper has, and nothing else."""
        return Member(
            self.world,
            self.world.restart(self.network),
            settings or self.settings,
            self.families,
            self.keeper,
            self.guard,
        )

    async def _run(self, network: SimulatedNetwork) -> None:
        async with (
            open_rpc(network, self.guard(network) if self.guard else None) as self._rpc,
            open_dht(
                network,
                self._rpc,
                families=self.families,
                settings=self.settings,
                keeper=self.keeper,
            ) as self._dht,
        ):
            self.ready.set()
            await self._leave.wait()
        self.ended.set()


def member(
    world: SimulatedWorld,
    name: str,
    bootstrap: Iterable[Member] = (),
    *,
    settings: DhtSettings | None = None,
    machine: NodeSettings | None = None,
    families: Iterable[Family] = (),
    keeper: Keeper | None = None,
    guard: Callable[[Network], Guard] | None = None,
) -> Member:
    """A node that joins at others."""
    if settings is None:
        settings = DhtSettings(bootstrap=tuple(one.address for one in bootstrap))
    return Member(world, world.add_node(name, machine), settings, families, keeper, guard)


async def swarm(world: SimulatedWorld, size: int, families: Iterable[Family] = ()) -> list[Member]:
    """Nodes that have come one after the other, each joining at up to three that were there."""
    members: list[Member] = []
    for number in range(size):
        one = member(world, f"node-{number}", members[:3], families=families)
        await joined(one)
        members.append(one)
    return members


async def joined(*members: Member) -> None:
    for one in members:
        await one.ready.wait()
        await one.dht.joined()


def table_sizes(members: Iterable[Member]) -> list[int]:
    return [one.dht.statistics().peers_in_table for one in members]
