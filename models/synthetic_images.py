"""A built-in set of images that need no download: ten kinds of figures, drawn from their number.

Image number i of a seed is the same on every machine: a disc, ring, square, … of random place, size
and colours, with noise over it. There is no end of them, and peers need no list: each draws its own
numbers. Images of another seed serve as those that training has not seen.

It is for tests, demonstrations and measuring speed. An accuracy on it says nothing about
photographs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.initial import seeded

SIDE = 32  # pixels, as in CIFAR
KINDS = (
    "disc",
    "ring",
    "square",
    "frame",
    "triangle",
    "plus",
    "cross",
    "horizontal stripes",
    "vertical stripes",
    "checkerboard",
)
NOISE = 24  # of 255, in each direction
CONTRAST = 64  # the least difference between figure and ground, in each colour


class ImageBatch(NamedTuple):
    images: Tensor  # (samples, 3, height, width), uint8 from 0 to 255, or floating from 0 to 1
    labels: Tensor  # (samples,), int64


def synthetic_images(seed: int, numbers: Sequence[int]) -> ImageBatch:
    """The images of these numbers, in their order."""
    drawn = [_image(_generator(seed, number)) for number in numbers]
    images = [image for image, _ in drawn]
    labels = [label for _, label in drawn]
    if not images:
        return ImageBatch(torch.empty(0, 3, SIDE, SIDE, dtype=torch.uint8), torch.empty(0).long())
    return ImageBatch(torch.stack(images), torch.tensor(labels))


def _generator(seed: int, number: int) -> torch.Generator:
    """Hashed, because torch seeds with 32 bits only: seeds next to each other must not overlap."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return seeded(int.from_bytes(digest[:4], "big"))


def _image(generator: torch.Generator) -> tuple[Tensor, int]:
    def between(low: int, high: int, shape: tuple[int, ...] = ()) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    label = int(between(0, len(KINDS) - 1))
    radius = int(between(7, 12))
    dy = torch.arange(SIDE)[:, None] - between(12, 19)
    dx = torch.arange(SIDE)[None, :] - between(12, 19)
    ground = between(0, 255, (3, 1, 1))
    figure = (ground + between(CONTRAST, 255 - CONTRAST, (3, 1, 1))) % 256
    noise = between(-NOISE, NOISE, (3, SIDE, SIDE))
    image = torch.where(_figure(KINDS[label], dx, dy, radius), figure, ground) + noise
    return image.clamp(0, 255).to(torch.uint8), label


def _figure(kind: str, dx: Tensor, dy: Tensor, radius: int) -> Tensor:
    """The pixels of the figure.  dx: (1, side), dy: (side, 1), from its middle; (side, side)."""
    inside = torch.maximum(dx.abs(), dy.abs()) <= radius
    square_of_distance = dx * dx + dy * dy
    match kind:
        case "disc":
            return square_of_distance <= radius * radius
        case "ring":
            hole = 4 * square_of_distance < radius * radius
            return (square_of_distance <= radius * radius) & ~hole
        case "square":
            return inside
        case "frame":
            return inside & (2 * torch.maximum(dx.abs(), dy.abs()) > radius)
        case "triangle":
            return inside & (2 * dx.abs() <= dy + radius)
        case "plus":
            return inside & (3 * torch.minimum(dx.abs(), dy.abs()) <= radius)
        case "cross":
            return inside & (3 * (dx.abs() - dy.abs()).abs() <= radius)
        case "horizontal stripes":
            return inside & (dy % 4 < 2)
        case "vertical stripes":
            return inside & (dx % 4 < 2)
        case _:
            return inside & ((dx % 6 < 3) ^ (dy % 6 < 3))
