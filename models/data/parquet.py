"""Reads Parquet shards, row group by row group, from the disk or by ranges from a web server.

Only the columns that are asked for are fetched. Needs pyarrow: the extra `parquet`.

Promises: the footer and each row group are within limits before they are read. An interrupted row
group is read again, from the same file, and no row is given twice.

A row group is the smallest unit to read, and some writers make one of a whole file. It is given up
if the file says that it is larger than `LARGEST_ROW_GROUP_BYTES` unpacked. A kilobyte can hold a
thousand rows that are all one text of sixteen megabytes, so rows are unpacked one by one, and
checked before they are copied.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from models.data.clock import Clock
from models.data.disk_reader import open_plain_file
from models.data.errors import DataError, DataSettingsError, Interrupted, ShardBroken
from models.data.examples import Document, Mark, Reading, SkippedDocument
from models.data.formats import TOO_LONG
from models.data.range_file import RangeFile
from models.data.retrying import Attempts
from models.data.settings import DataSettings, SourceSettings, is_address
from models.data.web import Version, Web
from models.extras import install

LARGEST_FOOTER_BYTES = 64 << 20  # of 100,000 row groups with a hundred columns
LARGEST_ROW_GROUP_BYTES = 2 << 30  # as the file says, of all columns; usual are 1 to 512 MB
ROWS_AT_ONCE = 1  # 60,000 a second all the same; more would be so many times the longest text
RANGE_BYTES = 1 << 20  # fetched at once, at least: many small reads would be as many requests
MAGIC = b"PAR1"


def parquet_documents(
    name: str,
    source: SourceSettings,
    settings: DataSettings,
    web: Web,
    start: Mark,
    attempts: Attempts,
) -> Reading:
    """The rows from the mark on; a row's number is counted over the whole file."""
    pyarrow_parquet = _pyarrow_parquet()
    progress = 0
    version = Version()
    while True:
        try:
            with _opened(name, settings, web, version) as file:
                rows = _Rows(pyarrow_parquet, file, source, settings, start, web.clock)
                for item in rows:
                    yield item
                    start = Mark(item.mark.document + 1)
                    progress += len(item.content) if isinstance(item, Document) else 0
            return
        except Interrupted as error:
            yield attempts.interrupted(error, progress)


class _Rows:
    def __init__(
        self,
        pyarrow_parquet: Any,
        file: BinaryIO,
        source: SourceSettings,
        settings: DataSettings,
        start: Mark,
        clock: Clock,
    ) -> None:
        self._file = file
        self._clock = clock
        self._source = source
        self._settings = settings
        self._start = start
        self._pyarrow_parquet = pyarrow_parquet

    def __iter__(self) -> Iterator[Document | SkippedDocument]:
        _check_footer(self._file)
        try:
            with self._pyarrow_parquet.ParquetFile(self._file) as parquet:
                yield from self._groups(parquet)
        except DataError:
            raise  # a RangeFile's own error, which pyarrow passes through
        except Exception as error:  # a damaged file makes pyarrow raise nearly anything
            raise ShardBroken(f"it is damaged Parquet ({_first_line(error)}).") from error

    def _groups(self, parquet: Any) -> Iterator[Document | SkippedDocument]:
        fields = [self._source.field]
        if self._source.label_field:
            fields.append(self._source.label_field)
        for field in fields:
            if field not in parquet.schema_arrow.names:
                there_are = ", ".join(parquet.schema_arrow.names[:20])
                raise ShardBroken(f"it has no column {field!r}, but: {there_are}.")
        first = 0
        for group in range(parquet.metadata.num_row_groups):
            metadata = parquet.metadata.row_group(group)
            if first + metadata.num_rows > self._start.document:
                _check_group(metadata)
                yield from self._rows(parquet, group, fields, first)
            first += metadata.num_rows

    def _rows(
        self, parquet: Any, group: int, fields: list[str], first: int
    ) -> Iterator[Document | SkippedDocument]:
        number = first
        for batch in parquet.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=fields):
            self._clock.check()
            for row in range(batch.num_rows):
                if number >= self._start.document:
                    label = batch.column(fields[1])[row] if len(fields) > 1 else None
                    yield from self._row(number, batch.column(fields[0])[row], label)
                number += 1

    def _row(self, number: int, content: Any, label: Any) -> Iterator[Document | SkippedDocument]:
        mark = Mark(number)
        found = _buffer_of(content)
        if found is None:
            yield SkippedDocument(mark, f"{self._source.field!r} is no text and no bytes")
            return
        if found.size > self._settings.largest_document_bytes:
            yield SkippedDocument(mark, TOO_LONG)
            return
        value = None if label is None else label.as_py()
        if label is not None and type(value) is not int:
            yield SkippedDocument(mark, f"{self._source.label_field!r} is no whole number")
        elif found.size:
            yield Document(found.to_pybytes(), value, mark)


def _buffer_of(value: Any) -> Any:
    """The memory of a text or picture, without copying it, or None. Pictures are stored as
    {"bytes": ..., "path": ...}. The bytes are raw: a damaged text is not valid UTF-8."""
    import pyarrow

    if isinstance(value, pyarrow.DictionaryScalar):
        value = value.value
    if isinstance(value, pyarrow.StructScalar):
        value = value["bytes"] if value.is_valid and "bytes" in value else None
    return value.as_buffer() if isinstance(value, pyarrow.BinaryScalar) else None


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataSettingsError(
            "Data of the kind 'parquet' needs pyarrow, which is not installed here.",
            advice=install("parquet"),
        ) from None
    return pyarrow.parquet


def _opened(name: str, settings: DataSettings, web: Web, version: Version) -> BinaryIO:
    if is_address(name):
        file = RangeFile(web, name, settings.largest_shard_bytes, version)
        return io.BufferedReader(file, RANGE_BYTES)
    try:
        return open_plain_file(Path(name))
    except OSError as error:
        raise Interrupted(error.strerror or str(error)) from None


def _check_footer(file: BinaryIO) -> None:
    """The last eight bytes are the footer's length and the magic."""
    size = file.seek(0, io.SEEK_END)
    if size < 12:
        raise ShardBroken("it is no Parquet file: it has less than 12 bytes.")
    file.seek(size - 8)
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC:
        raise ShardBroken("it is no Parquet file, or a truncated one: its end is not that of one.")
    if length > min(LARGEST_FOOTER_BYTES, size - 12):
        raise ShardBroken(f"it is damaged Parquet: its footer would have {length:,} bytes.")
    file.seek(0)


def _check_group(metadata: Any) -> None:
    # not by column: pyarrow ends the whole process over some statistics of a column
    size = metadata.total_byte_size
    if not 0 <= size <= LARGEST_ROW_GROUP_BYTES:
        raise ShardBroken(
            f"a row group has {size:,} bytes unpacked; the limit is {LARGEST_ROW_GROUP_BYTES:,}."
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
