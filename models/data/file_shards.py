"""Shards that are files: text, JSON lines and Parquet, on the disk or on web servers."""

from __future__ import annotations

from pathlib import Path

from models.data.disk_reader import ByteReader, DiskReader
from models.data.examples import Mark, OnRetry, Reading
from models.data.formats import Format, format_of
from models.data.retrying import Attempts
from models.data.settings import DataSettings, SourceSettings, is_address
from models.data.shard_list import shard_names
from models.data.shard_reading import documents_of
from models.data.web import Web
from models.data.web_reader import WebReader


class FileShards:
    """What a source of kind `text`, `jsonl` or `parquet` reads."""

    def __init__(
        self,
        source: SourceSettings,
        settings: DataSettings,
        web: Web,
        piece_bytes: int,
        folder: Path,
    ) -> None:
        self._source = source
        self._settings = settings
        self._web = web
        self._piece_bytes = piece_bytes
        self._names = shard_names(source.paths, source.kind, folder)

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def read(self, shard: int, start: Mark, on_retry: OnRetry) -> Reading:
        name = self._names[shard]
        attempts = Attempts(self._web.clock, on_retry)
        if self._source.kind == "parquet":
            from models.data.parquet import parquet_documents

            return parquet_documents(name, self._source, self._settings, self._web, start, attempts)
        return documents_of(
            self._reader(name, start.byte),
            self._format_from,
            start,
            attempts,
            self._settings.largest_shard_bytes,
        )

    def _format_from(self, start: Mark) -> Format:
        return format_of(
            self._source, self._settings.largest_document_bytes, self._piece_bytes, start
        )

    def _reader(self, name: str, byte: int) -> ByteReader:
        if is_address(name):
            return WebReader(self._web, name, byte, self._settings.largest_shard_bytes)
        return DiskReader(Path(name), byte)
