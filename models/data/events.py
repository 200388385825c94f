"""The events of data sources, typed, each with one sentence.

The opener of data gets them through `on_event`, in the thread that reads; by default `logged` logs
them. Counting and showing them is for the layers above.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("potluck.data")


@dataclass(frozen=True)
class PassBegun:
    """A source is read from the beginning: for the first time, or again."""

    source: str
    number: int  # from 1
    shards: int

    @property
    def sentence(self) -> str:
        return f"{self.source}: pass {self.number} over {_counted(self.shards, 'shard')} begins."


@dataclass(frozen=True)
class Retrying:
    """Reading a shard was interrupted, and goes on after a wait."""

    source: str
    shard: str
    reason: str
    attempt: int
    wait_seconds: float

    @property
    def sentence(self) -> str:
        return (
            f"{self.source}: {self.shard} was interrupted ({self.reason}); "
            f"attempt {self.attempt} in {self.wait_seconds:g} s."
        )


@dataclass(frozen=True)
class ShardSkipped:
    """The rest of a shard is not read in this pass. The part before the break was used."""

    source: str
    shard: str
    documents: int  # read before the break
    reason: str

    @property
    def sentence(self) -> str:
        kept = _counted(self.documents, "document")
        return f"{self.source}: {self.shard} is skipped after {kept}: {self.reason}"


@dataclass(frozen=True)
class DocumentsSkipped:
    """Some documents of a shard could not be used; reported once for each shard and reason."""

    source: str
    shard: str
    documents: int
    first: int  # the first of them, from 1
    reason: str

    @property
    def sentence(self) -> str:
        count = _counted(self.documents, "document")
        return (
            f"{self.source}: {count} of {self.shard} skipped, the first is number "
            f"{self.first}: {self.reason}."
        )


@dataclass(frozen=True)
class SourceEnded:
    """A source was read as often as it was to be."""

    source: str
    passes: int

    @property
    def sentence(self) -> str:
        return f"{self.source} has ended after {_counted(self.passes, 'pass', 'passes')}."


@dataclass(frozen=True)
class SourceRests:
    """A source is left alone for a while, because nothing could be read from it."""

    source: str
    reason: str
    rest_seconds: float

    @property
    def sentence(self) -> str:
        return (
            f"{self.source} is left out for {self.rest_seconds:g} s, then tried again: "
            f"{self.reason}"
        )


@dataclass(frozen=True)
class SourceIsBack:
    """A source that was left out gives examples again."""

    source: str

    @property
    def sentence(self) -> str:
        return f"{self.source} gives examples again."


@dataclass(frozen=True)
class Renormalised:
    """The mixture changed: these are the probabilities now."""

    probabilities: tuple[tuple[str, float], ...]

    @property
    def sentence(self) -> str:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.probabilities)
        return f"The mixture is now: {parts or 'nothing'}."


@dataclass(frozen=True)
class ExamplesLost:
    """Examples that a position still owed could not be read again."""

    source: str
    shard: str
    examples: int
    reason: str

    @property
    def sentence(self) -> str:
        count = _counted(self.examples, "example")
        return f"{self.source}: {count} of {self.shard} are lost to this pass: {self.reason}"


@dataclass(frozen=True)
class StartedOver:
    """A position does not belong to this source, which therefore begins at its beginning."""

    source: str
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.source} starts over: {self.reason}."


SourceEvent = (
    PassBegun
    | Retrying
    | ShardSkipped
    | DocumentsSkipped
    | SourceEnded
    | SourceRests
    | SourceIsBack
    | Renormalised
    | ExamplesLost
    | StartedOver
)
OnEvent = Callable[[SourceEvent], None]

_QUIET = (PassBegun, SourceEnded, SourceIsBack)


def logged(event: SourceEvent) -> None:
    """Write the event's sentence into the log `potluck.data`."""
    log.log(logging.INFO if isinstance(event, _QUIET) else logging.WARNING, event.sentence)


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
