"""What every network here answers, so that a trainer needs to know none of them by name.

The one thing easy to get wrong: `loss` is the mean over the *samples* of the batch, each sample
counting the same, whatever it is made of. Peers weight their gradients by samples, and only with
such a loss is the average over all peers the gradient of one large batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training takes, without what torch and the device's driver take for themselves.

    `statistics` are those of an optimizer with two per parameter (AdamW, LAMB). The flat buffers
    of the collaborative optimizer come on top: they are its to estimate.
    """

    parameters: int
    gradients: int
    statistics: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.statistics + self.activations


class Trainable(nn.Module):
    """A network with its loss.

    - `sample`: what one sample is, in words.
    - `window`: how many ids (bytes) of text one sample is made of; 0 where it is not made of text.
    - `settings`: what it was built from; `plain_settings()` are the same for a TOML or JSON file,
      and `models.registry.build_model` builds the same network from them.
    """

    sample: str
    window: int

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch's samples, as a float32 scalar (float64 in a float64 model)."""
        raise NotImplementedError

    def batch_of(self, windows: Tensor, generator: torch.Generator) -> Any:
        """What `loss` takes, from text.  windows: (samples, window), uint8 or int64."""
        raise NotImplementedError

    def samples_in(self, batch: Any) -> int:
        """How many samples a batch holds: what its gradient counts for."""
        raise NotImplementedError

    def plain_settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:
        """What is kept between forward and backward, with 2 bytes per value under autocast."""
        raise NotImplementedError

    def memory(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> MemoryEstimate:
        """What training takes with so many samples in a batch. Autocast keeps a copy of all
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


def on_device(batch: Any, device: torch.device | str) -> Any:
    """The same batch there: a tensor, or a NamedTuple of tensors, which all batches here are."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    return type(batch)(*(tensor.to(device) for tensor in batch))
