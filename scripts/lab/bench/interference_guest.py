"""A node that trains: `python -m lab.bench.interference_guest`, a bench peer with a guest in it.

The training is an ordinary loop in a worker thread, as a volunteer's is; the node is the thread
that the process began with. Beside what peer.py can be told: `train` begins, and never ends before
the process does; `rate` says how many steps a second there were between two moments.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import trio

from lab.bench.holdings import PeakMemory
from lab.bench.orders import obey
from lab.bench.peer import BenchPeer, open_bench_network
from lab.bench.training_task import BenchTask, TextSamples
from protocols.accumulation.state_pace import ServingCost
from protocols.network import Network
from protocols.rpc import Rpc

WINDOWS_READ = 32  # batches that are made beforehand: reading data is not what is measured


class TrainingGuest(BenchPeer):
    """The orders of this process: each public coroutine is one."""

    def __init__(
        self, network: Network, rpc: Rpc, memory: PeakMemory, nursery: trio.Nursery
    ) -> None:
        super().__init__(network, rpc, memory)
        self._nursery = nursery
        self._steps: list[tuple[float, float]] = []
        self.cost = ServingCost()
        self._over = threading.Event()

    async def train(self, threads: int, width: int, layers: int, batch: int) -> None:
        """Begin to train, in a thread, with this many threads of torch."""
        task = BenchTask(width=width, layers=layers, batch=batch)
        self._nursery.start_soon(self._train_until_over, task, threads)

    async def rate(self, began: float, ended: float) -> dict[str, Any]:
        """Steps per second of those that lie within these moments whole."""
        within = [end - start for start, end in self._steps if start >= began and end <= ended]
        return {"steps_per_second": len(within) / sum(within) if within else 0.0}

    async def _train_until_over(self, task: BenchTask, threads: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, self._train, task, threads)
            try:
                await trio.sleep_forever()
            finally:
                self._over.set()  # a thread cannot be cancelled; it ends after its step

    def _train(self, task: BenchTask, threads: int) -> None:
        torch.set_num_threads(threads)
        model = task.model()
        optimizer = task.optimizer(model.named_parameters())
        samples = TextSamples(model.window)
        batches = [
            samples.batch(range(number * task.batch, (number + 1) * task.batch))
            for number in range(WINDOWS_READ)
        ]
        while not self._over.is_set():
            began = time.monotonic()
            self.cost.computes()
            optimizer.zero_grad()
            loss = model.loss(batches[len(self._steps) % WINDOWS_READ])
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
            optimizer.step()
            self.cost.computed()
            self._steps.append((began, time.monotonic()))


async def main() -> None:
    async with open_bench_network(b"") as (network, rpc, memory), trio.open_nursery() as nursery:
        guest = TrainingGuest(network, rpc, memory, nursery)
        await obey(guest, guest.introduction())
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
