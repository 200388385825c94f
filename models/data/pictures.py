"""The pixels of a picture, from raw bytes or from a PNG or JPEG that a stranger may have made.

Promises: no more than `MOST_PIXELS` are ever unpacked, by the picture's own word and before memory
is taken; only PNG and JPEG are read, whatever else the library knows. Pillow (the extra `images`)
is needed for those two only.
"""

from __future__ import annotations

import io
import warnings

from models.data.errors import DataError, DataSettingsError

MOST_PIXELS = 64 << 20  # 8192 x 8192
FORMATS = ("PNG", "JPEG")
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


class NotAPicture(DataError):
    """Bytes that are no picture of the shape that is wanted."""


def pixels_of(content: bytes, shape: tuple[int, int, int]) -> bytes:
    """channels x height x width bytes, scaled to that size if they are packed."""
    channels, height, width = shape
    if len(content) == channels * height * width and not content.startswith(BEGINNINGS):
        return content
    if not content.startswith(BEGINNINGS):
        raise NotAPicture(
            f"it has {len(content):,} bytes, which is neither a PNG, nor a JPEG, nor "
            f"{channels} x {height} x {width}"
        )
    return _unpacked(content, channels, height, width)


def _unpacked(content: bytes, channels: int, height: int, width: int) -> bytes:
    try:
        from PIL import Image
    except ImportError:
        raise DataSettingsError(
            "Pictures in PNG or JPEG need Pillow, which is not installed here.",
            advice="Install potluck with the extra `images`: pip install 'potluck[images]'.",
        ) from None
    import numpy

    if channels not in (1, 3):
        raise NotAPicture(f"a PNG or JPEG has 1 or 3 channels here, and not {channels}")
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # what it finds odd is its author's business
            Image.open(io.BytesIO(content), formats=FORMATS) as image,
        ):
            if image.width * image.height > MOST_PIXELS:
                raise NotAPicture(f"it would have {image.width} x {image.height} pixels")
            image.draft("RGB" if channels == 3 else "L", (width, height))  # JPEG: unpack less
            plain = image.convert("RGB" if channels == 3 else "L").resize((width, height))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise NotAPicture(f"it is damaged ({str(error)[:100]})") from None
    pixels = numpy.asarray(plain).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1).tobytes()
