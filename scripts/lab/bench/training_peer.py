"""A peer that trains, in a process of its own: `python -m lab.bench.training_peer [fork]`.

It is a whole node, with a home, and takes part in a run like a guest's loop
(node/training/guest.py). Every sample has a number that no other peer and no other life of this
peer uses, and all its events are logged (training_log.py). The orders are in `TrainingPeer`
(orders.py has their format).

COMPUTING on the time sheet is the wall-clock time of the loop's own forward and backward passes,
without the optimizer's work.
"""

from __future__ import annotations

import gc
import logging
import resource
import sys
import threading
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trio
from torch import Tensor

from lab import gpu_double
from lab.bench.holdings import descriptors, tasks_by_name
from lab.bench.orders import run_or_fork
from lab.bench.own_network import InOwnNetwork
from lab.bench.size_task import NoSamples, SizedModel, SizeTask
from lab.bench.slow_uplink import open_slow_network
from lab.bench.time_sheet import ADDING, COMPUTING, RECORDING, TURNING, WAITING, TimeSheet
from lab.bench.training_log import TrainingLog
from lab.bench.training_task import BenchTask, TextSamples
from models.gpt import GPT
from node.core.configuration import Configuration, read_configuration
from node.core.node import Node
from node.core.status import memory_in_use
from node.training.guest import train_in_thread
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import CollaborationSettings
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.identity import Identity
from protocols.network import TraversableNetwork
from protocols.tensors import GPUS, is_on_gpu

if TYPE_CHECKING:
    from trio_typing import TaskStatus

LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 60.0
NEWS_SECONDS = 1.0  # between two looks at who is there, if nothing is heard
LEAVE_SECONDS = 20.0  # for a loop that waits for a round; then it is woken


@dataclass(frozen=True)
class PeerManner:
    """How this peer trains: the options of its optimizer, and what it writes down beside."""

    delayed: bool = False
    local_steps: int = 1
    fragments: int = 1
    max_norm: float | None = None
    held_out: bool = False
    """Whether it measures the loss on held-out samples after every step."""
    auxiliary: bool = False
    """Whether it comes to the rounds without samples, as a backbone does."""
    offload: bool = False
    """Whether it keeps its copies for averaging off its GPU."""
    company: int = 0
    """How many others it waits to see before its first batch. A peer that began alone could step so
    often that the others, with a state to fetch now, never catch up."""
    idle_seconds: float = 0.0
    """How much longer each pass takes, with the processor left alone: it stands for a device that
    computes while the host's thread waits, and for a machine that is not shared."""
    pass_seconds: float = 0.0
    """How long each pass takes at least, the processor left alone for the rest of it."""
    threads: int = 1
    """How many torch uses here: the peers share the machine's cores."""
    digests_from: int | None = 0
    """From which step of the run on the digest of its state is written down after every one, for
    the audit; None: never. It takes the processor's time."""


@dataclass(frozen=True, eq=False)
class _Guest:
    """The objects of the training thread."""

    task: BenchTask | SizeTask
    manner: PeerManner
    model: GPT | SizedModel
    samples: TextSamples | NoSamples
    optimizer: CollaborativeOptimizer
    bridge: Bridge
    log: TrainingLog


