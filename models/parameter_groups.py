"""Which parameters are decayed, and adapted layer by layer: all but biases and the scales of norms.

Both are told by having one dimension. Decaying them moves a norm's scale to zero for no good
reason, and the norm of a bias says nothing of how far a step may take it. It is what most
implementations of LAMB and LARS do, though the papers' algorithms do not say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

NamedParameters = Iterable[tuple[str, nn.Parameter]]


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
