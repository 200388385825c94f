"""From a definition to what a training loop needs: model, optimizer, schedule, batches, loss.

    task = build_task(definition, device="cpu", peer=peer_id)
    optimizer = CollaborativeOptimizer(
        task.named_parameters, task.optimizer_factory, bridge,
        scheduler=task.schedule_factory, buffers=task.buffers, **definition.optimizer_options())
    with task.open_batches(samples=8, position=kept) as batches:
        for batch in batches:
            optimizer.zero_grad()
            loss = task.compute(batch, optimizer.scaled)
            optimizer.step(samples=task.samples_in(batch), loss=loss)
        batches.position()

Promises: the initial parameters are the same bits on every machine; two peers read the same data in
different orders; data is opened as a stranger's (nothing from this machine's disk or local
network); no code that came over the network is run (trusted.py).

build_task reads nothing from the network. `open_batches` does so when the first batch is asked for,
and blocks: call it in the training thread. `stop` may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply, replicate

from models.classifier import ImageModel
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
from models.trainable import FLOAT32_BYTES, Trainable, on_device, tensors_in, with_each_tensor
from node.run.batches import FigureBatches, ModuleBatches, ReadBatches, TrainingBatches
from node.run.compiled_loss import (
    EXPERTS,
    SEVERAL_DEVICES,
    CompiledLoss,
    without_tracebacks,
)
from node.run.definition import RunDefinition
from node.run.mixtures import Mixtures
from node.run.out_of_memory import is_out_of_memory
from node.run.trusted import (
    blamed_on,
    file_of,
    function_in,
    load_trusted,
    own_settings,
    wrong_result,
)
from protocols.accumulation.options import autocast_to


@dataclass(frozen=True)
class RunTask:
    """The model, data and optimizer to train with. `model` is on the (first) device, in float32."""

    definition: RunDefinition
    model: Trainable
    devices: tuple[torch.device, ...]
    """One device, or several GPUs of this machine: then `loss` spreads a batch over them."""
    optimizer_factory: OptimizerFactory
    schedule_factory: ScheduleFactory | None
    data: DataSettings | ModuleType | None
    """None: the built-in figures."""
    peer: str
    model_file: str = field(default="", kw_only=True)
    """The file of a trusted module's model; empty for a registered model."""
    mixtures: Mixtures | None = field(default=None, kw_only=True)
    """Those of the model, in a run with experts."""
    compiled: CompiledLoss | None = field(default=None, kw_only=True)
    """What `compute` takes for the loss, in a run with `training.compile`."""

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    @property
    def buffers(self) -> list[tuple[str, Tensor]]:
        """Those that are part of the run's state. A buffer that is not persistent is this machine's
        own (the queue of SwAV): nobody fetches it."""
        kept = self.model.state_dict().keys()
        return [(name, one) for name, one in self.model.named_buffers() if name in kept]

    @contextmanager
    def buffers_stay(self) -> Iterator[None]:
        """Every buffer of the model is afterwards as it was: for passes that only measure."""
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.copy_(value)

    @property
    def plain_model(self) -> dict[str, Any]:
        """The settings that `potluck export` builds the model from, for a checkpoint's manifest; {}
        for a module's model, which `potluck export` cannot build."""
        return {} if "module" in self.definition.model else self.model.plain_settings()

    def open_batches(
        self, *, samples: int, position: Position | None = None, on_event: OnEvent = logged
    ) -> TrainingBatches:
        """Batches of this many samples, in this peer's own order, from the start or a position."""
        seed, device = self.definition.training.seed, self.devices[0]
        if isinstance(self.data, ModuleType):
            settings = own_settings(self.definition.data)
            opened = partial(
                self.data.open_batches, settings, seed=seed, peer=self.peer, samples=samples
            )
            return ModuleBatches(opened, file_of(self.data), device)
        if self.data is None:
            return FigureBatches(
                device,
                batch_of=self._batch_of,
                samples=samples,
                seed=seed,
                peer=self.peer,
                position=position,
            )
        return ReadBatches(
            self.data,
            device,
            model=self.model,
            batch_of=self._batch_of,
            samples=samples,
            seed=seed,
            peer=self.peer,
            position=position,
            on_event=on_event,
        )

    def made_up_batch(self, samples: int) -> Any:
        """A batch of the right form without data, for measuring how fast this machine is."""
        chance = seeded(0)
        if isinstance(self.data, ModuleType):  # only the module knows the form of its batches
            with self.open_batches(samples=samples) as batches:
                return next(batches)
        made_of: Any
        if self.model.window:
            shape = (samples, self.model.window)
            ids = min(128, self.model.vocabulary or 128)
            made_of = torch.randint(min(1, ids - 1), ids, shape, generator=chance).to(torch.uint8)
        else:
            made_of = synthetic_images(0, range(samples))
        return on_device(self._batch_of(made_of, chance), self.devices[0])

    def autocast(self) -> AbstractContextManager[Any]:
        """The context that passes are computed in: the run's precision, on this task's devices."""
        return autocast_to(self.definition.training.precision, self.devices[0].type)

    def compute(self, batch: Any, scaled: Callable[[Tensor], Tensor] = lambda loss: loss) -> Tensor:
        """One pass forward and backward, in the run's precision, and compiled if that works here.
        The gradients of the scaled loss are added to those of the parameters, which have none yet.
        Gives the loss itself, without a graph."""
        compiled = self.compiled
        if compiled is not None and compiled.is_used:
            try:
                return self._computed(batch, scaled, compiled)
            except Exception as error:  # compilers raise anything
                if is_out_of_memory(error):
                    raise
                failed = without_tracebacks(error)  # they hold the memory of the pass
            for _name, one in self.named_parameters:
                one.grad = None
            loss = self._computed(batch, scaled, self.loss)  # raises what is the model's fault
            compiled.give_up(failed)
            return loss
        return self._computed(batch, scaled, self.loss)

    def _computed(
        self, batch: Any, scaled: Callable[[Tensor], Tensor], loss_of: Callable[[Any], Tensor]
    ) -> Tensor:
        with self.autocast():
            loss = loss_of(batch)
        self.backward(scaled(loss))
        return loss.detach()

    def loss(self, batch: Any, model: Trainable | None = None) -> Tensor:
        """The mean over the batch's samples. Call `backward` with it. `model`: a copy of the
        task's model that computes in its place."""
        with self._own_code("loss"):
            if len(self.devices) > 1:
                return spread_loss(self.model, self.devices, batch)
            loss = (model or self.model).loss(batch)
        if self.model_file:
            self._check_loss(loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        with self._own_code("the backward pass of its loss"):
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own

    def samples_in(self, batch: Any) -> int:
        with self._own_code("samples_in"):
            samples = self.model.samples_in(batch)
        if self.model_file and not (isinstance(samples, int) and samples > 0):
            must = "must give the number of samples in a batch, at least 1"
            raise wrong_result(
                self.model_file, type(self.model).samples_in, must, repr(samples)[:100]
            )
        return samples

    def activation_bytes(self) -> tuple[int, int]:
        """The memory that a pass keeps, in the run's precision: whatever its samples are, and for
        each of them."""
        value_bytes = FLOAT32_BYTES if self.definition.training.precision == "float32" else 2
        with self._own_code("activation_bytes"):
            two, one = (self.model.activation_bytes(count, value_bytes) for count in (2, 1))
        return 2 * one - two, two - one

    def _batch_of(self, samples: Any, generator: torch.Generator) -> Any:
        with self._own_code("batch_of"):
            return self.model.batch_of(samples, generator)

    def at_step(self, step: int) -> None:
        """Tell the model for which step of the run the next batch is."""
        with self._own_code("at_step"):
            self.model.at_step(step)

    def _own_code(self, doing: str) -> AbstractContextManager[None]:
        """Blame a trusted module for errors of the model's code, where the model is a module's."""
        return blamed_on(self.model_file, doing) if self.model_file else nullcontext()

    def _check_loss(self, loss: object) -> None:
        is_number = isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
        if not (is_number and isinstance(loss, Tensor) and loss.requires_grad):
            must = "must give one number, the mean over the samples, as a tensor with a gradient"
            raise wrong_result(self.model_file, type(self.model).loss, must, _described(loss))


def build_task(
    definition: RunDefinition,
    *,
    device: str | torch.device | Sequence[str | torch.device] = "cpu",
    peer: str = "",
    trusted: Mapping[str, Path] | None = None,
) -> RunTask:
    """`device`: "cpu", "cuda:0", "mps", or several GPUs. `peer`: this peer's id, which decides its
    order of the data. `trusted`: the result of `trusted_modules` for the `--trust-module` flags.

    Raises models' own errors for settings that cannot be built, and UntrustedModule.
    """
    given = [device] if isinstance(device, str | torch.device) else list(device)
    devices = tuple(torch.device(one) for one in given)
    mixtures = mixtures_of(definition, trusted or {})
    if mixtures is not None:  # a GPU computes little of such a model, and waits for experts
        devices = devices[:1]
    model = model_of(definition, trusted or {}, seed=definition.training.seed, mixtures=mixtures)
    return _task_with(definition, model.to(devices[0]), devices, peer, trusted or {}, mixtures)


def task_to_look_at(definition: RunDefinition, trusted: Mapping[str, Path]) -> RunTask:
    """The task without a registered model's memory, to inspect its shapes and its data."""
    mixtures = mixtures_of(definition, trusted)
    model = model_of(definition, trusted, seed=None, mixtures=mixtures)
    return _task_with(definition, model, (torch.device("cpu"),), "", trusted, mixtures)


def mixtures_of(definition: RunDefinition, trusted: Mapping[str, Path]) -> Mixtures | None:
    """Fresh ones, for one model; None for a run without experts."""
    return None if definition.experts is None else Mixtures(definition, trusted)


def _task_with(
    definition: RunDefinition,
    model: Trainable,
    devices: tuple[torch.device, ...],
    peer: str,
    trusted: Mapping[str, Path],
    mixtures: Mixtures | None,
) -> RunTask:
    factory = optimizer_factory(definition.optimizer)
    schedule = None if definition.schedule is None else schedule_factory(definition.schedule)
    data = data_of(definition, model, trusted)
    named = definition.model.get("module")
    model_file = str(trusted[named]) if named is not None else ""
    compiled = None
    if definition.training.compile:
        trouble = SEVERAL_DEVICES if len(devices) > 1 else "" if mixtures is None else EXPERTS
        compiled = CompiledLoss(model.loss, trouble=trouble)
    return RunTask(
        definition,
        model,
        devices,
        factory,
        schedule,
        data,
        peer,
        model_file=model_file,
        mixtures=mixtures,
        compiled=compiled,
    )


def model_of(
    definition: RunDefinition,
    trusted: Mapping[str, Path],
    *,
    seed: int | None,
    mixtures: Mixtures | None = None,
) -> Trainable:
    """The run's model, with `seed=None` on the meta device (of a registered model). `mixtures`:
    fresh ones, which the model gets."""
    if "module" not in definition.model:
        made = None if mixtures is None else mixtures.mixture_of_rows
        model = build_model(definition.model, seed=seed, mixture=made)
        if mixtures is not None:
            mixtures.check_complete()
        return model
    module = load_trusted(definition.model, trusted, "model")
    build, file = function_in(module, "build_model"), file_of(module)
    more = {} if mixtures is None else {"mixture": mixtures.mixture}
    with blamed_on(file, "build_model"):
        model = build(own_settings(definition.model), seed=seed or 0, **more)
    if not isinstance(model, Trainable):
        must = "must give a models.trainable.Trainable"
        raise wrong_result(file, build, must, _described(model))
    if mixtures is not None:
        mixtures.check_complete()
    return model


def data_of(
    definition: RunDefinition, model: Trainable, trusted: Mapping[str, Path]
) -> DataSettings | ModuleType | None:
    """Where the run's samples come from, checked but not opened. None: the built-in figures."""
    if "module" in definition.data:
        module = load_trusted(definition.data, trusted, "data")
        function_in(module, "open_batches")
        return module
    if not definition.data.get("source") and not model.window:
        if isinstance(model, ImageModel):
            return None
        raise DataSettingsError(
            "The model takes no text (its window is 0), but [data] names only text.",
            advice="Name sources of pictures, or a [data] module that makes the batches; or give "
            "the model a `window`.",
        )
    return data_from_strangers(definition.data)


def data_from_strangers(table: Mapping[str, Any]) -> DataSettings:
    """The settings of a run's `[data]` table; DataSettingsError if a run cannot have them."""
    settings = data_settings(table)
    refuse_this_machine(settings)
    if settings.passes:
        raise DataSettingsError(
            "A run's data has no end, and `passes` would end it at each peer.",
            why="A run ends after its steps, which all peers make together.",
            advice="Leave `passes` out, and set `steps` below [training].",
        )
    return settings


def _described(given: object) -> str:
    """A module's result, in a few words."""
    if isinstance(given, Tensor):
        grad = "" if given.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(given.shape)} and {given.dtype}{grad}"
    return f"one of type {type(given).__name__}"


