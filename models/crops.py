"""Multi-crop of SwAV: several random views of each picture, in two sizes.

    large = crops_of(images, 2, 224, (0.14, 1.0), generator)
    small = crops_of(images, 6, 96, (0.05, 0.14), generator)

A view is a part of the picture, of a random place, area and shape. It is scaled to the side, and at
random mirrored, distorted in its colours, turned to grey and blurred, with the chances of the SwAV
paper (appendix A).

All draws are whole numbers of one generator on the CPU, so the same state of it gives the same
views.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = (3 / 4, 4 / 3)  # a part's width, in its heights
MIRRORED, DISTORTED, GREY, BLURRED = 0.5, 0.8, 0.2, 0.5  # chances
CHANGE = 0.8  # of brightness, contrast and saturation, up and down
TURN = 0.2  # of the hue, up and down: in whole turns of the colour wheel
BLUR_PIXELS = (0.1, 2.0)  # the standard deviation
BLUR_REACH = 20  # a pixel is blurred with those as far away as a 20th of the side

LUMA = torch.tensor([0.299, 0.587, 0.114])  # how bright red, green and blue are
DRAWS = 1 << 24
PICTURES_AT_ONCE = 4  # each is in memory once for each view meanwhile, in float32


def crops_of(
    images: Tensor, count: int, side: int, areas: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """`areas`: the least and the largest part of a picture that a view shows.
    images: (samples, 3, height, width), uint8, on the CPU; (samples, count, 3, side, side)."""
    crops = torch.empty(len(images), count, 3, side, side, dtype=torch.uint8)
    for first in range(0, len(images) if count else 0, PICTURES_AT_ONCE):
        few = slice(first, first + PICTURES_AT_ONCE)
        many = images[few].float().div(255.0).repeat_interleave(count, dim=0)
        views = _parts(many, side, areas, generator)
        views = _blurred(_distorted(views, generator), generator)
        crops[few] = views.mul(255.0).round().clamp(0.0, 255.0).view_as(crops[few])
    return crops


def _between(low: float, high: float, count: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(DRAWS, (count,), generator=generator)
    return low + (high - low) * drawn / DRAWS


def _happens(chance: float, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(DRAWS, (count,), generator=generator) < chance * DRAWS


def _parts(
    images: Tensor, side: int, areas: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """One part of each image.  (views, 3, height, width) to (views, 3, side, side)."""
    views = len(images)
    area = _between(*areas, views, generator)
    shape = _between(math.log(SHAPES[0]), math.log(SHAPES[1]), views, generator).exp()
    width, height = (area * shape).sqrt().clamp(max=1.0), (area / shape).sqrt().clamp(max=1.0)
    mirror = 1.0 - 2.0 * _happens(MIRRORED, views, generator).float()
    place = torch.zeros(views, 2, 3)  # from the view's coordinates to the image's, both -1 to 1
    place[:, 0, 0], place[:, 1, 1] = width * mirror, height
    place[:, 0, 2] = (1.0 - width) * _between(-1.0, 1.0, views, generator)
    place[:, 1, 2] = (1.0 - height) * _between(-1.0, 1.0, views, generator)
    grid = F.affine_grid(place, [views, 3, side, side], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _distorted(views: Tensor, generator: torch.Generator) -> Tensor:
    """Brightness, saturation and hue are one 3 x 3 matrix for each view; contrast comes after."""
    count = len(views)
    brightness, contrast, saturation = (
        _between(1.0 - CHANGE, 1.0 + CHANGE, count, generator) for _ in range(3)
    )
    angle = _between(-TURN, TURN, count, generator) * 2.0 * math.pi
    is_distorted = _happens(DISTORTED, count, generator)[:, None, None]
    is_grey = _happens(GREY, count, generator)[:, None, None]

    same, grey = torch.eye(3), LUMA.expand(3, 3)
    colours = grey + saturation[:, None, None] * (same - grey)
    matrix = brightness[:, None, None] * (colours @ _turn_of_hue(angle))
    matrix = torch.where(is_distorted, matrix, same)
    matrix = torch.where(is_grey, grey @ matrix, matrix)
    views = torch.einsum("vcd,vdhw->vchw", matrix, views).clamp(0.0, 1.0)

    middle = torch.einsum("c,vchw->v", LUMA, views) / views[0, 0].numel()
    middle, contrast = middle[:, None, None, None], contrast[:, None, None, None]
    changed = (middle + contrast * (views - middle)).clamp(0.0, 1.0)
    return torch.where(is_distorted[..., None], changed, views)


def _turn_of_hue(angle: Tensor) -> Tensor:
    """Colours turned around the grey axis (Rodrigues' formula).  (views,) to (views, 3, 3)."""
    cosine, sine = angle.cos()[:, None, None], angle.sin()[:, None, None]
    across = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / math.sqrt(3.0)
    return cosine * torch.eye(3) + (1.0 - cosine) / 3.0 + sine * across


def _blurred(views: Tensor, generator: torch.Generator) -> Tensor:
    """A Gaussian of its own for each view, along rows and then along columns."""
    count, reach = len(views), views.shape[-1] // BLUR_REACH
    deviation = _between(*BLUR_PIXELS, count, generator)
    is_blurred = _happens(BLURRED, count, generator)
    if not reach:
        return views
    steps = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (steps / deviation[:, None]) ** 2)
    weights = torch.where(is_blurred[:, None], weights, (steps == 0).float())
    weights = (weights / weights.sum(dim=1, keepdim=True))[:, :, None, None, None]
    for dim in (2, 3):
        ends = (0, 0, reach, reach) if dim == 2 else (reach, reach, 0, 0)
        wide = F.pad(views, ends, mode="reflect")
        shifted = (wide.narrow(dim, at, views.shape[dim]) for at in range(len(steps)))
        views = sum((weights[:, at] * one for at, one in enumerate(shifted)), torch.zeros(()))
    return views