class TrainingPeer(InOwnNetwork):
    """The orders of this process: each public coroutine is one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._node: Node | None = None
        self._over = threading.Event()
        self._ended = trio.Event()
        self._leaving = trio.CancelScope()
        self._sheet = TimeSheet()
        self._epoch = -1
        self._failure = ""
        self._catching_up: tuple[Bridge, TrainingLog] | None = None
        self._writing = threading.Lock()

    async def join(
        self,
        home: str,
        addresses: list[str],
        up_bytes_per_second: float = 0.0,
        host: str = LOOPBACK,
    ) -> dict[str, Any]:
        """Start a node that joins through these. Returns its id and addresses."""
        listen = f"/ip4/{host}/tcp/0"
        flags = {"network.listen": (listen,), "dht.bootstrap": tuple(addresses)}
        configuration = read_configuration(flags, environment={}, home=home)
        with trio.fail_after(JOIN_SECONDS):
            node: Node = await self._nursery.start(
                self._run_node, configuration, up_bytes_per_second
            )
        self._node = node
        return {"peer": node.network.peer_id, "address": node.network.addresses()[0]}

    async def train(
        self,
        settings: dict[str, Any],
        task: dict[str, Any],
        manner: dict[str, Any],
        first_number: int,
        log: str,
    ) -> None:
        """Begin to train in a thread, with samples from this number on; `epoch` says how far."""
        train = partial(self._train, _task_of(task), PeerManner(**manner), first_number, Path(log))
        self._nursery.start_soon(self._take_part, CollaborationSettings(**settings), train)

    async def train_plainly(
        self, task: dict[str, Any], manner: dict[str, Any], steps: int, passes: int
    ) -> dict[str, Any]:
        """Train as torch alone does, without a run: the seconds of a step, and in how many of them
        the double of the GPU was late, if it has one."""
        how = PeerManner(**manner)
        torch.set_num_threads(how.threads)
        train = partial(plain_steps, max_norm=how.max_norm, pass_seconds=how.pass_seconds)
        seconds, late = await trio.to_thread.run_sync(train, _task_of(task), steps, passes)
        return {"step_seconds": seconds, "late_seconds": late}

    async def progress(self) -> dict[str, Any]:
        """How far the loop is; `failure` is what ended it, if something did."""
        if self._catching_up is not None:
            self._write_events(*self._catching_up)
        samples = self._sheet.told()["samples"]
        return {"epoch": self._epoch, "samples": samples, "failure": self._failure}

    async def cpu(self) -> dict[str, Any]:
        """User and system seconds of all threads of this process so far, by `now`; the time sheet
        of its loop; and how late the double of its GPU was, if it has one."""
        return {
            "seconds": time.process_time(),
            "now": time.monotonic(),
            "sheet": self._sheet.told(),
            "late": gpu_double.lateness(),
            "epoch": self._epoch,
        }

    async def leave(self) -> dict[str, Any]:
        """End the loop after its step, and the collaboration; how far it was."""
        self._over.set()
        with trio.move_on_after(LEAVE_SECONDS):
            await self._ended.wait()
        self._leaving.cancel()
        await self._ended.wait()
        return await self.progress()

    async def totals(self) -> dict[str, Any]:
        """The resources that this process holds now."""
        gc.collect()
        return {
            "memory_bytes": memory_in_use() or 0,
            "most_memory_bytes": _most_memory_bytes(),
            "most_device_bytes": sum(
                torch.get_device_module(kind).max_memory_allocated() for kind in GPUS
            ),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "threads": threading.active_count(),
            "tasks_by_name": tasks_by_name(),
            "descriptors": descriptors(),
        }

    async def _run_node(
        self,
        configuration: Configuration,
        up_bytes_per_second: float,
        task_status: TaskStatus[Node] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        def open_network(
            identity: Identity, of: Configuration
        ) -> AbstractAsyncContextManager[TraversableNetwork]:
            return open_slow_network(identity, of, up_bytes_per_second)

        async with Node(configuration, open_network=open_network) as node:
            task_status.started(node)
            await trio.sleep_forever()

    async def _take_part(self, settings: CollaborationSettings, train: Any) -> None:
        assert self._node is not None
        try:
            with self._leaving:
                await train_in_thread(self._node, settings, train)
        except CollaborationEnded:
            pass
        except Exception as error:
            self._failure = repr(error)
            logging.exception("the training failed")
        finally:
            self._ended.set()

    # -- in the training thread

    def _train(
        self,
        task: BenchTask | SizeTask,
        manner: PeerManner,
        first_number: int,
        path: Path,
        bridge: Bridge,
    ) -> None:
        torch.set_num_threads(manner.threads)
        if isinstance(task, SizeTask):
            plain_steps(task.of_one_matrix, 1, 1)
        elif manner.pass_seconds:
            plain_steps(task, 1, 1)
        model, samples = task.model(), task.samples()
        with TrainingLog(path) as log:
            self._catching_up = bridge, log
            log.write("enters")
            try:
                optimizer = CollaborativeOptimizer(
                    model.named_parameters(),
                    task.optimizer,
                    bridge,
                    delayed=manner.delayed,
                    local_steps=manner.local_steps,
                    fragments=manner.fragments,
                    max_norm=manner.max_norm,
                    auxiliary=manner.auxiliary,
                    offload=manner.offload,
                )
                self._catching_up = None
                self._epoch = optimizer.epoch
                at = {"epoch": optimizer.epoch, "history": optimizer.history.hex()}
                log.write("began", delayed=manner.delayed or manner.fragments > 1, **at)
                guest = _Guest(task, manner, model, samples, optimizer, bridge, log)
                while len(bridge.estimate.peers) < manner.company:
                    bridge.wait_for_news(NEWS_SECONDS).wait()
                if manner.auxiliary:
                    self._assist(guest)
                else:
                    self._loop(guest, first_number)
            finally:
                self._write_events(bridge, log)

    def _loop(self, guest: _Guest, number: int) -> None:
        optimizer, sheet, count = guest.optimizer, self._sheet, guest.task.batch
        while not self._over.is_set():
            optimizer.zero_grad()
            began = time.monotonic()
            with sheet.on(COMPUTING):
                loss = guest.model.loss(guest.samples.batch(range(number, number + count)))
                loss.backward()  # type: ignore[no-untyped-call] # torch's own
                rest = began + guest.manner.pass_seconds - time.monotonic()
                time.sleep(max(rest, guest.manner.idle_seconds))
            with sheet.on(RECORDING):
                told = {"model_epoch": optimizer.model_epoch, "first": number, "count": count}
                # a loss on a GPU is not read: torch alone does not wait for it here either
                known = {} if is_on_gpu(loss) else {"loss": float(loss.detach())}
                guest.log.write("batch", **told, **known)
            number += count
            self._step(guest, loss)
            with sheet.on(RECORDING):
                self._note(guest)
            sheet.batch_ended(count)

    def _step(self, guest: _Guest, loss: Tensor) -> None:
        """The optimizer's step, and on the time sheet what it was for."""
        optimizer, bridge, sheet = guest.optimizer, guest.bridge, self._sheet
        was_at = (optimizer.epoch, optimizer.model_epoch)
        waited, began = bridge.statistics().waiting_seconds, time.monotonic()
        optimizer.step(samples=guest.task.batch, loss=loss)
        waited = bridge.statistics().waiting_seconds - waited
        sheet.add(WAITING, waited)
        has_turned = (optimizer.epoch, optimizer.model_epoch) != was_at
        sheet.add(TURNING if has_turned else ADDING, time.monotonic() - began - waited)

    def _assist(self, guest: _Guest) -> None:
        while not self._over.is_set():
            guest.optimizer.assist(epochs=1)
            self._note(guest)

    def _note(self, guest: _Guest) -> None:
        """Write down what happened in the last step, and what came of it."""
        self._write_events(guest.bridge, guest.log)
        optimizer = guest.optimizer
        if optimizer.epoch == self._epoch:
            return
        first = guest.manner.digests_from
        if first is None or optimizer.epoch < first:
            self._epoch = optimizer.epoch
            return
        # Of the state, with the optimizer's statistics: delayed, the model is a step behind it for
        # a while that is not the same at all peers.
        state = optimizer.capture()
        self._epoch = state.epoch
        told: dict[str, Any] = {"model_epoch": optimizer.model_epoch, "digest": state.digest.hex()}
        if guest.manner.held_out:
            with torch.no_grad():
                told["held_out"] = float(guest.model.loss(guest.samples.held_out()))
        guest.log.write("digest", epoch=state.epoch, history=state.history.hex(), **told)

    def _write_events(self, bridge: Bridge, log: TrainingLog) -> None:
        """In the training thread, or where that waits for a state in trio's."""
        with self._writing:
            while bridge.events:
                log.write_event(bridge.events.popleft())


