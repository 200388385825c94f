"""What a torch optimizer remembers, by the names of parameters; and putting it back.

    tree = optimizer_tree(optimizer, names)            # {"groups": …, "statistics": …, "rest": …}
    loadable = prepared(optimizer, names, tree)        # StateRefused, before anything is touched
    load(optimizer, loadable)

Any optimizer does whose state_dict has tensors and plain values. Switches that concern only how a
device computes (`fused`, `foreach`, …) stay this peer's own: one with a GPU and one without can
share a state.

Easy to get wrong: torch's `load_state_dict` casts statistics to the dtype of their parameter. Where
they were kept in another (float32 beside bfloat16 weights), that would lose bits, so they are put
in place again as they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from protocols.accumulation.expected_statistics import ExpectedStatistics
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.state_tree import check_kinds, shaped_like

OWN_SETTINGS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)
"""Of a param group: which parameters it has, and how the device computes."""


def names_of_parameters(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> list[str]:
    """The name of each parameter of the optimizer, in its own order of them."""
    by_identity = {id(parameter): name for name, parameter in named.items()}
    parameters = _parameters(optimizer)
    return [by_identity.get(id(one), f"#{number}") for number, one in enumerate(parameters)]


def optimizer_tree(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """Settings of its param groups, and what it keeps for each parameter."""
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
    """A state_dict for this optimizer with copies of what the tree holds."""
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
        "state": {
            numbers[name]: _placed(
                one, optimizer.state.get(parameters[numbers[name]], {}),
                parameters[numbers[name]], group_of[numbers[name]],
            )
            for name, one in statistics.items()
        },
        "param_groups": [
            _merged(theirs, mine) for theirs, mine in zip(groups, own["param_groups"], strict=True)
        ],
    }  # fmt: skip


def load(optimizer: torch.optim.Optimizer, loadable: dict[str, Any]) -> None:
    """Put what `prepared` made in place."""
    optimizer.load_state_dict(loadable)
    parameters = _parameters(optimizer)
    for number, statistics in loadable["state"].items():
        kept = optimizer.state[parameters[number]]
        for key, value in statistics.items():
            if isinstance(value, Tensor) and (
                kept[key].dtype != value.dtype or kept[key].device != value.device
            ):
                kept[key] = value


def _merged(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a param group: theirs, but for what is a peer's own."""
    own = {key: value for key, value in mine.items() if key in OWN_SETTINGS or key not in theirs}
    return {**cloned(shaped_like(dict(theirs), mine)), **own}


def _placed(
    statistics: Any, present: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]
) -> dict[str, Any]:
    """Copies of one parameter's statistics where this optimizer wants to have them."""

    def place(value: Any, key: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own = present.get(key)
        if isinstance(own, Tensor):
            return value.detach().to(own.device, copy=True)
        on_device = value.dim() > 0 or group.get("capturable") or group.get("fused")
        return value.detach().to(parameter.device if on_device else "cpu", copy=True)

    return {
        key: place(value, key) if isinstance(value, Tensor) else cloned(value)
        for key, value in shaped_like(statistics, present).items()
    }


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
