"""Takes out what a torch optimizer remembers, by the names of parameters, and puts it back.

    tree = optimizer_tree(optimizer, names)            # {"groups": …, "statistics": …, "rest": …}
    loadable = prepared(optimizer, names, tree)        # StateRefused, before anything is touched
    load(optimizer, loadable)

It works for any optimizer whose state_dict has tensors and plain values. Each peer keeps its own
switches for how a device computes (`fused`, `foreach`, …), so a peer with a GPU and one without can
share a state.

Easy to get wrong: torch's `load_state_dict` casts statistics to the dtype of their parameter. If
they were kept in another one (float32 beside bfloat16 weights), that would lose bits, so they are
put in place again afterwards, as they came.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protocols.accumulation.signature import shape_text
from protocols.accumulation.state_manifest import StateRefused, check_kinds, shaped_like

# ---- which statistics an optimizer has
#
# Finds out which statistics an optimizer keeps for a parameter, before it has kept any.
#
#   expected = ExpectedStatistics(optimizer)
#   expected.check("model.weight", parameter, group, statistics)      # StateRefused, by name
#
# A newcomer's optimizer has none before its first step, so those of a fetched state could not be
# compared with anything. A statistic of the wrong shape breaks the first step, or makes it wrong
# without an error. So the optimizer's own class makes a step with a parameter of six values, with
# the settings of each group. The result shows which statistics there are, and whether each has the
# parameter's shape or is one value for all of it.
#
# Easy to get wrong: the small parameter must not get into the optimizer's own state, hooks or
# schedule. If no such step can be made (LBFGS needs a closure), nothing is known, and nothing is
# refused.

log = logging.getLogger("potluck.state")

SMALL = (2, 3)  # two dimensions, for optimizers that keep statistics for each dimension


@dataclass(frozen=True)
class _Kept:
    """One statistic. If neither `is_like_parameter` nor `is_one_value`, its shape follows from the
    parameter's in another way (factored statistics). `dtype`: None is the parameter's."""

    sort: str
    is_like_parameter: bool
    is_one_value: bool
    dtype: torch.dtype | None


class ExpectedStatistics:
    """The statistics of an optimizer, for each of its param groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[int, dict[str, _Kept] | None] = {}

    def check(
        self, name: str, parameter: Tensor, group: Mapping[str, Any], statistics: Mapping[str, Any]
    ) -> None:
        """Raise StateRefused unless these can be the statistics of this parameter."""
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
            what = f"The state's statistic {key} of {name}"
            if (there := _sort_of(value)) != (here := known[key].sort):
                raise StateRefused(f"{what} is {there}, where {here} is expected.")
            if isinstance(value, Tensor):
                _check_one(what, parameter, value, known[key])

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
    is_other = not kept.is_one_value and value.dtype not in (dtype, torch.float32)
    if is_other or value.is_floating_point() != dtype.is_floating_point:
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
    except Exception as error:  # noqa: BLE001 - any optimizer, in a step that is only a test
        log.info("the statistics of %s are not known yet: %s", type(optimizer).__name__, error)
        return None
    return {
        str(key): _Kept(
            sort=_sort_of(value),
            is_like_parameter=value.shape == small.shape,
            is_one_value=value.numel() == 1,
            dtype=None if value.dtype is dtype else value.dtype,
        )
        if isinstance(value, Tensor)
        else _Kept(_sort_of(value), is_like_parameter=False, is_one_value=True, dtype=None)
        for key, value in trial.state[small].items()
    }


def _sort_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    return "a number" if isinstance(value, bool | int | float) else f"a {type(value).__name__}"


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


OWN_SETTINGS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)
"""Entries of a param group that stay a peer's own: its parameters, and how the device computes."""


