"""Examples to batches of tensors: windows of bytes for models of text, pictures with labels.

A model says what a sample of it is: `window` bytes (models/trainable.py). Examples are packed one
after another, each ended by the byte 0, which no text contains, and cut into windows; so nothing
is padded, and every byte of the data is trained on. What a model makes of its windows (inputs and
targets shifted by one, masks, sentence order) is its own business.

Promises: the same settings, seed, peer and position give the same batches; `position` counts every
byte and example in the batches given so far as used, and no other.

Easy to get wrong: bytes of the last example that did not fill a window belong to the position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.data.errors import DataError
from models.data.opening import Data, Snapshot
from models.data.pictures import MOST_PIXELS, NotAPicture, pixels_of
from models.data.position import LARGEST_REMAINDER_BYTES, Position
from models.data.settings import LARGEST_EXAMPLE_BYTES
from models.synthetic_images import ImageBatch

SEPARATOR = b"\0"
# what did not fill a batch, and the end of one example, must fit into a position
LARGEST_BATCH_BYTES = LARGEST_REMAINDER_BYTES - LARGEST_EXAMPLE_BYTES - len(SEPARATOR)
MOST_CLASSES = 1 << 31
MOST_UNUSABLE_IN_A_ROW = 1_000  # pictures; then it is not the pictures


class BatchSnapshot(NamedTuple):
    """Where reading stood behind a batch; cheap to take with each of them."""

    data: Snapshot
    remainder: bytes

    def position(self) -> Position:
        return self.data.position(self.remainder)


class WindowBatches:
    """An iterator over windows of text: uint8, (rows, window). The last may have fewer rows."""

    def __init__(self, data: Data, *, rows: int, window: int) -> None:
        if not 0 < rows * window <= LARGEST_BATCH_BYTES or window < 1:
            raise DataError(
                f"A batch of {rows} windows of {window} bytes cannot be made.",
                why=f"It must have at least one byte, and at most {LARGEST_BATCH_BYTES:,}.",
            )
        self._data = data
        self._rows = rows
        self._window = window
        self._bytes = bytearray(data.remainder)

    @property
    def data(self) -> Data:
        return self._data

    def __iter__(self) -> WindowBatches:
        return self

    def __next__(self) -> Tensor:
        wanted = self._rows * self._window
        while len(self._bytes) < wanted:
            example = next(self._data, None)
            if example is None:
                break
            self._bytes += example.content
            self._bytes += SEPARATOR
        rows = min(self._rows, len(self._bytes) // self._window)
        if rows == 0:
            raise StopIteration
        batch = self._bytes[: rows * self._window]
        del self._bytes[: rows * self._window]
        return torch.frombuffer(batch, dtype=torch.uint8).view(rows, self._window)

    def snapshot(self) -> BatchSnapshot:
        return BatchSnapshot(self._data.snapshot(), bytes(self._bytes))

    def position(self) -> Position:
        return self.snapshot().position()


class ImageBatches:
    """An iterator over pictures (uint8) with labels. The last may have fewer rows.

    A content is the bytes of the pixels, channel by channel, or a PNG or JPEG of any size. Those
    that are neither, or have no label below `classes`, are passed over; `passed_over` counts them.
    """

    def __init__(
        self,
        data: Data,
        *,
        rows: int,
        shape: tuple[int, int, int] = (3, 32, 32),
        classes: int = MOST_CLASSES,
    ) -> None:
        channels, height, width = shape
        if rows < 1 or min(shape) < 1 or channels * height * width > MOST_PIXELS:
            raise DataError(
                f"A batch of {rows} pictures of {channels} x {height} x {width} cannot be made.",
                why="It must have at least one, of at least one pixel.",
            )
        if not 0 < classes <= MOST_CLASSES:
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
                if example.label is None:
                    raise NotAPicture("it has no label (`label_field` in the settings)")
                if not 0 <= example.label < self._classes:
                    raise NotAPicture(
                        f"its label is {str(example.label)[:20]}, and there are {self._classes:,} "
                        "classes, from 0 on"
                    )
                images.append(pixels_of(example.content, self._shape))
                labels.append(example.label)
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

    def snapshot(self) -> BatchSnapshot:
        return BatchSnapshot(self._data.snapshot(), b"")

    def position(self) -> Position:
        return self.snapshot().position()
