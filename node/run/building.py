"""From a definition to what a training loop needs: model, optimizer, schedule, batches, loss.

    task = build_task(definition, device="cpu", peer=peer_id)
    optimizer = CollaborativeOptimizer(
        task.named_parameters, task.optimizer_factory, bridge,
        scheduler=task.schedule_factory, buffers=task.buffers, **definition.optimizer_options())
    with task.open_batches(samples=8, position=kept) as batches:
        for batch in batches:
            optimizer.zero_grad()
            with optimizer.autocast():
                loss = task.loss(batch)
            optimizer.scaled(loss).backward()
            optimizer.step(samples=task.samples_in(batch), loss=loss)
        batches.position()

Promises: the initial parameters are the same bits on every machine; two peers read the same data in
different orders; data is opened as a stranger's (nothing from this machine's disk or own network);
no code is run that came over the network. A definition may name a module for the model or the data;
it is taken only from a file that the volunteer names (`--trust-module`), and refused by name else.

Easy to get wrong: build_task reads nothing from the network. `open_batches` does, when the first
batch is asked for, and blocks: it belongs into the training thread. `stop` may come from any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models.data.events import OnEvent, logged
from models.data.position import Position
from models.registry import OptimizerFactory, ScheduleFactory
from models.trainable import Trainable
from node.run.definition import RunDefinition


class Batches(Protocol):
    """An iterator over batches on the task's device, until its block is left."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def __enter__(self) -> Batches: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def position(self) -> Position | None:
        """Behind the batches given so far; None for a module's data, which has none."""

    def stop(self) -> None:
        """From any thread: whoever waits for a batch gets models.data.clock.ReadingStopped."""


@dataclass(frozen=True)
class RunTask:
    """What is to be trained. `model` is on the device(s), in float32."""

    definition: RunDefinition
    model: Trainable
    devices: tuple[torch.device, ...]
    """One, or several GPUs of this machine: then `loss` spreads a batch over them (one peer)."""
    optimizer_factory: OptimizerFactory
    schedule_factory: ScheduleFactory | None
    peer: str
    trusted: Mapping[str, Path]
    """Modules by name, from this machine's own disk."""

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    @property
    def buffers(self) -> list[tuple[str, Tensor]]:
        return list(self.model.named_buffers())

    def open_batches(
        self, *, samples: int, position: Position | None = None, on_event: OnEvent = logged
    ) -> Batches:
        """So many samples each, in this peer's own order, from the beginning or a position."""
        raise NotImplementedError

    def made_up_batch(self, samples: int) -> Any:
        """A batch of the right form, from no data: for measuring how fast this machine is."""
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch's samples, to call backward on."""
        raise NotImplementedError

    def samples_in(self, batch: Any) -> int:
        return self.model.samples_in(batch)


def build_task(
    definition: RunDefinition,
    *,
    device: str | Sequence[str] = "cpu",
    peer: str = "",
    trusted: Mapping[str, Path] | None = None,
) -> RunTask:
    """`device`: "cpu", "cuda:0", "mps", or several GPUs. `peer`: this peer's id, which decides its
    order of the data. `trusted`: what `trusted_modules` made of `--trust-module`.

    WrongDefinition or models' own errors for what cannot be built, UntrustedModule for a module
    that was not trusted.
    """
    raise NotImplementedError


def trusted_modules(arguments: Sequence[str]) -> dict[str, Path]:
    """`--trust-module PATH/poem_model.py` (several) to {"poem_model": path}; WrongUse."""
    raise NotImplementedError
