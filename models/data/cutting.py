"""Cuts a document into pieces of a bounded size, at line breaks where possible.

A file of fifty kilobytes as one example would fill a batch with fifty windows of the same text. If
it is cut first and then shuffled, a batch has fifty different ones. A piece ends after the last
line break in its second half; if there is none, between two characters of UTF-8.

Promises: the pieces in a row are the document; none is empty or larger than the limit.
"""

from __future__ import annotations

SMALLEST_PIECE_BYTES = 16  # below, a character of UTF-8 might not fit behind the last break


def cut(content: bytes, largest: int) -> list[bytes]:
    """The pieces of a document; the document itself if `largest` is 0."""
    if not content:
        return []
    if largest == 0 or len(content) <= largest:
        return [content]
    pieces = []
    start = 0
    while len(content) - start > largest:
        end = _end_of_piece(content, start, start + largest)
        pieces.append(content[start:end])
        start = end
    pieces.append(content[start:])
    return pieces


def _end_of_piece(content: bytes, start: int, limit: int) -> int:
    line_break = content.rfind(b"\n", (start + limit) // 2, limit)
    if line_break >= 0:
        return line_break + 1
    for end in range(limit, limit - 4, -1):
        if content[end] & 0xC0 != 0x80:  # not inside a character
            return end
    return limit  # no UTF-8 at all
