"""One batch over several GPUs of one machine, which are one peer: torch's own data parallelism.

The model lives on the first device; for each batch it is copied to the others, each computes the
loss of its part, and the gradients come back to the first, where the optimizer is.

Easy to get wrong: parts are not equal where the samples do not divide, so the mean is weighted. And
each device has a thread of its own, which does not know in what the caller's autocast computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import parallel_apply, replicate

from models.trainable import Trainable, on_device, tensors_in, with_each_tensor


def spread_loss(model: Trainable, devices: Sequence[torch.device], batch: Any) -> Tensor:
    """The mean loss over all samples of the batch, on the first device."""
    parts = parts_of(batch, len(devices))
    used = list(devices[: len(parts)])
    kind = used[0].type
    precision = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    computing = [partial(_loss_of, replica, kind, *precision) for replica in replicate(model, used)]
    there = [(on_device(part, device),) for part, device in zip(parts, used, strict=True)]
    losses = parallel_apply(computing, there, devices=used)  # type: ignore[arg-type] # calls them
    counts = [model.samples_in(part) for part in parts]
    return weighted_mean([loss.to(used[0]) for loss in losses], counts)


def _loss_of(replica: Any, kind: str, is_mixed: bool, dtype: torch.dtype, batch: Any) -> Tensor:
    with torch.autocast(kind, dtype=dtype, enabled=is_mixed):
        loss: Tensor = replica.loss(batch)
        return loss


def weighted_mean(losses: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    """The mean over all samples of means over parts of them."""
    total = sum(samples)
    parts = [loss * (count / total) for loss, count in zip(losses, samples, strict=True)]
    return torch.stack(parts).sum()


def parts_of(batch: Any, count: int) -> list[Any]:
    """The batch cut along its samples into at most so many parts, none of them empty. A tensor that
    does not have the samples along its first dimension goes to all parts whole."""
    samples = len(next(tensors_in(batch)))

    def part_of(tensor: Tensor, number: int) -> Tensor:
        has_samples = tensor.dim() > 0 and len(tensor) == samples
        return tensor.chunk(count)[number] if has_samples else tensor

    parts = -(-samples // -(-samples // count))  # as many as chunk makes
    return [with_each_tensor(batch, partial(part_of, number=number)) for number in range(parts)]
