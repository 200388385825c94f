"""Models whose feed-forward blocks are mixtures of experts, which live elsewhere.

    model = DMoEGPT(settings, mixture, seed=0)     # mixture("ffn0", width) is the first mixture

This package knows nothing of the experts. A `mixture` is a function from the name of a mixture and
its width to the module for it: from (examples, width) to the same, with its input passed on, like
one residual block. Its parameters (those of its gate) are filled and trained as the model's own.

Mixture number n is called `ffn` and n, from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from models.classifier import CHANNELS_PER_GROUP, ImageClassifier, ResidualBlock, fill_convolutions
from models.gpt import BYTES, GPT, KEPT_EXACTLY, LOGIT_BYTES, Attention, GPTSettings
from models.initial import allocate, seeded
from models.settings import checked
from models.synthetic_images import KINDS, SIDE
from models.trainable import FLOAT32_BYTES

MixtureFactory = Callable[[str, int], nn.Module]

# Values that autograd keeps of a block, per byte and width: of the attention as in gpt.py, and of a
# mixture its input, the answers of four experts, and its output, all in float32.
KEPT_OF_ATTENTION, KEPT_OF_MIXTURE = 6, 6


class DMoEGPTSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape, as of GPT; every layer has a mixture."""

    context: Annotated[int, Meta(ge=1, le=65_536)] = 64
    width: Annotated[int, Meta(ge=1, le=16_384)] = 128
    layers: Annotated[int, Meta(ge=1, le=64)] = 2
    heads: Annotated[int, Meta(ge=1, le=256)] = 4
    vocabulary: Annotated[int, Meta(ge=2, le=1_000_000)] = BYTES


GPT_SIZES: dict[str, DMoEGPTSettings] = {
    "tiny": DMoEGPTSettings(),
    "small": DMoEGPTSettings(context=256, width=384, layers=6, heads=6),
    "base": DMoEGPTSettings(context=1024, width=768, layers=12, heads=12),
}


class MixtureBlock(nn.Module):
    """Each token goes to experts of its own: a mixture that scored a whole window would see the
    bytes that it has to predict."""

    def __init__(self, settings: GPTSettings, mixture: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(settings.width)
        self.attention = Attention(settings)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:  # (samples, length, width), and the same back
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = self.mixture(x.flatten(0, 1)).view_as(x)
        return y


class DMoEGPT(GPT):
    """`seed` decides the initial parameters; None leaves it on the meta device, without values."""

    def __init__(
        self, settings: DMoEGPTSettings, mixture: MixtureFactory, seed: int | None = 0
    ) -> None:
        settings = checked(settings, "the model dmoe_gpt")
        shape = GPTSettings(**msgspec.structs.asdict(settings))
        super().__init__(
            shape, seed, lambda number: MixtureBlock(shape, mixture(f"ffn{number}", shape.width))
        )

    def plain_settings(self) -> dict[str, Any]:
        return {**super().plain_settings(), "name": "dmoe_gpt"}

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:
        settings = self.settings
        kept = (KEPT_EXACTLY / 2 + KEPT_OF_MIXTURE) * FLOAT32_BYTES
        kept += KEPT_OF_ATTENTION * value_bytes
        per_place = int(settings.layers * settings.width * kept)
        per_place += settings.vocabulary * LOGIT_BYTES
        return samples * settings.context * per_place


class DMoEClassifierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """- `channels`: of the first convolution, a multiple of 8.
    - `width`: of the mixtures, of which there are `layers`.
    - `side`: of the images, which are square; used for estimates only.
    """

    channels: Annotated[int, Meta(ge=8, le=4096, multiple_of=CHANNELS_PER_GROUP)] = 16
    width: Annotated[int, Meta(ge=1, le=16_384)] = 64
    layers: Annotated[int, Meta(ge=1, le=64)] = 2
    classes: Annotated[int, Meta(ge=2, le=100_000)] = len(KINDS)
    side: Annotated[int, Meta(ge=8, le=4096)] = SIDE


CLASSIFIER_SIZES: dict[str, DMoEClassifierSettings] = {
    "tiny": DMoEClassifierSettings(),
    "small": DMoEClassifierSettings(channels=32, width=256, layers=4),
}


class DMoEClassifier(ImageClassifier):
    """Convolutions, the mean over the image, and mixtures: each image goes to experts of its own.

    `seed` decides the initial parameters; None leaves it on the meta device, without values.
    """

    def __init__(
        self, settings: DMoEClassifierSettings, mixture: MixtureFactory, seed: int | None = 0
    ) -> None:
        super().__init__()
        settings = checked(settings, "the model dmoe_classifier")
        self.settings = settings
        self.sample = f"one image, of one of {settings.classes} kinds"
        self.classes = settings.classes
        channels = settings.channels
        with torch.device("meta"):  # nothing is drawn here from torch's global generator
            self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
            self.stem_norm = nn.GroupNorm(channels // CHANNELS_PER_GROUP, channels)
            self.block = ResidualBlock(channels, 2 * channels, 2)
            self.widen = nn.Linear(2 * channels, settings.width)
            self.mixtures = nn.ModuleList(
                mixture(f"ffn{number}", settings.width) for number in range(settings.layers)
            )
            self.norm = nn.LayerNorm(settings.width)
            self.output = nn.Linear(settings.width, settings.classes)
        if seed is not None:
            allocate(self)
            fill_convolutions(self, seeded(seed))

    def forward(self, images: Tensor) -> Tensor:
        """Logits.  images: (samples, 3, height, width), as in ImageBatch; (samples, classes)."""
        x = F.relu(self.stem_norm(self.stem(self.centred(images))))
        x = self.widen(self.block(x).mean(dim=(2, 3)))
        for mixture in self.mixtures:
            x = mixture(x)
        logits: Tensor = self.output(self.norm(x))
        return logits

    def plain_settings(self) -> dict[str, Any]:
        return {"name": "dmoe_classifier", **msgspec.structs.asdict(self.settings)}

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:
        settings = self.settings
        convolved = (settings.side // 2) ** 2 * settings.channels
        mixed = settings.layers * settings.width * KEPT_OF_MIXTURE
        return samples * (4 * convolved * value_bytes + mixed * FLOAT32_BYTES)
