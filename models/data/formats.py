"""Bytes of a shard in, documents out: text and JSON lines, without any I/O.

Each format takes bytes in pieces of any size, and gives the documents that are complete.
`shard_reading` reads the bytes and handles interruptions, so reading can go on after one without
starting over.

Promises: no more than one document is held, and never more than its limit. An unusable document
becomes a SkippedDocument with its number, and the next one is fine.

A document's number also counts skipped and empty ones. It is the line number that a person would
look up, and positions use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from models.data.examples import Document, Mark, SkippedDocument
from models.data.settings import SourceSettings

TOO_LONG = "longer than `largest_document_bytes`"

Parsed = Iterator[Document | SkippedDocument]


class Format(Protocol):
    """A parser that takes bytes in pieces."""

    def feed(self, data: bytes) -> Parsed: ...

    def end(self) -> Parsed:
        """The documents in the last bytes, when no more will come."""
        ...


def format_of(
    source: SourceSettings, largest_document_bytes: int, piece_bytes: int, start: Mark
) -> Format:
    """The parser for a source of kind `text` or `jsonl`, for bytes from the mark on."""
    if source.kind == "jsonl":
        return JsonLines(source.field, source.label_field, largest_document_bytes, start)
    if source.documents == "files":
        return WholeFile(piece_bytes or largest_document_bytes, start)
    if source.documents == "paragraphs":
        return Paragraphs(largest_document_bytes, start)
    return TextLines(largest_document_bytes, start)


class LineCutter:
    """Lines out of bytes: (number, first byte, content without its end), or None for the content
    of a line beyond the limit."""

    def __init__(self, limit: int, start: Mark) -> None:
        self._limit = limit
        self._number, self._byte = start
        self._part = bytearray()  # of the line that is not complete; a list of pieces that a
        # server has made tiny would be thirty times as large
        self._length = 0
        self._too_long = False

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes | None]]:
        head, *rest = data.split(b"\n")
        self._keep(head)
        if not rest:
            return
        tail = rest.pop()
        yield self._finished(1)
        number, byte, limit = self._number, self._byte, self._limit
        for line in rest:
            length = len(line)
            # the state is right before each line is given: the caller may stop here for good
            self._number, self._byte = number + 1, byte + length + 1
            yield number, byte, (_without_return(line) if length <= limit else None)
            number, byte = self._number, self._byte
        self._keep(tail)

    def end(self) -> Iterator[tuple[int, int, bytes | None]]:
        if self._length:
            yield self._finished(0)

    def _keep(self, part: bytes) -> None:
        self._length += len(part)
        if self._length > self._limit:
            self._too_long = True
            self._part.clear()
        else:
            self._part += part

    def _finished(self, line_end: int) -> tuple[int, int, bytes | None]:
        content = None if self._too_long else _without_return(bytes(self._part))
        line = self._number, self._byte, content
        self._number += 1
        self._byte += self._length + line_end
        self._part.clear()
        self._length, self._too_long = 0, False
        return line


def _without_return(line: bytes) -> bytes:
    return line[:-1] if line.endswith(b"\r") else line


class TextLines:
    """Each line that is not empty is a document."""

    def __init__(self, limit: int, start: Mark) -> None:
        self._lines = LineCutter(limit, start)

    def feed(self, data: bytes) -> Parsed:
        return self._documents(self._lines.feed(data))

    def end(self) -> Parsed:
        return self._documents(self._lines.end())

    def _documents(self, lines: Iterator[tuple[int, int, bytes | None]]) -> Parsed:
        for number, byte, line in lines:
            if line:
                yield Document(line, None, Mark(number, byte))
            elif line is None:
                yield SkippedDocument(Mark(number, byte), TOO_LONG)


class Paragraphs:
    """The text between empty lines is a document; its number is that of its first line."""

    def __init__(self, limit: int, start: Mark) -> None:
        self._lines = LineCutter(limit, start)
        self._limit = limit
        self._paragraph: list[bytes] = []
        self._length = 0
        self._mark = start

    def feed(self, data: bytes) -> Parsed:
        return self._documents(self._lines.feed(data))

    def end(self) -> Parsed:
        yield from self._documents(self._lines.end())
        yield from self._finished()

    def _documents(self, lines: Iterator[tuple[int, int, bytes | None]]) -> Parsed:
        for number, byte, line in lines:
            if line is not None and not line.strip():
                yield from self._finished()
                continue
            if self._length == 0:
                self._mark = Mark(number, byte)
            # a line beyond the limit makes its whole paragraph one
            self._length += self._limit + 1 if line is None else len(line) + 1
            if self._length > self._limit:
                self._paragraph.clear()
            elif line is not None:
                self._paragraph.append(line)

    def _finished(self) -> Parsed:
        if self._length > self._limit:
            yield SkippedDocument(self._mark, TOO_LONG)
        elif self._paragraph:
            yield Document(b"\n".join(self._paragraph), None, self._mark)
        self._paragraph.clear()
        self._length = 0


class WholeFile:
    """The whole text, as documents of one size: a book has no limit."""

    def __init__(self, size: int, start: Mark) -> None:
        self._size = size
        self._number, self._byte = start
        self._kept = bytearray()

    def feed(self, data: bytes) -> Parsed:
        self._kept += data
        while len(self._kept) >= self._size:
            yield self._piece(self._size)

    def end(self) -> Parsed:
        if self._kept:
            yield self._piece(len(self._kept))

    def _piece(self, size: int) -> Document:
        document = Document(bytes(self._kept[:size]), None, Mark(self._number, self._byte))
        del self._kept[:size]
        self._number += 1
        self._byte += size
        return document


class JsonLines:
    """Each line is an object; one field of it is the document, and another may be its label."""

    def __init__(self, field: str, label_field: str, limit: int, start: Mark) -> None:
        self._lines = LineCutter(limit, start)
        self._field = field
        self._label_field = label_field
        self._decoder = _record_decoder(field, label_field)

    def feed(self, data: bytes) -> Parsed:
        return self._documents(self._lines.feed(data))

    def end(self) -> Parsed:
        return self._documents(self._lines.end())

    def _documents(self, lines: Iterator[tuple[int, int, bytes | None]]) -> Parsed:
        decode = self._decoder.decode
        for number, byte, line in lines:
            if line is None:
                yield SkippedDocument(Mark(number, byte), TOO_LONG)
                continue
            if not line or line.isspace():
                continue
            try:
                record = decode(line)
                content = record.content.encode()
            except msgspec.ValidationError as error:
                yield SkippedDocument(Mark(number, byte), self._wrong_record(error))
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                yield SkippedDocument(Mark(number, byte), f"no JSON ({error})")
            else:
                if content:
                    yield Document(content, record.label, Mark(number, byte))

    def _wrong_record(self, error: Exception) -> str:
        wanted = f"the field {self._field!r} with a text"
        if self._label_field:
            wanted += f" and {self._label_field!r} with a whole number"
        return f"no record with {wanted} ({error})"


def _record_decoder(field: str, label_field: str) -> msgspec.json.Decoder[Any]:
    """Reads only the one or two fields that are used; skips the others of a record."""
    fields: list[Any] = [("content", str)]
    names = {"content": field}
    if not label_field:
        record = msgspec.defstruct("Record", fields, rename=names, namespace={"label": None})
        return msgspec.json.Decoder(record)
    fields.append(("label", int))
    names["label"] = label_field
    return msgspec.json.Decoder(msgspec.defstruct("Record", fields, rename=names))
