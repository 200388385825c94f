"""What statistics an optimizer keeps for a parameter, found out before it has kept any.

    expected = ExpectedStatistics(optimizer)
    expected.check("model.weight", parameter, group, statistics)      # StateRefused, by name

A newcomer's optimizer has none before its first step, and what comes with a state would be put in
place unseen: one of the wrong shape breaks the first step, or makes it quietly wrong. So a step is
made with a parameter of six values, by the optimizer's own class and with the settings of each
group, and what that leaves behind says which statistics there are, and whether they are like the
parameter, or one value for all of it.

Easy to get wrong: the small parameter must not meet the optimizer's own state, hooks or schedule.
Where no such step can be made (LBFGS asks for a closure), nothing is known, and nothing refused.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protocols.accumulation.signature import shape_text
from protocols.accumulation.state_manifest import StateRefused

log = logging.getLogger("potluck.state")

SMALL = (2, 3)  # two dimensions, for optimizers that keep something for each


@dataclass(frozen=True)
class _Kept:
    """One statistic. Neither: it has another shape that follows from the parameter's (factored
    ones). `dtype`: None is the parameter's."""

    is_like_parameter: bool
    is_one_value: bool
    dtype: torch.dtype | None


class ExpectedStatistics:
    """Of an optimizer, for each of its param groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[int, dict[str, _Kept] | None] = {}

    def check(
        self, name: str, parameter: Tensor, group: Mapping[str, Any], statistics: Mapping[str, Any]
    ) -> None:
        """StateRefused unless these can be those of this parameter."""
        known = self._of_group(group, parameter.dtype)
        if known is None:
            return
        other = sorted(known.keys() ^ statistics.keys(), key=str)
        if other:
            where = "missing" if other[0] in known else "not one that is kept here"
            raise StateRefused(
                f"The state's statistic {other[0]} of {name} is {where}.",
                why="It was made with another optimizer, or another version of it.",
                advice="Take the optimizer that the run's organiser has published.",
            )
        for key, value in statistics.items():
            if isinstance(value, Tensor):
                _check_one(f"The state's statistic {key} of {name}", parameter, value, known[key])

    def _of_group(self, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, _Kept] | None:
        if id(group) not in self._known:
            self._known[id(group)] = _after_a_step(self._optimizer, group, dtype)
        return self._known[id(group)]


def _check_one(what: str, parameter: Tensor, value: Tensor, kept: _Kept) -> None:
    if kept.is_like_parameter and value.shape != parameter.shape:
        raise StateRefused(
            f"{what} is {shape_text(value.shape)}, where {shape_text(parameter.shape)} is expected."
        )
    if kept.is_one_value and value.numel() != 1:
        raise StateRefused(f"{what} is {shape_text(value.shape)}, where one value is expected.")
    dtype = parameter.dtype if kept.dtype is None else kept.dtype
    if not kept.is_one_value and value.dtype not in (dtype, torch.float32):
        here, there = (str(one).removeprefix("torch.") for one in (dtype, value.dtype))
        raise StateRefused(f"{what} is {there}, where {here} is expected.")


def _after_a_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, _Kept] | None:
    small = torch.nn.Parameter(torch.ones(SMALL, dtype=dtype))
    small.grad = torch.full_like(small, 0.5)
    settings = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
    own = {key: value for key, value in settings.items() if key in group}
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**copy.deepcopy(_without_parameters(group)), **own, "params": [small]}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(trial, hooks, OrderedDict())
    try:
        type(trial).step(trial)
    except Exception as error:  # noqa: BLE001 - anybody's optimizer, in a step that nobody needs
        log.info("what %s keeps is not known before a step: %s", type(optimizer).__name__, error)
        return None
    return {
        str(key): _Kept(
            is_like_parameter=value.shape == small.shape,
            is_one_value=value.numel() == 1,
            dtype=None if value.dtype is dtype else value.dtype,
        )
        if isinstance(value, Tensor)
        else _Kept(is_like_parameter=False, is_one_value=True, dtype=None)
        for key, value in trial.state[small].items()
    }


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
