"""One batch over several GPUs of one machine, which are one peer: torch's own data parallelism.

The model lives on the first device; for each batch it is copied to the others, each computes the
loss of its part, and the gradients come back to the first, where the optimizer is.

Easy to get wrong: parts are not equal where the samples do not divide, so the mean is weighted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import parallel_apply, replicate

from models.trainable import Trainable, on_device


def spread_loss(model: Trainable, devices: Sequence[torch.device], batch: Any) -> Tensor:
    """The mean loss over all samples of the batch, on the first device."""
    parts = parts_of(batch, len(devices))
    used = list(devices[: len(parts)])
    replicas = replicate(model, used)
    there = [(on_device(part, device),) for part, device in zip(parts, used, strict=True)]
    losses = parallel_apply([replica.loss for replica in replicas], there, devices=used)  # type: ignore[misc]
    counts = [model.samples_in(part) for part in parts]
    weighted = [
        loss.to(used[0]) * (count / sum(counts)) for loss, count in zip(losses, counts, strict=True)
    ]
    return torch.stack(weighted).sum()


def parts_of(batch: Any, count: int) -> list[Any]:
    """The batch cut along its samples into at most so many parts, none of them empty."""
    if isinstance(batch, Tensor):
        return list(batch.chunk(count))
    cut = [tensor.chunk(count) for tensor in batch]
    return [type(batch)(*part) for part in zip(*cut, strict=True)]
