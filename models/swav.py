"""SwAV (Caron et al. 2020): features of pictures without labels, by swapped cluster assignments.

A sample is one picture, seen in several crops (`crops`): two large ones and some small ones. The
network gives each crop a feature, and a score for each of some prototypes. The scores of the large
crops become *codes*: soft assignments to the prototypes that use all prototypes equally (Sinkhorn's
algorithm). The loss is the cross-entropy between the code of a large crop and the scores of each
other crop of the same picture.

A code depends on the other pictures that are assigned with it. With few of them, equal use of all
prototypes means little, so the features of earlier batches join in: the *queue*. As in the paper it
is each machine's own, and it holds features only. It is a buffer that is not persistent
(`nn.Module.register_buffer`), and so no part of the run's state: peers do not send it, a newcomer
begins with an empty one, and two peers with the same parameters have the same state.

What peers average is exact nevertheless. Codes have no gradient; with given codes the loss is a
mean over pictures. So the step of several peers is that of one machine which computes the same
batches, each with the queue of its peer. It is not that of one machine which assigns all pictures
together, as the paper's 64 GPUs do: that has other codes.

Where this differs from the paper:

- The norms are over groups of channels of one image, not over the batch (models/classifier.py).
- Prototypes are divided by their length in each pass. The paper sets their parameters to that
  length; here only the optimizer changes parameters, so that all peers hold the same bits.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from models.classifier import (
    CHANNELS_PER_GROUP,
    KEPT_PER_BLOCK,
    STAGES,
    ImageModel,
    fill_convolutions,
    residual_stages,
)
from models.crops import crops_of
from models.errors import WrongSettings
from models.initial import allocate, fill_evenly, seeded
from models.settings import checked
from models.synthetic_images import SIDE, ImageBatch
from models.trainable import FLOAT32_BYTES

LARGE = 2  # crops of a picture that get a code
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Part = Annotated[float, Meta(gt=0.0, le=1.0)]


class SwavSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """- `width`, `blocks`: of the residual network, as of `classifier`.
    - `hidden`, `features`: the widths of the projection head, inside and at its end.
    - `side`: pictures are read at this size; `large` and `small` are the sides of their crops, and
      there are `small_crops` small ones beside the two large ones.
    - `areas`: a small crop shows between the first and the second of these parts of its picture, a
      large one between the second and all of it.
    - `temperature`: of the scores in the loss.
    - `epsilon`, `rounds`: of the codes; a smaller epsilon gives harder ones. (Below 0.025, float32
      has no room for exp(-2 / epsilon).)
    - `queue`: how many features of earlier pictures help to make codes; 0: none.
    - `queue_from`: the run's step from which on they do. Before, features change too fast.
    - `frozen`: prototypes stay as they are for so many of the run's first steps.
    """

    width: Annotated[int, Meta(ge=8, le=4096, multiple_of=CHANNELS_PER_GROUP)] = 8
    blocks: Annotated[int, Meta(ge=1, le=64)] = 1
    hidden: Count = 64
    features: Count = 16
    prototypes: Annotated[int, Meta(ge=2, le=1 << 20)] = 32
    side: Annotated[int, Meta(ge=8, le=4096)] = SIDE
    large: Annotated[int, Meta(ge=8, le=4096)] = SIDE
    small: Annotated[int, Meta(ge=8, le=4096)] = SIDE // 2
    small_crops: Annotated[int, Meta(ge=0, le=64)] = 4
    areas: tuple[Part, Part] = (0.2, 0.4)
    temperature: Annotated[float, Meta(ge=0.01, le=10.0)] = 0.1
    epsilon: Annotated[float, Meta(ge=0.025, le=10.0)] = 0.03
    rounds: Annotated[int, Meta(ge=1, le=100)] = 3
    queue: Annotated[int, Meta(ge=0, le=1 << 20)] = 128
    queue_from: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    frozen: Annotated[int, Meta(ge=0, le=1 << 40)] = 0


SIZES: dict[str, SwavSettings] = {
    # for tests and demonstrations on the built-in figures
    "tiny": SwavSettings(),
    # crops, head, prototypes and queue of the paper, on a residual network of this package
    "base": SwavSettings(
        width=64,
        blocks=3,
        hidden=2048,
        features=128,
        prototypes=3000,
        side=256,
        large=224,
        small=96,
        small_crops=6,
        areas=(0.05, 0.14),
        queue=3840,
    ),
}


class CropBatch(NamedTuple):
    large: Tensor  # (samples, 2, 3, side, side), uint8
    small: Tensor  # (samples, crops, 3, side, side), uint8, of a smaller side


def sinkhorn(scores: Tensor, epsilon: float, rounds: int) -> Tensor:
    """Codes: for each sample shares of the prototypes that add up to one, and that use all
    prototypes about equally.  scores: (samples, prototypes), and the same back."""
    codes = torch.exp((scores - scores.max()) / epsilon)  # the largest cancels out
    for _ in range(rounds):
        codes = codes / codes.sum(dim=0, keepdim=True)
        codes = codes / codes.sum(dim=1, keepdim=True)
    return codes


def swapped_loss(scores: Tensor, codes: Tensor, temperature: float) -> Tensor:
    """The mean over samples, and over pairs of a large crop and another one.
    scores: (samples, crops, prototypes); codes: (samples, 2, prototypes), of the first crops."""
    guesses = F.log_softmax(scores / temperature, dim=2)
    pairs = torch.einsum("nsk,nvk->nsv", codes, guesses)
    with_itself = pairs.diagonal(dim1=1, dim2=2).sum()
    count = len(scores) * LARGE * (scores.shape[1] - 1)
    return (with_itself - pairs.sum()) / count


class Swav(ImageModel):
    """`seed` decides the initial parameters; None leaves it on the meta device, without values."""

    classes = None
    queue: Tensor

    def __init__(self, settings: SwavSettings, seed: int | None = 0) -> None:
        super().__init__()
        settings = checked(settings, "the model swav")
        if settings.areas[0] > settings.areas[1]:
            raise WrongSettings(
                f"Small crops cannot show from {settings.areas[0]} to {settings.areas[1]} of a "
                "picture.",
                advice="Set `areas` to two parts of which the second is larger.",
            )
        self.settings = settings
        self.side = settings.side
        self.sample = f"one picture in {LARGE + settings.small_crops} crops"
        last = settings.width << (STAGES - 1)
        with torch.device("meta"):  # nothing is drawn here from torch's global generator
            self.stem = nn.Conv2d(3, settings.width, 3, padding=1, bias=False)
            self.stem_norm = nn.GroupNorm(settings.width // CHANNELS_PER_GROUP, settings.width)
            self.blocks = residual_stages(settings.width, settings.blocks)
            self.widen = nn.Linear(last, settings.hidden)
            self.head_norm = nn.LayerNorm(settings.hidden)
            self.project = nn.Linear(settings.hidden, settings.features)
            self.prototypes = nn.Linear(settings.features, settings.prototypes, bias=False)
            room = torch.empty(LARGE, settings.queue, settings.features)
            self.register_buffer("queue", room, persistent=False)
        self._uses_queue, self._is_frozen = settings.queue > 0, False
        if seed is not None:
            allocate(self)
            generator = seeded(seed)
            fill_convolutions(self, generator)
            fill_evenly(self.prototypes.weight, 1.0, generator)
            self.queue.zero_()

    def at_step(self, step: int) -> None:
        self._uses_queue = self.settings.queue > 0 and step >= self.settings.queue_from
        self._is_frozen = step < self.settings.frozen

    def forward(self, images: Tensor) -> Tensor:
        """Features of length one.  images: (samples, 3, height, width); (samples, features)."""
        x = F.relu(self.stem_norm(self.stem(self.centred(images))))
        for block in self.blocks:
            x = block(x)
        x = F.relu(self.head_norm(self.widen(x.mean(dim=(2, 3)))))
        x = self.project(x)
        return F.normalize(x if x.dtype == torch.float64 else x.float(), dim=-1)

    def scores(self, features: Tensor) -> Tensor:
        """Cosines with the prototypes.  (…, features) to (…, prototypes)."""
        prototypes = F.normalize(self.prototypes.weight, dim=1)
        return F.linear(features, prototypes.detach() if self._is_frozen else prototypes)

    def loss(self, batch: CropBatch) -> Tensor:
        features = torch.cat([self._seen(batch.large), self._seen(batch.small)], dim=1)
        with torch.autocast(features.device.type, enabled=False):  # three digits are too few
            codes = self.codes(features[:, :LARGE].detach())
            return swapped_loss(self.scores(features), codes, self.settings.temperature)

    def _seen(self, crops: Tensor) -> Tensor:  # (samples, crops, 3, side, side)
        seen: Tensor = self(crops.flatten(0, 1))
        return seen.view(*crops.shape[:2], self.settings.features)

    @torch.no_grad()
    def codes(self, features: Tensor) -> Tensor:
        """The codes of these features, with those of the queue if it is full; in training they go
        into the queue.  features: (samples, 2, features); (samples, 2, prototypes)."""
        settings, samples = self.settings, len(features)
        together = features.transpose(0, 1)  # each large crop has codes and a queue of its own
        if self._uses_queue and bool(self.queue[:, -1].any()):  # features have length one
            together = torch.cat([together, self.queue.to(features.dtype)], dim=1)
        codes = [
            sinkhorn(one, settings.epsilon, settings.rounds)[:samples]
            for one in self.scores(together)
        ]
        if self._uses_queue and self.training:
            newest = features.transpose(0, 1).to(self.queue.dtype)
            kept = torch.cat([newest, self.queue], dim=1)[:, : settings.queue]
            self.queue.copy_(kept)
        return torch.stack(codes, dim=1)

    def batch_of(self, samples: ImageBatch, generator: torch.Generator) -> CropBatch:
        images, own = self.images_in(samples), self.settings
        least, most = own.areas
        large = crops_of(images, LARGE, own.large, (most, 1.0), generator)
        small = crops_of(images, own.small_crops, own.small, (least, most), generator)
        return CropBatch(large, small)

    def plain_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = msgspec.to_builtins(self.settings)
        return {"name": "swav", **settings}

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:
        own = self.settings
        pixels = LARGE * own.large**2 + own.small_crops * own.small**2
        first_stage = pixels * own.width  # each further one has half the values
        values = sum(first_stage >> stage for stage in range(STAGES)) * own.blocks
        values = KEPT_PER_BLOCK * values + 2 * first_stage
        # features and scores of the queue's pictures, and two copies of one crop's codes
        of_queue = own.queue * (2 * LARGE * own.features + (LARGE + 2) * own.prototypes)
        return samples * values * value_bytes + of_queue * FLOAT32_BYTES * (samples > 0)