def names_of_parameters(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> list[str]:
    """The name of each parameter of the optimizer, in the optimizer's order."""
    by_identity = {id(parameter): name for name, parameter in named.items()}
    parameters = _parameters(optimizer)
    return [by_identity.get(id(one), f"#{number}") for number, one in enumerate(parameters)]


def optimizer_tree(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """The settings of its param groups, and its statistics for each parameter."""
    content = optimizer.state_dict()
    return {
        "groups": [
            {key: value for key, value in group.items() if key not in OWN_SETTINGS}
            for group in content["param_groups"]
        ],
        "statistics": {
            names[key] if isinstance(key, int) and key < len(names) else f"#{key}": value
            for key, value in content["state"].items()
        },
        "rest": {
            key: value for key, value in content.items() if key not in ("state", "param_groups")
        },
    }


def prepared(
    optimizer: torch.optim.Optimizer, names: list[str], tree: Mapping[str, Any]
) -> dict[str, Any]:
    """A state_dict for this optimizer, checked. Its tensors are those of the tree."""
    own = optimizer.state_dict()
    groups, statistics = tree["groups"], tree["statistics"]
    if len(groups) != len(own["param_groups"]):
        raise StateRefused(
            f"The state has {len(groups)} param groups; the optimizer here has "
            f"{len(own['param_groups'])}."
        )
    for number, (theirs, mine) in enumerate(zip(groups, own["param_groups"], strict=True)):
        check_kinds(theirs, mine, f"param group {number}")
    numbers = {name: number for number, name in enumerate(names)}
    unknown = [name for name in statistics if name not in numbers]
    if unknown:
        raise StateRefused(f"The state has statistics of {unknown[0]}, which is not trained here.")
    parameters = _parameters(optimizer)
    group_of = [group for group in optimizer.param_groups for _ in group["params"]]
    expected = ExpectedStatistics(optimizer)
    for name, one in statistics.items():
        if not isinstance(one, dict):
            raise StateRefused("The state has statistics that are not kept by name.")
        number = numbers[name]
        if one:
            expected.check(name, parameters[number], group_of[number], one)
    return {
        **{key: cloned(shaped_like(one, own.get(key))) for key, one in tree["rest"].items()},
        "state": {numbers[name]: one for name, one in statistics.items()},
        "param_groups": [
            _merged(theirs, mine) for theirs, mine in zip(groups, own["param_groups"], strict=True)
        ],
    }


def load(optimizer: torch.optim.Optimizer, loadable: dict[str, Any]) -> None:
    """Load the state_dict that `prepared` returned, into the memory that the optimizer has already
    where that fits: a large state is not held twice."""
    parameters = _parameters(optimizer)
    group_of = [group for group in optimizer.param_groups for _ in group["params"]]
    placed: dict[int, dict[str, Any]] = {}
    with torch.no_grad():
        for number, one in loadable["state"].items():
            parameter = parameters[number]
            present = optimizer.state.get(parameter, {})
            placed[number] = _placed(one, present, parameter, group_of[number])
    optimizer.load_state_dict({**loadable, "state": placed})
    for number, statistics in placed.items():
        kept = optimizer.state[parameters[number]]
        for key, value in statistics.items():
            if isinstance(value, Tensor) and (
                kept[key].dtype != value.dtype or kept[key].device != value.device
            ):
                kept[key] = value


def _merged(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a param group: theirs, except for the entries that stay a peer's own."""
    own = {key: value for key, value in mine.items() if key in OWN_SETTINGS or key not in theirs}
    return {**cloned(shaped_like(dict(theirs), mine)), **own}


def _placed(
    statistics: Any, present: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]
) -> dict[str, Any]:
    """One parameter's statistics: in the memory of those that are present where they are of the
    same kind, otherwise copies, on the device where this optimizer needs them."""
    memory = Counter(_memory_of(one) for one in present.values() if isinstance(one, Tensor))

    def place(value: Tensor, key: Any) -> Tensor:
        own = present.get(key)
        if isinstance(own, Tensor):
            is_alike = (own.dtype, own.shape) == (value.dtype, value.shape)
            if is_alike and memory[_memory_of(own)] == 1:
                return own.copy_(value)
            return value.detach().to(own.device, copy=True)
        on_device = value.dim() > 0 or group.get("capturable") or group.get("fused")
        return value.detach().to(parameter.device if on_device else "cpu", copy=True)

    return {
        key: place(value, key) if isinstance(value, Tensor) else cloned(value)
        for key, value in shaped_like(statistics, present).items()
    }


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def cloned(tree: Any) -> Any:
    """The same tree with copies of its tensors."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        for key, one in tree.items():
            tree[key] = cloned(one)
        return tree
    if isinstance(tree, list | tuple):
        items = [cloned(one) for one in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
