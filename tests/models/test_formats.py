"""Text and JSON lines, however their bytes arrive."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.examples import Document, Mark, SkippedDocument
from models.data.formats import Format, JsonLines, Paragraphs, TextLines, WholeFile

Found = list[Document | SkippedDocument]

TEXT = b"first\r\n\nsecond line\n" + b"x" * 70 + b"\n \nlast \xc3\xa4 without an end"


def fed(parser: Format, data: bytes, step: int) -> Found:
    found: Found = []
    for start in range(0, len(data), step):
        found += parser.feed(data[start : start + step])
    return found + list(parser.end())


def parser_for(kind: str, start: Mark = Mark()) -> Format:  # noqa: B008 - it is a constant
    if kind == "lines":
        return TextLines(64, start)
    if kind == "paragraphs":
        return Paragraphs(64, start)
    if kind == "files":
        return WholeFile(10, start)
    return JsonLines("text", "", 64, start)


@pytest.mark.parametrize("kind", ["lines", "paragraphs", "files", "jsonl"])
def test_byte_by_byte_gives_what_all_at_once_gives(kind: str) -> None:
    data = TEXT + b'\n{"text": "a"}\n\n{"text": "b", "more": [1]}'
    whole = fed(parser_for(kind), data, len(data))
    assert whole
    for step in (1, 2, 3, 7, 64):
        assert fed(parser_for(kind), data, step) == whole


@pytest.mark.parametrize("kind", ["lines", "paragraphs", "files", "jsonl"])
def test_reading_can_begin_at_every_document(kind: str) -> None:
    data = TEXT + b'\n\n{"text": "a"}\n\n{"text": "b", "more": [1]}\n'
    whole = fed(parser_for(kind), data, len(data))
    for number, item in enumerate(whole):
        again = fed(parser_for(kind, item.mark), data[item.mark.byte :], 5)
        assert again == whole[number:]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=20)))
def test_lines_come_out_as_they_went_in_with_their_numbers(lines: list[str]) -> None:
    data = "\n".join(lines).encode()
    found = fed(TextLines(1000, Mark()), data, 7)
    expected = [(number, line.encode()) for number, line in enumerate(lines) if line]
    assert [(item.mark.document, item.content) for item in found] == expected  # type: ignore[union-attr]


def test_a_line_beyond_the_limit_is_skipped_and_named_and_the_next_is_fine() -> None:
    found = fed(TextLines(64, Mark()), b"a\n" + b"b" * 65 + b"\n" + b"c" * 64 + b"\n", 10)
    assert [item.mark.document for item in found] == [0, 1, 2]
    assert isinstance(found[1], SkippedDocument)
    assert isinstance(found[2], Document)


def test_an_endless_line_takes_no_memory() -> None:
    parser = TextLines(64, Mark())
    for _ in range(1_000):
        assert list(parser.feed(b"x" * 1_000)) == []
    assert len(parser._lines._part) <= 64
    (found,) = parser.end()
    assert isinstance(found, SkippedDocument)


def test_a_line_that_comes_in_tiny_pieces_takes_no_more_memory_than_its_bytes() -> None:
    parser = TextLines(1 << 20, Mark())
    tracemalloc.start()
    for _ in range(10_000):
        assert list(parser.feed(b"ab")) == []
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 4 * 20_000
    assert [document.content for document in parser.feed(b"\n")] == [b"ab" * 10_000]


def test_paragraphs_stand_between_empty_lines() -> None:
    found = fed(Paragraphs(64, Mark()), b"\n\na\nb\n\n \nc\n" + b"d" * 64 + b"\n\ne", 4)
    assert [item.content if isinstance(item, Document) else None for item in found] == [
        b"a\nb",
        None,
        b"e",
    ]
    assert [item.mark.document for item in found] == [2, 6, 9]


BAD_RECORDS = {
    "no JSON": b'{"text": ',
    "no object": b"[1, 2]",
    "no such field": b'{"title": "a", "label": 1}',
    "no text": b'{"text": 3, "label": 1}',
    "no label": b'{"text": "a"}',
    "a label that is no number": b'{"text": "a", "label": "1"}',
    "nested too deep": b'{"text": "a", "label": 1, "x": ' + b"[" * 100_000,
    "half a character": b'{"text": "\\ud800", "label": 1}',
    "no UTF-8": b'{"text": "\xff", "label": 1}',
}


@pytest.mark.parametrize("record", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_record_that_cannot_be_used_is_skipped_and_the_next_is_fine(record: bytes) -> None:
    good = json.dumps({"label": 2, "text": "ä", "more": {"x": None}}).encode()
    found = fed(JsonLines("text", "label", 1 << 20, Mark()), record + b"\n" + good, 1 << 20)
    assert isinstance(found[0], SkippedDocument)
    assert found[0].reason
    assert found[1] == Document("ä".encode(), 2, Mark(1, len(record) + 1))
