"""The tensors that results are written into: made once, and used again by every round.

Easy to get wrong: a buffer is free when it is not what is being averaged. The caller may well
average the last result further, and that is one of these.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ResultBuffers:
    """At most two buffers, of the size and dtype that were asked for last."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def other_than(self, source: Tensor) -> Tensor:
        """A buffer for as many values of the dtype of `source`, which shares no memory with it.

        What is in it is lost."""
        self._buffers = [
            one
            for one in self._buffers
            if one.numel() == source.numel() and one.dtype == source.dtype
        ]
        for buffer in self._buffers:
            if not _share_memory(buffer, source):
                return buffer
        self._buffers.append(torch.empty(source.numel(), dtype=source.dtype))
        return self._buffers[-1]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
