"""Clipping the averaged gradient by its global norm: the same factor, to the bit, at every peer.

    factor = clipping_factor(averaged, max_norm)         # min(1, max_norm / |averaged|)

The norm is of what all peers hold after the averaging, so that a run clips as one computer with
the whole batch would, whatever the parts were like.

Easy to get wrong: a float32 reduction depends on how many threads and which instructions a
machine has, and peers whose factors differ in the last bit drift apart. So the squares are summed
in double precision, and the factor is rounded to single: that two machines still differ would
need a sum within 1e-16 of a rounding boundary that is 1e-8 wide.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

VALUES_AT_ONCE = 1 << 18
"""Values that are widened to double precision at a time: 2 MiB, which stays in a cache."""


def global_norm(values: Tensor) -> float:
    """The Euclidean norm of a flat tensor, in double precision."""
    total = 0.0
    for piece in torch.split(values, VALUES_AT_ONCE):
        wide = piece.double()
        total += float(torch.dot(wide, wide))
    return math.sqrt(total)


def clipping_factor(norm: float, max_norm: float) -> float:
    """What the gradient is multiplied by, a number that float32 can hold; 1.0 is: not at all."""
    if norm <= max_norm:
        return 1.0
    return float(torch.tensor(max_norm / norm, dtype=torch.float32))
