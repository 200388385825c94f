from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.cutting import SMALLEST_PIECE_BYTES, cut


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=400) | st.binary(max_size=400), st.integers(SMALLEST_PIECE_BYTES, 100))
def test_the_pieces_are_the_document_and_none_is_too_large(text: str | bytes, largest: int) -> None:
    content = text.encode("utf-8", "replace") if isinstance(text, str) else text
    pieces = cut(content, largest)
    assert b"".join(pieces) == content
    assert all(0 < len(piece) <= largest for piece in pieces)
    if isinstance(text, str):
        for piece in pieces:
            piece.decode()  # no character is cut in two


def test_a_piece_ends_with_a_line_where_there_is_one() -> None:
    assert cut(b"one\n" * 10, 18) == [b"one\n" * 4, b"one\n" * 4, b"one\n" * 2]


def test_a_document_may_stay_whole() -> None:
    assert cut(b"x" * 1000, 0) == [b"x" * 1000]
    assert cut(b"", 0) == []
