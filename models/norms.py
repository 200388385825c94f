"""The norm of a tensor as LAMB and LARS take it: the same bits, however it is summed.

A float32 sum depends on how many threads share it, and therefore on the machine. Summed in float64
and rounded to float32 once, two orders of summation agree but for one norm in millions: peers with
like processors keep bit-identical parameters whatever their number of cores.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm_of(tensor: Tensor) -> Tensor:
    """The Euclidean norm, as a scalar of the tensor's dtype on its device."""
    dtype = tensor.dtype if tensor.device.type == "mps" else torch.float64  # which mps has not
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.to(tensor.dtype)
