"""Servers and a trainer of one grid, whole: directory, runtimes, and the trainer's own records.

Where a training thread is part of what is tested, the time is real, also on the simulated network.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import trio
from torch import Tensor, nn

from models.experts import build_expert
from node.net import Libp2pSettings, open_libp2p_network
from protocols.dht import Dht, DhtSettings, open_dht
from protocols.errors import PotluckError
from protocols.experts import (
    EXPERTS,
    AsyncTrainer,
    DMoE,
    ExpertBackend,
    ExpertClient,
    ExpertDirectory,
    ExpertGrid,
    GridGate,
    HostRecords,
    Rows,
    SwarmExperts,
    Uid,
    open_runtime,
    serve_experts,
)
from protocols.guest import Portal, open_portal
from protocols.identity import Identity, PeerId
from protocols.network import Network
from protocols.rpc import Rpc, open_rpc
from protocols.testing.world import LinkSettings, SimulatedNetwork, SimulatedWorld, WorldSettings
from tests.dht.members import Member, swarm
from tests.waiting import PATIENCE_SECONDS

Result = TypeVar("Result")

GRID = ExpertGrid("ffn", (3, 4))
WIDTH = 8
RATE = 0.1  # of the experts' optimizers
RUN = "poem"
IN_FLIGHT, EXAMPLES_OF_A_BATCH = 4, 16
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
LINK = LinkSettings(latency_seconds=0.001)

Serve = Callable[[Rpc, Sequence[ExpertBackend]], Awaitable[None]]


class Closed(PotluckError):
    """The end of a portal."""


def backend_of(uid: Uid) -> ExpertBackend:
    """An expert whose values follow from its uid."""
    settings = {"name": "feed-forward", "width": WIDTH, "inner": [16]}
    network = build_expert(settings, seed=uid.cells[0] * 100 + uid.cells[-1])
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    return ExpertBackend(uid, network, Rows((WIDTH,)), optimizer)


async def honestly(rpc: Rpc, backends: Sequence[ExpertBackend]) -> None:
    async with open_runtime(backends) as runtime:
        serve_experts(rpc, runtime)
        await trio.sleep_forever()


@dataclass
class Server:
    """A server with its experts. `serve` is how it answers."""

    uids: Sequence[Uid]
    serve: Serve = honestly
    load: float = 0.0
    backends: list[ExpertBackend] = field(default_factory=list)
    announced: trio.Event = field(default_factory=trio.Event)

    async def run(self, network: Network, rpc: Rpc, dht: Dht) -> None:
        self.backends = [backend_of(uid) for uid in self.uids]
        directory = ExpertDirectory(network, dht, RUN)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.serve, rpc, self.backends)
            await directory.announce(self.uids, self.load)
            self.announced.set()
            await directory.keep_announcing(lambda: self.uids, lambda: self.load, lambda _: None)


@dataclass
class Swarm:
    """The servers, and the trainer's side of them."""

    servers: Sequence[Server]
    experts: SwarmExperts
    records: HostRecords

    def modules(self) -> dict[Uid, nn.Module]:
        return {one.uid: one.network for server in self.servers for one in server.backends}


def _swarm(
    servers: Sequence[Server], grid: ExpertGrid, network: Network, rpc: Rpc, dht: Dht
) -> Swarm:
    """These servers, for a trainer on this node."""
    records = HostRecords()
    directory = ExpertDirectory(network, dht, RUN)
    return Swarm(servers, SwarmExperts(directory, ExpertClient(rpc), grid, records), records)


def open_training_portal() -> AbstractAsyncContextManager[Portal]:
    return open_portal(Closed("It has closed."))


# ---- on the simulated network


class Simulated:
    """A swarm of simulated nodes, in real time or in virtual time."""

    def __init__(self, world: SimulatedWorld, members: list[Member], swarm: Swarm) -> None:
        self.swarm = swarm
        self._world, self._members = world, members

    @staticmethod
    async def start(
        world: SimulatedWorld, servers: Sequence[Server], grid: ExpertGrid = GRID
    ) -> Simulated:
        members = await swarm(world, len(servers) + 1, [EXPERTS])
        for server, member in zip(servers, members, strict=False):
            world.start(member.network, Simulated._program(server, member))
            await server.announced.wait()
        trainer = members[-1]
        whole = _swarm(servers, grid, trainer.network, trainer.rpc, trainer.dht)
        return Simulated(world, members, whole)

    @staticmethod
    def _program(server: Server, member: Member) -> Callable[[Network], Awaitable[None]]:
        async def program(network: Network) -> None:
            await server.run(network, member.rpc, member.dht)

        return program

    def peer_of(self, server: Server) -> PeerId:
        return self._node_of(server).peer_id

    def crash(self, server: Server, *, silently: bool = False) -> None:
        self._world.crash(self._node_of(server), silently=silently)

    def _node_of(self, server: Server) -> SimulatedNetwork:
        return self._members[self.swarm.servers.index(server)].network


