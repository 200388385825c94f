"""Panels share exactly the room that there is."""

from __future__ import annotations

import pytest
from rich.text import Text

from node.app.screen.layout import Panel, beside, stacked


def panel(name: str, priority: int, least: int = 1, most: int = 1, *, grows: bool = False) -> Panel:
    def lines(width: int, height: int) -> list[Text]:
        return [Text(f"{name} {number} of {height}"[:width]) for number in range(height)]

    return Panel(name, "", lines, least, most, priority, grows)


def shown(panels: list[Panel], height: int, *, framed: bool = False) -> list[str]:
    return [line.plain for line in stacked(panels, 14, height, framed=framed)]


def test_the_least_important_panel_is_left_out_first() -> None:
    panels = [panel("a", 2), panel("b", 1), panel("c", 3)]
    assert shown(panels, 2) == ["── b ─────────", "b 0 of 1"]
    assert shown(panels, 4)[::2] == ["── a ─────────", "── b ─────────"]
    assert shown(panels, 1) == [""], "no title without anything below it"


def test_each_grows_to_what_it_can_use_and_the_rest_is_shared() -> None:
    panels = [panel("a", 1, 1, 2), panel("b", 2, 1, 3, grows=True), panel("c", 3, grows=True)]
    lines = shown(panels, 14)
    assert [lines.index(f"── {name} ─────────") for name in "abc"] == [0, 3, 10]
    assert len(lines) == 14


def test_a_frame_is_closed_and_as_wide_as_the_room() -> None:
    assert shown([panel("a", 1, grows=True)], 4, framed=True) == [
        "╭─ a ────────╮",
        "│ a 0 of 2   │",
        "│ a 1 of 2   │",
        "╰────────────╯",
    ]


def test_a_title_that_has_no_room_is_cut() -> None:
    titled = Panel("loss", "2.0713 in step 312", lambda *_: [], 1, 1, 1)
    assert stacked([titled], 20, 2, framed=False)[0].plain == "── loss  2.0713… ───"


@pytest.mark.parametrize("width", [1, 2, 5, 9])
@pytest.mark.parametrize("framed", [True, False])
def test_no_width_is_too_small(width: int, framed: bool) -> None:
    lines = stacked([panel("panel", 1, 2, 9, grows=True)], width, 7, framed=framed)
    assert len(lines) == 7
    assert max(line.cell_len for line in lines) <= width


def test_two_columns_stand_beside_each_other_with_wide_characters_too() -> None:
    left, right = [Text("漢字"), Text("x")], [Text("one"), Text("two")]
    assert [line.plain for line in beside(left, right, 5, 1)] == ["漢字  one", "x     two"]
