"""The random views of a picture that SwAV compares."""

from __future__ import annotations

import blake3
import torch

from models.crops import PICTURES_AT_ONCE, _parts, crops_of
from models.initial import seeded
from models.synthetic_images import synthetic_images

LARGE_AREAS, SMALL_AREAS = (0.14, 1.0), (0.05, 0.14)
IMAGES = synthetic_images(0, range(4)).images


def views(areas: tuple[float, float] = LARGE_AREAS, seed: int = 0, side: int = 24) -> torch.Tensor:
    return crops_of(IMAGES, 3, side, areas, seeded(seed))


def test_each_picture_has_its_views_of_the_wanted_side() -> None:
    assert views().shape == (4, 3, 3, 24, 24)
    assert views().dtype == torch.uint8
    nothing = crops_of(IMAGES, 0, 24, SMALL_AREAS, seeded(0))
    assert nothing.shape == (4, 0, 3, 24, 24)


def test_the_same_generator_gives_the_same_views_and_another_one_others() -> None:
    assert torch.equal(views(), views())
    assert not torch.equal(views(), views(seed=1))


def test_no_more_than_a_few_pictures_are_unpacked_at_a_time() -> None:
    """48 of 256 x 256 with 8 views, all at once, took 575 MB and five times as long."""
    many = synthetic_images(0, range(PICTURES_AT_ONCE + 2)).images
    one, other = seeded(0), seeded(0)
    parts = torch.split(many, PICTURES_AT_ONCE)
    few = [crops_of(part, 3, 24, SMALL_AREAS, other) for part in parts]
    assert torch.equal(crops_of(many, 3, 24, SMALL_AREAS, one), torch.cat(few))


def test_all_views_of_a_picture_differ() -> None:
    names = {blake3.blake3(one.numpy().tobytes()).digest() for one in views().flatten(0, 1)}
    assert len(names) == 12


def test_a_view_shows_a_part_of_the_area_that_was_asked_for() -> None:
    """Of a picture whose red grows from left to right and whose green grows from top to bottom."""
    ramp = torch.linspace(0.0, 255.0, 64)
    red, green = ramp.expand(64, 64), ramp[:, None].expand(64, 64)
    picture = torch.stack([red, green, torch.zeros(64, 64)]).to(torch.uint8)
    generator = seeded(3)
    for low, high in (LARGE_AREAS, SMALL_AREAS):
        plain = _undistorted(picture, (low, high), generator)
        width = (plain[:, 0, :, -1] - plain[:, 0, :, 0]).abs().mean(dim=1)
        height = (plain[:, 1, -1] - plain[:, 1, 0]).abs().mean(dim=1)
        shown = width * height / 255.0**2
        assert float(shown.min()) > 0.8 * low
        assert float(shown.max()) < 1.1 * high


def _undistorted(
    picture: torch.Tensor, areas: tuple[float, float], generator: torch.Generator
) -> torch.Tensor:
    return _parts(picture.float().expand(100, -1, -1, -1), 32, areas, generator)


def test_a_grey_picture_stays_grey_whatever_its_colours_are_turned_to() -> None:
    grey = torch.full((50, 3, 32, 32), 128, dtype=torch.uint8)
    seen = crops_of(grey, 2, 32, LARGE_AREAS, seeded(0)).int()
    assert int((seen.amax(dim=2) - seen.amin(dim=2)).max()) <= 1  # rounding
