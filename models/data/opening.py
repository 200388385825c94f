"""Opens a run's data: from settings, a seed and a peer to an iterator over examples.

    with open_data(settings, seed=7, peer="12D3KooW…") as data:
        for example in data:
            ...
        kept = data.position()          # write_position(kept, path)

    with open_data(settings, seed=7, peer="12D3KooW…", position=kept) as data:
        ...                             # goes on there; position.py says what that promises

Two peers with the same seed read the same shards in different orders, because the peer is part of
every seed in here. Nothing is read before the first example is asked for, and then as little as
possible: training starts with the first few dozen examples.

Only one thread at a time may use `Data`. `stop` may be called from any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from models.data.clock import CLOSED, Clock, MachineClock, ReadingStopped
from models.data.disk_reader import ByteReader, DiskReader
from models.data.events import OnEvent, logged
from models.data.examples import Example, Mark, OnRetry, Reading, Shards
from models.data.formats import Format, format_of
from models.data.mixture import Mixture
from models.data.order import derived_seed
from models.data.position import Position
from models.data.retrying import Attempts
from models.data.settings import (
    LARGEST_TOKENIZED_BYTES,
    DataSettings,
    SourceSettings,
    check,
    is_address,
    refuse_this_machine,
    source_names,
)
from models.data.shard_list import shard_names
from models.data.shard_reading import documents_of
from models.data.shuffled import ShuffledSource, SourceSnapshot
from models.data.source import Source, fingerprint_of
from models.data.standard_library import StandardLibraryShards
from models.data.tokens import BYTES_PER_ID, Tokenizer, load_tokenizer
from models.data.web import Web
from models.data.web_reader import WebReader

PIECE_BYTES = 2_048  # if no model says how large a sample is
SMALLEST_WINDOW_PIECE_BYTES = 64  # a shorter one is hardly text


class Snapshot(NamedTuple):
    """The parts of a position. Taking it costs microseconds; making a position of it costs more."""

    sources: tuple[SourceSnapshot, ...]
    drawn: int

    def position(self, remainder: bytes = b"") -> Position:
        return Position(
            [source.position() for source in self.sources],
            self.drawn,
            remainder,
        )


class Data:
    """An iterator over examples, until the block is left. Made by `open_data`."""

    def __init__(
        self,
        mixture: Mixture,
        sources: tuple[ShuffledSource, ...],
        web: Web,
        clock: Clock,
        remainder: bytes,
        load_tokenizer: Callable[[], Tokenizer] | None,
    ) -> None:
        self.load_tokenizer = load_tokenizer
        """Fetches the tokenizer, or gives the one that is kept; None: the ids are bytes."""
        self._mixture = mixture
        self._sources = sources
        self._web = web
        self._clock = clock
        self.remainder = remainder
        """From the position that it was opened at: `batches` puts it before the first example."""
        self._stopped = False

    def __iter__(self) -> Data:
        return self

    def __next__(self) -> Example:
        if self._stopped:
            raise ReadingStopped(CLOSED)
        return next(self._mixture)

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(source.snapshot() for source in self._sources), self._mixture.drawn)

    def position(self) -> Position:
        """The present position, with every example that was given counted as used."""
        return self.snapshot().position()

    def stop(self) -> None:
        """End a wait in another thread: ReadingStopped there, now and from then on."""
        self._stopped = True
        if isinstance(self._clock, MachineClock):
            self._clock.stop()

    def close(self) -> None:
        self.stop()
        for source in self._sources:
            source.close()
        self._web.close()

    def __enter__(self) -> Data:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_data(
    settings: DataSettings | None = None,
    *,
    seed: int,
    peer: str = "",
    position: Position | None = None,
    window: int = 0,
    folder: Path | None = None,
    on_event: OnEvent = logged,
    clock: Clock | None = None,
    from_strangers: bool = False,
) -> Data:
    """A run's data for one peer, from the beginning or from a position.

    `window` is how many ids (bytes) one sample of the model takes: documents are cut accordingly,
    if the settings do not say how. Paths are relative to `folder`. DataSettingsError if something
    in the settings does not exist.

    `from_strangers`: the settings came over the network, so nothing is read from this machine's
    disk, and nothing fetched from its local network, by whatever name.
    """
    settings = DataSettings() if settings is None else settings
    check(settings)
    if from_strangers:
        refuse_this_machine(settings)
    clock = MachineClock() if clock is None else clock
    web = Web(clock, settings.patience_seconds, only_internet=from_strangers)
    piece_bytes = piece_bytes_of(settings, window)
    peer_seed = derived_seed(seed, peer)
    names = source_names(settings)
    before = {kept.name: kept for kept in position.sources} if position is not None else {}
    sources = []
    for number, (source, name) in enumerate(zip(settings.source, names, strict=True)):
        if source.kind == "datasets":
            shards = _dataset_shards(source, settings, clock, from_strangers)
        else:
            shards = _shards_of(source, settings, piece_bytes, web, folder or Path.cwd())
        source_seed = derived_seed(peer_seed, "source", name)
        sources.append(
            ShuffledSource(
                Source(
                    number,
                    name,
                    shards,
                    piece_bytes=piece_bytes,
                    passes=settings.passes,
                    seed=source_seed,
                    fingerprint=fingerprint_of(
                        source, settings.tokenizer, piece_bytes, shards.names
                    ),
                    on_event=on_event,
                    position=before.get(name),
                ),
                examples=settings.shuffle_examples,
                largest_bytes=settings.shuffle_bytes // len(settings.source),
                seed=source_seed,
                now=clock.now,
                on_event=on_event,
            )
        )
    drawn = position.drawn if position is not None else 0
    mixture = Mixture(
        sources,
        [source.probability for source in settings.source],
        seed=derived_seed(peer_seed, "mixture", drawn),
        drawn=drawn,
        clock=clock,
        on_event=on_event,
    )
    remainder = position.remainder if position is not None else b""
    load = None
    if settings.tokenizer is not None:
        load = partial(load_tokenizer, settings.tokenizer, web, folder or Path.cwd())
    return Data(mixture, tuple(sources), web, clock, remainder, load)


def piece_bytes_of(settings: DataSettings, window: int) -> int:
    """The longest example of text: documents are cut by it. 0: they stay whole."""
    if settings.piece_bytes is not None:
        return settings.piece_bytes
    if settings.tokenizer is not None:
        window = min(window * BYTES_PER_ID, LARGEST_TOKENIZED_BYTES)
    return max(window, SMALLEST_WINDOW_PIECE_BYTES) if window else PIECE_BYTES


def _shards_of(
    source: SourceSettings, settings: DataSettings, piece_bytes: int, web: Web, folder: Path
) -> Shards:
    if source.kind == "standard-library":
        return StandardLibraryShards()
    return FileShards(source, settings, web, piece_bytes, folder)


def _dataset_shards(
    source: SourceSettings, settings: DataSettings, clock: Clock, from_strangers: bool
) -> Shards:
    from models.data.dataset_shards import DatasetShards

    return DatasetShards(source, settings, clock, from_strangers=from_strangers)


# Shards that are files: text, JSON lines and Parquet, on the disk or on web servers.


class FileShards:
    """The shards of a source of kind `text`, `jsonl` or `parquet`."""

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
