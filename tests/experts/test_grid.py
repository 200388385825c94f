"""Uids and grids: what they are and what is refused, by name."""

from __future__ import annotations

import pytest

from protocols.experts import ExpertGrid, Uid, WrongUid, parse_block, parse_uid

GRID = ExpertGrid("ffn", (4, 20))


def test_a_uid_is_written_as_it_is_read() -> None:
    assert str(GRID.uid("ffn.3.17")) == "ffn.3.17"
    assert GRID.uid("ffn.0.0") == Uid("ffn", (0, 0))


@pytest.mark.parametrize(
    "text", ["", "ffn.", "ffn..1", "ffn.01", "ffn.-1", "FFN.1", "1.1", "ffn.1.2.3.4.5", "ffn.1e1"]
)
def test_what_is_no_uid_is_refused(text: str) -> None:
    with pytest.raises(WrongUid, match="not the uid of an expert"):
        parse_uid(text)


@pytest.mark.parametrize("text", ["ffn.4.0", "ffn.0.20", "ffn.1", "ffn.1.2.3", "ffx.1.2"])
def test_a_uid_outside_of_the_grid_is_refused_with_one_that_is_inside(text: str) -> None:
    with pytest.raises(WrongUid, match="not in the grid ffn of 4 x 20") as refused:
        GRID.uid(text)
    assert "ffn.3.19" in str(refused.value)


@pytest.mark.parametrize(("name", "sizes"), [("Ffn", (2,)), ("f" * 33, (2,)), ("", (2,))])
def test_a_grid_needs_a_name_of_the_grammar(name: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(WrongUid, match="cannot be called"):
        ExpertGrid(name, sizes)


@pytest.mark.parametrize("sizes", [(), (2,) * 5, (0,), (4, 4097)])
def test_a_grid_has_one_to_four_dimensions_of_limited_size(sizes: tuple[int, ...]) -> None:
    with pytest.raises(WrongUid):
        ExpertGrid("ffn", sizes)


def test_the_numbers_of_the_cells_are_all_cells_once() -> None:
    cells = [GRID.at(number) for number in range(GRID.cells)]
    assert len(set(cells)) == GRID.cells == 80
    assert all(cell in GRID for cell in cells)
    assert cells[0] == Uid("ffn", (0, 0))
    assert cells[-1] == Uid("ffn", (3, 19))


def test_prefixes_lead_from_the_grid_to_the_expert() -> None:
    uid = Uid("ffn", (3, 17))
    assert [str(prefix) for prefix in uid.prefixes()] == ["ffn", "ffn.3"]
    assert uid.parent.child(17) == uid
    assert GRID.root == Uid("ffn")


def test_a_block_is_written_as_it_is_read() -> None:
    for text in ("ffn:*.*", "ffn:0-3.7", "ffn:2"):
        assert str(parse_block(text)) == text


def test_a_block_has_the_cells_between_its_ends() -> None:
    grid = ExpertGrid("ffn", (3, 2))
    assert list(grid.cells_in(parse_block("ffn:1-2.*"))) == [
        Uid("ffn", (1, 0)),
        Uid("ffn", (1, 1)),
        Uid("ffn", (2, 0)),
        Uid("ffn", (2, 1)),
    ]


@pytest.mark.parametrize("text", ["ffn", "ffn:", "ffn:1-", "ffn:2-1", "Ffn:1", "ffn:1.2.3.4.5"])
def test_a_wrong_block_is_named(text: str) -> None:
    with pytest.raises(WrongUid, match="not a block"):
        parse_block(text)
