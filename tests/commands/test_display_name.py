"""Names that people give themselves: bounded, harmless, and always beside the end of the key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.cells import cell_len

from node.core.display_name import LONGEST_NAME, MOST_CELLS, as_written, cleaned, label
from node.core.wrong_use import WrongUse
from protocols.accumulation import progress_slot

PEER = "12D3KooW" + "b" * 36 + "PXsWW5pf"


def test_the_key_is_always_beside_the_names() -> None:
    assert label(PEER) == "…PXsWW5pf"
    assert label(PEER, said="Ada") == "“Ada” …PXsWW5pf"
    assert label(PEER, verified="code:c2-2") == "code:c2-2 …PXsWW5pf"
    assert label(PEER, "code:c2-2", "Ada") == "code:c2-2 “Ada” …PXsWW5pf"
    assert label(PEER, "github:a-long-name", "Ada") == "github:a-long-n… …PXsWW5pf"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b[2J\x1b]0;root\x07", "??2J??0?root?"),
        ("ada\u202e\u2066evil", "ada??evil"),
        ("ada\u200b\ufeff", "ada??"),
        ("ada” …HTxBQDk1 “", "ada? ?HTxBQDk1 ?"),
        ("code:admin", "code?admin"),
        ("pаypаl", "p?yp?l"),  # two of its letters are Cyrillic
        ("Ａｄａ", "Ada"),
        ("  a\n\tb ", "a??b"),
        ("e\u0301\u0301\u0301", "é??"),
        ("Дарья", "Дарья"),
        ("漢字", "漢字"),
        ("x" * 400, "x" * LONGEST_NAME),
    ],
)
def test_a_strangers_name_is_harmless(said: str, shown: str) -> None:
    assert cleaned(said) == shown


@given(some.text())
def test_no_name_is_wider_than_its_place(said: str) -> None:
    assert cleaned(cleaned(said)) == cleaned(said)
    shown = label(PEER, said=said)
    assert shown.isprintable()
    assert cell_len(shown) <= MOST_CELLS + 1 + 9
    assert shown.endswith("…PXsWW5pf")


@pytest.mark.parametrize("typed", ["x" * 25, "ada:1", "pаypal", "a\x1bb", "who?"])
def test_a_name_that_others_would_see_otherwise_is_refused(typed: str) -> None:
    with pytest.raises(WrongUse, match="A name has at most 24 letters"):
        as_written(typed)


def test_a_name_as_people_write_them_is_taken() -> None:
    for name in ("Ada", "Jean-Luc P.", "O'Neill 2", "Дарья", "李小龙", ""):
        assert as_written(f" {name} ") == name
    assert LONGEST_NAME == progress_slot.LONGEST_NAME
