"""Peers that train, each with a training thread of its own, on the simulated network.

    async with training_world() as world:
        peers = [world.peer(f"peer-{number}") for number in range(4)]
        results = await world.train(peers, loop)            # loop(bridge, peer) in a thread

The clock is the real one. A virtual clock jumps whenever no task of trio's has anything to do, and
it does not see that a thread is computing; but these tests are about threads and the bridge. So
they do not check or need any times: the peers write down which samples went into which step, and a
single process replays them, in whatever order they came.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
import trio

from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import (
    Collaboration,
    CollaborationSettings,
    open_collaboration,
)
from protocols.accumulation.events import CaughtUp, GradientsDropped, HeldBack, StepTaken
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.accumulation.progress_slot import PROGRESS, ProgressSlot, progress_key
from protocols.dht import Dht, DhtSettings, open_dht
from protocols.identity import PeerId
from protocols.moshpit.matchmaking import GROUP
from protocols.rpc import open_rpc
from protocols.testing.world import SimulatedNetwork, SimulatedWorld, WorldSettings
from tests.waiting import PATIENCE_SECONDS

Result = TypeVar("Result")

SETTINGS = CollaborationSettings(run="test", target_batch=96, grace_seconds=5.0, round_seconds=20.0)


@dataclass
class TrainingPeer:
    """A node of its own. `collaboration` is there once it runs."""

    network: SimulatedNetwork
    settings: CollaborationSettings
    running: trio.Event = field(default_factory=trio.Event)
    leaving: trio.Event = field(default_factory=trio.Event)
    left: trio.Event = field(default_factory=trio.Event)
    collaboration: Collaboration | None = None
    dht: Dht | None = None

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    @property
    def bridge(self) -> Bridge:
        assert self.collaboration is not None
        return self.collaboration.bridge

    async def slots(self) -> dict[PeerId, ProgressSlot]:
        """The slots of all peers, as this one reads them."""
        assert self.dht is not None
        found = await self.dht.get(progress_key(self.settings.run))
        return {peer: entry.value for peer, entry in found.items()}


class TrainingWorld:
    """Nodes in one process that know the address of the first of them."""

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
                one.dht = dht
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
        """Run this loop in a thread for each peer. Returns their results, in order."""
        results: dict[int, Result] = {}

        async def run(number: int, bridge: Bridge) -> None:
            results[number] = await trio.to_thread.run_sync(loop, bridge, number)

        async with trio.open_nursery() as nursery:
            for number, one in enumerate(peers):
                nursery.start_soon(run, number, one.bridge)
        return [results[number] for number in range(len(peers))]


@asynccontextmanager
async def training_world(
    patience: float = PATIENCE_SECONDS, settings: WorldSettings | None = None
) -> AsyncIterator[TrainingWorld]:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # loads a third of torch, for seconds
    with trio.fail_after(patience):
        async with SimulatedWorld(settings=settings or WorldSettings()) as world:
            yield TrainingWorld(world)


@dataclass
class Ledger:
    """The fate of each batch of one peer, by the events of its bridge, in order.

    Invariant: `in_steps` and `pending` together are all batches but those that were dropped or
    held back. Batches go into steps in the order in which they were computed.
    """

    bridge: Bridge
    pending: list[tuple[int, int]] = field(default_factory=list)  # number of the batch, samples
    in_steps: dict[bytes, list[int]] = field(default_factory=dict)  # history -> numbers of batches
    dropped: list[int] = field(default_factory=list)
    steps: list[StepTaken] = field(default_factory=list)
    caught_up: set[int] = field(default_factory=set)  # epochs whose state was fetched
    read: int = 0

    def computed(self, number: int, samples: int) -> None:
        """Call it before `step`."""
        self.pending.append((number, samples))

    def read_events(self) -> None:
        """Call it after `step`, before older events are dropped (bridge.LAST_EVENTS)."""
        events = tuple(self.bridge.events)
        for event in events[self.read :]:
            if isinstance(event, StepTaken):
                self.steps.append(event)
                self.in_steps[event.history] = self._taken(event.own_samples)
            elif isinstance(event, CaughtUp):
                self.caught_up.add(event.epoch)
            elif isinstance(event, GradientsDropped | HeldBack):
                self.dropped += self._taken(event.samples, last=isinstance(event, HeldBack))
        self.read = len(events)

    def _taken(self, samples: int, *, last: bool = False) -> list[int]:
        taken: list[int] = []
        while samples > 0:
            number, size = self.pending.pop(-1 if last else 0)
            taken.append(number)
            samples -= size
        assert samples == 0, "a batch is in a step as a whole or not at all"
        return taken


def steps_of_the_run(ledgers: Sequence[Ledger]) -> dict[int, bytes]:
    """The history after each step of the run that all have ended in: from the last step back. If a
    fork was given up, its steps are in nobody's state, and the peers that made them have caught up.
    """
    last = max(step.epoch for ledger in ledgers for step in ledger.steps)
    made = [{step.epoch: step.history for step in ledger.steps} for ledger in ledgers]
    run = {last: next(one[last] for one in made if last in one)}
    for epoch in range(last - 1, -1, -1):
        run[epoch] = next(
            steps[epoch]
            for steps, ledger in zip(made, ledgers, strict=True)
            if steps.get(epoch + 1) == run[epoch + 1]
            and epoch in steps
            and epoch + 1 not in ledger.caught_up
        )
    return run


def dies_in_exchange(
    number: int,
    victim: TrainingPeer,
    world: TrainingWorld,
    is_dead: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let this peer die with the second message of its exchange of this number, from 1."""
    exchanges, begins = 0, Collaboration._exchange_begins

    def crash() -> None:
        world.world.crash(victim.network)
        is_dead.set()

    def exchange_begins(self: Collaboration) -> None:
        nonlocal exchanges
        begins(self)
        if self is victim.collaboration:
            exchanges += 1
            if exchanges == number:
                world.world.at_message(victim.network, 2, crash)

    monkeypatch.setattr(Collaboration, "_exchange_begins", exchange_begins)


def wait_for_company(bridge: Bridge, others: int) -> None:
    """Wait, in a training thread, until enough others are known, so that all begin together."""
    while len(bridge.estimate.peers) < others:
        bridge.wait_for_news(1.0).wait()


class Digests:
    """The digest of the state of each peer after each step, and after it has caught up."""

    def __init__(self) -> None:
        self.of: dict[int, dict[int, str]] = {}

    def watch(self, bridge: Bridge, peer: int, optimizer: CollaborativeOptimizer) -> None:
        tell = bridge.tell

        def told(event: Any) -> None:
            if isinstance(event, StepTaken | CaughtUp):
                state = optimizer.capture()
                self.of.setdefault(state.epoch, {})[peer] = state.digest.hex()
            tell(event)

        bridge.tell = told  # type: ignore[method-assign]

    def check(self) -> None:
        for epoch, found in sorted(self.of.items()):
            assert len(set(found.values())) == 1, f"epoch {epoch}: {found}"
