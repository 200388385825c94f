"""Examples to batches of tensors: windows of bytes for models of text, pictures with labels.

A model says what its sample is: `window` ids (models/trainable.py), which are bytes, or those of a
tokenizer (tokens.py). Examples are packed one after another, each ended by the byte 0, which no
text contains, or by the tokenizer's own end, and cut into windows. So nothing is padded, and every
byte of the data is trained on. The model itself turns windows into inputs and targets (shifted by
one, masks, sentence order).

Promises: the same settings, seed, peer and position give the same batches; `position` counts every
byte and example in the batches given so far as used, and no other.

The position includes the bytes of the last example that did not fill a window.
"""

from __future__ import annotations

import io
import warnings
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from models.data.errors import DataError, DataSettingsError, WrongTokenizer
from models.data.examples import Example
from models.data.opening import Data, Snapshot
from models.data.position import LARGEST_REMAINDER_BYTES, Position
from models.data.settings import LARGEST_EXAMPLE_BYTES
from models.data.tokens import ID_BYTES, Tokenizer
from models.extras import install
from models.synthetic_images import ImageBatch
from models.trainable import MOST_CLASSES

SEPARATOR = b"\0"
# the remainder of a batch, and the end of one example, must fit into a position
LARGEST_BATCH_BYTES = LARGEST_REMAINDER_BYTES - LARGEST_EXAMPLE_BYTES - len(SEPARATOR)
MOST_UNUSABLE_IN_A_ROW = 1_000  # pictures; with more, the source itself is wrong


class BatchSnapshot(NamedTuple):
    """The position after a batch; cheap to take with each of them."""

    data: Snapshot
    remainder: bytes

    def position(self) -> Position:
        return self.data.position(self.remainder)


