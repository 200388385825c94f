"""An embedding without values, for a model that fills its parameters itself.

    with torch.device("meta"):
        self.embedding = empty_embedding(256, width)

Easy to get wrong: torch's own `nn.Embedding(...)` draws from a normal distribution, also where
there is nothing to draw into. On the meta device that imports torch's compiler: more than a second
of a processor, of every process that builds a model.
"""

from __future__ import annotations

import torch
from torch import nn


def empty_embedding(rows: int, width: int) -> nn.Embedding:
    """`rows` vectors of this width, on the device that is set, with whatever is in the memory."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
