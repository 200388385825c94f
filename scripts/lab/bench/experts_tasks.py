"""The tasks of `scripts/bench experts-digits` and `experts-text`, and one training of either.

A task says what the experts are, the model around them, the data, and how good a model is. A model
has `layers` mixtures. Its dense twin is the same model with one expert of full size in each
mixture, to which every example goes. So both take the same multiplications for an example, and can
be given the same delays.

Batches of digits are small, as in the paper, and the trunk makes a step for several of them. An
expert makes one in the call that brings it more gradients than it gets in all of these batches but
one, if all experts have equally many. So all models make about equally many steps. With one batch
for each step, an expert makes one in every call, as in the product.
"""

from __future__ import annotations

import gzip
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.bench.local_experts import LocalExperts
from lab.bench.training_task import TextSamples, read_text
from lab.guest_thread import in_guest_thread
from models.experts import build_expert
from models.gpt import INITIAL_DEVIATION, Attention, GPTSettings
from protocols.experts import AsyncTrainer, DMoE, ExpertGrid, GridGate
from protocols.guest import Portal

ACTIVE = 4  # experts of an example; each has a quarter of the dense twin's multiplications
BALANCE = 0.01
LAST_LOOKS = 3  # the final value is their mean
LAST_SHARE = 10  # the loss in training is the mean over the last of so many parts
LEAST_RATE = 0.05  # the learning rate falls to this share of its first value
SEEDS_APART = 1000  # every expert of a training has a seed of its own

Batch = Any
Mixture = Callable[[int], nn.Module]  # the mixture of layer 0, 1, …


class ExpertTask(Protocol):
    """- `examples`: of a mixture, in a batch.
    - `batches_per_step`: of the trunk.
    - `learning_rate`, `dense_learning_rate`: of the model with experts, and of its dense twin.
    - `expert`: the settings of one (models/experts.py), and `begins_as_identity`: whether its
      output layer begins with zeros, so that it changes nothing until it has learnt something.
    - `value`: what `value_of` says of a model; `is_loss`: less is better.
    """

    layers: int
    width: int
    examples: int
    batches_per_step: int
    learning_rate: float
    dense_learning_rate: float
    value: str
    is_loss: bool
    begins_as_identity: bool

    def expert(self, *, is_dense: bool) -> dict[str, Any]: ...
    def model(self, mixture: Mixture) -> nn.Module: ...
    def batches(self, seed: int) -> Iterator[Batch]: ...
    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor: ...
    def value_of(self, model: nn.Module) -> float: ...


# Digits: scikit-learn's `load_digits`, 1,797 images of 8 x 8 pixels. The file beside this one is
# from its distribution: the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin,
# C. Kaynak, 1998, UCI Machine Learning Repository, CC BY 4.0).

DIGITS = Path(__file__).with_name("digits.csv.gz")
HELD_OUT_DIGITS = 360
DIGITS_TO_LEARN = 1797 - HELD_OUT_DIGITS
SPLIT_SEED = 0
CONTRAST = 2.5  # brings most pixels' deviation near 1


def read_digits() -> tuple[Tensor, Tensor]:
    """(images, 64) from 0 to 1, and the digit of each."""
    with gzip.open(DIGITS, "rt", encoding="ascii") as lines:
        rows = torch.tensor([[float(word) for word in line.split(",")] for line in lines])
    return rows[:, :-1] / 16.0, rows[:, -1].long()


class DigitsModel(nn.Module):
    def __init__(self, width: int, layers: int, mixture: Mixture) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.mixtures = nn.ModuleList(mixture(layer) for layer in range(layers))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:  # (images, 64) to (images, 10)
        x = self.first(images)
        for mixture in self.mixtures:
            x = mixture(x)
        logits: Tensor = self.last(self.norm(x))
        return logits


def quarter_of(width: int, inner: int) -> int:
    """The inner width of a feed-forward block with a quarter of the multiplications."""
    quarter = (2 * width * inner + inner * inner) / 4
    return round(math.sqrt(width * width + quarter) - width)


