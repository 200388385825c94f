"""Peers that train, each with a training thread of its own, on the simulated network.

    async with training_world() as world:
        peers = [world.peer(f"peer-{number}") for number in range(4)]
        results = await world.train(peers, loop)            # loop(bridge, peer) in a thread

The clock is the real one. A virtual clock jumps whenever no task of trio's has anything to do, and
it does not see that a thread is computing; the threads, the bridge and what wakes them are what is
tested here. So these tests say nothing of time, and nothing in them depends on it: which samples
went into which step is written down by the peers and replayed by a single process, whatever the
order was in which they came.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from node.simulated_network import SimulatedNetwork, SimulatedWorld, WorldSettings
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import (
    Collaboration,
    CollaborationSettings,
    open_collaboration,
)
from protocols.accumulation.progress_slot import PROGRESS
from protocols.dht.service import open_dht
from protocols.dht.settings import DhtSettings
from protocols.identity import PeerId
from protocols.moshpit.matchmaking import GROUP
from protocols.rpc import open_rpc

Result = TypeVar("Result")

PATIENCE_SECONDS = 60.0  # of a whole test; a machine under load may be slow
SETTINGS = CollaborationSettings(run="test", target_batch=64, grace_seconds=5.0, round_seconds=20.0)


@dataclass
class TrainingPeer:
    """A node of its own. `collaboration` is there once it runs."""

    network: SimulatedNetwork
    settings: CollaborationSettings
    running: trio.Event = field(default_factory=trio.Event)
    leaving: trio.Event = field(default_factory=trio.Event)
    left: trio.Event = field(default_factory=trio.Event)
    collaboration: Collaboration | None = None

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    @property
    def bridge(self) -> Bridge:
        assert self.collaboration is not None
        return self.collaboration.bridge


class TrainingWorld:
    """Nodes in one process that know where the first of them is."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._first: SimulatedNetwork | None = None

    async def peer(self, name: str, settings: CollaborationSettings = SETTINGS) -> TrainingPeer:
        """A node that has joined, with its collaboration open."""
        network = self.world.add_node(name)
        bootstrap = () if self._first is None else (self._first.address,)
        self._first = self._first or network
        one = TrainingPeer(network, settings)

        async def run(network: SimulatedNetwork) -> None:
            dht_settings = DhtSettings(bootstrap=bootstrap)
            async with (
                open_rpc(network) as rpc,
                open_dht(network, rpc, families=[GROUP, PROGRESS], settings=dht_settings) as dht,
            ):
                if bootstrap:
                    await dht.joined()
                async with open_collaboration(network, rpc, dht, settings) as one.collaboration:
                    one.running.set()
                    await one.leaving.wait()
            one.left.set()

        self.world.start(network, run)
        await one.running.wait()
        return one

    async def peers(
        self, count: int, settings: CollaborationSettings = SETTINGS
    ) -> list[TrainingPeer]:
        return [await self.peer(f"peer-{number}", settings) for number in range(count)]

    async def train(
        self, peers: Sequence[TrainingPeer], loop: Callable[[Bridge, int], Result]
    ) -> list[Result]:
        """Run this loop in a thread for each; what they returned, in order."""
        results: dict[int, Result] = {}

        async def run(number: int, bridge: Bridge) -> None:
            results[number] = await trio.to_thread.run_sync(loop, bridge, number)

        async with trio.open_nursery() as nursery:
            for number, one in enumerate(peers):
                nursery.start_soon(run, number, one.bridge)
        return [results[number] for number in range(len(peers))]


@asynccontextmanager
async def training_world(seed: int = 0) -> AsyncIterator[TrainingWorld]:
    with trio.fail_after(PATIENCE_SECONDS):
        async with SimulatedWorld(seed=seed, settings=WorldSettings()) as world:
            yield TrainingWorld(world)
