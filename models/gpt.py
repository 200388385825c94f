"""A small GPT on bytes: the default model.

Shaped like GPT-2 (norms before each block, learned positions, gelu by tanh, the output layer tied
to the embedding), so that `hf_export` can write it for other tools. Bytes are the vocabulary: any
text is made of 256 ids, there is no tokenizer to agree on, and its output can be read. With a
tokenizer (data/tokens.py) the settings name a larger `vocabulary`.

A sample is a window of `context + 1` bytes; its loss is the mean over the `context` predictions in
it, in nats per byte (5.55 for an untrained model, ln 256).

There is no dropout, deliberately. Its randomness would be each peer's own, and large runs on more
data than they can read do not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from models.embedding import empty_embedding
from models.errors import NotThisModel, WrongSettings
from models.initial import allocate, fill_constants, fill_evenly, seeded
from models.settings import checked
from models.trainable import FLOAT32_BYTES, Trainable

BYTES = 256
INITIAL_DEVIATION = 0.02  # GPT-2, 2.3

# Values that autograd keeps of a block, per byte and width: the input of each norm (2), always in
# float32; its output (2), query, key and value (3), the mixed heads (1), and both sides of the gelu
# (8).
KEPT_EXACTLY, KEPT = 2, 14
LOGIT_BYTES = 2 * FLOAT32_BYTES  # of the cross-entropy: the logits, and what is kept of them


class GPTSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape. Limits keep a run's definition from asking for absurd memory."""

    context: Annotated[int, Meta(ge=1, le=65_536)] = 64
    width: Annotated[int, Meta(ge=1, le=16_384)] = 128
    layers: Annotated[int, Meta(ge=1, le=256)] = 2
    heads: Annotated[int, Meta(ge=1, le=256)] = 4
    vocabulary: Annotated[int, Meta(ge=2, le=1_000_000)] = BYTES


SIZES: dict[str, GPTSettings] = {
    # from 5.5 to about 2 nats per byte in 300 steps of 32 samples: within a minute on two cores
    "tiny": GPTSettings(context=64, width=128, layers=2, heads=4),
    # an hour on a laptop
    "small": GPTSettings(context=256, width=384, layers=6, heads=6),
    # the shapes of GPT-2 small and medium
    "base": GPTSettings(context=1024, width=768, layers=12, heads=12),
    "large": GPTSettings(context=1024, width=1024, layers=24, heads=16),
}


class Attention(nn.Module):
    """Each position attends to itself and to those before it."""

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.queries_keys_values = nn.Linear(settings.width, 3 * settings.width)
        self.output = nn.Linear(settings.width, settings.width)

    def forward(self, x: Tensor) -> Tensor:  # (samples, length, width), and the same back
        samples, length, width = x.shape
        split = self.queries_keys_values(x).view(samples, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (samples, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.output(mixed.transpose(1, 2).reshape(samples, length, width))
        return y


class TransformerBlock(nn.Module):
    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(settings.width)
        self.attention = Attention(settings)
        self.wide_norm = nn.LayerNorm(settings.width)
        self.widen = nn.Linear(settings.width, 4 * settings.width)
        self.narrow = nn.Linear(4 * settings.width, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        wide = F.gelu(self.widen(self.wide_norm(x)), approximate="tanh")
        y: Tensor = x + self.narrow(wide)
        return y


class GPT(Trainable):
    """`seed` decides the initial parameters; None leaves it on the meta device, without values.
    `block` makes block number n: a TransformerBlock, if it is not given."""

    def __init__(
        self,
        settings: GPTSettings,
        seed: int | None = 0,
        block: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        settings = checked(settings, "the model gpt")
        if settings.width % settings.heads:
            raise WrongSettings(
                f"A width of {settings.width} cannot be shared by {settings.heads} heads.",
                advice="Choose a width that is a multiple of the heads.",
            )
        self.settings = settings
        self.window = settings.context + 1
        self.vocabulary = settings.vocabulary
        kind = "bytes" if self.vocabulary == BYTES else "ids"
        self.sample = f"a window of {self.window} {kind}, each but the first to be predicted"
        with torch.device("meta"):  # nothing is drawn here from torch's global generator
            self.embedding = empty_embedding(settings.vocabulary, settings.width)
            self.positions = empty_embedding(settings.context, settings.width)
            self.blocks = nn.ModuleList(
                TransformerBlock(settings) if block is None else block(number)
                for number in range(settings.layers)
            )
            self.norm = nn.LayerNorm(settings.width)
        if seed is not None:
            allocate(self)
            self._fill(seeded(seed))

    def _fill(self, generator: torch.Generator) -> None:
        fill_constants(self)
        # Each block adds to the stream twice: scaled so that the sum keeps its size (GPT-2, 2.3).
        into_stream = INITIAL_DEVIATION / math.sqrt(2 * self.settings.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                adds = name.endswith(("attention.output.weight", "narrow.weight"))
                fill_evenly(parameter, into_stream if adds else INITIAL_DEVIATION, generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for the byte after each position.

        ids: (samples, length), length at most the context; returns (samples, length, vocabulary).
        """
        length = ids.shape[1]
        x = self.embedding(ids) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, batch: Tensor) -> Tensor:  # (samples, window), uint8 or int64
        if batch.dim() != 2 or not 2 <= batch.shape[1] <= self.window:
            raise NotThisModel(
                f"A batch of shape {tuple(batch.shape)} is not made of windows of 2 to "
                f"{self.window} bytes.",
                advice="The model's `window` says how long the data should cut them.",
            )
        ids = batch.long()
        logits = self(ids[:, :-1])
        if logits.dtype != torch.float64:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def batch_of(self, windows: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        return windows

    def samples_in(self, batch: Tensor) -> int:
        return len(batch)

    def plain_settings(self) -> dict[str, Any]:
        return {"name": "gpt", **msgspec.structs.asdict(self.settings)}

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:
        settings = self.settings
        kept = KEPT_EXACTLY * FLOAT32_BYTES + KEPT * value_bytes
        per_place = settings.layers * settings.width * kept
        per_place += settings.vocabulary * LOGIT_BYTES
        return samples * settings.context * per_place

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        generator: torch.Generator,
        temperature: float = 1.0,
    ) -> Iterator[int]:
        """Further ids, one by one: `bytes(gpt.generate(b"def ", 200, generator=seeded(1)))`.

        Temperature 0 takes the likeliest each time. Every id costs a pass over the whole context:
        this is for a look at the model, not for serving.
        """
        device = self.embedding.weight.device
        ids = list(prompt)[-self.settings.context :] or [ord("\n")]
        for _ in range(count):
            logits = self(torch.tensor([ids], device=device))[0, -1].cpu()
            logits = logits.double()  # here: Apple's GPU has no float64
            if temperature > 0.0:
                chances = torch.softmax(logits / temperature, dim=0)
                following = int(torch.multinomial(chances, 1, generator=generator))
            else:
                following = int(logits.argmax())
            yield following
            ids = [*ids, following][-self.settings.context :]
