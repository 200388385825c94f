"""Clipping the averaged gradient by its global norm: the same factor, to the bit, at every peer.

    factor = clipping_factor(global_norm(averaged), max_norm)      # min(1, max_norm / norm)

The norm is of what all peers hold after the averaging, so that a run clips as one computer with
the whole batch would, whatever the parts were like.

Easy to get wrong: a float32 reduction depends on how many threads and which instructions a
machine has, and peers whose factors differ in the last bit drift apart. So the squares are summed
in double precision, and the factor keeps fewer digits than the sum has: that two machines still
differ would need a sum within some 1e-16 of the boundary between two factors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

VALUES_AT_ONCE = 1 << 18
"""Values that are widened to double precision at a time: 2 MiB, which stays in a cache."""

TORCH_EPSILON = 1e-6  # which torch adds to the norm

FACTOR_BITS = 44
"""Of the factor's mantissa: relative steps of 6e-14, small beside the 1e-12 that a run in double
precision is held to, and large beside what the order of a sum in double precision changes."""


def global_norm(values: Tensor) -> float:
    """The Euclidean norm of a flat tensor, in double precision."""
    total = 0.0
    for piece in torch.split(values, VALUES_AT_ONCE):
        wide = piece.double()
        total += float(torch.dot(wide, wide))
    return math.sqrt(total)


def clipping_factor(norm: float, max_norm: float) -> float:
    """What the gradient is multiplied by, as in torch.nn.utils.clip_grad_norm_; 1.0: not at all."""
    factor = max_norm / (norm + TORCH_EPSILON)
    if factor >= 1.0:
        return 1.0
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(math.ldexp(mantissa, FACTOR_BITS)), exponent - FACTOR_BITS)
