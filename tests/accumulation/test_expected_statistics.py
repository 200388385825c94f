"""Statistics that are not those of this optimizer are refused before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from models.lamb import Lamb
from models.lars import Lars
from protocols.accumulation.optimizer_state import ExpectedStatistics
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.training_state import capture, restore

Factory = Callable[..., torch.optim.Optimizer]
FACTORIES: dict[str, Factory] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": partial(torch.optim.RMSprop, centered=True),
    "lamb": partial(Lamb, lr=0.1),
    "lars": partial(Lars, lr=0.1),
}


def stepped(factory: Factory, *shape: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = factory([("w", parameter)])
    parameter.grad = torch.ones(shape)
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("name", FACTORIES)
def test_the_statistics_of_an_optimizer_fit_a_new_one(name: str) -> None:
    there, kept = stepped(FACTORIES[name], 4, 5)
    state = capture([("w", there)], (), kept, run="test", epoch=1, history=b"h" * 16)
    here = torch.nn.Parameter(torch.zeros(4, 5))
    fresh = FACTORIES[name]([("w", here)])
    restore(state, [("w", here)], (), fresh)
    again = capture([("w", here)], (), fresh, run="test", epoch=1, history=b"h" * 16)
    assert again.digest == state.digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda kept: kept.update(exp_avg=torch.zeros(5, 4)),
            "exp_avg of w is 5×4, where 4×5 is expected",
        ),
        (
            lambda kept: kept.update(exp_avg=torch.zeros(())),
            "exp_avg of w is one value, where 4×5 is expected",
        ),
        (
            lambda kept: kept.update(exp_avg=torch.zeros(4, 5, dtype=torch.float64)),
            "exp_avg of w is float64, where float32 is expected",
        ),
        (
            lambda kept: kept.update(step=torch.zeros(4, 5)),
            "step of w is 4×5, where one value is expected",
        ),
        (lambda kept: kept.pop("exp_avg_sq"), "exp_avg_sq of w is missing"),
        (
            lambda kept: kept.update(more=torch.zeros(4, 5)),
            "more of w is not one that is kept here",
        ),
    ],
)
def test_statistics_that_do_not_fit_are_refused_by_name_and_nothing_is_touched(
    change: Callable[[dict[str, Any]], object], words: str
) -> None:
    there, kept = stepped(torch.optim.AdamW, 4, 5)
    change(kept.state[there])
    state = capture([("w", there)], (), kept, run="test", epoch=1, history=b"h" * 16)
    here = torch.nn.Parameter(torch.zeros(4, 5))
    fresh = torch.optim.AdamW([("w", here)])
    with pytest.raises(StateRefused, match=words):
        restore(state, [("w", here)], (), fresh)
    assert not here.any()
    assert not fresh.state


def test_nothing_is_refused_for_an_optimizer_that_cannot_step_by_itself() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 5))
    optimizer = torch.optim.LBFGS([parameter])
    (group,) = optimizer.param_groups
    ExpectedStatistics(optimizer).check("w", parameter, group, {"d": torch.zeros(40)})


def test_finding_out_changes_nothing_of_the_optimizer() -> None:
    parameter, optimizer = stepped(torch.optim.AdamW, 4, 5)
    before, steps = parameter.detach().clone(), []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    ExpectedStatistics(optimizer).check(
        "w", parameter, optimizer.param_groups[0], optimizer.state[parameter]
    )
    assert torch.equal(parameter, before)
    assert list(optimizer.state) == [parameter]
    assert optimizer.state[parameter]["step"].item() == 1.0
    assert not steps
    assert schedule.last_epoch == 0
