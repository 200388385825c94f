"""Parquet shards, from the disk and by ranges."""

from __future__ import annotations

import io
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.data import parquet as reading
from models.data import range_file
from models.data.errors import NoDataLeft
from models.data.events import DocumentsSkipped, Retrying, SourceEvent
from tests.models.openers import everything, one_source, opened, sentences
from tests.models.web_server import Handler, Site, serving, status, web_server, without_ranges


def packed(columns: dict[str, list[Any]], rows_in_group: int = 100) -> bytes:
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table(columns), stream, row_group_size=rows_in_group, compression="none"
    )
    return stream.getvalue()


ROWS = [f"row {number} of a parquet shard" for number in range(1_000)]
EXPECTED = sorted(row.encode() for row in ROWS)
SHARD = packed({"text": ROWS, "other": [f"{n} " * 200 for n in range(1_000)]})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with web_server(tmp_path) as made:
        yield made


def test_rows_are_read_from_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(SHARD)
    assert everything(one_source("parquet", tmp_path)) == EXPECTED


@pytest.mark.slow
def test_only_the_columns_that_are_wanted_are_fetched(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "RANGE_BYTES", 4_096)
    site.answers["/a.parquet"] = serving(SHARD)
    assert everything(one_source("parquet", f"{site.url}/a.parquet")) == EXPECTED
    ranges = [asked.removeprefix("bytes=").split("-") for _, asked in site.asked]
    fetched = sum(int(last) - int(first) + 1 for first, last in ranges)
    assert fetched < len(SHARD) / 2


@pytest.mark.slow
def test_an_interruption_loses_and_repeats_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "RANGE_BYTES", 4_096)

    def cut(handler: Handler) -> None:
        handler.cut_off()

    good = serving(SHARD)
    site.answers["/a"] = good
    site.once["/a"] = [cut, good, good, good, good, good, cut, good, status(503)]
    events: list[SourceEvent] = []
    assert everything(one_source("parquet", f"{site.url}/a"), events) == EXPECTED
    assert len([event for event in events if isinstance(event, Retrying)]) == 3


@pytest.mark.slow
def test_going_on_reads_no_row_group_that_is_done(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "RANGE_BYTES", 4_096)
    site.answers["/a"] = serving(SHARD)
    described = one_source("parquet", f"{site.url}/a", shuffle_examples=1)
    with opened(described) as data:
        before = [next(data).content for _ in range(950)]
        kept = data.position()
    site.asked.clear()
    with opened(described, position=kept) as data:
        after = [example.content for example in data]
    assert sorted(before + after) == EXPECTED
    ranges = [asked.removeprefix("bytes=").split("-") for _, asked in site.asked]
    fetched = sum(int(last) - int(first) + 1 for first, last in ranges)
    assert fetched < len(SHARD) / 5


def test_pictures_and_labels(tmp_path: Path) -> None:
    pictures = [{"bytes": bytes([number] * 12), "path": "x.png"} for number in range(5)]
    shard = packed({"image": pictures, "label": [0, 1, 2, None, 4]})
    (tmp_path / "a.parquet").write_bytes(shard)
    events: list[SourceEvent] = []
    described = one_source("parquet", tmp_path, field="image", label_field="label", piece_bytes=0)
    with opened(described, events) as data:
        found = sorted((example.label, example.content[0]) for example in data)
    assert found == [(0, 0), (1, 1), (2, 2), (4, 4)]
    (skipped,) = [event for event in events if isinstance(event, DocumentsSkipped)]
    assert skipped.first == 4


def damaged(where: int) -> bytes:
    return SHARD[:where] + bytes(200) + SHARD[where + 200 :]


FOOTER = len(SHARD) - 8 - int.from_bytes(SHARD[-8:-4], "little")
GOOD = packed({"text": ["the next shard"]})
DAMAGED = {
    "truncated": (SHARD[:-1_000], "truncated one"),
    "empty": (b"", "less than 12 bytes"),
    "a footer that says it is huge": (SHARD[:-8] + b"\xff\xff\xff\x7fPAR1", "its footer would"),
    "a damaged footer": (damaged(FOOTER), "damaged Parquet"),
    "damaged pages": (damaged(4), "damaged Parquet"),
    "another column": (packed({"title": ["a"]}), "no column 'text', but: title"),
    "numbers": (packed({"text": [1, 2]}), "no text and no bytes"),
}


