"""A server of experts and its clients, on the simulated network and on the real one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import trio
from torch import Tensor, nn

from models.experts import build_expert
from protocols.experts import (
    ExpertBackend,
    ExpertClient,
    ExpertGrid,
    Rows,
    Runtime,
    open_runtime,
    serve_experts,
)
from protocols.identity import PeerId
from protocols.network import Network
from protocols.rpc import Rpc, open_rpc
from tests.contract.neighbourhood import LoopbackNeighbourhood, Neighbourhood

GRID = ExpertGrid("ffn", (16,))
UID = GRID.at(0)
WIDTH = 1024
ROWS = Rows((WIDTH,))
LARGE = 1365  # rows: 5.3 MiB, more than a call may bring, and 3 x as many in a byte a value


class Halving(nn.Module):
    """x / 2, with a parameter that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.factor


def halving(number: int = 0, *, learns: bool = True) -> ExpertBackend:
    network = Halving()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6) if learns else None
    return ExpertBackend(GRID.at(number), network, ROWS, optimizer)


def feed_forward(number: int = 0) -> ExpertBackend:
    settings = {"name": "feed-forward", "width": WIDTH, "inner": [32]}
    network = build_expert(settings, seed=number)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    return ExpertBackend(GRID.at(number), network, ROWS, optimizer)


@dataclass
class Served:
    """One server and one client, with what is below them."""

    peer: PeerId
    client: ExpertClient
    runtime: Runtime
    asking: Rpc
    answering: Rpc
    near: Network
    far: Network


@asynccontextmanager
async def served(place: Neighbourhood, backends: Iterable[ExpertBackend]) -> AsyncIterator[Served]:
    near, far = await place.pair()
    async with (
        open_rpc(near) as asking,
        open_rpc(far) as answering,
        open_runtime(backends) as runtime,
    ):
        serve_experts(answering, runtime)
        yield Served(far.peer_id, ExpertClient(asking), runtime, asking, answering, near, far)


@asynccontextmanager
async def loopback() -> AsyncIterator[Neighbourhood]:
    """The real network alone, for what needs the runtime's thread."""
    async with trio.open_nursery() as nursery:
        yield LoopbackNeighbourhood(nursery)
        nursery.cancel_scope.cancel()
