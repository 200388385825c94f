"""Names to models, optimizers and schedules, built from the plain settings of a run's file.

    [model]                [optimizer]             [schedule]
    name = "gpt"           name = "lamb"           name = "linear"
    size = "tiny"          lr = 0.00176            warmup = 100
    context = 256          weight_decay = 0.01     steps = 10_000

`size` names a shape of the model, and other keys then change single fields of it. What is not
known is refused, with the nearest right name. A model of one's own needs none of this:
`CollaborativeOptimizer` takes any.

The one thing easy to get wrong: the seed of the initial parameters is part of what all peers must
agree on, and therefore an argument without a default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from models.schedules import Schedule
from models.trainable import Trainable

NamedParameters = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]
ScheduleFactory = Callable[[Optimizer], Schedule]


def build_model(settings: Mapping[str, Any], *, seed: int | None) -> Trainable:
    """The network that these settings describe; with `seed=None` on the meta device."""
    raise NotImplementedError


def optimizer_factory(settings: Mapping[str, Any]) -> OptimizerFactory:
    """What makes the optimizer for `named_parameters`; biases and norms are not decayed."""
    raise NotImplementedError


def schedule_factory(settings: Mapping[str, Any]) -> ScheduleFactory:
    """What makes the schedule of an optimizer's learning rates; one step of it is one epoch."""
    raise NotImplementedError
