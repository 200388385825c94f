"""The items in the pipeline: documents, examples cut from them, and where each came from.

An example is never larger than what the settings say, so that a buffer of ten thousand has a size
that can be known. Its place is enough to find it again, which is what a position is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol


class Mark(NamedTuple):
    """Where reading a shard can begin: before this document, which starts at this byte.

    The byte is 0 where the format cannot begin in the middle; reading then begins at the first
    document and passes over those before.
    """

    document: int = 0
    byte: int = 0


class Document(NamedTuple):
    """One document of a shard: a line, an article, a file, a picture."""

    content: bytes
    label: int | None
    mark: Mark


class ExamplePlace(NamedTuple):
    """Where an example came from. (pass, shard, document, piece) names it in its source."""

    source: int
    passing: int  # over the source's data, from 0
    shard: int  # in the list of shards, not in the order of this pass
    document: int
    piece: int
    byte: int  # of the document's mark


class Example(NamedTuple):
    """An item that is shuffled and mixed. `content` is text in UTF-8, or the bytes of a picture."""

    content: bytes
    label: int | None
    place: ExamplePlace


class Pause(NamedTuple):
    """Instead of the next item: there is none before this time on the source's clock."""

    until: float


class SkippedDocument(NamedTuple):
    """Instead of a document: it cannot be used, and why."""

    mark: Mark
    reason: str


Reading = Iterator[Document | SkippedDocument | Pause]


OnRetry = Callable[[str, int, float], None]
"""Called with the reason, the number of the attempt that comes, and the wait before it."""


class Shards(Protocol):
    """The shards of one source: a list of names, and how to read one of them.

    The same names in the same order mean the same data: positions go by them.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, shard: int, start: Mark, on_retry: OnRetry) -> Reading:
        """The documents of one shard from a mark on.

        Ends with ShardBroken where going on makes no sense; gives a Pause where reading was
        interrupted and is to be asked for more only later.
        """
        ...
