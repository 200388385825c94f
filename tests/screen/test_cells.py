"""Text is measured in cells, and harmless."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from node.app.screen.cells import clean, clip, fit, pad, time_span, wrap


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "�[31mred�[0m"),
        ("two\nlines\tand\r", "two lines and"),
        ("e\u0301", "é"),
        ("q\u0301\u0301\u0301\u0301", "q\u0301\u0301"),
        ("\u202eabc", "�abc"),
        ("❤\ufe0f", "❤"),
        ("🇩🇪", "��"),
        ("漢字", "漢字"),
        ("नमस्ते", "नमस्ते"),
    ],
)
def test_text_of_a_stranger_becomes_one_harmless_line(written: str, shown: str) -> None:
    assert clean(written) == shown


def test_wide_characters_are_cut_between_cells() -> None:
    assert clip("漢字漢字", 6) == "漢字…"
    assert clip("漢字漢字", 5) == "漢字…"
    assert clip("漢字", 4) == "漢字"
    assert clip("漢字", 0) == ""
    assert all(cell_len(pad("漢字", width)) == width for width in range(8))


def test_parts_are_left_out_from_the_end() -> None:
    assert fit(("one", "", "two", "three"), 9) == "one · two"
    assert fit(("one", "two", "three"), 8) == "one"
    assert fit(("something",), 5) == "some…"


def test_words_are_kept_whole_and_the_last_line_says_that_there_is_more() -> None:
    assert wrap("a peer that is gone", 8, 3) == ["a peer", "that is", "gone"]
    assert wrap("a peer that is gone", 8, 2) == ["a peer", "that is…"]
    assert wrap("", 8, 2) == []


def test_times_are_whole_seconds() -> None:
    assert [time_span(one) for one in (0.0, 2.9, 61.0, None)] == ["0 s", "2 s", "1 min 1 s", "?"]
