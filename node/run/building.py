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
no code is run that came over the network (trusted.py).

Easy to get wrong: build_task reads nothing from the network. `open_batches` does, when the first
batch is asked for, and blocks: it belongs into the training thread. `stop` may come from any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from models.classifier import Classifier
from models.data.errors import DataSettingsError
from models.data.events import OnEvent, logged
from models.data.position import Position
from models.data.settings import DataSettings, data_settings, refuse_this_machine
from models.initial import seeded
from models.registry import (
    OptimizerFactory,
    ScheduleFactory,
    build_model,
    optimizer_factory,
    schedule_factory,
)
from models.synthetic_images import synthetic_images
from models.trainable import Trainable, on_device
from node.run.batches import Batches, FigureBatches, ModuleBatches, ReadBatches
from node.run.definition import RunDefinition
from node.run.spreading import spread_loss
from node.run.trusted import BrokenModule, load_trusted, own_settings


@dataclass(frozen=True)
class RunTask:
    """What is to be trained. `model` is on the (first) device, in float32."""

    definition: RunDefinition
    model: Trainable
    devices: tuple[torch.device, ...]
    """One, or several GPUs of this machine: then `loss` spreads a batch over them (one peer)."""
    optimizer_factory: OptimizerFactory
    schedule_factory: ScheduleFactory | None
    data: DataSettings | ModuleType | None
    """None: the built-in figures."""
    peer: str

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    @property
    def buffers(self) -> list[tuple[str, Tensor]]:
        return list(self.model.named_buffers())

    @property
    def plain_model(self) -> dict[str, Any]:
        """For a checkpoint's manifest: what `potluck export` builds the model from; {} for a
        module's, which it does not know."""
        return {} if "module" in self.definition.model else self.model.plain_settings()

    def open_batches(
        self, *, samples: int, position: Position | None = None, on_event: OnEvent = logged
    ) -> Batches:
        """So many samples each, in this peer's own order, from the beginning or a position."""
        seed, device = self.definition.training.seed, self.devices[0]
        if isinstance(self.data, ModuleType):
            settings = own_settings(self.definition.data)
            opened = partial(
                self.data.open_batches, settings, seed=seed, peer=self.peer, samples=samples
            )
            return ModuleBatches(opened, device)
        if self.data is None:
            return FigureBatches(
                device, samples=samples, seed=seed, peer=self.peer, position=position
            )
        return ReadBatches(
            self.data,
            self.model,
            device,
            samples=samples,
            seed=seed,
            peer=self.peer,
            position=position,
            on_event=on_event,
        )

    def made_up_batch(self, samples: int) -> Any:
        """A batch of the right form, from no data: for measuring how fast this machine is."""
        chance = seeded(0)
        if self.model.window:
            shape = (samples, self.model.window)
            windows = torch.randint(1, 128, shape, generator=chance).to(torch.uint8)
            batch = self.model.batch_of(windows, chance)
        elif isinstance(self.data, ModuleType):
            with self.open_batches(samples=samples) as batches:
                batch = next(batches)
        else:
            batch = synthetic_images(0, range(samples))
        return on_device(batch, self.devices[0])

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch's samples, to call backward on."""
        if len(self.devices) > 1:
            return spread_loss(self.model, self.devices, batch)
        return self.model.loss(batch)

    def samples_in(self, batch: Any) -> int:
        return self.model.samples_in(batch)


def build_task(
    definition: RunDefinition,
    *,
    device: str | torch.device | Sequence[str | torch.device] = "cpu",
    peer: str = "",
    trusted: Mapping[str, Path] | None = None,
) -> RunTask:
    """`device`: "cpu", "cuda:0", "mps", or several GPUs. `peer`: this peer's id, which decides its
    order of the data. `trusted`: what `trusted_modules` made of `--trust-module`.

    Models' own errors for what cannot be built, UntrustedModule for a module that was not trusted.
    """
    given = [device] if isinstance(device, str | torch.device) else list(device)
    devices = tuple(torch.device(one) for one in given)
    factory = optimizer_factory(definition.optimizer)
    schedule = None if definition.schedule is None else schedule_factory(definition.schedule)
    model = model_of(definition, trusted or {}, seed=definition.training.seed)
    data = data_of(definition, model, trusted or {})
    return RunTask(definition, model.to(devices[0]), devices, factory, schedule, data, peer)


def model_of(
    definition: RunDefinition, trusted: Mapping[str, Path], *, seed: int | None
) -> Trainable:
    """The run's model, with `seed=None` on the meta device (of a registered model)."""
    if "module" not in definition.model:
        return build_model(definition.model, seed=seed)
    module = load_trusted(definition.model, trusted, "model")
    model = _called(module, "build_model", own_settings(definition.model), seed=seed or 0)
    if not isinstance(model, Trainable):
        raise BrokenModule(
            f"build_model of {module.__spec__ and module.__spec__.origin} gave no model.",
            why=f"It gave a {type(model).__name__}, and must give a models.trainable.Trainable.",
        )
    return model


def data_of(
    definition: RunDefinition, model: Trainable, trusted: Mapping[str, Path]
) -> DataSettings | ModuleType | None:
    """Where the run's samples come from, checked; nothing is opened. None: the built-in figures."""
    if "module" in definition.data:
        module = load_trusted(definition.data, trusted, "data")
        _attribute(module, "open_batches")
        return module
    if not definition.data.get("source") and isinstance(model, Classifier):
        return None
    return data_from_strangers(definition.data)


def data_from_strangers(table: Mapping[str, Any]) -> DataSettings:
    """What a `[data]` table means in a run; DataSettingsError if it cannot be there."""
    settings = data_settings(table)
    refuse_this_machine(settings)
    if settings.passes:
        raise DataSettingsError(
            "In a run data has no end, and `passes` would give it one for each peer.",
            why="A run is over after its steps, which all peers make together.",
            advice="Leave `passes` out, and set `steps` below [training].",
        )
    return settings


def _called(module: ModuleType, name: str, *arguments: Any, **options: Any) -> Any:
    function = _attribute(module, name)
    try:
        return function(*arguments, **options)
    except Exception as error:
        raise BrokenModule(
            f"{name} of the trusted module {module.__name__} failed.",
            why=f"{type(error).__name__}: {str(error)[:300]}",
            advice="Tell whoever wrote it.",
        ) from error


def _attribute(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if not callable(found):
        raise BrokenModule(
            f"The trusted module {module.__name__} has no function {name}.",
            advice="docs/organisers.md says what a module must have.",
        )
    return found
