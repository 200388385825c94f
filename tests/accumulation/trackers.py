"""Nodes that publish their progress in a simulated world, for the tests of the tracker."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import trio

from protocols.accumulation.known import ProgressSettings
from protocols.accumulation.progress_slot import PROGRESS, ProgressSlot
from protocols.accumulation.tracker import Tracker, open_tracker
from protocols.dht import Dht, DhtSettings, Keeper, open_dht
from protocols.rpc import open_rpc
from protocols.testing.world import SimulatedNetwork, SimulatedWorld
from tests.accumulation.progress_slots import slot

TARGET = 1000


class TrackingPeer:
    """A node with a tracker, until the world ends, it is told to leave, or it is killed.

    It computes a batch at a time when it is told to, and begins the next epoch when it is told.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        network: SimulatedNetwork,
        bootstrap: Sequence[str],
        first: ProgressSlot,
        *,
        counts_silence: bool = True,
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper = keeper
        self._counts_silence = counts_silence
        self.world, self.network = world, network
        self._bootstrap = tuple(bootstrap)
        self._first = first
        self._leave, self.ended, self.ready = trio.Event(), trio.Event(), trio.Event()
        self._tracker: Tracker | None = None
        self._dht: Dht | None = None
        self._scope = trio.CancelScope()
        world.start(network, self._run)

    @property
    def tracker(self) -> Tracker:
        assert self._tracker is not None
        return self._tracker

    @property
    def dht(self) -> Dht:
        assert self._dht is not None
        return self._dht

    def note(self, **changes: object) -> None:
        self.tracker.note(msgspec.structs.replace(self.tracker.mine(), **changes))

    def counts(self, samples: int) -> None:
        self.note(samples=self.tracker.mine().samples + samples)

    async def computes(self, batch: int, seconds: float, batches: int) -> None:
        for _ in range(batches):
            await trio.sleep(seconds)
            self.counts(batch)

    async def leave(self) -> None:
        self._leave.set()
        await self.ended.wait()

    async def is_cancelled(self) -> None:
        """Leave as by Ctrl-C: cancels the scope around all of it."""
        self._scope.cancel()
        await self.ended.wait()

    def kill(self) -> None:
        self.world.crash(self.network)

    async def _run(self, network: SimulatedNetwork) -> None:
        dht = DhtSettings(bootstrap=self._bootstrap)
        async with (
            open_rpc(network) as rpc,
            open_dht(
                network, rpc, families=[PROGRESS], settings=dht, keeper=self._keeper
            ) as self._dht,
        ):
            with self._scope:
                async with open_tracker(
                    network,
                    self._dht,
                    ProgressSettings(TARGET, run="poem"),
                    self._first,
                    counts_silence=self._counts_silence,
                ) as self._tracker:
                    self.ready.set()
                    await self._leave.wait()
        self.ended.set()


async def trackers(
    world: SimulatedWorld, size: int, first: ProgressSlot | None = None
) -> list[TrackingPeer]:
    """Start this many peers, and wait until they have met and have read each other's slots."""
    peers: list[TrackingPeer] = []
    for number in range(size):
        peers.append(peer_in(world, f"peer-{number}", peers, first))
        await peers[-1].ready.wait()
    with trio.fail_after(60):
        for one in peers:
            while len(one.tracker.estimate.peers) < size - 1:
                await one.tracker.changed()
    return peers


def peer_in(
    world: SimulatedWorld,
    name: str,
    others: Sequence[TrackingPeer] = (),
    first: ProgressSlot | None = None,
) -> TrackingPeer:
    network = world.add_node(name)
    bootstrap = [one.network.address for one in others[:3]]
    return TrackingPeer(world, network, bootstrap, first or slot())
