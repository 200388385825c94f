"""An embedding without values, for a model that fills its parameters itself.

    with torch.device("meta"):
        self.embedding = empty_embedding(256, width)

torch's own `nn.Embedding(...)` draws from a normal distribution, even if there are no values to
fill. On the meta device that imports torch's compiler, which takes more than a second in every
process that builds a model.
"""

from __future__ import annotations

import torch
from torch import nn


def empty_embedding(rows: int, width: int) -> nn.Embedding:
    """`rows` vectors of this width, on the current device, uninitialized."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
