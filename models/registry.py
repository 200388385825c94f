"""Names to models, optimizers and schedules, built from the plain settings of a run's file.

    [model]                [optimizer]             [schedule]
    name = "gpt"           name = "lamb"           name = "linear"
    size = "tiny"          lr = 0.00176            warmup = 100
    context = 256          weight_decay = 0.01     steps = 10_000

`size` names a shape of the model, and other keys then change single fields of it. Unknown names and
keys are refused, with the nearest known one. `CollaborativeOptimizer` takes any model, also one
that is not listed here.

The seed of the initial parameters is part of what all peers must agree on, so it is an argument
without a default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from torch import nn
from torch.optim import Optimizer

from models import albert, classifier, dmoe, gpt, swav
from models.dmoe import MixtureFactory
from models.errors import WrongSettings, nearest
from models.lamb import Lamb
from models.lars import Lars
from models.schedules import DECAYS, Schedule, ScheduleSettings
from models.settings import read_settings, take_name
from models.trainable import Trainable
from models.transformers_model import SIZES as TRANSFORMERS_SIZES
from models.transformers_model import TransformersModel, TransformersSettings
from models.uncompiled import SGD, AdamW

NamedParameters = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]
ScheduleFactory = Callable[[Optimizer], Schedule]


class ModelKind(NamedTuple):
    settings: type[msgspec.Struct]
    sizes: Mapping[str, msgspec.Struct]
    build: Callable[[Any, int | None], Trainable]


MODELS: dict[str, ModelKind] = {
    "gpt": ModelKind(gpt.GPTSettings, gpt.SIZES, gpt.GPT),
    "albert": ModelKind(albert.AlbertSettings, albert.SIZES, albert.Albert),
    "classifier": ModelKind(classifier.ClassifierSettings, classifier.SIZES, classifier.Classifier),
    "swav": ModelKind(swav.SwavSettings, swav.SIZES, swav.Swav),
    "transformers": ModelKind(TransformersSettings, TRANSFORMERS_SIZES, TransformersModel),
}


class MixedKind(NamedTuple):
    """A model with mixtures of experts."""

    settings: type[msgspec.Struct]
    sizes: Mapping[str, msgspec.Struct]
    build: Callable[[Any, MixtureFactory, int | None], Trainable]


MIXED_MODELS: dict[str, MixedKind] = {
    "dmoe_gpt": MixedKind(dmoe.DMoEGPTSettings, dmoe.GPT_SIZES, dmoe.DMoEGPT),
    "dmoe_classifier": MixedKind(
        dmoe.DMoEClassifierSettings, dmoe.CLASSIFIER_SIZES, dmoe.DMoEClassifier
    ),
}

ALL_MODELS: dict[str, ModelKind | MixedKind] = {**MODELS, **MIXED_MODELS}


def model_settings(settings: Mapping[str, Any]) -> msgspec.Struct:
    """The typed settings for these plain ones: those of the size, with the changes."""
    name = take_name(settings, ALL_MODELS, "model")
    kind = ALL_MODELS[name]
    own = {key: value for key, value in settings.items() if key not in ("name", "size")}
    if "size" in settings:
        size = settings["size"]
        if not isinstance(size, str) or size not in kind.sizes:
            raise WrongSettings(
                f"There is no size {size!r:.60} of the model {name}.",
                advice=nearest(str(size), kind.sizes),
            )
        own = {**msgspec.structs.asdict(kind.sizes[size]), **own}
    return read_settings(own, kind.settings, f"the model {name}")


def build_model(
    settings: Mapping[str, Any], *, seed: int | None, mixture: MixtureFactory | None = None
) -> Trainable:
    """The network that these settings describe; with `seed=None` on the meta device. `mixture`
    makes the mixtures of experts, for a model that has some."""
    read, name = model_settings(settings), settings["name"]
    if name in MODELS:
        return MODELS[name].build(read, seed)
    if mixture is None:
        raise WrongSettings(
            f"The model {name} has mixtures, and there are no experts for them.",
            advice="In a run, describe them below [experts].",
        )
    return MIXED_MODELS[name].build(read, mixture, seed)


Rate = Annotated[float, Meta(ge=0.0, le=1e6)]
Small = Annotated[float, Meta(gt=0.0, le=1.0)]
Decay = Annotated[float, Meta(ge=0.0, le=1e6)]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class SGDSettings(_Settings, frozen=True):
    """torch.optim.SGD, without dampening."""

    lr: Rate
    momentum: Share = 0.0
    nesterov: bool = False
    weight_decay: Decay = 0.0

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise WrongSettings(
                "Nesterov's step needs a momentum.", advice="Set `momentum`, for example to 0.9."
            )


class AdamSettings(_Settings, frozen=True):
    """torch.optim.AdamW."""

    lr: Rate
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Small = 1e-8
    weight_decay: Decay = 0.01


class LambSettings(_Settings, frozen=True):
    """`models.lamb.Lamb`. `largest_norm` is the upper bound of the paper's phi."""

    lr: Rate
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Small = 1e-6
    weight_decay: Decay = 0.01
    largest_norm: Annotated[float, Meta(gt=0.0)] | None = None


