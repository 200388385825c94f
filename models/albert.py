"""ALBERT (Lan et al. 2020): one layer used many times, and embeddings narrower than the network.

It learns to guess masked ids and whether two segments are in order (`masking`). Runs over home
internet were first shown with it, because it has few parameters: base has 12 million where BERT's
equivalent has 108, and needs as much computing.

A sample is one window of text with two segments. Its loss is the mean over its masked ids of the
cross-entropy, plus that of the order, as in the paper.

The norms come after each block, not before it as in the GPT, and there is no dropout (nor has the
paper's second version any).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from models.embedding import empty_embedding
from models.errors import NotThisModel, WrongSettings
from models.initial import allocate, fill_constants, fill_evenly, seeded
from models.masking import (
    ALBERT_VOCABULARY,
    BYTE_VOCABULARY,
    SPECIALS_AROUND,
    MaskedBatch,
    Vocabulary,
    chosen_in,
    masked_batch,
)
from models.settings import checked
from models.trainable import FLOAT32_BYTES, Trainable

INITIAL_DEVIATION = 0.02

# Values that autograd keeps of one pass through the layer, per id and width: the input of each norm
# (2), always in float32; the layer's input, query, key, value, the mixed heads and the output of
# each norm (7). Then both sides of the gelu, and of the embeddings their sum and its norm.
KEPT_EXACTLY, KEPT = 2, 7
KEPT_EMBEDDINGS = 2
LOGIT_BYTES = 2 * FLOAT32_BYTES  # of the cross-entropy: the logits, and what is kept of them

NORM_EPSILON = 1e-12  # as published; norms are computed in float32 also under autocast
SEGMENTS = 2


class AlbertSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`context` counts all ids of the model's input: [CLS], two segments, and two [SEP]."""

    context: Annotated[int, Meta(ge=8, le=65_536)] = 512
    width: Annotated[int, Meta(ge=1, le=16_384)] = 768
    wide: Annotated[int, Meta(ge=1, le=65_536)] = 3072
    embedding: Annotated[int, Meta(ge=1, le=16_384)] = 128
    layers: Annotated[int, Meta(ge=1, le=256)] = 12
    heads: Annotated[int, Meta(ge=1, le=256)] = 12
    vocabulary: Vocabulary = BYTE_VOCABULARY


SIZES: dict[str, AlbertSettings] = {
    # for tests and demonstrations on bytes
    "tiny": AlbertSettings(context=128, width=128, wide=512, embedding=64, layers=4, heads=4),
    # the two of the paper with the published vocabulary, for ids that were made with it
    "base": AlbertSettings(vocabulary=ALBERT_VOCABULARY),
    "large": AlbertSettings(
        width=1024, wide=4096, layers=24, heads=16, vocabulary=ALBERT_VOCABULARY
    ),
    # and the same on bytes
    "base-bytes": AlbertSettings(),
    "large-bytes": AlbertSettings(width=1024, wide=4096, layers=24, heads=16),
}


