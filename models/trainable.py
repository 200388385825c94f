"""The interface of every network here, so that a trainer needs to know none of them by name.

Easy to get wrong: `loss` is the mean over the *samples* of the batch, each sample counting the
same, whatever it is made of. Peers weight their gradients by samples, and only with such a loss is
the average over all peers the gradient of one large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FLOAT32_BYTES = 4
MOST_CLASSES = 1 << 31  # of pictures


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of memory for training, without those of torch and the device's driver.

    `statistics` are those of an optimizer with two per parameter (AdamW, LAMB). The flat buffers
    of the collaborative optimizer are not included; it estimates them itself.
    """

    parameters: int
    gradients: int
    statistics: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.statistics + self.activations


class Trainable(nn.Module):
    """A network with its loss. A model of one's own must have `loss`; all else has a default.

    - `sample`: one sample, described in words.
    - `window`: how many ids of text (bytes, or a tokenizer's) one sample is made of; 0 if it is not
      made of text.
    - `vocabulary`: how many ids it can read; 0 if that is not known.
    - `side`: pictures are read as squares of this many pixels.
    - `classes`: its pictures have labels below this; None: they need none.
    - `settings`: the network was built from these; `plain_settings()` are the same for a TOML or
      JSON file, and `models.registry.build_model` builds the same network from them.

    A batch is any argument of `loss`: a tensor, or tensors in a tuple, list, NamedTuple or dict,
    each with the samples along its first dimension.
    """

    sample: str = "a sample"
    window: int = 0
    vocabulary: int = 0
    side: int = 32
    classes: int | None = MOST_CLASSES

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch's samples, as a float32 scalar (float64 in a float64 model)."""
        raise NotImplementedError("a model must have a method loss(self, batch)")

    def batch_of(self, samples: Any, generator: torch.Generator) -> Any:  # noqa: ARG002
        """A batch for `loss`, on the CPU, from what was read: windows of text, as (samples, window)
        of uint8 or int64, or an ImageBatch."""
        return samples

    def at_step(self, step: int) -> None:
        """Called before each batch with the run's step, for a model that begins otherwise than it
        goes on. It may change what the loss is, and no parameter."""

    def samples_in(self, batch: Any) -> int:
        """How many samples a batch holds: the weight of its gradient. The length of its first
        tensor, unless a model overrides it."""
        return len(next(tensors_in(batch)))

    def plain_settings(self) -> dict[str, Any]:
        """Empty, unless the model is one of models/registry.py."""
        return {}

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:  # noqa: ARG002
        """Bytes that are kept between forward and backward, with 2 bytes per value under autocast.
        If a model does not override this, it is 0, and volunteers are told too little memory."""
        return 0

    def memory(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> MemoryEstimate:
        """The memory for training with this many samples in a batch. Autocast keeps a copy of all
        parameters in fewer bytes while a batch is computed."""
        count = parameter_count(self)
        copied = value_bytes * count if value_bytes < FLOAT32_BYTES else 0
        return MemoryEstimate(
            parameters=FLOAT32_BYTES * count + copied,
            gradients=FLOAT32_BYTES * count,
            statistics=2 * FLOAT32_BYTES * count,
            activations=self.activation_bytes(samples, value_bytes),
        )


def parameter_count(network: nn.Module) -> int:
    """Every parameter once, however often it is used."""
    return sum(parameter.numel() for parameter in network.parameters())


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in its own order; none if it is no batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for one in batch.values():
            yield from tensors_in(one)
    elif isinstance(batch, list | tuple):
        for one in batch:
            yield from tensors_in(one)


def with_each_tensor(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with other tensors in it; other values (a number, a text) stay."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: with_each_tensor(one, change) for key, one in batch.items()}
    if isinstance(batch, list | tuple):
        changed = [with_each_tensor(one, change) for one in batch]
        if hasattr(batch, "_fields"):  # a NamedTuple takes its values one by one
            return type(batch)(*changed)
        return tuple(changed) if isinstance(batch, tuple) else changed
    return batch


def on_device(batch: Any, device: torch.device | str) -> Any:
    """The batch on that device."""
    return with_each_tensor(batch, lambda tensor: tensor.to(device))