def _task_of(fields: dict[str, Any]) -> BenchTask | SizeTask:
    return SizeTask(**fields) if "parameters" in fields else BenchTask(**fields)


def plain_steps(
    task: BenchTask | SizeTask,
    steps: int,
    passes: int,
    *,
    max_norm: float | None = None,
    pass_seconds: float = 0.0,
) -> tuple[float, float]:
    """Train as torch alone does, and return the seconds of a step, and in how many of them the
    double was late. The first step takes seconds more, of imports, which do not count if there are
    others."""
    model, samples = task.model(), task.samples()
    optimizer = task.optimizer(model.named_parameters())
    began, late = time.monotonic(), gpu_double.lateness()
    for step in range(steps):
        if step == 1:
            began, late = time.monotonic(), gpu_double.lateness()
        optimizer.zero_grad()
        for number in range(passes):
            until = time.monotonic() + pass_seconds
            loss = model.loss(samples.batch(range(number * task.batch, (number + 1) * task.batch)))
            (loss / passes).backward()  # type: ignore[no-untyped-call]
            time.sleep(max(0.0, until - time.monotonic()))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        float(loss.detach())  # waits for the device
    counted = max(1, steps - 1)
    return (time.monotonic() - began) / counted, (gpu_double.lateness() - late) / counted


def _most_memory_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


if __name__ == "__main__":
    run_or_fork(TrainingPeer)
