"""Reads the documents of one text or JSON-lines shard, packed or not, wherever it is.

This is the one loop that reads, unpacks and parses bytes; those three do not depend on each other.
Interruptions come out as pauses, and reading continues with the next byte. A packed shard is
recognized by its first bytes, not by its name: servers unpack, or forget to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from models.data.disk_reader import ByteReader
from models.data.errors import Interrupted, ShardBroken
from models.data.examples import Document, Mark, Pause, Reading, SkippedDocument
from models.data.formats import Format, Parsed
from models.data.gunzip import MAGIC, Gunzip
from models.data.retrying import Attempts


def documents_of(
    reader: ByteReader,
    parser_from: Callable[[Mark], Format],
    start: Mark,
    attempts: Attempts,
    largest_bytes: int,
) -> Reading:
    """All the documents from the mark on; the reader stands at the mark's byte. Closes it."""
    text = _Text(reader, attempts, largest_bytes)
    parser = parser_from(start if start.byte else Mark())
    try:
        for data in text:
            if isinstance(data, Pause):
                yield data
            else:
                yield from _from_mark(parser.feed(data), start, text.is_packed)
        yield from _from_mark(parser.end(), start, text.is_packed)
    finally:
        reader.close()


def _from_mark(parsed: Parsed, start: Mark, is_packed: bool) -> Parsed:
    if not is_packed and (start.byte or not start.document):
        return parsed
    return _passing_over(parsed, start.document, is_packed)


def _passing_over(parsed: Parsed, first: int, is_packed: bool) -> Parsed:
    for document in parsed:
        number, byte = document.mark
        if number < first:
            continue
        # packed bytes can only be read from the beginning, so they are no marks
        mark = Mark(number, 0 if is_packed else byte)
        if isinstance(document, Document):
            yield Document(document.content, document.label, mark)
        else:
            yield SkippedDocument(mark, document.reason)


class _Text:
    """The bytes of a shard, unpacked if necessary."""

    def __init__(self, reader: ByteReader, attempts: Attempts, largest_bytes: int) -> None:
        self._reader = reader
        self._attempts = attempts
        self._largest_bytes = largest_bytes
        self.is_packed = False

    def __iter__(self) -> Iterator[bytes | Pause]:
        head = b""
        begun = self._reader.byte != 0
        gunzip = Gunzip()
        for data in _bytes(self._reader, self._attempts):
            if isinstance(data, Pause):
                yield data
                continue
            if not begun:
                head += data
                if len(head) < len(MAGIC) and MAGIC.startswith(head):
                    continue
                begun, data, head = True, head, b""
                self.is_packed = data.startswith(MAGIC)
            if self.is_packed:
                yield from self._within_limit(gunzip, data)
            else:
                yield data
        if self.is_packed:
            gunzip.end()
        elif head:
            yield head

    def _within_limit(self, gunzip: Gunzip, data: bytes) -> Iterator[bytes]:
        for text in gunzip.feed(data):
            if gunzip.given > self._largest_bytes:
                raise ShardBroken(
                    f"it unpacks to more than the {self._largest_bytes:,} bytes of "
                    "`largest_shard_bytes`."
                )
            yield text


def _bytes(reader: ByteReader, attempts: Attempts) -> Iterator[bytes | Pause]:
    while True:
        # skipping a large shard up to a mark takes minutes, in which nothing is given
        attempts.clock.check()
        try:
            data = reader.read()
        except Interrupted as error:
            yield attempts.interrupted(error, reader.byte)
            continue
        if not data:
            return
        yield data