class WindowBatches:
    """An iterator over windows of text, (rows, window): uint8, or int64 with a tokenizer, which is
    fetched with the first batch. The last may have fewer rows. `vocabulary`: how many ids the model
    has, if it is known."""

    def __init__(self, data: Data, *, rows: int, window: int, vocabulary: int = 0) -> None:
        self._id_bytes = 1 if data.load_tokenizer is None else ID_BYTES
        if not 0 < rows * window * self._id_bytes <= LARGEST_BATCH_BYTES or window < 1:
            raise DataError(
                f"A batch of {rows} windows of {window} ids cannot be made.",
                why="It must have at least one, and at most "
                f"{LARGEST_BATCH_BYTES // self._id_bytes:,}.",
            )
        self._data = data
        self._rows = rows
        self._window = window
        self._vocabulary = vocabulary
        self._tokenizer: Tokenizer | None = None
        self._bytes = bytearray(data.remainder)

    @property
    def data(self) -> Data:
        return self._data

    def __iter__(self) -> WindowBatches:
        return self

    def __next__(self) -> Tensor:
        if self._tokenizer is None and self._data.load_tokenizer is not None:
            self._tokenizer = self._checked(self._data.load_tokenizer())
        one = self._window * self._id_bytes
        while len(self._bytes) < self._rows * one:
            example = next(self._data, None)
            if example is None:
                break
            if self._tokenizer is None:
                self._bytes += example.content
                self._bytes += SEPARATOR
            else:
                self._bytes += self._tokenizer.encoded(example.content)
        rows = min(self._rows, len(self._bytes) // one)
        if rows == 0:
            raise StopIteration
        batch = self._bytes[: rows * one]
        del self._bytes[: rows * one]
        if self._tokenizer is None:
            return torch.frombuffer(batch, dtype=torch.uint8).view(rows, self._window)
        return torch.frombuffer(batch, dtype=torch.int32).view(rows, self._window).long()

    def _checked(self, tokenizer: Tokenizer) -> Tokenizer:
        """Also drops a remainder that is none of its ids: of a position with another tokenizer."""
        if 0 < self._vocabulary < tokenizer.ids:
            raise WrongTokenizer(
                f"The tokenizer has {tokenizer.ids:,} ids, and the model {self._vocabulary:,}.",
                advice="Give the model a vocabulary that is at least as large.",
            )
        is_cut = len(self._bytes) % ID_BYTES != 0
        if is_cut or not ids_below(self._bytes, tokenizer.ids):
            self._bytes.clear()
        return tokenizer

    def snapshot(self) -> BatchSnapshot:
        return BatchSnapshot(self._data.snapshot(), bytes(self._bytes))

    def position(self) -> Position:
        return self.snapshot().position()


def ids_below(encoded: bytearray, count: int) -> bool:
    ids = numpy.frombuffer(encoded, dtype=numpy.int32)
    return not ids.size or bool(ids.min() >= 0 and ids.max() < count)


class ImageBatches:
    """An iterator over pictures (uint8) with labels. The last may have fewer rows.

    The content is the bytes of the pixels, channel by channel, or a PNG or JPEG of any size. Other
    contents, and those without a label below `classes`, are skipped; `passed_over` counts them.
    With `classes=None` no labels are needed, and all are 0.
    """

    def __init__(
        self,
        data: Data,
        *,
        rows: int,
        shape: tuple[int, int, int] = (3, 32, 32),
        classes: int | None = MOST_CLASSES,
    ) -> None:
        channels, height, width = shape
        if rows < 1 or min(shape) < 1 or channels * height * width > MOST_PIXELS:
            raise DataError(
                f"A batch of {rows} pictures of {channels} x {height} x {width} cannot be made.",
                why="It must have at least one, of at least one pixel.",
            )
        if classes is not None and not 0 < classes <= MOST_CLASSES:
            raise DataError(f"There cannot be {classes} classes of pictures.")
        self._data = data
        self._classes = classes
        self._rows = rows
        self._shape = shape
        self.passed_over = 0

    @property
    def data(self) -> Data:
        return self._data

    def __iter__(self) -> ImageBatches:
        return self

    def __next__(self) -> ImageBatch:
        images, labels = [], []
        in_a_row = 0
        for example in self._data:
            try:
                label = self._label(example)
                images.append(pixels_of(example.content, self._shape))
                labels.append(label)
                in_a_row = 0
            except NotAPicture as error:
                self.passed_over += 1
                in_a_row += 1
                if in_a_row == MOST_UNUSABLE_IN_A_ROW:
                    raise DataError(
                        f"Of {in_a_row:,} pictures in a row not one can be used.",
                        why=f"The last: {error}.",
                    ) from None
            if len(images) == self._rows:
                break
        if not images:
            raise StopIteration
        pixels = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
        return ImageBatch(pixels.view(len(images), *self._shape), torch.tensor(labels))

    def _label(self, example: Example) -> int:
        if self._classes is None:
            return 0
        if example.label is None:
            raise NotAPicture("it has no label (`label_field` in the settings)")
        if not 0 <= example.label < self._classes:
            raise NotAPicture(
                f"its label is {str(example.label)[:20]}, and there are {self._classes:,} "
                "classes, from 0 on"
            )
        return example.label

    def snapshot(self) -> BatchSnapshot:
        return BatchSnapshot(self._data.snapshot(), b"")

    def position(self) -> Position:
        return self.snapshot().position()


# The pixels of a picture, from raw bytes or from a PNG or JPEG that a stranger may have made.
#
# Promises: no more than `MOST_PIXELS` are ever unpacked; the picture's own header is checked before
# memory is taken. Only PNG and JPEG are read, whatever else the library knows. Pillow (the extra
# `images`) is needed for those two only.


MOST_PIXELS = 64 << 20  # 8192 x 8192
FORMATS = ("PNG", "JPEG")
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


class NotAPicture(DataError):
    """Bytes that are no picture of the wanted shape."""


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
            advice=install("images"),
        ) from None
    if channels not in (1, 3):
        raise NotAPicture(f"a PNG or JPEG has 1 or 3 channels here, and not {channels}")
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # its warnings are for the picture's author
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