class Layer(nn.Module):
    """The one layer: attention in both directions, then a wide gelu, each followed by a norm."""

    def __init__(self, settings: AlbertSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.query = nn.Linear(settings.width, settings.width)
        self.key = nn.Linear(settings.width, settings.width)
        self.value = nn.Linear(settings.width, settings.width)
        self.output = nn.Linear(settings.width, settings.width)
        self.attention_norm = nn.LayerNorm(settings.width, eps=NORM_EPSILON)
        self.widen = nn.Linear(settings.width, settings.wide)
        self.narrow = nn.Linear(settings.wide, settings.width)
        self.norm = nn.LayerNorm(settings.width, eps=NORM_EPSILON)

    def forward(self, x: Tensor) -> Tensor:  # (samples, length, width), and the same back
        samples, length, width = x.shape
        by_head = (samples, length, self.heads, width // self.heads)
        q = self.query(x).view(by_head).transpose(1, 2)  # (samples, heads, length, width / heads)
        k = self.key(x).view(by_head).transpose(1, 2)
        v = self.value(x).view(by_head).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v)
        mixed = mixed.transpose(1, 2).reshape(samples, length, width)
        x = self.attention_norm(x + self.output(mixed))
        y: Tensor = self.norm(x + self.narrow(F.gelu(self.widen(x), approximate="tanh")))
        return y


class Albert(Trainable):
    """`seed` decides the initial parameters; None leaves it on the meta device, without values."""

    def __init__(self, settings: AlbertSettings, seed: int | None = 0) -> None:
        super().__init__()
        settings = checked(settings, "the model albert")
        if settings.width % settings.heads:
            raise WrongSettings(
                f"A width of {settings.width} cannot be shared by {settings.heads} heads.",
                advice="Choose a width that is a multiple of the heads.",
            )
        self.settings = settings
        self.window = settings.context - SPECIALS_AROUND
        self.vocabulary = settings.vocabulary.size
        self.sample = f"a window of {self.window} ids in two segments, 15 % of them to be guessed"
        narrow, width = settings.embedding, settings.width
        with torch.device("meta"):  # nothing is drawn here from torch's global generator
            self.words = empty_embedding(settings.vocabulary.size, narrow)
            self.positions = empty_embedding(settings.context, narrow)
            self.segments = empty_embedding(SEGMENTS, narrow)
            self.embedding_norm = nn.LayerNorm(narrow, eps=NORM_EPSILON)
            self.into_width = nn.Linear(narrow, width)
            self.layer = Layer(settings)
            # of the pooled [CLS]: are the segments in order?
            self.pool = nn.Linear(width, width)
            self.order = nn.Linear(width, 2)
            # of each masked position: which id stood there? Shares its last matrix with `words`
            self.guess = nn.Linear(width, narrow)
            self.guess_norm = nn.LayerNorm(narrow, eps=NORM_EPSILON)
            self.guess_bias = nn.Parameter(torch.empty(settings.vocabulary.size))
        if seed is not None:
            allocate(self)
            generator = seeded(seed)
            fill_constants(self)
            for parameter in self.parameters():
                if parameter.dim() >= 2:
                    fill_evenly(parameter, INITIAL_DEVIATION, generator)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        """The last layer's output: (samples, length) twice, to (samples, length, width).

        All ids count: there is no padding, since text is cut into windows of one length.
        """
        words = self.words(ids) + self.segments(segments)
        x: Tensor = self.into_width(
            self.embedding_norm(words + self.positions.weight[: ids.shape[1]])
        )
        for _ in range(self.settings.layers):
            x = self.layer(x)
        return x

    def guesses(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary.  hidden: (..., width); returns (..., vocabulary)."""
        x = self.guess_norm(F.gelu(self.guess(hidden), approximate="tanh"))
        return F.linear(x, self.words.weight, self.guess_bias)

    def orders(self, hidden: Tensor) -> Tensor:
        """Logits for "in order" and "swapped".  hidden: (samples, length, width); (samples, 2)."""
        y: Tensor = self.order(torch.tanh(self.pool(hidden[:, 0])))
        return y

    def loss(self, batch: MaskedBatch) -> Tensor:
        if batch.ids.shape[1] > self.settings.context:
            raise NotThisModel(
                f"Samples of {batch.ids.shape[1]} ids are longer than the context of "
                f"{self.settings.context}.",
                advice="The model's `window` says how long the data should cut them.",
            )
        hidden = self(batch.ids, batch.segments)
        there = batch.positions[:, :, None].expand(-1, -1, hidden.shape[2])
        guesses = _exact(self.guesses(hidden.gather(1, there)))  # (samples, chosen, vocabulary)
        orders = _exact(self.orders(hidden))
        guessing = F.cross_entropy(guesses.flatten(0, 1), batch.targets.flatten())
        return guessing + F.cross_entropy(orders, batch.swapped)

    def batch_of(self, windows: Tensor, generator: torch.Generator) -> MaskedBatch:
        return masked_batch(windows, self.settings.vocabulary, generator)

    def samples_in(self, batch: MaskedBatch) -> int:
        return len(batch.ids)

    def plain_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = msgspec.to_builtins(self.settings)
        return {"name": "albert", **settings}

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:
        """Sharing parameters saves none of this: every pass through the layer keeps its own."""
        settings = self.settings
        per_layer = settings.width * (KEPT_EXACTLY * FLOAT32_BYTES + KEPT * value_bytes)
        per_layer += 2 * settings.wide * value_bytes
        per_place = settings.layers * per_layer + KEPT_EMBEDDINGS * settings.embedding * value_bytes
        guessed = chosen_in(self.window)
        per_sample = settings.context * per_place
        return samples * (per_sample + guessed * settings.vocabulary.size * LOGIT_BYTES)


def _exact(logits: Tensor) -> Tensor:
    """In at least float32: a cross-entropy in bfloat16 would have three digits."""
    return logits if logits.dtype == torch.float64 else logits.float()
