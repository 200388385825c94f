"""Whether gradients can be averaged: finite, and within what their codec carries.

    check = Averageable(parameters, largest)
    name = check.first_wrong(gradients)            # None where all is well, as it nearly always is

A small model has many small tensors, and asking each of them costs more than reading its values. So
the small ones are gathered in a scratch that stays in the processor's cache, and looked at in one
pass; which one it was is found out only where something is wrong.

Easy to get wrong: NaN is in no order. It has to fail `value <= bound`, and not merely not pass
`value > bound`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocols.accumulation.parameters import Parameters

SCRATCH_VALUES = 1 << 18  # 1 MB of float32; a tensor that is larger is read where it is


@dataclass(frozen=True, eq=False)
class _Group:
    """Parameters by their numbers, looked at together. `scratch` has a view for each; None for a
    single one that is read where it is."""

    numbers: tuple[int, ...]
    bound: float
    scratch: Tensor | None
    views: tuple[Tensor, ...] = ()


class Averageable:
    """For one model. Invariant: each parameter that has values is in exactly one group."""

    def __init__(self, parameters: Parameters, largest: Sequence[float]) -> None:
        self._names, self._largest = parameters.names, largest
        sizes = [one.numel() for one in parameters.tensors]
        gathered = [n for n, size in enumerate(sizes) if 0 < size <= SCRATCH_VALUES]
        alone = [n for n, size in enumerate(sizes) if size > SCRATCH_VALUES]
        room = min(SCRATCH_VALUES, sum(sizes[n] for n in gathered))
        scratch = torch.empty(room, dtype=parameters.dtype, device=parameters.device)
        self._groups = [_Group((n,), largest[n], None) for n in alone]
        while gathered:
            numbers, end, views = [], 0, []
            while gathered and end + sizes[gathered[0]] <= room:
                n = gathered.pop(0)
                view = scratch[end : end + sizes[n]].view(parameters.tensors[n].shape)
                numbers.append(n)
                views.append(view)
                end += sizes[n]
            bound = min(largest[n] for n in numbers)
            self._groups.append(_Group(tuple(numbers), bound, scratch[:end], tuple(views)))

    @torch.no_grad()
    def first_wrong(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> str | None:
        """The first parameter whose gradient has a value beyond its codec, or that is no number.

        The gradients are `scale` times as large as what will be averaged.
        """
        ends = [torch.aminmax(one) for group in self._groups for one in _values(group, gradients)]
        if not ends:
            return None
        # The smallest and the largest values; NaN comes out as NaN. One wait for the device.
        found = torch.stack([one for pair in ends for one in pair]).abs_().max().item()
        if found <= _scaled(min(group.bound for group in self._groups), scale):
            return None
        return self._name(gradients, scale)

    def _name(self, gradients: Sequence[Tensor | None], scale: float) -> str | None:
        """One by one. Nothing is wrong with it after all where bounds differ."""
        for name, one, bound in zip(self._names, gradients, self._largest, strict=True):
            if one is not None and one.numel():
                furthest = torch.stack(torch.aminmax(one)).abs_().max().item()
                if not furthest <= _scaled(bound, scale):
                    return name
        return None


def _scaled(bound: float, scale: float) -> float:
    """Infinity is beyond any bound."""
    return min(bound * scale, sys.float_info.max)


def _values(group: _Group, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """What is to be looked at of a group, if anything."""
    if group.scratch is None:
        gradient = gradients[group.numbers[0]]
        return [] if gradient is None else [gradient.detach()]
    views, values = [], []
    for n, view in zip(group.numbers, group.views, strict=True):
        gradient = gradients[n]
        if gradient is None:
            view.zero_()
        else:
            views.append(view)
            values.append(gradient)
    if not values:
        return []
    torch._foreach_copy_(views, values)
    return [group.scratch]
