"""Models, optimizers and schedules from names and plain settings; impossible ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.errors import ModelsError, WrongSettings
from models.gpt import GPT, GPTSettings
from models.lamb import Lamb
from models.lars import Lars
from models.registry import (
    MODELS,
    OPTIMIZERS,
    build_model,
    model_settings,
    optimizer_factory,
    schedule_factory,
)
from models.schedules import DECAYS


def test_every_size_of_every_model_can_be_built() -> None:
    for name, kind in MODELS.items():
        for size in kind.sizes:
            assert build_model({"name": name, "size": size}, seed=None).plain_settings()


def test_other_keys_change_single_fields_of_a_size() -> None:
    read = model_settings({"name": "gpt", "size": "small", "context": 512})
    assert read == GPTSettings(context=512, width=384, layers=6, heads=6)


def test_the_default_is_the_smallest_gpt() -> None:
    assert model_settings({"name": "gpt"}) == model_settings({"name": "gpt", "size": "tiny"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "The model has no name. There are: albert, classifier, dmoe_classifier,"),
        ({"name": "gtp"}, "called 'gtp', and there is none. Did you mean gpt?"),
        ({"name": 5}, "called 5, and there is none"),
        ({"name": "gpt", "size": "smal"}, "no size 'smal' of the model gpt. Did you mean small?"),
        ({"name": "gpt", "leyers": 2}, "'leyers' for the model gpt. Did you mean layers?"),
        ({"name": "gpt", "layers": "2"}, "'layers' of the model gpt cannot be right: Expected"),
        ({"name": "gpt", "layers": True}, "'layers' of the model gpt cannot be right"),
        ({"name": "gpt", "layers": 0}, "Expected `int` >= 1"),
        ({"name": "gpt", "width": 10**9}, "Expected `int` <= 16384"),
        ({"name": "gpt", "width": 100, "heads": 3}, "multiple of the heads"),
        ({"name": "classifier", "width": 12}, "multiple of 8"),
        ({"name": "albert", "vocabulary": {"size": 3}}, "missing required field"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_is_refused_with_the_nearest_right_name(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(WrongSettings) as refused:
        build_model(settings, seed=None)
    assert said in str(refused.value)
    assert refused.value.exit_code == 2


KINDS: list[tuple[dict[str, Any], type[torch.optim.Optimizer]]] = [
    ({"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ({"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]}, torch.optim.AdamW),
    ({"name": "lamb", "lr": 0.00176, "largest_norm": 10.0}, Lamb),
    ({"name": "lars", "lr": 1}, Lars),
]


def test_every_optimizer_is_tried_here() -> None:
    assert {settings["name"] for settings, _ in KINDS} == set(OPTIMIZERS)


@pytest.mark.parametrize(("settings", "kind"), KINDS, ids=list(OPTIMIZERS))
def test_every_optimizer_is_made_for_named_parameters_and_steps(
    settings: dict[str, Any], kind: type[torch.optim.Optimizer]
) -> None:
    model = GPT(GPTSettings(context=8, width=16, layers=1, heads=2))
    optimizer = optimizer_factory({"weight_decay": 0.3, **settings})(model.named_parameters())
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {settings["lr"]}
    before = [p.detach().clone() for p in model.parameters()]
    model.loss(torch.arange(18, dtype=torch.uint8).view(2, 9)).backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_it_steps_one_parameter_after_the_other_in_a_stated_order() -> None:
    """The groups' order decides where a state's tensors belong: decayed ones first, as named."""
    model = GPT(GPTSettings(context=8, width=16, layers=1, heads=2))
    optimizer = optimizer_factory({"name": "lamb", "lr": 0.1})(model.named_parameters())
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    expected = sorted(dict(model.named_parameters()).items(), key=lambda one: one[1].dim() < 2)
    assert names == [name for name, _ in expected]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "lam", "lr": 0.1}, "Did you mean lamb?"),
        ({"name": "adamw"}, "The settings of the optimizer adamw cannot be right: Object missing"),
        ({"name": "adamw", "lr": 0.1, "beta": [0.9, 0.9]}, "Did you mean betas?"),
        ({"name": "adamw", "lr": 0.1, "betas": [0.9, 1.0]}, "'betas[1]' of the optimizer adamw"),
        ({"name": "lars", "lr": -1.0}, "Expected `float` >= 0.0"),
        ({"name": "sgd", "lr": 0.1, "nesterov": True}, "needs a momentum"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_before_there_is_a_model(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(WrongSettings) as refused:
        optimizer_factory(settings)
    assert said in str(refused.value)


@pytest.mark.parametrize("decay", DECAYS)
def test_every_schedule_is_made_for_an_optimizer(decay: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule_factory({"name": decay, "warmup": 3, "steps": 10})(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "cosin", "steps": 5}, "Did you mean cosine?"),
        ({"name": "cosine", "step": 5}, "Did you mean steps?"),
        ({"name": "cosine"}, "cannot end at step 0"),
        ({"name": "cosine", "decay": "linear", "steps": 5}, "is its `name`"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelsError) as refused:
        schedule_factory(settings)
    assert said in str(refused.value)