class LarsSettings(_Settings, frozen=True):
    """`models.lars.Lars`."""

    lr: Rate
    momentum: Share = 0.9
    weight_decay: Decay = 5e-4
    trust: Small = 1e-3


def _sgd(groups: list[dict[str, Any]], s: SGDSettings) -> Optimizer:
    return SGD(groups, s.lr, s.momentum, 0.0, s.weight_decay, s.nesterov)


def _adamw(groups: list[dict[str, Any]], s: AdamSettings) -> Optimizer:
    return AdamW(groups, s.lr, s.betas, s.eps, s.weight_decay)


def _lamb(groups: list[dict[str, Any]], s: LambSettings) -> Optimizer:
    largest = math.inf if s.largest_norm is None else s.largest_norm
    return Lamb(groups, s.lr, s.betas, s.eps, s.weight_decay, norm_bounds=(0.0, largest))


def _lars(groups: list[dict[str, Any]], s: LarsSettings) -> Optimizer:
    return Lars(groups, s.lr, s.momentum, s.weight_decay, s.trust)


class OptimizerKind(NamedTuple):
    settings: type[msgspec.Struct]
    build: Callable[[list[dict[str, Any]], Any], Optimizer]


OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind(SGDSettings, _sgd),
    "adamw": OptimizerKind(AdamSettings, _adamw),
    "lamb": OptimizerKind(LambSettings, _lamb),
    "lars": OptimizerKind(LarsSettings, _lars),
}


def optimizer_factory(settings: Mapping[str, Any]) -> OptimizerFactory:
    """A factory for the optimizer of `named_parameters`; biases and norms are not decayed.

    The settings are checked here, before there is a model.
    """
    name = take_name(settings, OPTIMIZERS, "optimizer")
    kind = OPTIMIZERS[name]
    own = {key: value for key, value in settings.items() if key != "name"}
    read = read_settings(own, kind.settings, f"the optimizer {name}")
    return lambda named_parameters: kind.build(parameter_groups(named_parameters), read)


def schedule_factory(settings: Mapping[str, Any]) -> ScheduleFactory:
    """A factory for the schedule of an optimizer's learning rates; one step of it is one epoch."""
    name = take_name(settings, dict.fromkeys(DECAYS), "schedule")
    own = {key: value for key, value in settings.items() if key != "name"}
    if "decay" in own:
        raise WrongSettings("The decay of a schedule is its `name`.", advice="Leave `decay` out.")
    read = read_settings({"decay": name, **own}, ScheduleSettings, f"the schedule {name}")
    return lambda optimizer: Schedule(optimizer, read)


# Which parameters are decayed, and adapted layer by layer: all but biases and the scales of norms.
# Both are recognized by having one dimension. Decaying them moves a norm's scale to zero for no
# good reason, and the norm of a bias says nothing about how far a step may take it. Most
# implementations of LAMB and LARS do this, though the papers' algorithms do not mention it.


def parameter_groups(named_parameters: NamedParameters) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer; a group that would be empty is left out.

    The second has no decay and, for Lamb and Lars, no adaptation (other optimizers keep that key
    and ignore it). Parameters that are not trained are left out.
    """
    decayed: list[tuple[str, nn.Parameter]] = []
    plain: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (decayed if parameter.dim() >= 2 else plain).append((name, parameter))
    groups: list[dict[str, Any]] = [
        {"params": decayed},
        {"params": plain, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
