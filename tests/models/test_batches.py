"""Examples packed into tensors: no byte lost, none twice, also over a position."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from models.data import batches
from models.data.batches import (
    LARGEST_BATCH_BYTES,
    ImageBatches,
    NotAPicture,
    WindowBatches,
    pixels_of,
)
from models.data.errors import DataError
from models.data.position import (
    LARGEST_POSITION_BYTES,
    LARGEST_REMAINDER_BYTES,
    Position,
    position_from_json,
)
from models.data.settings import LARGEST_BUFFER, LARGEST_EXAMPLE_BYTES, DataSettings
from tests.models.openers import one_source, opened
from tests.models.test_parquet import packed


@pytest.fixture
def described(tmp_path: Path) -> DataSettings:
    text = b"\n".join(b"line number %d" % number for number in range(400))
    (tmp_path / "a.txt").write_bytes(text)
    return one_source("text", tmp_path, shuffle_examples=30)


def flat(batches: list[torch.Tensor]) -> bytes:
    return b"".join(bytes(batch.flatten().tolist()) for batch in batches)


def test_windows_are_the_examples_in_a_row_each_ended_by_a_zero(described: DataSettings) -> None:
    with opened(described) as data:
        expected = b"".join(example.content + b"\0" for example in data)
    with opened(described) as data:
        found_batches = list(WindowBatches(data, rows=4, window=33))
    assert all(batch.dtype == torch.uint8 for batch in found_batches)
    assert {tuple(batch.shape) for batch in found_batches[:-1]} == {(4, 33)}
    found = flat(found_batches)
    assert expected.startswith(found)
    assert len(expected) - len(found) < 33


@pytest.mark.parametrize("taken", [0, 1, 7, 30])
def test_a_position_between_batches_loses_no_byte(described: DataSettings, taken: int) -> None:
    with opened(described) as data:
        windows = WindowBatches(data, rows=2, window=50)
        before = list(islice(windows, taken))
        kept = position_from_json(windows.position().to_json())
    with opened(described, position=kept) as data:
        after = list(WindowBatches(data, rows=2, window=50))
    lines = (flat(before) + flat(after)).split(b"\0")
    expected = [b"line number %d" % number for number in range(400)]
    assert len(set(lines) & set(expected)) >= len(expected) - 50 // 10
    assert len(set(lines[:-1])) == len(lines) - 1, "none comes twice"


def test_the_same_position_gives_the_same_batches(described: DataSettings) -> None:
    with opened(described) as data:
        windows = WindowBatches(data, rows=2, window=50)
        next(windows)
        kept = windows.position()
    runs = []
    for _ in range(2):
        with opened(described, position=kept) as data:
            runs.append(flat(list(WindowBatches(data, rows=2, window=50))))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("rows", "window"), [(0, 5), (5, 0), (-1, -5), (1 << 20, 1 << 20)])
def test_batches_that_cannot_be_are_refused(
    described: DataSettings, rows: int, window: int
) -> None:
    with opened(described) as data, pytest.raises(DataError, match="cannot be made"):
        WindowBatches(data, rows=rows, window=window)


def test_the_position_behind_the_largest_batch_and_example_can_be_read_again() -> None:
    assert LARGEST_BATCH_BYTES + LARGEST_EXAMPLE_BYTES < LARGEST_REMAINDER_BYTES
    whole = Position([], remainder=bytes(LARGEST_REMAINDER_BYTES)).to_json()
    assert len(whole) + 10 * LARGEST_BUFFER < LARGEST_POSITION_BYTES


@pytest.mark.parametrize("more", [{"rows": 0}, {"rows": -1}, {"rows": 1, "shape": (3, 0, 4)},
                                  {"rows": 1, "classes": 0}])  # fmt: skip
def test_pictures_that_cannot_be_are_refused(described: DataSettings, more: dict[str, Any]) -> None:
    with opened(described) as data, pytest.raises(DataError, match="cannot be"):
        ImageBatches(data, **more)


def test_labels_that_no_model_has_are_passed_over(tmp_path: Path) -> None:
    lines = [f'{{"text": "{"x" * 12}", "label": {label}}}' for label in (2, -1, 10, 2**40, 2**80)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with opened(one_source("jsonl", tmp_path, label_field="label")) as data:
        pictures = ImageBatches(data, rows=9, shape=(3, 2, 2), classes=10)
        assert [batch.labels.tolist() for batch in pictures] == [[2]]
    assert pictures.passed_over == 4


def as_file(picture: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


def test_pictures_become_pixels_by_channel(tmp_path: Path) -> None:
    red = as_file(Image.new("RGB", (64, 48), (255, 0, 0)), "PNG")
    raw = bytes(range(48))
    shard = packed({"image": [red, raw, b"nothing", red], "label": [1, 2, 3, 4]})
    (tmp_path / "a.parquet").write_bytes(shard)
    described = one_source(
        "parquet", tmp_path, field="image", label_field="label", piece_bytes=0, shuffle_examples=1
    )
    with opened(described) as data:
        pictures = ImageBatches(data, rows=2, shape=(3, 4, 4))
        (first, second) = list(pictures)
    assert first.images.shape == (2, 3, 4, 4)
    assert first.images.dtype == torch.uint8
    assert first.labels.tolist() == [1, 2]
    assert first.images[0, 0].eq(255).all()
    assert first.images[0, 1:].eq(0).all()
    assert bytes(first.images[1].flatten().tolist()) == raw
    assert second.labels.tolist() == [4]
    assert pictures.passed_over == 1


def test_data_without_a_usable_picture_is_an_error_and_not_an_endless_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST_UNUSABLE_IN_A_ROW", 50)
    (tmp_path / "a.txt").write_bytes(b"no picture\n" * 10)
    described = one_source("text", tmp_path, passes=0)
    with opened(described) as data, pytest.raises(DataError, match="not one can be used"):
        next(ImageBatches(data, rows=2))


def huge_png(side: int) -> bytes:
    """A PNG that says it has so many pixels, squared."""
    small = as_file(Image.new("L", (4, 4)), "PNG")
    import struct
    import zlib

    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]


NO_PICTURES = {
    "damaged PNG": as_file(Image.new("RGB", (64, 64)), "PNG")[:60],
    "damaged JPEG": as_file(Image.new("RGB", (64, 64)), "JPEG")[:200],
    "another format": as_file(Image.new("RGB", (64, 64)), "GIF"),
    "a bomb": huge_png(50_000),
    "a bomb that Pillow only warns of": huge_png(10_000),
    "empty": b"",
}


@pytest.mark.parametrize("content", NO_PICTURES.values(), ids=NO_PICTURES.keys())
def test_a_file_that_is_not_a_picture_is_named(content: bytes) -> None:
    with pytest.raises(NotAPicture):
        pixels_of(content, (3, 8, 8))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_packed_pictures_are_scaled(kind: str, mode: str) -> None:
    picture = as_file(Image.new(mode, (33, 57)), kind)
    assert len(pixels_of(picture, (3, 8, 9))) == 3 * 8 * 9
    assert len(pixels_of(picture, (1, 8, 9))) == 8 * 9
