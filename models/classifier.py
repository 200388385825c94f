"""A small residual network that classifies images (He et al. 2016, the shapes of section 4.2).

Three stages of blocks of two 3 x 3 convolutions, each stage half as large and twice as wide as the
one before, then the mean over the image and one linear layer.

A sample is one image with its label; its loss is the cross-entropy.

The norms are over groups of channels within one image, not over the batch. With batch norm a
sample's loss would depend on the other samples in a peer's batch, and each peer would have its own
running means: the run would not be one large batch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from models.errors import NotThisModel
from models.initial import allocate, fill_constants, fill_evenly, seeded
from models.settings import checked
from models.synthetic_images import KINDS, SIDE, ImageBatch
from models.trainable import FLOAT32_BYTES, Trainable

STAGES = 3
CHANNELS_PER_GROUP = 8

# Values that autograd keeps of a block, per pixel and channel: the input of each convolution (2)
# and of each norm (2).
KEPT_PER_BLOCK = 4


class ClassifierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """- `width`: channels of the first stage, a multiple of 8.
    - `blocks`: in each stage; the network has 6 x blocks + 2 layers.
    - `side`: of the images, which are square; used for estimates only.
    """

    width: Annotated[int, Meta(ge=8, le=4096, multiple_of=CHANNELS_PER_GROUP)] = 16
    blocks: Annotated[int, Meta(ge=1, le=64)] = 1
    classes: Annotated[int, Meta(ge=2, le=100_000)] = len(KINDS)
    side: Annotated[int, Meta(ge=8, le=4096)] = SIDE


SIZES: dict[str, ClassifierSettings] = {
    "tiny": ClassifierSettings(),
    "small": ClassifierSettings(width=32, blocks=3),
    "base": ClassifierSettings(width=64, blocks=9),
}


class ResidualBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(width // CHANNELS_PER_GROUP, width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(width // CHANNELS_PER_GROUP, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, before, height, width) to (samples, width, height / stride, width / stride)."""
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return F.relu(y + self.shortcut(x))


def residual_stages(width: int, blocks: int) -> nn.ModuleList:
    """The blocks of all stages: from `width` channels to four times as many."""
    stages, before = nn.ModuleList(), width
    for stage in range(STAGES):
        for number in range(blocks):
            stride = 2 if stage > 0 and number == 0 else 1
            stages.append(ResidualBlock(before, width << stage, stride))
            before = width << stage
    return stages


class ImageModel(Trainable):
    """A network that learns from coloured images."""

    stem: nn.Conv2d

    def centred(self, images: Tensor) -> Tensor:
        """Values from -1 to 1, in the model's own type."""
        brightest = 1.0 if images.is_floating_point() else 255.0
        return images.to(self.stem.weight.dtype) * (2.0 / brightest) - 1.0

    def images_in(self, samples: Any) -> Tensor:
        """The images that a batch is made of; NotThisModel if these are not any."""
        if not isinstance(samples, ImageBatch):
            raise NotThisModel(
                f"A model of images ({type(self).__name__}) does not learn from text.",
                advice="Give it images: `synthetic_images`, or an ImageBatch of your own.",
            )
        return samples.images


class ImageClassifier(ImageModel):
    """The loss of a network that gives a logit for each class of an image."""

    output: nn.Linear

    def loss(self, batch: ImageBatch) -> Tensor:
        if batch.images.dim() != 4 or batch.images.shape[1] != 3:
            raise NotThisModel(
                f"A batch of shape {tuple(batch.images.shape)} is not made of coloured images.",
                advice="Give images as (samples, 3, height, width).",
            )
        logits = self(batch.images)
        if logits.dtype != torch.float64:
            logits = logits.float()
        return F.cross_entropy(logits, batch.labels)

    def batch_of(self, samples: ImageBatch, generator: torch.Generator) -> ImageBatch:  # noqa: ARG002
        self.images_in(samples)
        return samples

    def samples_in(self, batch: ImageBatch) -> int:
        return len(batch.labels)


def fill_convolutions(network: nn.Module, generator: torch.Generator) -> None:
    fill_constants(network)
    for parameter in network.parameters():
        if parameter.dim() >= 2:
            inputs = parameter[0].numel()
            fill_evenly(parameter, math.sqrt(2.0 / inputs), generator)  # He et al. 2015
    with torch.no_grad():
        for block in network.modules():
            if isinstance(block, ResidualBlock):  # begins as the identity (Goyal et al. 2017, 5.1)
                block.second_norm.weight.zero_()


class Classifier(ImageClassifier):
    """`seed` decides the initial parameters; None leaves it on the meta device, without values."""

    def __init__(self, settings: ClassifierSettings, seed: int | None = 0) -> None:
        super().__init__()
        settings = checked(settings, "the model classifier")
        self.settings = settings
        self.sample = f"one image, of one of {settings.classes} kinds"
        self.classes = settings.classes
        with torch.device("meta"):  # nothing is drawn here from torch's global generator
            self.stem = nn.Conv2d(3, settings.width, 3, padding=1, bias=False)
            self.stem_norm = nn.GroupNorm(settings.width // CHANNELS_PER_GROUP, settings.width)
            self.blocks = residual_stages(settings.width, settings.blocks)
            self.output = nn.Linear(settings.width << (STAGES - 1), settings.classes)
        if seed is not None:
            allocate(self)
            fill_convolutions(self, seeded(seed))

    def forward(self, images: Tensor) -> Tensor:
        """Logits.  images: (samples, 3, height, width), as in ImageBatch; (samples, classes)."""
        x = F.relu(self.stem_norm(self.stem(self.centred(images))))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(x.mean(dim=(2, 3)))
        return logits

    def plain_settings(self) -> dict[str, Any]:
        return {"name": "classifier", **msgspec.structs.asdict(self.settings)}

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:
        settings = self.settings
        first_stage = settings.side**2 * settings.width  # each further one has half the values
        values = sum(first_stage >> stage for stage in range(STAGES)) * settings.blocks
        return samples * (KEPT_PER_BLOCK * values + 2 * first_stage) * value_bytes
