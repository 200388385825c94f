"""The signature has everything that a run's peers must share, and differences are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3

from models.registry import schedule_factory
from protocols.accumulation.local_steps import LocalSteps
from protocols.accumulation.options import description_of
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.accumulation.progress_slot import SIGNATURE_BYTES
from protocols.accumulation.steps import Factory, GradientSteps, Scheduler, Steps
from protocols.accumulation.training_description import (
    _DOMAIN,
    TrainingDescription,
    as_setting,
    how_it_differs,
)
from protocols.rpc import decode, encode

ADAM: Factory = partial(torch.optim.AdamW, lr=0.01)


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)


def decayed_groups(
    named: list[tuple[str, torch.nn.Parameter]],
) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": named[:1], "weight_decay": 0.0},
        {"params": named[1:]},
    ]
    return torch.optim.AdamW(groups)


def described(
    *,
    inputs: int = 4,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    buffer: torch.dtype = torch.int64,
    factory: Factory = ADAM,
    scheduler: Scheduler | None = None,
    codec: Codecs = "none",
    local_steps: int = 1,
    fragments: int = 1,
    target_batch: int = 4096,
    max_norm: float | None = 1.0,
    average_parameters_every: int = 0,
    group_size: int = 256,
    approximate: bool = False,
    powersgd_rank: int = 0,
    delayed: bool = False,
    fp16: bool = False,
    further: dict[str, str] | None = None,
) -> TrainingDescription:
    model = torch.nn.Linear(inputs, 2, dtype=dtype)
    model.bias.requires_grad = not frozen
    parameters = Parameters(model.named_parameters())
    buffers = {"count": torch.zeros((), dtype=buffer)}
    steps: Steps
    if local_steps > 1:
        steps = LocalSteps(
            parameters,
            factory,
            scheduler,
            max_norm=max_norm,
            codec=codec,
            scales_loss=fp16,
            buffers=buffers,
            fragments=fragments,
        )
    else:
        steps = GradientSteps(
            parameters,
            factory,
            scheduler,
            delayed=delayed,
            max_norm=max_norm,
            codec=codec,
            scales_loss=fp16,
            buffers=buffers,
        )
    return description_of(
        steps,
        target_batch=target_batch,
        local_steps=local_steps,
        fragments=fragments,
        max_norm=max_norm,
        average_parameters_every=average_parameters_every,
        group_size=group_size,
        approximate=approximate,
        powersgd_rank=powersgd_rank,
        further=further or {},
    )


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (partial(described, inputs=5), "model/weight is 2×4 here and 2×5 there"),
        (partial(described, dtype=torch.float64), "model/bias is float32 here and float64 there"),
        (partial(described, buffer=torch.int32), "buffer/count is int64 here and int32 there"),
        (partial(described, frozen=True), "bias is trained only here"),
        (
            partial(described, factory=partial(torch.optim.SGD, lr=0.01)),
            "the optimizer is AdamW here and SGD there",
        ),
        (
            partial(described, factory=partial(torch.optim.AdamW, lr=0.02)),
            "the optimizer's lr is 0.01 here and 0.02 there",
        ),
        (
            partial(described, factory=partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95))),
            "the optimizer's betas is (0.9, 0.999) here and (0.9, 0.95) there",
        ),
        (
            partial(described, factory=decayed_groups),
            "the optimizer has 1 param groups here and 2 there",
        ),
        (partial(described, scheduler=one_cycle), "the schedule is none here and OneCycleLR there"),
        (
            partial(described, scheduler=schedule_factory({"name": "cosine", "steps": 9})),
            "the schedule is none here and Schedule(cosine, warmup=0, steps=9, floor=0, power=2) "
            "there",
        ),
        (partial(described, codec="float16"), "the codec is none here and float16 there"),
        (
            partial(described, codec={"bias": "float16"}),
            "the codec of bias is none here and float16 there",
        ),
        (partial(described, target_batch=2048), "the target batch is 4,096 here and 2,048 there"),
        (partial(described, max_norm=None), "max_norm is 1 here and none there"),
        (partial(described, local_steps=8), "local_steps is 1 here and 8 there"),
        (partial(described, powersgd_rank=8), "powersgd_rank is not set here and 8 there"),
        (partial(described, local_steps=8, fragments=2), "fragments is not set here and 2 there"),
        (
            partial(described, average_parameters_every=10),
            "average_parameters_every is 0 here and 10 there",
        ),
        (partial(described, group_size=64), "group_size is 256 here and 64 there"),
        (partial(described, approximate=True), "approximate is false here and true there"),
        (partial(described, further={"k": "4"}), "k is not set here and 4 there"),
    ],
)
def test_a_difference_changes_the_signature_and_is_reported(
    theirs: Callable[[], TrainingDescription], words: str
) -> None:
    mine, other = described(), theirs()
    assert mine.digest != other.digest
    assert words in how_it_differs(mine, other)


def test_fragments_are_the_only_difference_of_peers_that_differ_in_them() -> None:
    """The order of the parameters is that of the model."""
    mine, other = described(local_steps=8), described(local_steps=8, fragments=2)
    assert how_it_differs(mine, other) == ["fragments is not set here and 2 there"]


@pytest.mark.parametrize(
    "theirs",
    [
        described,
        partial(described, delayed=True),
        partial(described, fp16=True),
        partial(described, factory=partial(torch.optim.AdamW, lr=0.01, foreach=True)),
    ],
    ids=["nothing", "delayed", "precision", "how torch computes"],
)
def test_allowed_differences_do_not_change_the_signature(
    theirs: Callable[[], TrainingDescription],
) -> None:
    assert described().digest == theirs().digest
    assert how_it_differs(described(), theirs()) == []


def test_without_anything_further_the_signature_is_that_of_older_peers() -> None:
    mine = described()
    older = msgspec.structs.astuple(mine)[:-1]
    assert decode(TrainingDescription, encode(older)) == mine
    assert mine.digest == blake3(_DOMAIN + encode(older)).digest(SIGNATURE_BYTES)


def test_it_travels_and_comes_back_the_same() -> None:
    mine = described(codec="float16", factory=decayed_groups, further={"k": "4"})
    assert decode(TrainingDescription, encode(mine)) == mine
    assert decode(TrainingDescription, encode(mine)).digest == mine.digest


def test_a_few_differences_are_listed_and_the_rest_counted() -> None:
    other = described(
        inputs=5,
        factory=partial(torch.optim.SGD, lr=1.0),
        scheduler=one_cycle,
        local_steps=3,
        target_batch=1,
        max_norm=None,
        average_parameters_every=0,
    )
    found = how_it_differs(described(), other)
    assert len(found) == 6
    assert found[-1] == "and 2 more"


def test_settings_of_any_type_become_text() -> None:
    values = [True, None, 0.1, (0.9, [1, 2]), "adam", torch.zeros(1)]
    assert [as_setting(one) for one in values] == [
        "True",
        "None",
        "0.1",
        "(0.9, (1, 2))",
        "adam",
        "Tensor",
    ]
