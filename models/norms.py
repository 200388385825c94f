"""The norm of a tensor for LAMB and LARS: the same bits, in whatever order it is summed.

A float32 sum depends on how many threads share it, and therefore on the machine. When summed in
float64 and rounded to float32 once, two orders of summation agree except for one norm in millions.
So peers with like processors keep bit-identical parameters whatever their number of cores.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm_of(tensor: Tensor) -> Tensor:
    """The Euclidean norm, as a scalar of the tensor's dtype on its device."""
    dtype = tensor.dtype if tensor.device.type == "mps" else torch.float64  # mps has no float64
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.to(tensor.dtype)
