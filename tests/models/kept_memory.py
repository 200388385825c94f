"""How many bytes a loss really keeps for its backward pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from models.trainable import Trainable


def kept_bytes(model: Trainable, batch: Any, precision: torch.dtype = torch.float32) -> int:
    """Of all storages that autograd keeps, each once; the parameters do not count."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # holds them, so that no address is given twice

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    autocast = nullcontext() if precision == torch.float32 else torch.autocast("cpu", precision)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        model.loss(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
