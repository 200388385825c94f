"""Expert networks for a mixture of experts, by name.

    network = build_expert({"name": "feed-forward", "width": 1024}, seed=3)
    rows = network(rows)                   # (rows, *network.row_shape), and the same back

An expert takes a batch of rows and gives back rows of the same shape: what the layer of a mixture
adds up. Each but `nop` adds its change to what it was given (x + f(x)). The weights of a mixture
have the sum 1, so the mixture passes its own input on, like one residual block.

There is no dropout. A server computes the forward pass again when the gradient comes, and the
second pass must be the same function as the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from models.errors import WrongSettings
from models.initial import allocate, fill_constants, fill_evenly, seeded
from models.settings import read_settings, take_name

Width = Annotated[int, Meta(ge=1, le=65_536)]


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class FeedForwardSettings(_Settings, frozen=True):
    """`inner` has the widths of the hidden layers: the paper's block is 1024→4096→4096→1024."""

    width: Width = 1024
    inner: Annotated[tuple[Width, ...], Meta(min_length=1, max_length=16)] = (4096, 4096)


class TransformerSettings(_Settings, frozen=True):
    """A row is a sequence of this length: (sequence, width)."""

    width: Width = 1024
    sequence: Annotated[int, Meta(ge=1, le=65_536)] = 512
    heads: Annotated[int, Meta(ge=1, le=256)] = 16
    inner: Width = 4096


class GatedSettings(_Settings, frozen=True):
    width: Width = 1024
    inner: Width = 2816  # 8/3 of the width, as wide as the matrices of a feed-forward block of 4


class NopSettings(_Settings, frozen=True):
    width: Width = 1024


class ExpertNetwork(nn.Module):
    """A network from rows to rows of `row_shape`. Subclasses are made on the meta device, without
    values; `build_expert` fills them."""

    def __init__(self, row_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.row_shape = row_shape


class FeedForward(ExpertNetwork):
    """Linear layers with a norm and ReLU between them (Learning@home, section 4.1)."""

    def __init__(self, settings: FeedForwardSettings) -> None:
        super().__init__((settings.width,))
        widths = (settings.width, *settings.inner)
        self.hidden = nn.ModuleList(
            nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in settings.inner)
        self.output = nn.Linear(widths[-1], settings.width)

    def forward(self, rows: Tensor) -> Tensor:  # (rows, width), and the same back
        x = rows
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        y: Tensor = rows + self.output(x)
        return y


class Transformer(ExpertNetwork):
    """An encoder block with gelu, like BERT's, with its norms before the two halves."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__((settings.sequence, settings.width))
        if settings.width % settings.heads:
            raise WrongSettings(
                f"A width of {settings.width} cannot be shared by {settings.heads} heads.",
                advice="Choose a width that is a multiple of the heads.",
            )
        self.heads = settings.heads
        self.attention_norm = nn.LayerNorm(settings.width)
        self.queries_keys_values = nn.Linear(settings.width, 3 * settings.width)
        self.mixed = nn.Linear(settings.width, settings.width)
        self.wide_norm = nn.LayerNorm(settings.width)
        self.widen = nn.Linear(settings.width, settings.inner)
        self.narrow = nn.Linear(settings.inner, settings.width)

    def forward(self, rows: Tensor) -> Tensor:  # (rows, sequence, width), and the same back
        samples, length, width = rows.shape
        split = self.queries_keys_values(self.attention_norm(rows))
        q, k, v = split.view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v)  # each (samples, heads, length, part)
        rows = rows + self.mixed(heads.transpose(1, 2).reshape(samples, length, width))
        y: Tensor = rows + self.narrow(F.gelu(self.widen(self.wide_norm(rows))))
        return y


class Gated(ExpertNetwork):
    """SwiGLU (Shazeer, 2020): one half of the wide layer gates the other."""

    def __init__(self, settings: GatedSettings) -> None:
        super().__init__((settings.width,))
        self.norm = nn.LayerNorm(settings.width)
        self.widen = nn.Linear(settings.width, 2 * settings.inner)
        self.narrow = nn.Linear(settings.inner, settings.width)

    def forward(self, rows: Tensor) -> Tensor:  # (rows, width), and the same back
        gate, value = self.widen(self.norm(rows)).chunk(2, dim=-1)
        y: Tensor = rows + self.narrow(F.silu(gate) * value)
        return y


class Nop(ExpertNetwork):
    """Gives back what it gets, to measure everything else."""

    def __init__(self, settings: NopSettings) -> None:
        super().__init__((settings.width,))

    def forward(self, rows: Tensor) -> Tensor:
        return rows.clone()


class ExpertKind(NamedTuple):
    settings: type[msgspec.Struct]
    build: Callable[[Any], ExpertNetwork]


EXPERTS: dict[str, ExpertKind] = {
    "feed-forward": ExpertKind(FeedForwardSettings, FeedForward),
    "transformer": ExpertKind(TransformerSettings, Transformer),
    "gated": ExpertKind(GatedSettings, Gated),
    "nop": ExpertKind(NopSettings, Nop),
}


def build_expert(settings: Mapping[str, Any], *, seed: int | None) -> ExpertNetwork:
    """The network that these plain settings describe; with `seed=None` on the meta device."""
    name = take_name(settings, EXPERTS, "expert")
    kind = EXPERTS[name]
    own = {key: value for key, value in settings.items() if key != "name"}
    read = read_settings(own, kind.settings, f"the expert {name}")
    with torch.device("meta"):  # nothing is drawn here from torch's global generator
        network = kind.build(read)
    if seed is not None:
        allocate(network)
        _fill(network, seeded(seed))
    return network.eval()


def _fill(network: ExpertNetwork, generator: torch.Generator) -> None:
    """So that values keep their size through each linear layer."""
    fill_constants(network)
    for parameter in network.parameters():
        if parameter.dim() >= 2:
            fill_evenly(parameter, 1.0 / math.sqrt(parameter.shape[1]), generator)