@pytest.mark.parametrize("where", ["disk", pytest.param("web", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("content", "words"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_shard_is_named_and_the_next_is_read(
    tmp_path: Path, site: Site, where: str, content: bytes, words: str
) -> None:
    events: list[SourceEvent] = []
    if where == "disk":
        (tmp_path / "a.parquet").write_bytes(content)
        (tmp_path / "b.parquet").write_bytes(GOOD)
        described = one_source("parquet", tmp_path)
    else:
        site.answers["/a"], site.answers["/b"] = serving(content), serving(GOOD)
        described = one_source("parquet", f"{site.url}/a", f"{site.url}/b")
        if not content:
            words = "416"
    assert b"the next shard" in everything(described, events)
    assert words in sentences(events)


def test_a_server_without_ranges_is_named(site: Site) -> None:
    site.answers["/a"], site.answers["/b"] = without_ranges(SHARD), serving(GOOD)
    events: list[SourceEvent] = []
    described = one_source("parquet", f"{site.url}/a", f"{site.url}/b")
    assert everything(described, events) == [b"the next shard"]
    assert "its server does not serve ranges" in sentences(events)


def test_a_shard_that_changed_while_it_was_interrupted_is_skipped_from_there(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "RANGE_BYTES", 4_096)
    good = serving(SHARD, '"a"')
    site.answers["/a"] = serving(packed({"text": ["of another file"] * 1_000}), '"b"')
    site.once["/a"] = [good, good, good, good, good, good, status(503)]
    events: list[SourceEvent] = []
    with opened(one_source("parquet", f"{site.url}/a"), events) as data:
        found = {example.content for example in data}
    assert found
    assert found < set(EXPECTED)
    assert "it has changed on its server" in sentences(events)


@pytest.mark.parametrize(
    "how", ["a dictionary", "a dictionary that is not said to be one", "delta"]
)
def test_a_kilobyte_of_rows_that_unpack_to_gigabytes_takes_little_memory(
    tmp_path: Path, how: str
) -> None:
    """Each row is one and the same text of 2 MiB. All of them at once would be 1 GiB."""
    import pyarrow.parquet

    text, rows = b"y" * (2 << 20), 512 if how != "delta" else 12
    one = pyarrow.array([text], pyarrow.binary())
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), one)
    more: dict[str, Any] = {"store_schema": how == "a dictionary"}
    if how == "delta":
        column = pyarrow.array([text] * rows, pyarrow.binary())
        more = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": column}), path, compression="zstd", write_statistics=False, **more
    )
    assert path.stat().st_size < 2_000
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    events: list[SourceEvent] = []
    described = one_source("parquet", path, largest_document_bytes=len(text) - 1)
    tracemalloc.start()
    try:
        with opened(described, events) as data, pytest.raises(NoDataLeft):
            next(data)
        assert tracemalloc.get_traced_memory()[1] < len(text), "none of them is copied"
    finally:
        tracemalloc.stop()
    assert pool.max_memory() - before < 11 * len(text)
    assert f"{rows} documents" in sentences(events)


def test_no_server_can_make_us_read_more_at_once_than_memory_has(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_file, "LARGEST_RANGE_BYTES", 1_000)
    site.answers["/a"] = serving(SHARD)
    events: list[SourceEvent] = []
    with opened(one_source("parquet", f"{site.url}/a"), events) as data, pytest.raises(NoDataLeft):
        next(data)
    assert "would have to be read at once" in sentences(events)


def test_a_row_group_beyond_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LARGEST_ROW_GROUP_BYTES", 1_000)
    (tmp_path / "a.parquet").write_bytes(SHARD)
    (tmp_path / "b.parquet").write_bytes(GOOD)
    events: list[SourceEvent] = []
    assert everything(one_source("parquet", tmp_path), events) == [b"the next shard"]
    assert "a row group has" in sentences(events)


@pytest.mark.slow
def test_whatever_is_damaged_in_a_shard_becomes_an_event(tmp_path: Path) -> None:
    """Damage makes pyarrow raise nearly anything; nothing of it may end a training."""
    chance = random.Random(7)
    (tmp_path / "b.parquet").write_bytes(GOOD)
    for _ in range(40):
        content = bytearray(SHARD)
        for _ in range(chance.choice([1, 2, 5])):
            first = FOOTER if chance.random() < 0.6 else 0
            content[chance.randrange(first, len(content))] = chance.randrange(256)
        (tmp_path / "a.parquet").write_bytes(content)
        assert b"the next shard" in everything(one_source("parquet", tmp_path))
