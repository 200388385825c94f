"""The errors of data. The first six reach people; the other three are handled in this package.

`ShardBroken` and `Interrupted` end the reading of one shard: the first would occur again at the
same place, the second may pass after a wait. They become events (`events`), and never end a
training. Only `NoDataLeft` does, when no source has anything left to give.
"""

from __future__ import annotations

from models.errors import ModelsError, WrongSettings


class DataError(ModelsError):
    """Root of the errors about data."""


class DataSettingsError(DataError, WrongSettings):
    """A description of data with a mistake. Nothing was opened."""

    exit_code = 2


class WrongTokenizer(DataSettingsError):
    """A tokenizer that is not here, cannot be used, or is not the one that is meant."""


class PositionError(DataError):
    """A saved position that cannot be read."""


class NoDataLeft(DataError):
    """Every source is broken for now. The position is intact: open the data again later."""

    exit_code = 4


class TokenizerAway(NoDataLeft):
    """The tokenizer's server does not give it for now."""


class SourceAway(NoDataLeft):
    """A source cannot be opened for now, because its server cannot be reached."""


class ShardBroken(DataError):
    """A shard cannot be read beyond here, and trying again would not change that."""


class SourceBroken(DataError):
    """A source gave nothing for several shards in a row."""


class Interrupted(DataError):
    """Reading was interrupted; the same reader goes on at the same byte when asked again.

    `retry_seconds` is how long the other side asks us to wait; 0.0 if it does not.
    """

    def __init__(self, what: str, *, retry_seconds: float = 0.0) -> None:
        super().__init__(what)
        self.retry_seconds = retry_seconds