def make_identity(network: nn.Module) -> None:
    """Let a feed-forward block give back what it gets, until its output layer has learnt."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith("output."):
                parameter.zero_()


class DigitsTask:
    """Section 4.2 of the paper, on fewer and smaller images."""

    layers = 4
    width = 64
    inner = 256
    examples = 4
    batches_per_step = 16
    learning_rate = dense_learning_rate = 1e-3
    value = "accuracy"
    is_loss = False

    def __init__(self, *, begins_as_identity: bool = False) -> None:
        self.begins_as_identity = begins_as_identity
        images, digits = read_digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
        images = images[order]
        self._images = CONTRAST * (images - images[HELD_OUT_DIGITS:].mean(dim=0))
        self._digits = digits[order]

    def expert(self, *, is_dense: bool) -> dict[str, Any]:
        inner = self.inner if is_dense else quarter_of(self.width, self.inner)
        return {"name": "feed-forward", "width": self.width, "inner": [inner, inner]}

    def model(self, mixture: Mixture) -> nn.Module:
        return DigitsModel(self.width, self.layers, mixture)

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        count = len(self._images) - HELD_OUT_DIGITS
        while True:
            order = torch.randperm(count, generator=generator) + HELD_OUT_DIGITS
            for rows in torch.split(order, self.examples):
                yield self._images[rows], self._digits[rows]

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        images, digits = batch
        return F.cross_entropy(model(images), digits)

    def value_of(self, model: nn.Module) -> float:
        told = model(self._images[:HELD_OUT_DIGITS]).argmax(dim=1)
        return float((told == self._digits[:HELD_OUT_DIGITS]).float().mean())


class TextModel(nn.Module):
    """A small transformer, whose feed-forward blocks are mixtures. Each token has its experts."""

    def __init__(self, settings: GPTSettings, mixture: Mixture) -> None:
        super().__init__()
        width, layers = settings.width, range(settings.layers)
        self.embedding = nn.Embedding(settings.vocabulary, width)
        self.positions = nn.Embedding(settings.context, width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=INITIAL_DEVIATION)
        self.attention_norms = nn.ModuleList(nn.LayerNorm(width) for _ in layers)
        self.attentions = nn.ModuleList(Attention(settings) for _ in layers)
        self.mixtures = nn.ModuleList(map(mixture, layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:  # (samples, length) to (samples, length, vocabulary)
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for norm, attention, mixture in zip(
            self.attention_norms, self.attentions, self.mixtures, strict=True
        ):
            x = x + attention(norm(x))
            x = mixture(x.flatten(0, 1)).view_as(x)
        return F.linear(self.norm(x), self.embedding.weight)


TEXT_BYTES = 4 << 20
HELD_OUT_BYTES = 1 << 18
HELD_OUT_WINDOWS = 256


class TextTask:
    """Predict the next byte of Python's standard library. The value is in nats per byte, of the
    first modules, which are not trained on."""

    settings = GPTSettings(context=64, width=64, layers=2, heads=4)
    layers = settings.layers
    width = settings.width
    inner = 172  # 8/3 of the width, and four times a whole number
    windows = 16
    examples = windows * settings.context
    batches_per_step = 1
    learning_rate, dense_learning_rate = 4e-3, 2e-3  # the best of 2 and 4e-3; of 1, 2, 4, 8e-3
    value = "loss"
    is_loss = True
    begins_as_identity = False

    def __init__(self) -> None:
        text, window = read_text(TEXT_BYTES), self.settings.context + 1
        self._samples = TextSamples(window, text[HELD_OUT_BYTES:])
        self._held_out = TextSamples(window, text[:HELD_OUT_BYTES]).batch(range(HELD_OUT_WINDOWS))

    def expert(self, *, is_dense: bool) -> dict[str, Any]:
        inner = self.inner if is_dense else self.inner // ACTIVE
        return {"name": "gated", "width": self.width, "inner": inner}

    def model(self, mixture: Mixture) -> nn.Module:
        return TextModel(self.settings, mixture)

    def batches(self, seed: int) -> Iterator[Batch]:
        number = seed << 32  # every seed has samples of its own
        while True:
            yield self._samples.batch(range(number, number + self.windows))
            number += self.windows

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        ids = batch.long()
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def value_of(self, model: nn.Module) -> float:
        return float(self.loss_of(model, self._held_out))


TASKS: dict[str, Callable[[], ExpertTask]] = {"digits": DigitsTask, "text": TextTask}


# One training


@dataclass(frozen=True)
class Arm:
    """The circumstances of a training.

    - `experts`: of each layer; 1 is the dense twin.
    - `delay_ms`: the mean delay of a batch, in all its passes together, as in the paper. Every call
      has an exponential delay with its share of that as the mean, so a batch waits longer: for the
      slowest call of each pass.
    - `in_flight`: batches under way.
    - `failure_rate`: the share of calls that fail.
    """

    experts: int
    delay_ms: float
    in_flight: int
    failure_rate: float

    @property
    def is_dense(self) -> bool:
        return self.experts == 1

    @property
    def active(self) -> int:
        return min(ACTIVE, self.experts)


async def train(
    task: ExpertTask, arm: Arm, *, seed: int, batches: int, look_every: int
) -> dict[str, Any]:
    """Train a model from the beginning, and look at it every so many batches."""

    def guest(portal: Portal) -> dict[str, Any]:
        training = _Training(task, arm, portal, seed=seed, batches=batches)
        return training.run(look_every)

    return await in_guest_thread(guest)


class _Training:
    def __init__(
        self, task: ExpertTask, arm: Arm, portal: Portal, *, seed: int, batches: int
    ) -> None:
        torch.manual_seed(seed)
        self._task, self._arm, self._seed, self._batches = task, arm, seed, batches
        side = math.isqrt(arm.experts)
        grid = ExpertGrid("ffn", (side, arm.experts // side))
        self._experts = [self._experts_of(grid, layer) for layer in range(task.layers)]
        self._model = task.model(lambda layer: self._mixture(grid, self._experts[layer], portal))
        nearby = [experts.nearby() for experts in self._experts]
        self._looked_at = task.model(lambda layer: self._mixture(grid, nearby[layer], portal))

    def _experts_of(self, grid: ExpertGrid, layer: int) -> LocalExperts:
        task, arm = self._task, self._arm
        settings, first = task.expert(is_dense=arm.is_dense), layer * grid.cells
        seed = self._seed * SEEDS_APART
        networks = [build_expert(settings, seed=seed + first + at) for at in range(grid.cells)]
        if task.begins_as_identity:
            for network in networks:
                make_identity(network)
        return LocalExperts(
            {grid.at(at): network for at, network in enumerate(networks)},
            lambda parameters: self._optimizer(parameters, (1.0 - arm.failure_rate) ** 2),
            examples_per_step=1
            + task.examples * (task.batches_per_step - 1) * arm.active // arm.experts,
            delay_seconds=arm.delay_ms / 1000.0 / (2 * task.layers),
            failure_rate=arm.failure_rate,
            seed=self._seed * task.layers + layer,
        )

    def _optimizer(self, parameters: Iterable[Tensor], share: float = 1.0) -> torch.optim.Optimizer:
        """Adam, whose learning rate falls linearly over the steps of the training. `share`: as many
        of them an expert makes, for it needs an answer in both directions."""
        task = self._task
        steps = share * (self._batches // task.batches_per_step)
        rate = task.dense_learning_rate if self._arm.is_dense else task.learning_rate
        made = 0

        def lower(optimizer: torch.optim.Optimizer, *_: object) -> None:
            nonlocal made
            made += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * max(LEAST_RATE, 1.0 - made / steps)

        optimizer = torch.optim.Adam(parameters, lr=rate, fused=True)
        optimizer.register_step_post_hook(lower)
        return optimizer

    def _mixture(self, grid: ExpertGrid, experts: LocalExperts, portal: Portal) -> nn.Module:
        gate = GridGate(self._task.width, grid)
        return DMoE(gate, experts, portal, k=self._arm.active, balance=BALANCE)

    def run(self, look_every: int) -> dict[str, Any]:
        task, began = self._task, time.monotonic()
        optimizer = self._optimizer(self._model.parameters())
        trainer = AsyncTrainer(self._model, self._share_of_loss, in_flight=self._arm.in_flight)
        curve, staleness = [(0, self._look())], 0
        losses = deque[float](maxlen=max(1, self._batches // LAST_SHARE))
        for turn, done in enumerate(trainer.run(task.batches(self._seed)), start=1):
            staleness += done.staleness
            losses.append(done.loss * task.batches_per_step)
            if turn % task.batches_per_step == 0:
                optimizer.step()
                optimizer.zero_grad()
            if turn % look_every == 0:
                curve.append((turn, self._look()))
            if turn == self._batches:
                break
        values = [value for _, value in curve[-LAST_LOOKS:]]
        return {
            "curve": curve,
            "final": round(sum(values) / len(values), 4),
            "training_loss": round(sum(losses) / len(losses), 4),
            "dropped": trainer.dropped,
            "staleness": round(staleness / self._batches, 1),
            "failed_calls": round(self._failed_share(), 4),
            "expert_steps": sum(experts.steps for experts in self._experts),
            "batches_per_s": round(self._batches / (time.monotonic() - began), 1),
        }

    def _share_of_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._task.loss_of(model, batch) / self._task.batches_per_step

    def _look(self) -> float:
        self._looked_at.load_state_dict(self._model.state_dict())
        with torch.no_grad():
            return round(self._task.value_of(self._looked_at), 4)

    def _failed_share(self) -> float:
        calls = sum(experts.calls for experts in self._experts)
        return sum(experts.failures for experts in self._experts) / calls