# One batch over several GPUs of one machine, which are one peer: torch's own data parallelism.
#
# The model lives on the first device. For each batch it is copied to the others, each computes the
# loss of its part, and the gradients come back to the first, where the optimizer is.
#
# Parts differ in size where the samples do not divide evenly, so the mean is weighted. Each device
# has a thread of its own, and the caller's autocast does not apply in it.


def spread_loss(model: Trainable, devices: Sequence[torch.device], batch: Any) -> Tensor:
    """The mean loss over all samples of the batch, on the first device."""
    parts = parts_of(batch, len(devices))
    used = list(devices[: len(parts)])
    kind = used[0].type
    precision = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    computing = [partial(_loss_of, replica, kind, *precision) for replica in replicate(model, used)]
    there = [(on_device(part, device),) for part, device in zip(parts, used, strict=True)]
    losses = parallel_apply(computing, there, devices=used)  # type: ignore[arg-type] # calls them
    counts = [model.samples_in(part) for part in parts]
    return weighted_mean([loss.to(used[0]) for loss in losses], counts)


def _loss_of(replica: Any, kind: str, is_mixed: bool, dtype: torch.dtype, batch: Any) -> Tensor:
    with torch.autocast(kind, dtype=dtype, enabled=is_mixed):
        loss: Tensor = replica.loss(batch)
        return loss


def weighted_mean(losses: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    """The mean over all samples, from the means over parts of them."""
    total = sum(samples)
    parts = [loss * (count / total) for loss, count in zip(losses, samples, strict=True)]
    return torch.stack(parts).sum()


def parts_of(batch: Any, count: int) -> list[Any]:
    """The batch cut along its samples into at most `count` parts, none of them empty. A tensor
    whose first dimension is not the samples goes to all parts whole."""
    samples = len(next(tensors_in(batch)))

    def part_of(tensor: Tensor, number: int) -> Tensor:
        has_samples = tensor.dim() > 0 and len(tensor) == samples
        return tensor.chunk(count)[number] if has_samples else tensor

    parts = -(-samples // -(-samples // count))  # as many as chunk makes
    return [with_each_tensor(batch, partial(part_of, number=number)) for number in range(parts)]
