"""Peers with a small model each, one that serves its state and others that fetch it.

donors = await start_donors(world, 3)
fetched = await donors_and_newcomer(...)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import trio

from protocols.accumulation.results import ResultLayouts
from protocols.accumulation.state_fetching import (
    FetchedState,
    FetchSettings,
    KeptPieces,
    StateSource,
    fetch_state,
)
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_serving import StateServer, StateServingSettings
from protocols.accumulation.training_state import LiveState, TrainingState, look
from protocols.identity import PeerId
from protocols.rpc import Rpc, open_rpc
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)

RUN = "test"
VALUES = 32 << 10  # parameters: with AdamW 384 KiB of state
PIECE_BYTES = 16 << 10  # 25 of them
STATE_BYTES = 12 * VALUES + 8
HISTORY = b"h" * 16
BYTES_PER_SECOND = 10_000.0
HOME = NodeSettings(upload_bytes_per_second=BYTES_PER_SECOND)
"""At this rate, a single donor needs 39 seconds for a state, and three need 13."""
UNPACED = StateServingSettings(upload_bytes_per_second=None)

Result = TypeVar("Result")


class Model:
    """Parameters, an optimizer that has made a step, and methods that change them."""

    def __init__(self, values: int = VALUES, *, seed: int = 0, dtype: torch.dtype = torch.float32):
        chance = torch.Generator().manual_seed(seed)
        self.parameter = torch.nn.Parameter(torch.randn(values, generator=chance).to(dtype))
        self.optimizer = torch.optim.AdamW([("w", self.parameter)], lr=0.1)
        self.epoch, self.history = 0, HISTORY
        self.lock = StateLock()

    def step(self) -> None:
        with self.lock.changing():
            self.parameter.grad = self.parameter.detach().clone()
            self.optimizer.step()
            self.epoch += 1
            self.history = bytes([self.epoch % 256]) * 16

    def look(self, extra: dict[str, object] | None = None) -> LiveState:
        return look(
            [("w", self.parameter)],
            (),
            self.optimizer,
            extra=extra,
            run=RUN,
            epoch=self.epoch,
            history=self.history,
            piece_bytes=PIECE_BYTES,
        )

    def capture(self) -> TrainingState:
        return self.look().copy()


@dataclass
class Donor:
    """A peer that serves its state."""

    network: SimulatedNetwork
    model: Model
    settings: StateServingSettings = UNPACED
    ready: trio.Event = field(default_factory=trio.Event)
    claim: StateSource | None = None
    _server: StateServer | None = None

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    @property
    def server(self) -> StateServer:
        assert self._server is not None
        return self._server

    def source(self) -> StateSource:
        """The source as its slot would describe it."""
        if self.claim is not None:
            return self.claim
        offer = self.server.offer
        if offer is None:
            return StateSource(self.peer, self.model.epoch, self.model.history)
        return StateSource(self.peer, offer.epoch, offer.history, offer.digest)

    async def run(self, network: SimulatedNetwork) -> None:
        async with open_rpc(network) as rpc:
            await self.serve(rpc)

    async def serve(self, rpc: Rpc) -> None:
        self._server = StateServer(rpc, self.model.look, self.model.lock, self.settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._server.run)
            self._server.needed()
            await self._server.offered()
            self.ready.set()


async def start_donors(
    world: SimulatedWorld,
    count: int,
    *,
    machine: NodeSettings = HOME,
    settings: StateServingSettings = UNPACED,
    model: Callable[[int], Model] | None = None,
    first: int = 0,
) -> list[Donor]:
    """Start donors, and wait until they are ready. Without `model`, all have the same state."""
    donors = []
    for number in range(first, first + count):
        network = world.add_node(f"donor-{number}", machine)
        own = Model() if model is None else model(number)
        if model is None:
            own.step()
        donor = Donor(network, own, settings)
        donors.append(donor)
        world.start(network, donor.run)
    for donor in donors:
        await donor.ready.wait()
    return donors


@dataclass
class Newcomer:
    """A peer that wants a state."""

    network: SimulatedNetwork
    rpc: Rpc
    model: Model = field(default_factory=lambda: Model(seed=1))

    @staticmethod
    async def start(world: SimulatedWorld, name: str) -> Newcomer:
        """Start one more newcomer, until the world ends."""
        network = world.add_node(name)
        ready: list[Newcomer] = []
        started = trio.Event()

        async def run(network: SimulatedNetwork) -> None:
            async with open_rpc(network) as rpc:
                ready.append(Newcomer(network, rpc))
                started.set()
                await trio.sleep_forever()

        world.start(network, run)
        await started.wait()
        return ready[0]

    async def fetch_from(self, sources: Callable[[], Sequence[StateSource]]) -> FetchedState:
        return await fetch_state(self.rpc, sources, self.model.look())

    async def fetch(
        self,
        donors: Sequence[Donor],
        *,
        kept: KeptPieces | None = None,
        settings: FetchSettings | None = None,
        at_least_epoch: int = 0,
        progress: Callable[[int, int], None] | None = None,
        layouts: ResultLayouts | None = None,
    ) -> FetchedState:
        return await fetch_state(
            self.rpc,
            lambda: [one.source() for one in donors if not one.network.closed],
            self.model.look(),
            kept=kept,
            settings=settings,
            at_least_epoch=at_least_epoch,
            progress=progress,
            layouts=layouts,
        )


def with_newcomer(
    scenario: Callable[[SimulatedWorld, Newcomer], Awaitable[Result]], *, latency: float = 0.02
) -> Result:
    """Run a scenario with a newcomer that knows all donors, under a virtual clock."""

    async def main(world: SimulatedWorld) -> Result:
        network = world.add_node("newcomer")
        async with open_rpc(network) as rpc:
            return await scenario(world, Newcomer(network, rpc))

    settings = WorldSettings(link=LinkSettings(latency_seconds=latency))
    return run_simulation(main, settings=settings)


def introduce(world: SimulatedWorld, newcomer: Newcomer, donors: Iterable[Donor]) -> None:
    for donor in donors:
        world.introduce(newcomer.network, donor.network)


def same(first: TrainingState, second: TrainingState) -> bool:
    return first.digest == second.digest and torch.equal(first.memory, second.memory)
