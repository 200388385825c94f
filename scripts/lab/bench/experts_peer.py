"""A server of experts, or a trainer that calls them, in a process of its own: `python -m
lab.bench.experts_peer [fork]`.

Every peer has a key and a port, and no token, like the reference's. A server has a runtime with its
thread. A trainer calls from a thread beside trio's, as a training loop does, and each call's time
is what that thread waits. The orders are in `ExpertsPeer` (orders.py has their format).
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trio
from torch import Tensor

from lab.bench.machine import proportional_bytes
from lab.bench.orders import run_or_fork
from models.experts import build_expert
from node.net import Libp2pSettings, open_libp2p_network
from protocols.blocking import in_thread
from protocols.errors import Unreachable
from protocols.experts import (
    ExpertBackend,
    ExpertClient,
    ExpertGrid,
    Rows,
    Uid,
    open_runtime,
    serve_experts,
)
from protocols.guest import Portal, open_portal
from protocols.identity import Identity, PeerId
from protocols.network import Network
from protocols.rpc import open_rpc

if TYPE_CHECKING:
    from trio_typing import TaskStatus

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
CALL_SECONDS = 60.0
WARM_UP_CALLS = 10  # the reference's
GRID = ExpertGrid("bench", (64,))


class ExpertsPeer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._backends: list[ExpertBackend] = []

    async def serve(self, expert: dict[str, Any], experts: int) -> dict[str, Any]:
        """Serve so many experts of this kind from now on. Returns where."""
        self._backends = [make_backend(expert, number) for number in range(experts)]
        network: Network = await self._nursery.start(self._run_server)
        return {"peer": network.peer_id, "addresses": list(network.addresses())}

    async def learn(self, peer: str, addresses: list[str], experts: int, width: int) -> None:
        """Be a trainer that knows this server, and call each of its experts once, with one row."""
        self._server = PeerId(peer)
        self._uids = [GRID.at(number) for number in range(experts)]
        self._client, self._portal = await self._nursery.start(self._run_trainer, tuple(addresses))
        for uid in self._uids:
            await self._call_forward(uid, torch.randn(1, width))

    async def latency(self, rows: int, width: int, calls: int) -> dict[str, Any]:
        """The median times of a forward and of a backward call, in milliseconds."""
        return await in_thread(self._latency, rows, width, calls)

    def _latency(self, rows: int, width: int, calls: int) -> dict[str, Any]:
        inputs, gradients, uid = torch.randn(rows, width), torch.ones(rows, width), self._uids[0]
        for _ in range(WARM_UP_CALLS):
            self._forward(uid, inputs)
        forward = [_timed(self._forward, uid, inputs) for _ in range(calls)]
        backward = [_timed(self._backward, uid, inputs, gradients) for _ in range(calls)]
        return {
            "forward_ms": statistics.median(forward) * 1000,
            "backward_ms": statistics.median(backward) * 1000,
        }

    async def train(self, batches: int, rows: int, width: int, seed: int) -> None:
        """So many forward and backward passes, each through an expert by chance."""
        await in_thread(self._train, batches, rows, width, random.Random(seed))

    def _train(self, batches: int, rows: int, width: int, chance: random.Random) -> None:
        inputs, gradients = torch.randn(rows, width), torch.ones(rows, width)
        for _ in range(batches):
            uid = chance.choice(self._uids)
            self._forward(uid, inputs)
            self._backward(uid, inputs, gradients)

    async def train_alone(self, batches: int, rows: int, width: int) -> dict[str, Any]:
        """The same work on this server's own experts, in one thread and without a network."""
        return await in_thread(self._train_alone, batches, rows, width)

    def _train_alone(self, batches: int, rows: int, width: int) -> dict[str, Any]:
        inputs, gradients = torch.randn(rows, width), torch.ones(rows, width)
        began = time.perf_counter()
        for number in range(batches):
            backend = self._backends[number % len(self._backends)]
            backend.forward(inputs)
            backend.backward(inputs, gradients)
        return {"seconds": time.perf_counter() - began}

    async def spent(self) -> dict[str, Any]:
        """Of this server so far: CPU seconds in all and of the runtime's thread, the batches that
        it computed, and its memory."""
        return {
            "cpu_seconds": time.process_time(),
            "device_cpu_seconds": _thread_seconds("experts"),
            "batches": sum(one.statistics.batches for one in self._backends),
            "rows": sum(
                one.statistics.forward_rows + one.statistics.backward_rows for one in self._backends
            ),
            "pss_bytes": proportional_bytes(os.getpid()),
        }

    def _forward(self, uid: Uid, inputs: Tensor) -> Tensor:
        return self._portal.begin(self._call_forward, uid, inputs).wait()

    def _backward(self, uid: Uid, inputs: Tensor, gradients: Tensor) -> Tensor:
        return self._portal.begin(self._call_backward, uid, inputs, gradients).wait()

    async def _call_forward(self, uid: Uid, inputs: Tensor) -> Tensor:
        return await self._client.forward(self._server, uid, inputs, timeout=CALL_SECONDS)

    async def _call_backward(self, uid: Uid, inputs: Tensor, gradients: Tensor) -> Tensor:
        return await self._client.backward(
            self._server, uid, inputs, gradients, timeout=CALL_SECONDS
        )

    async def _run_server(
        self, task_status: TaskStatus[Network] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with (
            open_libp2p_network(Identity.generate(), _settings()) as network,
            open_rpc(network) as rpc,
            open_runtime(self._backends) as runtime,
        ):
            serve_experts(rpc, runtime)
            task_status.started(network)
            await trio.sleep_forever()

    async def _run_trainer(
        self,
        addresses: tuple[str, ...],
        task_status: TaskStatus[tuple[ExpertClient, Portal]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async with (
            open_libp2p_network(Identity.generate(), _settings()) as network,
            open_rpc(network) as rpc,
            open_portal(Unreachable("The bench has ended.")) as portal,
        ):
            network.learn_addresses(self._server, addresses)
            task_status.started((ExpertClient(rpc), portal))
            await trio.sleep_forever()


def make_backend(expert: dict[str, Any], number: int) -> ExpertBackend:
    network = build_expert(expert, seed=number)
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters) if parameters else None
    return ExpertBackend(GRID.at(number), network, Rows(network.row_shape), optimizer)


def _settings() -> Libp2pSettings:
    return Libp2pSettings(listen_addresses=(LOOPBACK,))


def _timed(function: Callable[..., Tensor], *arguments: Any) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def _thread_seconds(name: str) -> float | None:
    """CPU seconds of the thread with this name, where the system tells."""
    for thread in threading.enumerate():
        if thread.name == name:
            try:
                facts = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            except OSError:
                return None
            return int(facts.split()[0]) / 1e9
    return None


if __name__ == "__main__":
    run_or_fork(ExpertsPeer)
