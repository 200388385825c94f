"""Data sets of Hugging Face, streamed by the library `datasets`: the extra of that name.

The library's own shards are ours, so that each peer has another order of them; its shuffling and
its buffers are not used. It never executes code of a data set (it no longer can, and we do not ask
for it). Its requests have the library's limits on time and size, not those of `web`.

The library uses the network as soon as a data set is opened, before there is an example. So a data
set that cannot be opened is a settings error.
"""

from __future__ import annotations

from typing import Any

from models.data.clock import Clock
from models.data.errors import DataSettingsError, Interrupted, ShardBroken, SourceAway
from models.data.examples import Document, Mark, OnRetry, Reading, SkippedDocument
from models.data.formats import TOO_LONG
from models.data.retrying import Attempts
from models.data.settings import DataSettings, SourceSettings
from models.extras import install

MOST_SHARDS = 100_000
CONNECTING_LIBRARIES = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "aiohttp"})


class DatasetShards:
    """The shards that `datasets` divides a data set into."""

    def __init__(
        self,
        source: SourceSettings,
        settings: DataSettings,
        clock: Clock,
        *,
        from_strangers: bool = False,
    ) -> None:
        self._source = source
        self._limit = settings.largest_document_bytes
        self._clock = clock
        self._dataset = _opened(source, from_strangers)
        self._count = min(int(self._dataset.num_shards), MOST_SHARDS)

    @property
    def names(self) -> tuple[str, ...]:
        name = self._source.dataset
        return tuple(f"{name} {number} of {self._count}" for number in range(1, self._count + 1))

    def read(self, shard: int, start: Mark, on_retry: OnRetry) -> Reading:
        attempts = Attempts(self._clock, on_retry)
        progress = 0
        number = start.document
        while True:
            try:
                part = self._dataset.shard(num_shards=self._count, index=shard)
                for record in part.skip(number) if number else part:
                    found = self._document(number, record)
                    number += 1
                    if found is not None:
                        yield found
                        progress += len(found.content) if isinstance(found, Document) else 0
                return
            except ShardBroken:
                raise
            except OSError as error:
                pause = attempts.interrupted(Interrupted(_words(error)), progress)
            except Exception as error:
                reason = f"{type(error).__name__}: {_words(error)}"
                if not _is_of_a_connection(error):
                    raise ShardBroken(f"{reason}.") from error
                pause = attempts.interrupted(Interrupted(reason), progress)
            yield pause

    def _document(self, number: int, record: Any) -> Document | SkippedDocument | None:
        field, label_field = self._source.field, self._source.label_field
        if field not in record:
            raise ShardBroken(f"it has no field {field!r}, but: {', '.join(list(record)[:20])}.")
        content = _content_of(record[field])
        label = record.get(label_field) if label_field else None
        if content is None:
            return SkippedDocument(Mark(number), f"{field!r} is no text and no bytes")
        if len(content) > self._limit:
            return SkippedDocument(Mark(number), TOO_LONG)
        if label_field and type(label) is not int:
            return SkippedDocument(Mark(number), f"{label_field!r} is no whole number")
        return Document(content, label, Mark(number)) if content else None


def _opened(source: SourceSettings, from_strangers: bool) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataSettingsError(
            "Data of the kind 'datasets' needs the library datasets, which is not installed here.",
            advice=install("datasets"),
        ) from None
    try:
        dataset = datasets.load_dataset(
            source.dataset,
            source.subset or None,
            split=source.split,
            streaming=True,
            # a stranger's settings must not use the login of this machine's user
            token=False if from_strangers else None,
        )
        return _undecoded(datasets, dataset, source.field)
    except Exception as error:
        if _is_away(error):
            raise SourceAway(
                f"The data set {source.dataset!r} cannot be reached.",
                why=f"{type(error).__name__}: {_words(error)}.",
                advice="Check this machine's connection. It is tried again.",
            ) from error
        raise DataSettingsError(
            f"The data set {source.dataset!r} cannot be opened.",
            why=f"{type(error).__name__}: {_words(error)}.",
            advice="Check its name, `subset` and `split`, and this machine's connection.",
        ) from error


def _undecoded(datasets: Any, dataset: Any, field: str) -> Any:
    """Pictures as the bytes they are stored as: decoding is for `pictures`, with its limits."""
    feature = (dataset.features or {}).get(field)
    if isinstance(feature, datasets.Image):
        return dataset.cast_column(field, datasets.Image(decode=False))
    return dataset


def _is_away(error: BaseException) -> bool:
    """Whether its server cannot be reached for now, and does not refuse this data set."""
    status = getattr(getattr(error, "response", None), "status_code", 503)
    is_of_now = status == 429 or status >= 500
    is_network = isinstance(error, ConnectionError | TimeoutError) or _is_of_a_connection(error)
    return is_network and is_of_now


def _is_of_a_connection(error: BaseException) -> bool:
    """Not all errors of these libraries are an OSError."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return not kinds.isdisjoint(CONNECTING_LIBRARIES)


def _content_of(value: object) -> bytes | None:
    """A text or picture as bytes. Pictures are stored as {"bytes": ..., "path": ...}."""
    if isinstance(value, dict):
        value = value.get("bytes")
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    return value if isinstance(value, bytes) else None


def _words(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