@asynccontextmanager
async def in_real_time(servers: Sequence[Server], grid: ExpertGrid) -> AsyncIterator[Simulated]:
    async with SimulatedWorld(seed=1, settings=WorldSettings(link=LINK)) as world:
        with trio.fail_after(PATIENCE_SECONDS):
            simulated = await Simulated.start(world, servers, grid)
        yield simulated


# ---- on the real network


@asynccontextmanager
async def on_loopback(servers: Sequence[Server], grid: ExpertGrid) -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        bootstrap: tuple[str, ...] = ()
        nodes = []
        for _ in range(len(servers) + 1):
            network = await stack.enter_async_context(
                open_libp2p_network(Identity.generate(), Libp2pSettings((LOOPBACK,)))
            )
            rpc = await stack.enter_async_context(open_rpc(network))
            dht = await stack.enter_async_context(
                open_dht(network, rpc, families=[EXPERTS], settings=DhtSettings(bootstrap))
            )
            bootstrap = bootstrap or network.addresses()[:1]
            await dht.joined()
            nodes.append((network, rpc, dht))
        nursery = await stack.enter_async_context(trio.open_nursery())
        for server, node in zip(servers, nodes, strict=False):
            nursery.start_soon(server.run, *node)
            await server.announced.wait()
        yield _swarm(servers, grid, *nodes[-1])
        nursery.cancel_scope.cancel()


# ---- what a test compares with


async def in_training_thread(work: Callable[..., Result], *arguments: object) -> Result:
    with trio.fail_after(PATIENCE_SECONDS):
        return await trio.to_thread.run_sync(work, *arguments)


def spread(grid: ExpertGrid, servers: int) -> list[list[Uid]]:
    """All cells of a grid, dealt out to so many servers."""
    return [[grid.at(n) for n in range(one, grid.cells, servers)] for one in range(servers)]


def mixture(
    gate: GridGate, modules: Mapping[Uid, nn.Module], x: Tensor, k: int, absent: Iterable[Uid] = ()
) -> Tensor:
    """Equation 3 in one process, as one would write it down: the k best of these experts for each
    example, less those that are absent."""
    absent = set(absent)
    parts = gate(x)
    outputs = []
    for row in range(len(x)):
        scores = {
            uid: torch.stack(
                [part[row, cell] for part, cell in zip(parts, uid.cells, strict=True)]
            ).sum()
            for uid in modules
        }
        best = sorted(modules, key=lambda uid: (-scores[uid].item(), uid))[:k]
        answering = [uid for uid in best if uid not in absent]
        weights = torch.softmax(torch.stack([scores[uid] for uid in answering]), dim=0)
        answers = torch.cat([modules[uid](x[row : row + 1]) for uid in answering])
        outputs.append(weights @ answers)
    return torch.stack(outputs)


# ---- training


@dataclass
class Training:
    """A small model with a layer of experts, trained in a thread with several batches in flight.

    `losses` and `times` have an entry for each batch that was done; `dropped` counts the others.
    """

    layer: DMoE
    batches: int
    meanwhile: Mapping[int, Callable[[], object]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    dropped: int = 0

    async def run(self) -> None:
        await in_training_thread(self._train)

    def _train(self) -> None:
        torch.manual_seed(8)
        width = self.layer.gate.projection.in_features
        model = nn.Sequential(nn.Linear(6, width), self.layer, nn.Linear(width, 3))
        teacher = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        with torch.no_grad():
            questions = [torch.randn(EXAMPLES_OF_A_BATCH, 6) for _ in range(self.batches)]
            batches = [(one, 3.0 * teacher(one)) for one in questions]

        def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        trainer = AsyncTrainer(model, loss_of, in_flight=IN_FLIGHT)
        for turn, done in enumerate(trainer.run(batches)):
            optimizer.step()
            self.losses.append(done.loss)
            self.times.append(time.monotonic())
            if turn in self.meanwhile:
                trio.from_thread.run_sync(self.meanwhile[turn])
        self.dropped = trainer.dropped
